"""A server with a tiny model of every task, on a port of this machine."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
import uvicorn

from enginery.serve.app import make_app
from enginery.serve.config import ServeConfig
from enginery.serve.http.sockets import bind
from enginery.serve.keys import ApiKeys
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
    "sounds": ("wav2vec2", "audio-classification", {}),
    "calls": ("wav2vec2", "automatic-speech-recognition", {}),
    "writer": ("gpt2", "text-generation-with-past", {}),
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
    """The application under uvicorn, in a thread; calling it sends a request."""

    def __init__(self, paths, config, keys=()):
        self.app = make_app(paths, config, keys=ApiKeys(keys))
        sockets = bind("127.0.0.1", 0)
        self.port = sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        options = uvicorn.Config(
            self.app,
            log_config=None,
            access_log=False,
            ws="none",
            lifespan="on",
            timeout_graceful_shutdown=10,
        )
        self._server = uvicorn.Server(options)
        self._thread = threading.Thread(target=self._server.run, args=(sockets,), daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the server has ended"
            time.sleep(0.01)
        self.client = httpx.Client(base_url=self.url, timeout=60)

    @property
    def models(self):
        return self.app.state.registry

    def __call__(self, method, path, body=None, *, headers=None, query=""):
        """The answer to a request, with its JSON as `json`."""
        data = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        url = f"{path}?{query}" if query else path
        return seen(self.client.request(method, url, content=data, headers=headers))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()
        self._server.should_exit = True
        self._thread.join(60)


def seen(response):
    """A response as tests look at it."""
    content_type = response.headers.get("content-type", "")
    is_json = content_type == "application/json" and response.content
    return SimpleNamespace(
        status=response.status_code,
        body=response.content,
        content_type=content_type,
        headers=dict(response.headers),
        json=json.loads(response.content) if is_json else None,
    )


@pytest.fixture(scope="session")
def running(tiny_paths):
    """All tasks on one server."""
    with Running(tiny_paths(*TINY), ServeConfig(max_inputs=64, access_log="off")) as server:
        yield server


@pytest.fixture(scope="session")
def running_one(tiny_paths):
    """One model that embeds, on a server with a key."""
    config = ServeConfig(max_inputs=64, access_log="off")
    with Running(tiny_paths("vectors"), config, keys=(b"s3cret",)) as server:
        yield server


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
