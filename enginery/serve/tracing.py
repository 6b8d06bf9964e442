"""A trace of each request, for whoever collects them with OpenTelemetry.

Takes a request that was answered; leaves its spans with a collector, by OTLP over HTTP.

    $ OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318 enginery serve build/minilm
    >>> tracing = Tracing.from_environment()
    >>> if tracing:
    ...     tracing.record(request, response, "/embed", "minilm", timings, started, ended)

A span for the request, and in it tokenize, queue and inference. They are made when all is done,
with times that were taken anyway, so that answering a request is the same code with and without.
The caller's `traceparent` (w3.org/TR/trace-context) is the parent. Attributes are named as
OpenTelemetry's conventions for HTTP have them; none holds a body, a key or a query. Sampling,
the service's name and the exporter's headers are set by OpenTelemetry's own variables.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from enginery.core.errors import OptionError
from enginery.serve.messages import Request, Response
from enginery.serve.replies import Timings

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP = "http/protobuf"
_SERVICE = "enginery"

_log = logging.getLogger(__name__)


class Tracing:
    """Makes spans and hands them to an exporter that sends them from a thread of its own.

    Args:
        exporter: an `opentelemetry.sdk.trace.export.SpanExporter`.
        batch: send many at once, later; False to export each span as it ends.
    """

    def __init__(self, exporter: Any, *, batch: bool = True) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = os.environ.get("OTEL_SERVICE_NAME") or _SERVICE
        # A provider of its own: whoever runs the application in theirs keeps the global one.
        self._provider = TracerProvider(resource=Resource.create({"service.name": named}))
        kind = BatchSpanProcessor if batch else SimpleSpanProcessor
        self._provider.add_span_processor(kind(exporter))
        self._tracer = self._provider.get_tracer("enginery.serve")
        self._extract = TraceContextTextMapPropagator().extract
        self._in_span = trace.set_span_in_context
        self._server, self._failed = trace.SpanKind.SERVER, trace.Status(trace.StatusCode.ERROR)

    @classmethod
    def from_environment(cls) -> Tracing | None:
        """What `OTEL_EXPORTER_OTLP_ENDPOINT` asks for; None, and no import, where it is not set.

        The variable may be there for all programs of a machine: without the packages the server
        runs, and says once that there are no traces.

        Raises:
            OptionError: the variables ask for a protocol other than OTLP over HTTP.
        """
        environment = os.environ
        if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or (
            environment.get("OTEL_TRACES_EXPORTER", "otlp") == "none"
        ):
            return None
        endpoint = next((name for name in _ENDPOINTS if environment.get(name)), "")
        if not endpoint:
            return None
        protocol = next((name for name in _PROTOCOLS if environment.get(name)), "")
        if protocol and environment[protocol] != _HTTP:
            raise OptionError(
                f"{protocol} is '{environment[protocol]}', expected '{_HTTP}'.",
                do=f"Unset it, and let {endpoint} name the collector's HTTP port, 4318 as a rule.",
            )
        if not _installed():
            _log.warning("%s is set, but there are no traces: install 'enginery[otel]'.", endpoint)
            return None
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter())

    def record(
        self,
        request: Request,
        response: Response,
        route: str,
        model: str,
        timings: Timings | None,
        started: float,
        ended: float,
    ) -> None:
        """Makes the spans of an answered request.

        The parts are laid end to end and end with the request: what comes before them is reading
        and parsing, and what a client sends slowly. Making bytes of the answer is so little that
        it is counted there too.

        Args:
            request: names the parent in its `traceparent`.
            response: gives status and request id.
            route: the pattern, never the path.
            model: the hosted model's name, or empty.
            timings: where the time went; None where no model was asked.
            started: of `time.perf_counter`, as `Request.started`.
            ended: the same, when the answer was ready.
        """
        to_epoch = time.time_ns() - time.perf_counter_ns()
        begin, end = (int(at * 1e9) + to_epoch for at in (started, ended))
        span = self._tracer.start_span(
            f"{request.method} {route}" if route else request.method,
            context=self._extract(_lower(request.headers)),
            kind=self._server, attributes=_attributes(request, response, route, model, timings),
            start_time=begin,
        )  # fmt: skip
        if span.is_recording():
            if response.status >= 500:
                span.set_status(self._failed)
            if timings is not None:
                inside = self._in_span(span)
                parts = (
                    ("tokenize", timings.tokenize_seconds), ("queue", timings.queue_seconds),
                    ("inference", timings.inference_seconds),
                )  # fmt: skip
                at = max(begin, end - sum(int(seconds * 1e9) for _, seconds in parts))
                for name, seconds in parts:
                    until = min(end, at + int(seconds * 1e9))
                    self._tracer.start_span(name, context=inside, start_time=at).end(until)
                    at = until
        span.end(end)

    def close(self) -> None:
        """Sends what waits, and ends."""
        self._provider.shutdown()


def _installed() -> bool:
    try:
        return all(
            importlib.util.find_spec(name) is not None
            for name in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
        )
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that a trace travels in."""
    return {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}


def _attributes(
    request: Request, response: Response, route: str, model: str, timings: Timings | None
) -> dict[str, Any]:
    host, _, port = request.client.rpartition(":")
    found: dict[str, Any] = {
        "http.request.method": request.method, "url.path": request.path,
        "http.response.status_code": response.status, "http.request.body.size": len(request.body),
        "http.response.body.size": len(response.body), "client.address": host or request.client,
    }  # fmt: skip
    if host and port.isdecimal():
        found["client.port"] = int(port)
    if route:
        found["http.route"] = route
    if model:
        found["enginery.model"] = model
    if timings is not None:
        found["enginery.tokens"] = timings.tokens
        found["enginery.truncated"] = timings.truncated
    name = next((value for key, value in response.headers if key == "x-request-id"), "")
    if name:
        found["enginery.request_id"] = name
    return found
