"""`enginery serve` as a process: started, asked, killed, reloaded, ended."""

import asyncio
import gc
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from enginery import publish_model
from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import ArtifactError, OptionError
from enginery.publish.config import PublishConfig
from enginery.serve.config import ServeConfig, named_paths
from enginery.serve.models.loading import load
from enginery.serve.models.registry import ModelRegistry
from enginery.serve.server import serve_models
from tests.core.artifacts import verdict

WAIT = 60
HEAVY = {
    *("numpy", "onnxruntime", "tokenizers", "pydantic", "prometheus_client", "orjson"),
    *("PIL", "opentelemetry", "starlette", "rich"),
}
"""Packages that the parent of the worker processes does not import."""


class Server:
    """A running `enginery serve`, its news in `lines`."""

    def __init__(self, process):
        self.process = process
        self.lines = []
        self._listening = threading.Event()
        self.url = ""
        threading.Thread(target=self._read, daemon=True).start()
        assert self._listening.wait(WAIT), self.lines
        self.client = httpx.Client(base_url=self.url, timeout=WAIT)

    def _read(self):
        with self.process.stderr as stream:
            for line in stream:
                self.lines.append(line.rstrip())
                if found := re.search(r"listening on (http://\S+)", line):
                    self.url = found[1]
                    self._listening.set()

    def says(self, part, *, times=1):
        ends = time.monotonic() + WAIT
        while time.monotonic() < ends:
            if sum(part in line for line in self.lines) >= times:
                return True
            time.sleep(0.02)
        raise AssertionError(f"{part!r} was not said: {self.lines}")

    def wait_ready(self):
        ends = time.monotonic() + WAIT
        while time.monotonic() < ends:
            try:
                if self.client.get("/health/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.02)
        raise AssertionError(f"never ready: {self.lines}")

    @property
    def children(self):
        pid = self.process.pid
        return [
            int(found) for found in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]

    @property
    def child(self):
        return self.children[0]


@contextmanager
def serving(*artifacts, options=(), **environment):
    process = subprocess.Popen(
        [sys.executable, "-m", "enginery", "serve", *map(str, artifacts), "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        server = Server(process)
        server.wait_ready()
        yield server
        server.client.close()
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(WAIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def test_the_parent_imports_nothing_heavy(exported):
    path = str(exported("bert", "fill-mask").path)
    code = (
        "import sys\n"
        "from enginery.serve import server\n"
        "from enginery.serve.config import ServeConfig\n"
        "server.Parent.run = lambda self: print(*sys.modules) or 0\n"
        f"server.serve_models([{path!r}], ServeConfig(port=0))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert "enginery.serve.http.parent" in modules
    assert not modules & {*HEAVY, "pyarrow", "psutil"}


@pytest.mark.more
def test_failed_validation_is_a_warning_and_missing_one_is_logged(tiny_paths, tmp_path):
    paths = tiny_paths("vectors", "mood")
    shutil.copytree(paths["vectors"], tmp_path / "bad")
    bad = Artifact.open(tmp_path / "bad")
    bad.annotate(verdict(bad, passed=False, summary="1 of 9 cases differs."), b"{}")
    given = (tmp_path / "bad", f"new={paths['mood']}")
    with serving(*given, options=("--allow-failed",)) as server:
        server.says(
            "ready: bad, feature-extraction, fp32 on CPUExecutionProvider, validation failed"
        )
        warning = (
            "warning: bad failed its validation; it is served because of --allow-failed: "
            "1 of 9 cases differs."
        )
        server.says(warning)
        server.says("ready: new, text-classification, fp32 on CPUExecutionProvider, not validated")
        server.process.send_signal(signal.SIGHUP)
        server.says("bad: reloaded, content unchanged, validation failed")
        server.says("new: reloaded, content unchanged, not validated")
        assert server.lines.count(warning) == 2


@pytest.mark.more
def test_log_has_the_status_of_requests_cancelled_by_the_server(tiny_paths):
    path = tiny_paths("vectors")["vectors"]
    options = ("--queue-inputs", "5000", "--grace", "0", "--max-body-bytes", "2000000")
    with serving(path, options=options) as server:
        texts = ["the pump runs and the valve is open " * 20] * 2000
        found = []

        def ask():
            found.append(httpx.post(f"{server.url}/embed", json={"inputs": texts}, timeout=WAIT))

        client = threading.Thread(target=ask)
        client.start()
        while server.client.get("/info").json()["models"][0]["queue"]["inputs"] == 0:
            assert not found
        address = urlsplit(server.url).hostname, urlsplit(server.url).port
        with socket.create_connection(address, timeout=WAIT) as refused:
            refused.sendall(
                b"POST /embed HTTP/1.1\r\nHost: a\r\nX-Request-Id: large\r\n"
                b"Content-Length: 2000001\r\n\r\n"
            )
            assert refused.recv(65536).startswith(b"HTTP/1.1 413 ")
        server.process.terminate()
        client.join(WAIT)
        assert server.process.wait(WAIT) == 0
        log = [json.loads(line) for line in server.process.stdout]
    (response,) = found
    assert response.status_code == 503
    names = ("method", "path", "route", "model", "status")
    lines = [
        tuple(line[name] for name in names)
        for line in log
        if line["path"] != "/info" and "health" not in line["path"]
    ]
    assert lines == [
        ("POST", "/embed", "/embed", "", 413),
        ("POST", "/embed", "/embed", path.name, 503),
    ]
    last = log[-1]
    assert (last["bytes_out"], last["bytes_in"]) == (
        len(response.content),
        len(response.request.content),
    )
    assert last["request_id"] == response.headers["x-request-id"]
    assert next(line["request_id"] for line in log if line["status"] == 413) == "large"


def run_serve(path, *options):
    """Run a server that ends by itself."""
    words = [sys.executable, "-m", "enginery", "serve", str(path), "--port", "0", *options]
    return subprocess.run(words, capture_output=True, text=True, timeout=WAIT, check=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--providers", "cudaa"), "did you mean 'cuda'"),
        (("--providers", "cpu", "--provider-option", "cuda.gpu_mem_limit=2GiB"), "cuda"),
    ],
)
def test_invalid_provider_is_rejected_before_listening(tiny_paths, options, message):
    done = run_serve(tiny_paths("vectors")["vectors"], *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert "listening" not in done.stderr


async def test_garbage_collection_is_enabled_once_models_are_loaded(exported):
    path = exported("bert", "feature-extraction").path
    registry = ModelRegistry({"m": path}, ServeConfig(), asyncio.get_running_loop())
    gc.disable()
    try:
        await load(registry)
        assert gc.isenabled()
        assert gc.get_freeze_count()
    finally:
        gc.enable()
        gc.unfreeze()
        await registry.close()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([], OptionError, "no artifact was given"),
        (["nowhere"], ArtifactError, "nowhere is not an artifact"),
        (["a={good}", "a={good}"], OptionError, "two artifacts have the name 'a'"),
        (["a/b={good}"], OptionError, "model name 'a/b' is invalid"),
        (["={good}"], OptionError, "model name '' is invalid"),
    ],
)
def test_invalid_artifacts_are_rejected_before_anything_starts(exported, given, error, message):
    good = exported("bert", "fill-mask").path
    with pytest.raises(error, match=message):
        named_paths([item.format(good=good) for item in given])


def test_model_is_named_by_its_directory_or_explicitly(exported, tmp_path, monkeypatch):
    good = exported("bert", "fill-mask")
    (tmp_path / "tiny").symlink_to(good.path)
    monkeypatch.chdir(tmp_path)
    assert set(named_paths(["tiny", "mine=tiny"])) == {"tiny", "mine"}
    assert set(named_paths([good.path])) == {good.manifest.source.name}, "in the store"


def test_versions_and_aliases_are_no_names(exported, tmp_path):
    good = exported("bert", "fill-mask")
    for name in ("latest", "1", "v1.2", "production", "model"):
        (tmp_path / name).symlink_to(good.path)
        assert set(named_paths([tmp_path / name])) == {good.manifest.source.name}
    config = PublishConfig(name="tiny-bert", allow_failed=True)
    publish_model(good, tmp_path / "registry", config=config)
    for name in ("latest", "1"):
        assert set(named_paths([tmp_path / "registry/tiny-bert" / name])) == {"tiny-bert"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"port": 70000}, "'port' is 70000"),
        ({"max_padding": 1.0}, "'max_padding' is 1, expected less than 1"),
        ({"workers": -1}, "'workers' is -1, expected a finite number of 0 or more"),
        ({"grace": float("nan")}, "'grace' is nan"),
        ({"api_key": "a", "api_key_file": "b"}, "are both set"),
    ],
)
def test_invalid_options_are_rejected(change, message):
    with pytest.raises(OptionError, match=message):
        serve_models(["anything"], ServeConfig(**change))
