"""What the application does with every request, whatever its route."""

import asyncio
import json
import logging

import pytest

from enginery.core.errors import InputError, OptionError, ProviderError
from enginery.serve.application import ServerApplication
from enginery.serve.config import ServeConfig
from enginery.serve.keys import Keys
from enginery.serve.messages import Request
from enginery.serve.refusals import (
    OverloadedError,
    TooLargeError,
    UnauthorizedError,
    UnavailableError,
)
from tests.serve.conftest import seen
from tests.serve.doubles import StandInMetrics, StandInModel, StandInModels

EMBED = ("POST", "/embed", {"inputs": "warm"})


def application(*models, keys=(), **parts):
    return ServerApplication(
        StandInModels(*models or [StandInModel()]), ServeConfig(), keys=Keys(keys), **parts
    )


def ask(app, method, path, body=None, headers=None):
    data = body if isinstance(body, bytes) else json.dumps(body).encode() if body else b""
    return seen(asyncio.run(app(Request(method, path, "", headers or {}, data))))


class Log:
    """An access log that keeps its lines."""

    def __init__(self):
        self.lines = []

    def __call__(self, request, response, *, route, model, seconds, timings):
        self.lines.append(
            (request.method, request.path, route, response.status, len(response.body))
        )


def test_an_answer_does_not_wait_for_its_line_in_the_log():
    log = Log()
    app = ServerApplication(
        StandInModels(StandInModel()), ServeConfig(), keys=Keys(), access_log=log
    )

    async def one():
        await app(Request("POST", "/embed", "", {}, b'{"inputs": "a"}'))
        before = list(log.lines)
        await asyncio.sleep(0)
        return before

    assert asyncio.run(one()) == []
    assert [line[:2] for line in log.lines] == [("POST", "/embed")]


# Keys


@pytest.mark.parametrize(
    "headers",
    [{"authorization": "Bearer two"}, {"authorization": "bearer  one "}, {"x-api-key": "two"}],
)
def test_any_of_the_keys_lets_in(headers):
    app = application(keys=(b"one", b"two"))
    assert ask(app, *EMBED, headers).status == 200


@pytest.mark.parametrize(
    ("headers", "message"),
    [({}, "an API key is needed."), ({"authorization": "Bearer tw"}, "not one of this server's"),
     ({"authorization": "Basic two"}, "not one"), ({"x-api-key": ""}, "not one"),
     ({"x-api-key": "é\udcff"}, "not one")],
)  # fmt: skip
def test_without_a_key_nothing_is_answered(headers, message):
    app = application(keys=(b"one", b"two"))
    found = ask(app, *EMBED, headers)
    assert found.status == 401
    assert message in found.json["error"]
    assert found.headers["www-authenticate"].startswith("Bearer")


def test_a_key_is_asked_for_before_the_body_is_read():
    app = application(keys=(b"one",))
    with pytest.raises(UnauthorizedError):
        app.admit(Request("POST", "/embed"))
    app.admit(Request("POST", "/embed", headers={"x-api-key": "one"}))
    for path in ("/health", "/nowhere"):
        app.admit(Request("GET", path))
    application().admit(Request("POST", "/embed"))


def test_probes_scrapers_and_the_page_need_no_key():
    app = application(keys=(b"one",), metrics=StandInMetrics())
    for path in ("/", "/health", "/health/live", "/health/ready", "/ping", "/metrics",
                 "/openapi.json", "/v2/health/live", "/v2/health/ready",
                 "/v2/models/minilm/ready"):  # fmt: skip
        assert ask(app, "GET", path).status == 200, path
    for path in ("/info", "/v2", "/v1/models", "/v2/models/minilm", "/models/minilm/info"):
        assert ask(app, "GET", path).status == 401, path


def test_keys_come_from_the_option_the_file_or_the_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one\n\n  two  \n")
    environment = {"ENGINERY_API_KEY": "three"}
    assert Keys.from_config(ServeConfig(api_key="zero"), environment).keys == (b"zero",)
    from_file = Keys.from_config(ServeConfig(api_key_file=str(file)), environment)
    assert from_file.keys == (b"one", b"two")
    assert Keys.from_config(ServeConfig(), environment).keys == (b"three",)
    assert not Keys.from_config(ServeConfig(), {})


