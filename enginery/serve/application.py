"""The server's application: a request in, an answer out, whatever happens.

    >>> application = ServerApplication(models, ServeConfig())
    >>> (await application(Request("POST", "/embed", body=b'{"inputs": "warm"}'))).status
    200

Finds the route, asks for the key, lets the route answer, and turns whatever goes wrong into the
shape of the route's protocol. Answers that a model gave carry where the time went, in milliseconds,
by the names of text-embeddings-inference (with decimals, which that has not): x-total-time,
x-tokenization-time, x-queue-time, x-inference-time, x-compute-time, x-compute-tokens,
x-compute-characters, x-compute-type. Every answer carries x-request-id, the client's own or a new
one. A server that drains answers what still reaches it: its readiness alone says that no more
should be sent. What the HTTP layer refuses by itself is counted, logged and named in the same way.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import time
from typing import Any

from enginery.core.errors import EngineryError
from enginery.runtime.tokenizer_files import is_panic
from enginery.serve.call import Call, ServerParts
from enginery.serve.config import ServeConfig
from enginery.serve.error_shapes import Family, error_response
from enginery.serve.keys import Keys
from enginery.serve.messages import Request, Response
from enginery.serve.refusals import RefusalError, as_refusal
from enginery.serve.replies import Timings
from enginery.serve.rooms import AccessLog, HostedModel, Metrics, Models, Tracing
from enginery.serve.routes.table import route_table

_log = logging.getLogger("enginery.serve")

_REASONS = {
    400: "invalid", 401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "method",
    413: "too_large", 422: "invalid", 429: "overloaded", 503: "unavailable",
}  # fmt: skip
"""Why a request was refused, as metrics count it."""
_CLIENT_GONE = 499
"""nginx's status for a client that went before its answer."""
_LONGEST_ID = 128


