"""What the application does with every request, whatever its route."""

import asyncio
import json
import logging
import sys

import pytest
from starlette.testclient import TestClient

from enginery.core.errors import (
    ArtifactError,
    EngineryError,
    InputError,
    MissingPackageError,
    OptionError,
    ProviderError,
)
from enginery.serve.app import ENDPOINTS, config_from, create_app
from enginery.serve.batching.queue import OverloadedError
from enginery.serve.config import ServeConfig, check_options
from enginery.serve.keys import ApiKeys
from enginery.serve.middleware import BodyBudget, BufferBody
from enginery.serve.models.served_model import TooManyInputsError, UnavailableError
from enginery.serve.observability.record import RequestRecord
from tests.serve.doubles import StandInModel, StandInModels, application, ask

EMBED = ("POST", "/embed", {"inputs": "warm"})

# Keys


@pytest.mark.parametrize(
    "headers",
    [{"authorization": "Bearer two"}, {"authorization": "bearer  one "}, {"x-api-key": "two"}],
)
def test_any_of_the_keys_is_accepted(headers):
    app = application(keys=(b"one", b"two"))
    assert ask(app, *EMBED, headers).status == 200


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "an API key is required."),
        ({"authorization": "Bearer tw"}, "the API key is invalid"),
        ({"authorization": "Basic two"}, "is invalid"),
        ({"x-api-key": ""}, "is invalid"),
        ({"x-api-key": b"\xe9\xff"}, "is invalid"),
    ],
)
def test_requests_without_a_valid_key_are_rejected(headers, message):
    app = application(keys=(b"one", b"two"))
    found = ask(app, *EMBED, headers)
    assert found.status == 401
    assert message in found.json["error"]
    assert found.json["error_type"] == "Validation"
    assert found.headers["www-authenticate"].startswith("Bearer")


def test_probes_scrapers_and_the_page_need_no_key():
    app = application(keys=(b"one",))
    for path in (
        "/",
        "/health",
        "/health/live",
        "/health/ready",
        "/ping",
        "/metrics",
        "/openapi.json",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/minilm/ready",
    ):
        assert ask(app, "GET", path).status == 200, path
    for path in ("/info", "/v2", "/v1/models", "/v2/models/minilm", "/models/minilm/info"):
        assert ask(app, "GET", path).status == 401, path


def test_keys_come_from_the_option_the_file_or_the_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one\n\n  two  \n")
    environment = {"ENGINERY_API_KEY": "three"}
    assert ApiKeys.from_config(ServeConfig(api_key="zero"), environment).keys == (b"zero",)
    from_file = ApiKeys.from_config(ServeConfig(api_key_file=str(file)), environment)
    assert from_file.keys == (b"one", b"two")
    assert ApiKeys.from_config(ServeConfig(), environment).keys == (b"three",)
    assert not ApiKeys.from_config(ServeConfig(), {})


def test_keys_that_cannot_be_used_are_named_without_the_key(tmp_path):
    file = tmp_path / "keys"
    file.write_text("\n")
    with pytest.raises(OptionError, match="has no key"):
        ApiKeys.from_config(ServeConfig(api_key_file=str(file)), {})
    with pytest.raises(OptionError, match=r"cannot be read: No such file"):
        ApiKeys.from_config(ServeConfig(api_key_file=str(tmp_path / "none")), {})
    with pytest.raises(OptionError) as caught:
        ApiKeys.from_config(ServeConfig(api_key="hush hush"), {})
    assert "hush" not in str(caught.value)
    assert "hush" not in repr(ApiKeys((b"hush",)))


# What every answer carries


def test_response_has_timings_in_milliseconds():
    headers = ask(application(), *EMBED).headers
    assert headers["x-tokenization-time"] == "0.100"
    assert headers["x-queue-time"] == "0.200"
    assert headers["x-inference-time"] == "4.000"
    assert float(headers["x-total-time"]) > 0
    assert headers["x-compute-time"] == headers["x-total-time"]
    assert headers["x-compute-tokens"] == "7"
    assert headers["x-compute-type"] == "gpu"