def test_keys_that_cannot_be_used_are_said_without_the_key(tmp_path):
    file = tmp_path / "keys"
    file.write_text("\n")
    with pytest.raises(OptionError, match="has no key"):
        Keys.from_config(ServeConfig(api_key_file=str(file)), {})
    with pytest.raises(OptionError, match=r"cannot be read: No such file"):
        Keys.from_config(ServeConfig(api_key_file=str(tmp_path / "none")), {})
    with pytest.raises(OptionError) as caught:
        Keys.from_config(ServeConfig(api_key="hush hush"), {})
    assert "hush" not in str(caught.value)
    assert "hush" not in repr(Keys((b"hush",)))


# What every answer carries


def test_answer_says_where_the_time_went_in_milliseconds():
    headers = ask(application(), *EMBED).headers
    assert headers["x-tokenization-time"] == "0.100"
    assert headers["x-queue-time"] == "0.200"
    assert headers["x-inference-time"] == "4.000"
    assert float(headers["x-total-time"]) > 0
    assert headers["x-compute-time"] == headers["x-total-time"]
    assert (headers["x-compute-tokens"], headers["x-compute-characters"]) == ("7", "4")
    assert headers["x-compute-type"] == "gpu"


def test_request_id_is_echoed_or_made():
    app = application()
    assert ask(app, *EMBED, {"x-request-id": "abc 1"}).headers["x-request-id"] == "abc 1"
    for given in ("", "x" * 129, "a\r\nset-cookie: b", "é"):
        made = ask(app, *EMBED, {"x-request-id": given}).headers["x-request-id"]
        assert made != given
        assert made.isascii()
    assert ask(app, "GET", "/nowhere").headers["x-request-id"]


def test_options_names_the_methods_without_a_key():
    found = ask(application(keys=(b"one",)), "OPTIONS", "/embed")
    assert (found.status, found.headers["allow"]) == (204, "OPTIONS, POST")


def test_wrong_method_is_405_with_allow_in_the_shape_of_its_family():
    found = ask(application(), "DELETE", "/v1/embeddings")
    assert (found.status, found.headers["allow"]) == (405, "OPTIONS, POST")
    assert found.json["error"]["type"] == "invalid_request_error"


# What goes wrong

SHAPES = {
    "/v2/models/minilm/infer": ({"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1],
                                             "data": ["warm"]}]}, {"error": str}),
    "/embed": ({"inputs": "warm"}, {"error": str, "error_type": str}),
    "/predict/minilm": ({"inputs": "warm"}, {"error": str}),
    "/v1/embeddings": ({"input": "warm"}, {"error": dict}),
}  # fmt: skip


@pytest.mark.parametrize("path", SHAPES)
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OverloadedError("the queue is full.", retry_after_seconds=2.2), 429),
        (UnavailableError("the worker is gone."), 503),
        (TooLargeError("too many."), 413),
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
    wanted = {429: "3", 503: "1"}.get(status)
    assert found.headers.get("retry-after") == wanted


def test_message_has_what_to_do():
    error = InputError("text 0 is no good.", do="Send another.")
    found = ask(application(StandInModel(answer_with=error)), *EMBED)
    assert found.json == {"error": "text 0 is no good. Send another.", "error_type": "Validation"}


def test_fault_is_logged_with_its_traceback_and_the_answer_has_an_id_alone(caplog):
    app = application(StandInModel(answer_with=ZeroDivisionError("boom")))
    with caplog.at_level(logging.ERROR):
        found = ask(app, *EMBED)
    request_id = found.headers["x-request-id"]
    assert found.json == {"error": f"internal error. Request id: {request_id}",
                          "error_type": "Backend"}  # fmt: skip
    (record,) = caplog.records
    assert request_id in record.getMessage()
    assert record.exc_info[0] is ZeroDivisionError