class _HttpError(RefusalError):
    """What the HTTP layer found."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ServerApplication:
    """The routes of one server, with its key, its metrics and its log."""

    def __init__(
        self,
        models: Models,
        config: ServeConfig,
        *,
        keys: Keys | None = None,
        metrics: Metrics | None = None,
        access_log: AccessLog | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Nothing is asked of the models before a request comes.

        Args:
            models: what answers.
            config: the options of the server.
            keys: the keys that clients have to send; None for those of `config` and environment.
            metrics: what counts; None for nothing.
            access_log: what writes a line a request; None for nothing.
            tracing: what makes spans; None for nothing.

        Raises:
            OptionError: the keys cannot be read.
        """
        self._table = route_table()
        keys = Keys.from_config(config, os.environ) if keys is None else keys
        self.parts = ServerParts(models, config, keys, self._table, metrics)
        self._metrics, self._access_log, self._tracing = metrics, access_log, tracing
        self._compute: dict[str, tuple[HostedModel, str]] = {}
        self._prefix = secrets.token_hex(4)
        self._count = itertools.count(1)

    def admit(self, request: Request) -> None:
        """Raises UnauthorizedError where a key is wanted: before its body is read, too."""
        if self.parts.keys and not self._table.is_public(request.method, request.path):
            self.parts.keys.require(request.headers)

    async def __call__(self, request: Request) -> Response:
        """The answer to a request.

        Raises:
            CancelledError: the client has gone, or `refusal` has answered; nothing else is raised.
        """
        call = self._call(request)
        family: Family = "plain"
        try:
            if request.method == "OPTIONS":
                allowed = self._table.allowed(request.path)
                response = Response(204, b"", "", (("allow", ", ".join(allowed)),))
            else:
                call.route, call.path_values = self._table.find(request.method, request.path)
                family = call.route.family
                if self.parts.keys and not call.route.public:
                    self.parts.keys.require(request.headers)
                response = await call.route.handler(call)
        except EngineryError as error:
            response = self._refused(call, as_refusal(error))
        except asyncio.CancelledError:
            if not call.noted:
                if self._metrics:
                    self._metrics.refused(_name(call), "cancelled")
                self._note(call, Response(_CLIENT_GONE))
            raise
        except BaseException as error:
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
            _log.exception("request %s: %s %s", call.request_id, request.method, request.path)
            fault = _HttpError(500, "internal error.")
            response = error_response(family, fault, request_id=call.request_id)
        return self._note(call, response, answered=True)

    def refusal(self, request: Request, status: int, message: str) -> Response:
        """The HTTP layer's own answer, in the shape of the protocol of the request's path.

        It is counted and logged as every other answer is. A request that runs is answered by it:
        what comes of the request itself, its cancelling too, is not written down any more.
        """
        call = request.known if isinstance(request.known, Call) else self._call(request)
        call.timings = None
        return self._note(call, self._refused(call, _HttpError(status, message)))

    def _call(self, request: Request) -> Call:
        started = request.started or time.perf_counter()
        call = request.known = Call(
            request, self.parts, request_id=self._request_id(request), started=started
        )
        return call

    def _refused(self, call: Call, refusal: RefusalError) -> Response:
        path = call.request.path
        family: Family = "plain"
        if call.route is not None:
            family = call.route.family
        elif path:
            family = self._table.family(path)
        if self._metrics and not call.noted:
            self._metrics.refused(_name(call), _REASONS.get(refusal.status, "http"))
        return error_response(family, refusal)

    def _note(self, call: Call, response: Response, *, answered: bool = False) -> Response:
        """Writes down what happened, on the answer and elsewhere; once for a request."""
        ended = time.perf_counter()
        identity = (("x-request-id", call.request_id),)
        if call.timings is not None and response.status == 200:
            response.headers += identity + self._times(call, ended - call.started)
        else:
            response.headers += identity
        if call.noted:
            return response
        call.noted = True
        facts = (call, response, call.timings, ended)
        if answered:  # behind it: the client need not wait for this to get it
            asyncio.get_running_loop().call_soon(self._write_down, *facts)
        else:
            self._write_down(*facts)
        return response

    def _write_down(
        self, call: Call, response: Response, timings: Timings | None, ended: float
    ) -> None:
        name = _name(call)
        pattern = call.route.pattern if call.route else ""
        seconds = ended - call.started
        if self._metrics:
            self._metrics.request(
                route=pattern, model=name, status=response.status, seconds=seconds
            )
            if timings is not None:
                self._metrics.reply(name, timings, inputs=call.inputs)
        if self._access_log:
            self._access_log(
                call.request, response, route=pattern, model=name, seconds=seconds, timings=timings
            )
        # What is no HTTP at all is no request that a trace could be of.
        if self._tracing and call.request.method:
            self._tracing.record(
                call.request, response, route=pattern, model=name, timings=timings,
                started=call.started, ended=ended,
            )  # fmt: skip

    def _times(self, call: Call, seconds: float) -> tuple[tuple[str, str], ...]:
        timings: Any = call.timings
        total = f"{seconds * 1e3:.3f}"
        return (
            ("x-compute-type", self._compute_type(call)),
            ("x-compute-time", total),
            ("x-compute-characters", str(call.characters)),
            ("x-compute-tokens", str(timings.tokens)),
            ("x-total-time", total),
            ("x-tokenization-time", f"{timings.tokenize_seconds * 1e3:.3f}"),
            ("x-queue-time", f"{timings.queue_seconds * 1e3:.3f}"),
            ("x-inference-time", f"{timings.inference_seconds * 1e3:.3f}"),
        )

    def _compute_type(self, call: Call) -> str:
        """`cpu` or `gpu`; it changes with a reload alone."""
        model = call.model
        if model is None:
            return "cpu"
        known = self._compute.get(model.name)
        if known is None or known[0] is not model:
            providers = model.info().get("providers") or [{}]
            on_cpu = "CPU" in str(providers[0].get("name", "CPU"))
            known = self._compute[model.name] = (model, "cpu" if on_cpu else "gpu")
        return known[1]

    def _request_id(self, request: Request) -> str:
        given = request.headers.get("x-request-id", "")
        # It goes into a header and a log: nothing that could end a line.
        if 0 < len(given) <= _LONGEST_ID and given.isascii() and given.isprintable():
            return given
        return f"{self._prefix}-{next(self._count):x}"


def _name(call: Call) -> str:
    return call.model.name if call.model is not None else ""
