"""Traces of requests with OpenTelemetry.

    $ OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318 enginery serve build/minilm

opentelemetry-instrumentation-asgi creates the span of a request, whose parent is the caller's
`traceparent` (w3.org/TR/trace-context). Its child spans tokenize, queue and inference are created
when the response starts, from the timings that are measured anyway. Attributes follow
OpenTelemetry's conventions for HTTP; none contains a body, a key or a query string. OpenTelemetry's
own variables set the sampling, the propagation, the service name and the exporter's headers.
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
    """A tracer with an exporter that sends spans from its own thread."""

    def __init__(self, exporter: Any, *, batch: bool = True) -> None:
        """Set up the tracer.

        Args:
            exporter: an `opentelemetry.sdk.trace.export.SpanExporter`.
            batch: export spans in batches; False to export each span as it ends.
        """
        # Use the stable HTTP attribute names, not the older experimental ones.
        os.environ.setdefault("OTEL_SEMCONV_STABILITY_OPT_IN", "http")
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

        resource = Resource.create()  # reads OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": _SERVICE}))
        # Not the global provider, which belongs to the program that embeds this application.
        self._provider = TracerProvider(resource=resource)
        kind = BatchSpanProcessor if batch else SimpleSpanProcessor
        self._provider.add_span_processor(kind(exporter))
        self._tracer = self._provider.get_tracer("enginery.serve")
        self._trace = trace

    @classmethod
    def from_environment(cls) -> Tracing | None:
        """Return the tracing that `OTEL_EXPORTER_OTLP_ENDPOINT` configures; None if it is not set.

        The variable may be set for all programs of a machine. So if the packages are missing, log a
        warning and run without traces.

        Raises:
            OptionError: the variables specify a protocol other than OTLP over HTTP.
        """
        endpoint = trace_endpoint(os.environ)
        if not endpoint:
            return None
        if not _installed():
            _log.warning(
                "%s is set, but traces are disabled because packages are missing: "
                "install 'enginery[otel]'.",
                endpoint,
            )
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
                # The query string would become an attribute, and it may contain a key.
                await traced({**scope, "query_string": b"", "enginery.scope": scope}, receive, send)
            else:
                await app(scope, receive, send)

        return outside

    def _describing(self, record: RequestRecord, send: Send) -> Send:
        """Return a `send` that adds attributes and child spans when the response starts."""
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
        """Create the child spans one after another, so that the last one ends now.

        The time before them is reading and parsing the request, including slow clients, and
        serializing the response, which takes very little.
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
        # With several inputs each time is a maximum, so their sum may exceed the whole request.
        at = max(begin, end - sum(int(seconds * 1e9) for _, seconds in parts))
        for name, seconds in parts:
            until = min(end, at + int(seconds * 1e9))
            self._tracer.start_span(name, context=context, start_time=at).end(until)
            at = until

    def close(self) -> None:
        """Export the remaining spans and shut down."""
        self._provider.shutdown()


def trace_endpoint(environment: Mapping[str, str]) -> str:
    """Return the name of the variable with the traces' endpoint; empty if traces are off.

    Raises:
        OptionError: the variables specify a protocol other than OTLP over HTTP.
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
            do=f"Unset it, and set {endpoint} to the collector's HTTP port, usually 4318.",
        )
    return endpoint


def _installed() -> bool:
    try:
        return all(importlib.util.find_spec(name) is not None for name in _NEEDED)
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _attributes(record: RequestRecord) -> dict[str, Any]:
    attributes: dict[str, Any] = {"enginery.request_id": record.request_id}
    if record.route:
        attributes["http.route"] = record.route
    if record.model:
        attributes["enginery.model"] = record.model
    if record.timings is not None:
        attributes["enginery.tokens"] = record.timings.tokens
        attributes["enginery.truncated"] = record.timings.truncated
    return attributes
