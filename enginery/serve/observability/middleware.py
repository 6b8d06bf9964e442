"""The outermost layer of the application: begins a record of each request, and reports it.

    app = ObservabilityMiddleware(app, activity=activity, shutting_down=answer, metrics=metrics)

Responses that a model gave carry where the time went, in milliseconds, by the names of
text-embeddings-inference (there without decimals): x-total-time, x-tokenization-time,
x-queue-time, x-inference-time, x-compute-time, x-compute-tokens, x-compute-characters,
x-compute-type. Every response carries x-request-id, the client's own or a new one.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Iterable
from time import perf_counter
from typing import TYPE_CHECKING

from enginery.serve.lifecycle import Activity
from enginery.serve.observability.record import CLIENT_CLOSED_REQUEST, RequestRecord

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from enginery.serve.observability.access_log import AccessLog
    from enginery.serve.observability.metrics import Metrics
    from enginery.serve.observability.tracing import Tracing

_LONGEST_ID = 128


class ObservabilityMiddleware:
    """Observes requests; adds no task to any."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        activity: Activity,
        shutting_down: ASGIApp,
        metrics: Metrics | None = None,
        access_log: AccessLog | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Wrap an application.

        Args:
            app: finds its record at `scope["state"]["record"]` and adds route, model and timings.
            activity: kept up to date for the process; its `draining` closes connections.
            shutting_down: answers a request that the server has cancelled because it ends.
            metrics: counts requests; None for none.
            access_log: writes a line a request; None for none.
            tracing: makes spans; None for none.
        """
        self._app = tracing.wrap(app) if tracing is not None else app
        self._activity = activity
        self._shutting_down = shutting_down
        observers = (
            metrics.observe if metrics is not None else None,
            access_log.write if access_log is not None else None,
        )
        self._observers = tuple(each for each in observers if each is not None)
        self._prefix = secrets.token_hex(4)
        self._count = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and report it when its response is sent."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = self._begin(scope)
        activity = self._activity
        activity.in_flight += 1
        activity.last_request_at = record.started

        async def respond(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": self._headers(record, message.get("headers", ()))}
            elif message["type"] == "http.response.body":
                if record.method != "HEAD":
                    record.sent_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    record.ended = perf_counter()
            await send(message)

        try:
            await self._app(scope, receive, respond)
        except asyncio.CancelledError:
            if not activity.draining:
                raise
            # By the server, which waits no longer for requests that run.
            if not record.status:
                record.timings = None
                await self._shutting_down(scope, receive, respond)
        except Exception:
            record.status = record.status or 500  # which the server answers
            raise
        finally:
            activity.in_flight -= 1
            self._report(record, scope)

    def _begin(self, scope: Scope) -> RequestRecord:
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given.decode("latin-1")
        # It goes into a header and a log: nothing that could end a line.
        if not (0 < len(given) <= _LONGEST_ID and given.isascii() and request_id.isprintable()):
            request_id = f"{self._prefix}-{next(self._count):x}"
        host, port = (scope.get("client") or ("", 0))[:2]
        if host:
            host = f"[{host}]" if ":" in host else host
            host = f"{host}:{port}" if port else host  # a proxy's header names no port
        record = RequestRecord(request_id, scope["method"], scope["path"], host, perf_counter())
        scope.setdefault("state", {})["record"] = record
        return record

    def _headers(
        self, record: RequestRecord, headers: Iterable[tuple[bytes, bytes]]
    ) -> list[tuple[bytes, bytes]]:
        found = [*headers, (b"x-request-id", record.request_id.encode("ascii"))]
        timings = record.timings
        if timings is not None and record.status == 200:
            total = b"%.3f" % ((perf_counter() - record.started) * 1e3)
            found += (
                (b"x-compute-type", record.compute_type.encode("ascii")),
                (b"x-compute-time", total),
                (b"x-compute-characters", b"%d" % record.characters),
                (b"x-compute-tokens", b"%d" % timings.tokens),
                (b"x-total-time", total),
                (b"x-tokenization-time", b"%.3f" % (timings.tokenize_seconds * 1e3)),
                (b"x-queue-time", b"%.3f" % (timings.queue_seconds * 1e3)),
                (b"x-inference-time", b"%.3f" % (timings.inference_seconds * 1e3)),
            )
        if self._activity.draining:
            found = [(name, value) for name, value in found if name.lower() != b"connection"]
            found.append((b"connection", b"close"))
        return found

    def _report(self, record: RequestRecord, scope: Scope) -> None:
        # Of the route that matched, though it may have been refused before that was called.
        record.route = record.route or getattr(scope.get("endpoint"), "pattern", "")
        if not record.ended:
            record.ended = perf_counter()
        if not record.status:  # the application has seen that nobody waits for the response
            record.status = CLIENT_CLOSED_REQUEST
            record.timings = None
        for observe in self._observers:
            observe(record)
