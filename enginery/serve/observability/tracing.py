"""A trace of each request, for whoever collects them with OpenTelemetry.

    $ OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318 enginery serve build/minilm
    >>> tracing = Tracing.from_environment()
    >>> app = ObservabilityMiddleware(app, activity=activity, tracing=tracing)

opentelemetry-instrumentation-asgi makes the span of a request, whose parent is the caller's
`traceparent` (w3.org/TR/trace-context). In it are tokenize, queue and inference, made once the
response begins, of times that were taken anyway. Attributes are OpenTelemetry's for HTTP; none
holds a body, a key or a query. Sampling, propagation, the service's name and the exporter's headers
are set by OpenTelemetry's own variables.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from enginery.core.errors import OptionError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from enginery.serve.observability.record import RequestRecord

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP = "http/protobuf"
_SERVICE = "enginery"
_NEEDED = (
    "opentelemetry.sdk.trace",
    "opentelemetry.exporter.otlp.proto.http",
    "opentelemetry.instrumentation.asgi",
)

_log = logging.getLogger("enginery.serve")


class Tracing:
    """Makes spans and hands them to an exporter that sends them from a thread of its own."""

    def __init__(self, exporter: Any, *, batch: bool = True) -> None:
        """Begin no span.

        Args:
            exporter: an `opentelemetry.sdk.trace.export.SpanExporter`.
            batch: send many at once, later; False to export each span as it ends.
        """
        # The stable names of HTTP's attributes, not those that they had before.
        os.environ.setdefault("OTEL_SEMCONV_STABILITY_OPT_IN", "http")
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

        resource = Resource.create()  # of OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": _SERVICE}))
        # A provider of its own: whoever runs the application in theirs keeps the global one.
        self._provider = TracerProvider(resource=resource)
        kind = BatchSpanProcessor if batch else SimpleSpanProcessor
        self._provider.add_span_processor(kind(exporter))
        self._tracer = self._provider.get_tracer("enginery.serve")
        self._trace = trace

    @classmethod
    def from_environment(cls) -> Tracing | None:
        """Return what `OTEL_EXPORTER_OTLP_ENDPOINT` asks for; None where it is not set.

        The variable may be there for all programs of a machine: without the packages the server
        runs, and says once that there are no traces.

        Raises:
            OptionError: the variables ask for a protocol other than OTLP over HTTP.
        """
        endpoint = trace_endpoint(os.environ)
        if not endpoint:
            return None
        if not _installed():
            _log.warning("%s is set, but there are no traces: install 'enginery[otel]'.", endpoint)
            return None
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter())

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Return the application with a span around each of its requests."""
        from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
        from opentelemetry.metrics import NoOpMeterProvider

        async def inside(scope: Scope, receive: Receive, send: Send) -> None:
            original = scope["enginery.scope"]
            await app(original, receive, self._describing(original["state"]["record"], send))

        traced: ASGIApp = OpenTelemetryMiddleware(
            inside,
            default_span_details=lambda scope: (scope["method"], {}),
            tracer_provider=self._provider,
            meter_provider=NoOpMeterProvider(),
            exclude_spans=["receive", "send"],
        )

        async def outside(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                # A query may hold a key, and would become an attribute.
                await traced({**scope, "query_string": b"", "enginery.scope": scope}, receive, send)
            else:
                await app(scope, receive, send)

        return outside

    def _describing(self, record: RequestRecord, send: Send) -> Send:
        """Describe the current span once the route has answered, and make its parts."""
        span = self._trace.get_current_span()
        if not span.is_recording():
            return send

        async def describe(message: Message) -> None:
            if message["type"] == "http.response.start":
                if record.route:
                    span.update_name(f"{record.method} {record.route}")
                span.set_attributes(_attributes(record))
                self._make_parts(record, span)
            await send(message)

        return describe

    def _make_parts(self, record: RequestRecord, span: Any) -> None:
        """Lay the parts end to end, up to now.

        What comes before them is reading and parsing, and what a client sends slowly. Making bytes
        of the answer is so little that it is counted there too.
        """
        timings = record.timings
        if timings is None:
            return
        end = time.time_ns()
        begin = end - int((time.perf_counter() - record.started) * 1e9)
        parts = (
            ("tokenize", timings.tokenize_seconds),
            ("queue", timings.queue_seconds),
            ("inference", timings.inference_seconds),
        )
        context = self._trace.set_span_in_context(span)
        # Of several inputs each part is the longest: together they may be more than the request.
        at = max(begin, end - sum(int(seconds * 1e9) for _, seconds in parts))
        for name, seconds in parts:
            until = min(end, at + int(seconds * 1e9))
            self._tracer.start_span(name, context=context, start_time=at).end(until)
            at = until

    def close(self) -> None:
        """Send what waits, and end."""
        self._provider.shutdown()


def trace_endpoint(environment: Mapping[str, str]) -> str:
    """Return the variable that names where traces go; empty where none are wanted.

    Raises:
        OptionError: the variables ask for a protocol other than OTLP over HTTP.
    """
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or (
        environment.get("OTEL_TRACES_EXPORTER", "otlp") == "none"
    ):
        return ""
    endpoint = next((name for name in _ENDPOINTS if environment.get(name)), "")
    protocol = next((name for name in _PROTOCOLS if environment.get(name)), "")
    if endpoint and protocol and environment[protocol] != _HTTP:
        raise OptionError(
            f"{protocol} is '{environment[protocol]}', expected '{_HTTP}'.",
            do=f"Unset it, and let {endpoint} name the collector's HTTP port, 4318 as a rule.",
        )
    return endpoint


def _installed() -> bool:
    try:
        return all(importlib.util.find_spec(name) is not None for name in _NEEDED)
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _attributes(record: RequestRecord) -> dict[str, Any]:
    found: dict[str, Any] = {"enginery.request_id": record.request_id}
    if record.route:
        found["http.route"] = record.route
    if record.model:
        found["enginery.model"] = record.model
    if record.timings is not None:
        found["enginery.tokens"] = record.timings.tokens
        found["enginery.truncated"] = record.timings.truncated
    return found