def test_panic_of_rust_code_is_answered_as_a_fault(caplog):
    from tokenizers import Regex, Tokenizer, models, normalizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.normalizer = normalizers.Replace(Regex("(a|aa)+b"), "")
    model = StandInModel()

    async def panics(*_, **__):
        tokenizer.encode("a" * 60)

    model.embed = panics
    found = ask(application(model), *EMBED)
    assert (found.status, found.json["error_type"]) == (500, "Backend")
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/embeddings", ("rate_limit_error", "rate_limit_exceeded")), ("/embed", "Overloaded")],
)
def test_overload_is_named_as_the_protocol_names_it(path, kind):
    body, _ = SHAPES[path]
    model = StandInModel(answer_with=OverloadedError("full."))
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


def test_draining_server_answers_what_still_comes_and_is_not_ready():
    models = StandInModels(StandInModel())
    app = ServerApplication(models, ServeConfig(), keys=Keys())
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


def test_refusal_of_the_http_layer_has_the_shape_of_its_path():
    app = application()

    def refused(path, status=413, message="too large"):
        found = app.refusal(Request("POST", path), status, message)
        assert found.status == status
        return json.loads(found.body)

    assert refused("/v2/x") == {"error": "too large"}
    assert refused("/embed") == {"error": "too large", "error_type": "Validation"}
    assert refused("/v1/embeddings")["error"]["message"] == "too large"
    refused("", 431)
    refused("/embed\udcff", 400, "\udcff")


def test_refusal_of_the_http_layer_is_counted_logged_and_named():
    metrics, log = StandInMetrics(), Log()
    app = application(metrics=metrics, access_log=log)
    garbage = app.refusal(Request("", ""), 400, "this is not HTTP/1.1")
    large = app.refusal(Request("POST", "/embed", headers={"x-request-id": "r1"}), 413, "too large")
    late = app.refusal(Request("GET", "/x"), 408, "too late")
    assert log.lines == [("", "", "", 400, len(garbage.body)), ("POST", "/embed", "", 413,
                         len(large.body)), ("GET", "/x", "", 408, len(late.body))]  # fmt: skip
    assert dict(large.headers)["x-request-id"] == "r1"
    assert dict(garbage.headers)["x-request-id"]
    assert metrics.refusals == [("", "invalid"), ("", "too_large"), ("", "http")]
    assert metrics.requests == [("", "", 400), ("", "", 413), ("", "", 408)]


@pytest.mark.parametrize("stubborn", [False, True])
def test_request_that_the_server_cuts_off_is_what_its_client_was_told_and_once(stubborn):
    metrics, log = StandInMetrics(), Log()

    class Model(StandInModel):
        async def _answer(self, method, inputs, options):
            try:
                return await super()._answer(method, inputs, options)
            except asyncio.CancelledError:
                if not stubborn:
                    raise
                self.answer_with = None
                return await super()._answer(method, inputs, options)

    async def give_up():
        model = Model(answer_with=asyncio.Event())
        app = application(model, metrics=metrics, access_log=log)
        request = Request(*EMBED[:2], headers={"x-request-id": "r1"}, body=b'{"inputs": "warm"}')
        task = asyncio.ensure_future(app(request))
        while not model.calls:
            await asyncio.sleep(0)
        response = app.refusal(request, 503, "the server is shutting down.")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return response

    response = asyncio.run(give_up())
    assert dict(response.headers)["x-request-id"] == "r1"
    assert json.loads(response.body)["error_type"] == "Unhealthy"
    assert log.lines == [("POST", "/embed", "/embed", 503, len(response.body))]
    assert metrics.requests == [("/embed", "minilm", 503)]
    assert metrics.refusals == [("minilm", "unavailable")]
    assert metrics.replies == []


# Metrics, log, spans