def test_request_id_is_echoed_or_made():
    app = application()
    assert ask(app, *EMBED, {"x-request-id": "abc 1"}).headers["x-request-id"] == "abc 1"
    for given in ("", "x" * 129, b"\xe9"):
        made = ask(app, *EMBED, {"x-request-id": given}).headers["x-request-id"]
        assert made != given
        assert made.isascii()
    for found in (ask(app, "GET", "/nowhere"), ask(application(keys=(b"k",)), *EMBED)):
        assert found.headers["x-request-id"]


def test_options_names_the_methods_without_a_key():
    found = ask(application(keys=(b"one",)), "OPTIONS", "/embed")
    assert (found.status, found.headers["allow"]) == (204, "OPTIONS, POST")
    assert ask(application(), "OPTIONS", "/").headers["allow"] == "GET, HEAD, OPTIONS, POST"


def test_wrong_method_is_405_with_allow_in_the_shape_of_its_protocol():
    found = ask(application(), "DELETE", "/v1/embeddings")
    assert (found.status, found.headers["allow"]) == (405, "OPTIONS, POST")
    assert found.json["error"]["type"] == "invalid_request_error"
    assert found.json["error"]["message"] == (
        "/v1/embeddings does not support 'DELETE', expected OPTIONS or POST."
    )
    assert ask(application(), "PUT", "/").headers["allow"] == "GET, HEAD, OPTIONS, POST"


def test_unknown_route_is_404_with_the_nearest_one():
    found = ask(application(), "POST", "/embd", {"inputs": "a"})
    assert (found.status, found.json) == (
        404,
        {"error": "there is no route '/embd'; did you mean '/embed'?"},
    )
    for path, shape in (("/v2/x", {"error"}), ("/v1/x", {"error"}), ("/x/y/z", {"error"})):
        assert set(ask(application(), "GET", path).json) == shape
    assert isinstance(ask(application(), "GET", "/v1/x").json["error"], dict)
    assert ask(application(), "GET", "/" + "x" * 5000).status == 404


def test_trailing_slash_is_accepted():
    assert ask(application(), "POST", "/embed/", {"inputs": "warm"}).status == 200
    assert ask(application(), "GET", "/health/live/").status == 200
    assert ask(application(), "GET", "/health/live//").status == 404


def test_head_has_the_headers_and_no_body():
    found = ask(application(), "HEAD", "/health/live")
    assert (found.status, found.body) == (200, b"")
    assert int(found.headers["content-length"]) > 0


# What goes wrong

SHAPES = {
    "/v2/models/minilm/infer": (
        {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["warm"]}]},
        {"error": str},
    ),
    "/embed": ({"inputs": "warm"}, {"error": str, "error_type": str}),
    "/predict/minilm": ({"inputs": "warm"}, {"error": str}),
    "/v1/embeddings": ({"input": "warm"}, {"error": dict}),
}


@pytest.mark.parametrize("path", SHAPES)
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OverloadedError("the queue is full.", retry_after_seconds=2.2), 429),
        (UnavailableError("the worker is gone."), 503),
        (TooManyInputsError("too many."), 413),
        (InputError("text 0 is no good.", do="Send another."), 422),
        (ProviderError("the GPU is gone."), 503),
        (RuntimeError("a secret"), 500),
    ],
    ids=lambda value: value if isinstance(value, int) else "",
)
def test_every_error_has_the_shape_of_its_protocol(path, error, status, caplog):
    body, shape = SHAPES[path]
    if path == "/v1/embeddings" and status == 422:
        status = 400  # OpenAI's clients know no other
    found = ask(application(StandInModel(answer_with=error)), "POST", path, body)
    assert found.status == status
    assert {name: type(value) for name, value in found.json.items()} == shape
    assert "secret" not in found.body.decode()
    assert found.headers.get("retry-after") == {429: "3", 503: "1"}.get(status)


