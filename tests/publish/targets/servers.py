"""Registries on 127.0.0.1: MLflow's server and Debian's docker-registry."""

from __future__ import annotations

import gzip
import http.server
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

# `mlflow-skinny`, the client, has the server's modules and not what they import.
_MLFLOW_SERVER = ("mlflow", "flask", "sqlalchemy", "alembic", "graphene", "huey", "skops", "docker")
_START_SECONDS = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def mlflow_server(directory: Path):
    """Run `mlflow server` with an SQLite store; yield its address.

    The server's packages and ours do not go together (pyarrow below 26): MLFLOW_SERVER_PYTHON names
    the Python of an environment with `pip install mlflow`.
    """
    python = os.environ.get("MLFLOW_SERVER_PYTHON", "")
    for name in () if python else _MLFLOW_SERVER:
        if importlib.util.find_spec(name) is None:
            pytest.skip(
                f"the MLflow server needs the package {name}: set MLFLOW_SERVER_PYTHON to the "
                "Python of an environment with mlflow, see CONTRIBUTING.md"
            )
    port = free_port()
    command = [
        python or sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--backend-store-uri",
        f"sqlite:///{directory / 'mlflow.db'}",
        "--artifacts-destination",
        str(directory / "artifacts"),
        "--workers",
        "1",
    ]
    environment = {
        **os.environ,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    with running(command, directory / "server.log", environment) as server:
        wait_for(f"http://127.0.0.1:{port}/health", server, directory / "server.log")
        yield f"http://127.0.0.1:{port}"


@contextmanager
def wordy_registry(place: str):
    """Run a registry that sends 64 MiB of spaces, as 64 kB of gzip, for paths with `place`.

    Yields `127.0.0.1:port`. Its tokens come from itself.
    """
    body = gzip.compress(b" " * 2**26)

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if place in self.path:
                self.send_response(404 if "refused" in self.path else 200)
                self.send_header("Content-Encoding", "gzip")
                content = body
            elif self.headers["Authorization"] or self.path == "/v2/":
                self.send_response(200)
                content = b"{}"
            else:
                self.send_response(401)
                host = self.headers["Host"]
                self.send_header("Www-Authenticate", f'Bearer realm="http://{host}/token"')
                content = b""
            if self.path == "/token" != place:
                content = b'{"token": "x"}'
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def token_registry(uses: int):
    """Run a registry whose tokens are for one user and for a few requests each.

    Blobs go to another name of the same machine, as some registries keep them elsewhere. Yields
    `127.0.0.1:port` and what was asked: `(method, path, Authorization, body)`.
    """
    asked: list[tuple[str, str, str, bytes]] = []
    left: dict[str, int] = {}

    class Answers(http.server.BaseHTTPRequestHandler):
        def handle_request(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path, said = self.path.partition("?")[0], self.headers["Authorization"] or ""
            asked.append((self.command, path, said, body))
            host, content = f"127.0.0.1:{self.server.server_port}", b""
            token = said.removeprefix("Bearer ")
            if path == "/token" and said.startswith("Basic "):
                left[f"t{len(left)}"] = uses
                self.send_response(200)
                content = b'{"token": "t%d"}' % (len(left) - 1)
            elif path.startswith("/elsewhere/"):
                self.send_response(201)
            elif path == "/token" or not left.get(token):
                self.send_response(401)
                realm = f'Bearer realm="http://{host}/token",service="tests"'
                self.send_header("Www-Authenticate", realm)
            else:
                left[token] -= 1
                self.send_response(202 if self.command == "POST" else 404)
                self.send_header("Location", f"http://localhost:{host[10:]}/elsewhere/1")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_HEAD = do_POST = do_PUT = handle_request  # noqa: N815

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def docker_registry(directory: Path, *, password: str = ""):
    """Run a registry with its blobs in `directory/blobs`; yield `127.0.0.1:port`.

    Args:
        directory: an empty one.
        password: of the user `ada`; empty for a registry that anybody may write.
    """
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("docker-registry is not installed: apt-get install docker-registry")
    port = free_port()
    auth = ""
    if password:
        bcrypt = pytest.importorskip("bcrypt", reason="pip install bcrypt")
        hashed = bcrypt.hashpw(password.encode(), bcrypt.gensalt(4, b"2a")).decode()
        (directory / "htpasswd").write_text(f"ada:{hashed}\n")
        auth = f"auth: {{htpasswd: {{realm: tests, path: {directory / 'htpasswd'}}}}}\n"
    (directory / "config.yml").write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {directory / 'blobs'}}}, "
        "delete: {enabled: true}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n{auth}"
    )
    log = directory / "registry.log"
    with running([program, "serve", str(directory / "config.yml")], log, None) as server:
        wait_for(f"http://127.0.0.1:{port}/v2/", server, log)
        yield f"127.0.0.1:{port}"


@contextmanager
def running(command: list[str], log: Path, environment: dict[str, str] | None):
    with log.open("w") as stream:
        server = subprocess.Popen(
            command, stdout=stream, stderr=stream, env=environment, start_new_session=True
        )
        try:
            yield server
        finally:
            os.killpg(server.pid, 15)  # MLflow's server has workers of its own
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, 9)
                server.wait()


def wait_for(url: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            pytest.fail(f"the server ended: {log.read_text()[-2000:]}")
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.2)
        else:
            return
    pytest.fail(f"the server did not start: {log.read_text()[-2000:]}")
