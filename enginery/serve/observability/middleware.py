"""The outermost middleware: creates a record of each request, and reports it at the end.

    app = ObservabilityMiddleware(app, activity=activity, shutting_down=answer, metrics=metrics)

Responses with results of a model have its timings in milliseconds in the headers of
text-embeddings-inference (which has no decimals): x-total-time, x-tokenization-time, x-queue-time,
x-inference-time, x-compute-time; also x-compute-tokens, x-compute-characters and x-compute-type.
Every response has x-request-id, the client's own or a new one.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Iterable
from time import perf_counter
from typing import TYPE_CHECKING

from enginery.serve.http.lifecycle import Activity
from enginery.serve.observability.record import CLIENT_CLOSED_REQUEST, RequestRecord

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from enginery.serve.observability.access_log import AccessLog
    from enginery.serve.observability.metrics import Metrics
    from enginery.serve.observability.tracing import Tracing

_LONGEST_ID = 128


class ObservabilityMiddleware:
    """The middleware that reports requests to metrics, access log and traces."""

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
            app: the application, which adds route, model and timings to the record in
                `scope["state"]["record"]`.
            activity: updated with the requests in progress; if `draining`, responses close their
                connections.
            shutting_down: responds to a request that was cancelled because the server shuts down.
            metrics: counts requests; None for no metrics.
            access_log: writes one line per request; None for no log.
            tracing: creates spans; None for no traces.
        """
        self._app = tracing.wrap(app) if tracing is not None else app
        self._activity = activity
        self._shutting_down = shutting_down
        observers = (
            metrics.observe if metrics is not None else None,
            access_log.put if access_log is not None else None,
        )
        self._observers = tuple(observer for observer in observers if observer is not None)
        self._prefix = secrets.token_hex(4)
        self._count = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for a request, and report the request at the end."""
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
            # Cancelled by the server, which no longer waits for running requests.
            if not record.status:
                record.timings = None
                await self._shutting_down(scope, receive, respond)
        except Exception:
            record.status = record.status or 500  # the server's response to this error
            raise
        finally:
            activity.in_flight -= 1
            self._report(record, scope)

    def _begin(self, scope: Scope) -> RequestRecord:
        header = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = header.decode("latin-1")
        # The id goes into a header and a log, so it must not contain control characters.
        if not (0 < len(header) <= _LONGEST_ID and header.isascii() and request_id.isprintable()):
            request_id = f"{self._prefix}-{next(self._count):x}"
        host, port = (scope.get("client") or ("", 0))[:2]
        if host:
            host = f"[{host}]" if ":" in host else host
            host = f"{host}:{port}" if port else host  # a proxy's header has no port
        record = RequestRecord(request_id, scope["method"], scope["path"], host, perf_counter())
        scope.setdefault("state", {})["record"] = record
        return record

    def _headers(
        self, record: RequestRecord, headers: Iterable[tuple[bytes, bytes]]
    ) -> list[tuple[bytes, bytes]]:
        fields = [*headers, (b"x-request-id", record.request_id.encode("ascii"))]
        timings = record.timings
        if timings is not None and record.status == 200:
            total = b"%.3f" % ((perf_counter() - record.started) * 1e3)
            fields += (
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
            fields = [(name, value) for name, value in fields if name.lower() != b"connection"]
            fields.append((b"connection", b"close"))
        return fields

    def _report(self, record: RequestRecord, scope: Scope) -> None:
        # The matched route, even if the request was rejected before its handler was called.
        record.route = record.route or getattr(scope.get("endpoint"), "pattern", "")
        if not record.ended:
            record.ended = perf_counter()
        if not record.status:  # the client disconnected before the response
            record.status = CLIENT_CLOSED_REQUEST
            record.timings = None
        for observe in self._observers:
            observe(record)
