"""Spans of a request: their times, their parents, and that they arrive at a collector."""

import asyncio
import gzip
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from enginery.core.errors import OptionError
from enginery.serve.batching.scheduler import Timings
from enginery.serve.config import ServeConfig
from enginery.serve.server import serve_models
from tests.serve.observability.application import App, ask

pytest.importorskip("opentelemetry.instrumentation.asgi", reason="pip install 'enginery[otel]'")
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from enginery.serve.observability import tracing as tracing_module
from enginery.serve.observability.tracing import Tracing

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


def record(tracing, *, headers=(), status=200, timings=None, seconds=0.0, **request):
    async def wait():
        await asyncio.sleep(seconds)

    app = App(
        status=status,
        body=b"secret too",
        before=wait,
        known={"route": "/v2/models/{model}/infer", "model": "minilm", "timings": timings},
    )
    pairs = [(name.encode(), value.encode()) for name, value in dict(headers).items()]
    ask(
        app,
        observed={"tracing": tracing},
        path="/v2/models/minilm/infer",
        headers=[*pairs, (b"x-request-id", b"abc")],
        **request,
    )
    return app


def spans(exporter):
    return {span.name: span for span in exporter.get_finished_spans()}


def test_child_spans_are_consecutive_within_the_request(exporter):
    timings = Timings(0.005, 0.01, 0.025, tokens=7)
    record(Tracing(exporter, batch=False), timings=timings, seconds=0.05)
    found = spans(exporter)
    request = found.pop("POST /v2/models/{model}/infer")
    assert request.kind == SpanKind.SERVER
    assert request.parent is None
    assert request.end_time - request.start_time >= 0.05e9
    assert time.time_ns() - request.end_time < 60e9
    lengths = {name: span.end_time - span.start_time for name, span in found.items()}
    assert lengths == pytest.approx({"tokenize": 5e6, "queue": 10e6, "inference": 25e6})
    assert found["tokenize"].end_time == found["queue"].start_time
    assert found["queue"].end_time == found["inference"].start_time
    assert request.start_time <= found["tokenize"].start_time
    assert found["inference"].end_time <= request.end_time
    assert {span.parent.span_id for span in found.values()} == {request.context.span_id}


def test_child_spans_longer_than_the_request_are_clipped(exporter):
    """Of several inputs each part is the longest: they may overlap."""
    record(Tracing(exporter, batch=False), timings=Timings(0.3, 0.4, 0.45))
    found = spans(exporter)
    request = found["POST /v2/models/{model}/infer"]
    for span in found.values():
        # Two clocks: the record's begins a moment before the span does.
        assert request.start_time - 10e6 <= span.start_time <= span.end_time <= request.end_time


def test_callers_trace_is_continued(exporter):
    tracing = Tracing(exporter, batch=False)
    record(tracing, headers={"traceparent": PARENT, "tracestate": "vendor=1"}, timings=Timings())
    for span in exporter.get_finished_spans():
        assert f"{span.context.trace_id:032x}" == "4bf92f3577b34da6a3ce929d0e0e4736"
    request = spans(exporter)["POST /v2/models/{model}/infer"]
    assert f"{request.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert request.context.trace_state.get("vendor") == "1"