def test_message_includes_the_remedy():
    error = InputError("text 0 is no good.", do="Send another.")
    found = ask(application(StandInModel(answer_with=error)), *EMBED)
    assert found.json == {"error": "text 0 is no good. Send another.", "error_type": "Validation"}


def test_fault_is_logged_with_traceback_and_the_response_has_only_its_id(caplog):
    app = application(StandInModel(answer_with=ZeroDivisionError("boom")))
    with caplog.at_level(logging.ERROR):
        found = ask(app, *EMBED)
    request_id = found.headers["x-request-id"]
    assert found.json == {
        "error": f"internal error. Request id: {request_id}",
        "error_type": "Backend",
    }
    (record,) = caplog.records
    assert request_id in record.getMessage()
    assert record.exc_info[0] is ZeroDivisionError


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/embeddings", ("rate_limit_error", "rate_limit_exceeded")), ("/embed", "Overloaded")],
)
def test_overload_has_the_error_type_of_the_protocol(path, kind):
    body, _ = SHAPES[path]
    model = StandInModel(answer_with=OverloadedError("full.", retry_after_seconds=0))
    found = ask(application(model), "POST", path, body)
    if path == "/embed":
        assert found.json["error_type"] == kind
    else:
        assert (found.json["error"]["type"], found.json["error"]["code"]) == kind


@pytest.mark.parametrize("state", ["loading", "stuck", "failed", "closed"])
@pytest.mark.parametrize("path", SHAPES)
def test_model_that_is_not_ready_is_503_with_its_reason(state, path):
    model = StandInModel()
    model.state, model.reason = state, "a batch has been running for 61 s"
    found = ask(application(model), "POST", path, SHAPES[path][0])
    assert found.status == 503
    assert f"is {state}: a batch has been running" in found.body.decode()
    assert found.headers["retry-after"] == "1"


def test_draining_server_answers_requests_but_is_not_ready():
    models = StandInModels(StandInModel())
    app = application(models)
    models.draining = True
    assert ask(app, *EMBED).status == 200
    for path in (
        "/health",
        "/health/ready",
        "/v2/health/ready",
        "/v2/models/minilm/ready",
        "/ping",
    ):
        assert ask(app, "GET", path).status == 503, path
    assert ask(app, "GET", "/health").json["status"] == "draining"
    assert ask(app, "GET", "/health/live").status == 200


# Bodies


def call(app, scope, messages):
    """Runs an ASGI application on messages; returns what it sent."""
    sent = []

    async def receive():
        if messages:
            return messages.pop(0)
        return await asyncio.Future()

    async def send(message):
        sent.append(message)

    async def run():
        await asyncio.wait_for(app(scope, receive, send), 30)

    asyncio.run(run())
    return sent


def chunk(body=b"", more=False):
    return {"type": "http.request", "body": body, "more_body": more}


def scope_of(path="/embed", headers=()):
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "asgi": {"version": "3.0"},
        "headers": list(headers),
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "state": {},
    }


def test_body_over_the_limit_is_413_by_declared_and_actual_size():
    app = application(config=ServeConfig(max_body_bytes=64, access_log="off"))
    found = ask(app, "POST", "/embed", {"inputs": "x" * 64})
    assert (found.status, found.json["error_type"]) == (413, "Validation")
    assert "expected at most 64 bytes" in found.json["error"]
    parts = [chunk(b"x" * 50, more=True), chunk(b"x" * 50, more=True)]  # and it would go on
    sent = call(app, scope_of(), parts)
    assert sent[0]["status"] == 413
    assert ask(app, *EMBED).status == 200


def test_bodies_together_are_bounded_and_the_largest_is_always_taken():
    budget = BodyBudget(ServeConfig(max_body_bytes=100, max_held_bytes=60))
    budget.take(100, 100)  # alone
    with pytest.raises(EngineryError, match="holds 100 bytes of other requests") as refused:
        budget.take(1, 1)
    assert refused.value.status == 503
    budget.held_bytes -= 100
    budget.take(50, 50)
    budget.take(50, 50)  # up to the larger of the two
    assert budget.held_bytes == 100
    with pytest.raises(EngineryError, match="expected at most 100 bytes") as refused:
        budget.take(0, 101)
    assert refused.value.status == 413