def test_metrics_have_patterns_and_names_of_models_only():
    metrics = StandInMetrics()
    app = application(metrics=metrics)
    ask(app, *EMBED)
    ask(app, "POST", "/predict/nobody", {"inputs": "x"})
    ask(app, "GET", "/secret/path")
    ask(app, "POST", "/predict/minilm", {"inputs": 3})
    assert metrics.requests == [
        ("/embed", "minilm", 200), ("/predict/{model}", "", 404), ("", "", 404),
        ("/predict/{model}", "minilm", 422),
    ]  # fmt: skip
    assert metrics.replies == [("minilm", 7, 1)]
    assert metrics.refusals == [("", "not_found"), ("", "not_found"), ("minilm", "invalid")]


def test_log_and_spans_are_told_of_each_request():
    told = []

    class Tracing:
        def record(self, *given, **named):
            told.append(("span", named["route"], named["model"], named["timings"] is not None))

    def log(request, response, *, route, model, seconds, timings):
        told.append(("line", route, model, dict(response.headers)["x-request-id"]))

    app = application(access_log=log, tracing=Tracing())
    ask(app, *EMBED, {"x-request-id": "r1"})
    assert told == [("line", "/embed", "minilm", "r1"), ("span", "/embed", "minilm", True)]


def test_client_that_goes_cancels_the_model_and_is_counted():
    metrics, told = StandInMetrics(), []

    async def leave():
        waiting = asyncio.Event()
        model = StandInModel(answer_with=waiting)
        app = application(
            model, metrics=metrics,
            access_log=lambda request, response, **more: told.append(response.status),
        )  # fmt: skip
        task = asyncio.ensure_future(app(Request(*EMBED[:2], body=b'{"inputs": "warm"}')))
        while not model.calls:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert metrics.refusals == [("minilm", "cancelled")]
    assert metrics.requests == [("/embed", "minilm", 499)]
    assert told == [499]


# Whatever a client sends

STRANGE = [
    b"", b"{", b"null", b"3", b'"x"', b"[]", b"\xff\xfe", b"\xef\xbb\xbf{}", b"NaN", b"[" * 100_000,
    b'{"inputs": ' + b"[" * 1000 + b"]" * 1000 + b"}", b'{"inputs": "\\ud800"}',
    b'{"inputs": 1e400}', b'{"inputs": ' + b"9" * 400 + b"}", b'{"inputs": "a\x00"}',
    b'{"inputs": null}', b"{}", b'{"\\u0000": 1}', b'{"inputs": [[[]]]}', b'{"inputs": {"a": {}}}',
    b'{"inputs": [true]}', b'{"inputs": [1.5]}', b'{"inputs": [-1]}', b'{"inputs": [99999999]}',
    b'{"inputs": [["a", "b", "c"]]}', b'{"inputs": ["a", 1]}',
    b'{"inputs": "3", "truncate": "yes"}',
    b'{"inputs": "a", "parameters": []}', b'{"inputs": [18446744073709551616]}', b"\x00" * 1000,
    b'{"inputs": "a", "dimensions": "4"}', b'{"inputs": "a", "dimensions": 0}', b'{"inputs": ""}',
    b'{"inputs": "a", "dimensions": 1e3}', b'{"input": []}',
    b'{"input": "a", "encoding_format": 3}',
    b'{"inputs": [{"name": 3}]}', b'{"inputs": "a", "inputs": [{"name": "text"}]}',
    b'{"ids": [-1]}', b'{"ids": [[]]}', b'{"ids": 3}', b'{"texts": ["a"]}',
    b'{"query": 1, "texts": []}',
]  # fmt: skip


@pytest.mark.parametrize("body", STRANGE, ids=lambda body: repr(body[:24]))
def test_nothing_that_is_sent_is_a_fault(running, body):
    for route in running.application.parts.table.routes:
        if route.method != "POST":
            continue
        for model in ("vectors", "mood", "photos") if "{model}" in route.pattern else ("",):
            path = route.pattern.replace("{model}", model).replace("{version}", "1")
            for headers in ({}, {"content-type": "multipart/form-data; boundary=x"},
                            {"content-type": "image/png"},
                            {"inference-header-content-length": "2"}):  # fmt: skip
                found = running("POST", path, body, headers=headers)
                assert found.status < 500, (path, headers, found.body)
                if found.status != 200:
                    assert found.json["error"], path