def test_caller_that_does_not_sample_gets_no_spans(exporter):
    tracing = Tracing(exporter, batch=False)
    record(tracing, headers={"traceparent": PARENT[:-1] + "0"}, timings=Timings())
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize("value", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_invalid_traceparent_starts_a_new_trace(exporter, value):
    record(Tracing(exporter, batch=False), headers={"traceparent": value})
    (request,) = exporter.get_finished_spans()
    assert request.parent is None


def test_attributes_are_http_conventions_and_hold_no_secret(exporter):
    app = record(Tracing(exporter, batch=False), timings=Timings(tokens=7, truncated=1))
    assert app.scope["query_string"] == b"key=secret-query"  # the application has it all the same
    attributes = dict(spans(exporter)["POST /v2/models/{model}/infer"].attributes)
    assert "secret" not in str(attributes)
    expected = {
        "http.request.method": "POST",
        "url.path": "/v2/models/minilm/infer",
        "http.response.status_code": 200,
        "client.address": "10.0.0.7",
        "client.port": 51234,
        "http.route": "/v2/models/{model}/infer",
        "enginery.model": "minilm",
        "enginery.tokens": 7,
        "enginery.truncated": 1,
        "enginery.request_id": "abc",
    }
    assert {name: attributes.get(name) for name in expected} == expected


def test_caller_that_is_cancelled_gets_its_span_ended(exporter):
    async def cancelled():
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        ask(App(before=cancelled), observed={"tracing": Tracing(exporter, batch=False)})
    assert len(exporter.get_finished_spans()) == 1


@pytest.mark.parametrize(("status", "code"), [(429, StatusCode.UNSET), (503, StatusCode.ERROR)])
def test_only_server_errors_mark_the_span(exporter, status, code):
    record(Tracing(exporter, batch=False), status=status)
    assert exporter.get_finished_spans()[0].status.status_code == code


def test_request_without_a_model_is_one_span(exporter):
    record(Tracing(exporter, batch=False), client=None)
    assert len(exporter.get_finished_spans()) == 1


# From the environment


@pytest.fixture
def collector():
    """A collector on loopback: address, and what it was sent."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            message = ExportTraceServiceRequest()
            message.ParseFromString(body)
            received.append((self.path, message))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("named", ["enginery", "shop-search"])
def test_spans_arrive_at_a_collector(collector, monkeypatch, named):
    address, received = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    if named != "enginery":
        monkeypatch.setenv("OTEL_SERVICE_NAME", named)
    tracing = Tracing.from_environment()
    record(tracing, headers={"traceparent": PARENT}, timings=Timings(0.01, 0.02, 0.03))
    tracing.close()
    assert {path for path, _ in received} == {"/v1/traces"}
    names, services = set(), set()
    for _, message in received:
        for group in message.resource_spans:
            services |= {
                a.value.string_value for a in group.resource.attributes if a.key == "service.name"
            }
            names |= {span.name for scope in group.scope_spans for span in scope.spans}
    assert names == {"POST /v2/models/{model}/infer", "tokenize", "queue", "inference"}
    assert services == {named}


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318", "OTEL_TRACES_EXPORTER": "none"},
    ],
    ids=["unset", "empty", "disabled", "exporter-none"],
)
def test_tracing_is_off_by_default(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Tracing.from_environment() is None


def test_nothing_is_imported_without_traces():
    code = (
        "import sys\nfrom enginery.serve.observability.tracing import Tracing\n"
        "assert Tracing.from_environment() is None\n"
        "print([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == "[]\n"


def test_missing_package_is_a_warning_and_the_server_runs(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    monkeypatch.setattr(tracing_module, "_installed", lambda: False)
    assert Tracing.from_environment() is None
    assert "install 'enginery[otel]'" in caplog.text


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, "enginery"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=embeddings,team=a"}, "embeddings"),
    ],
)
def test_service_is_named_as_the_variables_say(monkeypatch, exporter, variables, named):
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    tracing = Tracing(exporter, batch=False)
    assert tracing._provider.resource.attributes["service.name"] == named


def test_grpc_is_refused_before_a_worker_starts(monkeypatch, tiny_paths):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setattr("enginery.serve.server.run", lambda *_: pytest.fail("started"))
    (path,) = tiny_paths("vectors").values()
    with pytest.raises(OptionError, match="is 'grpc', expected 'http/protobuf'"):
        serve_models([path], ServeConfig(port=0))


def test_grpc_error_names_the_variable(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(OptionError, match=r"is 'grpc', expected 'http/protobuf'\. Unset it"):
        Tracing.from_environment()
