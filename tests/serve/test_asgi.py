"""The same application under uvicorn, and under a server of messages."""

import asyncio
import threading

import httpx
import orjson
import pytest
import uvicorn

from enginery.core.errors import ArtifactError, MissingPackageError, OptionError
from enginery.serve.asgi import AsgiApp, _Served, config_from, create_app
from enginery.serve.config import ServeConfig
from tests.serve.echo import Echo, until


def scope(path="/echo", method="GET", headers=(), **more):
    return {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(),
        "query_string": b"a=b", "headers": [(b"host", b"a"), *headers], "client": ["::1", 5],
        **more,
    }  # fmt: skip


class Peer:
    """What a server sends and hears."""

    def __init__(self, *messages):
        self.messages = asyncio.Queue()
        for message in messages or ({"type": "http.request", "body": b""},):
            self.messages.put_nowait(message)
        self.sent = []

    async def receive(self):
        return await self.messages.get()

    async def send(self, message):
        self.sent.append(message)

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def headers(self):
        return dict(self.sent[0]["headers"])

    @property
    def body(self):
        return self.sent[1]["body"]


def ask(asked, *messages, application=None, **options):
    async def whole():
        peer = Peer(*messages)
        await AsgiApp(application or Echo(), **options)(asked, peer.receive, peer.send)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return peer

    return asyncio.run(whole())


def test_request_and_answer():
    asked = scope("/a%20b", "POST", [(b"X-One", b"1"), (b"x-one", b"2")])
    parts = [{"type": "http.request", "body": b"ab", "more_body": True},
             {"type": "http.request", "body": b"c"}]  # fmt: skip
    application = Echo()
    peer = ask(asked, *parts, application=application)
    found = orjson.loads(peer.body)
    assert (found["path"], found["query"], found["body"]) == ("/a b", "a=b", "abc")
    assert found["headers"] == {"host": "a", "x-one": "1, 2"}
    assert application.requests[0].client == "[::1]:5"
    assert peer.status == 200
    assert peer.headers[b"content-type"] == b"application/json"
    assert peer.headers[b"content-length"] == str(len(peer.body)).encode()
    assert peer.headers[b"x-from"] == b"echo"


def test_head_has_a_length_and_no_body():
    peer = ask(scope("/large/70000", "HEAD"))
    assert (peer.headers[b"content-length"], peer.body) == (b"70000", b"")


def test_answer_without_a_body_has_no_length():
    peer = ask(scope("/status/204"))
    assert (peer.status, peer.headers, peer.body) == (204, {}, b"")


def test_body_too_large_is_413_by_its_length_and_by_its_bytes():
    length = [(b"content-length", b"1001")]
    assert ask(scope(headers=length), max_body_bytes=1000).status == 413
    parts = [{"type": "http.request", "body": b"x" * 501, "more_body": True}] * 2
    peer = ask(scope(), *parts, max_body_bytes=1000)
    assert peer.status == 413
    assert orjson.loads(peer.body)["path"] == "/echo"


@pytest.mark.parametrize("path", ["/%ff", "/%f"])
def test_path_that_is_not_utf8_is_400(path):
    assert ask(scope(path)).status == 400


def test_refused_requests_are_told_with_what_is_known_of_them():
    application = Echo()
    ask(scope("/%ff", "POST"), application=application)
    ask(scope(headers=[(b"content-length", b"99")]), application=application, max_body_bytes=9)
    seen = [(request.method, request.path, request.query, request.client, status)
            for request, status in application.refused]  # fmt: skip
    assert seen == [("POST", "", "a=b", "[::1]:5", 400), ("GET", "/echo", "a=b", "[::1]:5", 413)]


def test_length_that_is_no_number_is_400():
    assert ask(scope(headers=[(b"content-length", b"x")])).status == 400


def test_path_is_below_where_the_application_is_mounted():
    for path, below in (("/models/v2", "/v2"), ("/models", "/"), ("/modelsv2", "/modelsv2")):
        for root in ("/models", "/models/"):
            peer = ask(scope(path, root_path=root))
            assert orjson.loads(peer.body)["path"] == below


def test_whoever_may_not_ask_is_told_before_the_body_is_read():
    peer = ask(scope(method="POST", headers=[(b"x-api-key", b"wrong")]), {"type": "nothing"})
    assert peer.status == 401


@pytest.mark.parametrize("path", ["/bug", "/inner"])
def test_bug_is_500_with_a_traceback_in_the_log(path, caplog):
    peer = ask(scope(path))
    assert (peer.status, orjson.loads(peer.body)["error"]) == (500, "internal error")
    assert caplog.records[0].exc_info