def test_held_bytes_are_always_released():
    app = application(config=ServeConfig(max_body_bytes=64, access_log="off"))
    ask(app, *EMBED)
    ask(app, "POST", "/embed", {"inputs": "x" * 64})
    ask(app, "POST", "/embed", b"{")
    call(app, scope_of(), [chunk(b"x" * 50, more=True), {"type": "http.disconnect"}])
    assert app.state.budget.held_bytes == 0


def test_body_is_freed_after_its_request():
    app, scope = application(), scope_of()
    call(app, scope, [chunk(b'{"inputs": "a"}')])
    assert scope["state"]["body"] == b""


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
@pytest.mark.parametrize("option", ["max_wait", "grace", "drain_delay", "stuck_after"])
def test_times_are_finite_and_not_negative(option, value):
    with pytest.raises(OptionError, match=f"option '{option}' is .*, expected a finite number"):
        check_options(ServeConfig(**{option: value}))


def test_nan_results_have_no_retry_after():
    app = application(StandInModel(answer_with=UnavailableError("NaN.", retry_after_seconds=0.0)))
    found = ask(app, *EMBED)
    assert (found.status, "retry-after" in found.headers) == (503, False)


def test_disconnect_before_the_body_gets_no_response():
    parts = [chunk(b'{"inp', more=True), {"type": "http.disconnect"}]
    assert call(application(), scope_of(), parts) == []


def test_disconnect_cancels_the_request():
    waiting = asyncio.Event()
    model = StandInModel(answer_with=waiting)
    cancelled = []

    async def answer(_task, inputs, _options, _timings):
        model.calls.append(inputs)
        try:
            await waiting.wait()
        except asyncio.CancelledError:
            cancelled.append(inputs)
            raise

    model.infer = answer
    messages = [chunk(b'{"inputs": "warm"}'), {"type": "http.disconnect"}]
    assert call(application(model), scope_of(), messages) == []
    assert cancelled == [["warm"]]


async def test_cancellation_by_the_server_is_not_a_disconnect():
    buffer = BufferBody(lambda *_: asyncio.sleep(60), BodyBudget(ServeConfig()))
    scope = scope_of()
    scope["state"]["record"] = RequestRecord(
        request_id="1", method="POST", path="/", client="", started=0.0
    )
    messages = [chunk(b"{}")]

    async def receive():
        return messages.pop() if messages else await asyncio.Future()

    task = asyncio.create_task(buffer(scope, receive, None))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# Under any ASGI server


def test_options_come_from_the_environment():
    found = config_from(
        {
            "ENGINERY_SERVE_BATCH_ROWS": "7",
            "ENGINERY_SERVE_TRUNCATE": "false",
            "ENGINERY_SERVE_PROVIDER_OPTION": "cuda.a=1,cuda.b=2",
            "OTHER": "1",
        }
    )
    assert (found.batch_rows, found.truncate) == (7, False)
    assert found.provider_option == ("cuda.a=1", "cuda.b=2")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("BATCH_ROW", "7", "did you mean 'batch_rows'"),
        ("BATCH_ROWS", "x", "batch_rows"),
        ("PORT", "80", "belongs to the ASGI server"),
        ("MAX_PADDING", "2", "less than 1"),
    ],
)
def test_option_that_cannot_be_used_is_an_option_error(name, value, words):
    with pytest.raises(OptionError, match=words):
        config_from({f"ENGINERY_SERVE_{name}": value})


def test_factory_without_models_says_what_it_needs(tmp_path):
    with pytest.raises(OptionError, match="Set ENGINERY_MODELS=name=path"):
        create_app({})
    with pytest.raises(ArtifactError, match="is not an artifact"):
        create_app({"ENGINERY_MODELS": str(tmp_path)})


