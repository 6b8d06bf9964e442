"""A server with a tiny model of every task: its application alone, and on a port."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest
import uvicorn

from enginery.serve.application import ServerApplication
from enginery.serve.asgi import AsgiApp
from enginery.serve.config import ServeConfig
from enginery.serve.http_sockets import bind, urls
from enginery.serve.keys import Keys
from enginery.serve.messages import Request
from enginery.serve.metrics import Metrics
from enginery.serve.models import Models
from tests.serve.processes import ServerProcess
from tests.tiny import tiny_artifact

TINY = {
    "vectors": ("bert", "feature-extraction", {}),
    "mood": ("bert", "text-classification", {}),
    "ranker": ("bert", "text-classification", {"num_labels": 1}),
    "names": ("bert", "token-classification", {}),
    "reader": ("bert", "question-answering", {}),
    "filler": ("bert", "fill-mask", {}),
    "photos": ("vit", "image-classification", {}),
    "pictures": ("vit", "feature-extraction", {}),
}


@pytest.fixture(scope="session")
def tiny_paths(tmp_path_factory):
    """`tiny_paths("mood", "names")`: their artifacts' directories by name."""
    root = tmp_path_factory.mktemp("served")

    def make(*names):
        for name in names:
            if not (root / name).is_dir():
                kind, task, options = TINY[name]
                tiny_artifact(kind, task, root / name, **options)
        return {name: root / name for name in names}

    return make


class Running:
    """An application in an event loop of its own thread, and on a port of this machine."""

    def __init__(self, paths, config, keys=()):
        self._started = threading.Event()
        self._arguments = paths, config, keys
        self._failed = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failed:
            raise self._failed

    async def _run(self):
        paths, config, keys = self._arguments
        self.loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        try:
            self.metrics = Metrics()
            self.models = Models(paths, config, self.loop, on_batch=self.metrics.batch)
            self.metrics.watch_models(lambda: self.models)
            await self.models.load()
            self.application = ServerApplication(
                self.models, config, keys=Keys(keys), metrics=self.metrics
            )
            self.asgi = AsgiApp(self.application, max_body_bytes=config.max_body_bytes)
            sockets = bind("127.0.0.1", 0)
            (self.url,) = urls(sockets)
            self.port = sockets[0].getsockname()[1]
            server = uvicorn.Server(
                uvicorn.Config(self.asgi, ws="none", log_config=None, access_log=False)
            )
            serving = self.loop.create_task(server.serve(sockets))
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
        except BaseException as error:
            self._failed = error
            self._started.set()
            return
        self._started.set()
        await self._end.wait()
        server.should_exit = True
        await serving
        await self.models.close()

    def __call__(self, method, path, body=None, *, headers=None, query=""):
        """The answer to a request, with its JSON as `json`."""
        data = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        request = Request(method, path, query, headers or {}, data, "127.0.0.1:1")
        future = asyncio.run_coroutine_threadsafe(self.application(request), self.loop)
        return seen(future.result(60))

    def close(self):
        self.loop.call_soon_threadsafe(self._end.set)
        self._thread.join(60)


def seen(response):
    """A response as tests look at it."""
    is_json = response.content_type == "application/json" and response.body
    return SimpleNamespace(
        status=response.status, body=response.body, content_type=response.content_type,
        headers=dict(response.headers), json=json.loads(response.body) if is_json else None,
    )  # fmt: skip


@pytest.fixture(scope="session")
def running(tiny_paths):
    """All tasks on one server."""
    server = Running(tiny_paths(*TINY), ServeConfig(max_inputs=64, access_log="off"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def running_one(tiny_paths):
    """One model that embeds, on a server with a key."""
    config = ServeConfig(max_inputs=64, access_log="off")
    server = Running(tiny_paths("vectors"), config, keys=(b"s3cret",))
    yield server
    server.close()


@pytest.fixture
def start():
    """`start(config={"grace": 0.5})`: a process of `tests.serve.serving`, ended by the test."""
    started = []

    def make(**options):
        started.append(ServerProcess(**options))
        return started[-1]

    yield make
    for server in started:
        server.clean_up()