def test_client_that_has_gone_cancels_its_request():
    async def whole():
        application, peer = Echo(), Peer()
        running = asyncio.create_task(AsgiApp(application)(scope("/wait"), peer.receive, peer.send))
        await until(lambda: application.requests)
        peer.messages.put_nowait({"type": "http.disconnect"})
        await running
        assert application.cancelled == 1
        assert not peer.sent
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(whole())


def test_client_that_goes_before_its_body_is_not_answered():
    application = Echo()
    peer = ask(scope(), {"type": "http.disconnect"}, application=application)
    assert not peer.sent
    assert not application.requests


def test_websocket_is_closed():
    peer = ask({"type": "websocket", "path": "/"}, {"type": "websocket.connect"})
    assert peer.sent == [{"type": "websocket.close", "code": 1000}]


def test_lifespan_runs_its_hooks_and_says_what_failed():
    happened = []

    async def startup():
        happened.append("up")

    async def shutdown():
        happened.append("down")

    messages = ({"type": "lifespan.startup"}, {"type": "lifespan.shutdown"})
    peer = ask({"type": "lifespan"}, *messages, startup=startup, shutdown=shutdown)
    assert [m["type"] for m in peer.sent] == [
        "lifespan.startup.complete", "lifespan.shutdown.complete",
    ]  # fmt: skip
    assert happened == ["up", "down"]

    async def fails():
        raise ValueError("no models")

    peer = ask({"type": "lifespan"}, *messages, startup=fails)
    assert peer.sent == [{"type": "lifespan.startup.failed", "message": "no models"}]


def test_uvicorn_runs_it():
    happened = []

    async def startup():
        happened.append("up")

    async def shutdown():
        happened.append("down")

    app = AsgiApp(Echo(), max_body_bytes=1000, startup=startup, shutdown=shutdown)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            assert client.post("/echo", content=b"body").json()["body"] == "body"
            assert client.post("/echo", content=b"x" * 1001).status_code == 413
            assert client.post("/echo", content=iter([b"x" * 600] * 2)).status_code == 413
            assert client.get("/bug").status_code == 500
            assert client.head("/large/70000").headers["content-length"] == "70000"
    finally:
        server.should_exit = True
        thread.join()
    assert happened == ["up", "down"]


def test_options_come_from_the_environment():
    config = config_from(
        {"ENGINERY_SERVE_BATCH_ROWS": "8", "ENGINERY_SERVE_TRUNCATE": "false", "PATH": "x",
         "ENGINERY_SERVE_PROVIDER_OPTION": "cpu.a=1,cpu.b=2"}
    )  # fmt: skip
    assert (config.batch_rows, config.truncate) == (8, False)
    assert config.provider_option == ("cpu.a=1", "cpu.b=2")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("BATCH_ROW", "8", "did you mean 'batch_rows'"), ("BATCH_ROWS", "x", "batch_rows"),
     ("BATCH_ROWS", "0", "expected 1 or more"), ("PORT", "80", "the ASGI server's own")],
)  # fmt: skip
def test_option_that_cannot_be_used_is_an_option_error(name, value, words):
    with pytest.raises(OptionError, match=words):
        config_from({f"ENGINERY_SERVE_{name}": value})


def test_factory_without_models_says_what_it_needs(tmp_path):
    with pytest.raises(OptionError, match="ENGINERY_MODELS is empty"):
        create_app({})
    with pytest.raises(ArtifactError):
        create_app({"ENGINERY_MODELS": f"m={tmp_path}"})


def test_factory_serves_models(exported):
    artifact = exported("bert", "text-classification")

    async def whole():
        app = create_app(
            {"ENGINERY_MODELS": f"tiny={artifact.path}", "ENGINERY_SERVE_ACCESS_LOG": "off"}
        )
        early = Peer()
        await app(scope("/v2/models/tiny"), early.receive, early.send)
        assert early.status == 503
        life = Peer({"type": "lifespan.startup"})
        living = asyncio.create_task(app({"type": "lifespan"}, life.receive, life.send))
        await until(lambda: life.sent)
        assert life.sent == [{"type": "lifespan.startup.complete"}]
        peer = Peer()
        await app(scope("/v2/models/tiny/ready"), peer.receive, peer.send)
        assert peer.status == 200
        life.messages.put_nowait({"type": "lifespan.shutdown"})
        await living
        assert life.sent[1:] == [{"type": "lifespan.shutdown.complete"}]

    asyncio.run(whole())


def test_a_missing_package_is_said_before_anything_is_loaded(monkeypatch, tmp_path):
    def missing():
        raise MissingPackageError("prometheus_client", extra="serve", purpose="Serving")

    monkeypatch.setattr("enginery.serve.service.require_packages", missing)
    served = _Served({"none": tmp_path}, ServeConfig())
    with pytest.raises(MissingPackageError, match="prometheus_client"):
        asyncio.run(served.start())