def test_factory_serves_models(tiny_paths):
    paths = tiny_paths("vectors", "mood")
    models = ", ".join(f"{name}={path}" for name, path in paths.items())
    app = create_app({"ENGINERY_MODELS": models, "ENGINERY_SERVE_ACCESS_LOG": "off"})
    with TestClient(app) as client:
        found = client.post("/embed", json={"inputs": "warm"})
        assert (found.status_code, len(found.json()[0])) == (200, 32)
        assert client.get("/health/ready").json() == {"status": "ready"}


def test_last_requests_are_counted_when_the_process_ends(tiny_paths, monkeypatch):
    monkeypatch.setattr("enginery.serve.observability.metrics._COUNT_SECONDS", 60.0)
    (path,) = tiny_paths("vectors").values()
    app = create_app({"ENGINERY_MODELS": str(path), "ENGINERY_SERVE_ACCESS_LOG": "off"})
    metrics = app.state.metrics
    metrics.watch_activity(lambda: True)
    with TestClient(app) as client:
        assert client.post("/embed", json={"inputs": "warm"}).status_code == 200
        assert metrics._uncounted
    assert not metrics._uncounted


def test_model_that_cannot_be_loaded_fails_the_lifespan(tiny_paths, tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    app = create_app({"ENGINERY_MODELS": str(tmp_path), "ENGINERY_SERVE_ACCESS_LOG": "off"})
    with pytest.raises(EngineryError, match=r"manifest\.json"), TestClient(app):
        pass


def test_a_missing_package_is_named_before_anything_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "orjson", None)
    with pytest.raises(MissingPackageError, match=r"enginery\[serve\]"):
        create_app({"ENGINERY_MODELS": str(tmp_path)})


# Whatever a client sends

STRANGE = [
    b"",
    b"{",
    b"null",
    b"3",
    b'"x"',
    b"[]",
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b"NaN",
    b"[" * 100_000,
    b'{"inputs": ' + b"[" * 1000 + b"]" * 1000 + b"}",
    b'{"inputs": "\\ud800"}',
    b'{"inputs": 1e400}',
    b'{"inputs": ' + b"9" * 400 + b"}",
    b'{"inputs": "a\x00"}',
    b"{}",
    b'{"\\u0000": 1}',
    b'{"inputs": [18446744073709551616]}',
    b"\x00" * 1000,
    b'{"inputs": "a", "dimensions": 1e3}',
    b'{"inputs": [{"name": 3}]}',
    b'{"inputs": "a", "inputs": [{"name": "text"}]}',
    b'{"ids": [-1]}',
    b'{"ids": [[]]}',
    b'{"ids": 3}',
    b'{"texts": ["a"]}',
    b'{"query": 1, "texts": []}',
    b'{"inputs": {"source_sentence": "a", "sentences": "b"}}',
    b'{"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}], '
    b'"outputs": [{"name": "x"}, 3]}',
]


@pytest.mark.more
@pytest.mark.parametrize("body", STRANGE, ids=lambda body: repr(body[:24]))
def test_no_fuzzed_request_is_a_fault(running, body):
    for endpoint in ENDPOINTS:
        if endpoint.method != "POST":
            continue
        for model in ("vectors", "mood", "photos") if "{model}" in endpoint.path else ("",):
            path = endpoint.path.replace("{model}", model).replace("{version}", "1")
            for headers in (
                {},
                {"content-type": "multipart/form-data; boundary=x"},
                {"content-type": "image/png"},
                {"inference-header-content-length": "2"},
            ):
                found = running("POST", path, body, headers=headers)
                assert found.status < 500, (path, headers, found.body)
                if found.status != 200:
                    assert found.json["error"], path


def test_every_endpoint_has_a_handler_of_its_own_path_and_method():
    pairs = [(endpoint.method, endpoint.path) for endpoint in ENDPOINTS]
    assert len(pairs) == len(set(pairs))
    assert json.loads(application().state.openapi())["paths"]
