"""A Hugging Face Hub with one model on 127.0.0.1, for downloads."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "a" * 40
NEXT_COMMIT = "b" * 40


class HubDouble:
    """The content of the server and the requests that it got."""

    def __init__(self) -> None:
        self.files = {
            "config.json": b"{}",
            "tokenizer.json": b'{"a": 1}',
            "model.safetensors": b"weights",
            "README.md": b"card",
            "onnx/model.onnx": b"graph",
        }
        self.revisions = {"main": COMMIT, "v1": COMMIT, COMMIT: COMMIT}
        self.refusal: tuple[int, str] = (0, "")
        """Status and X-Error-Code of every response; 0 for normal responses."""
        self.on_info = lambda: None
        """Called after each response about the model."""
        self.paths: list[str] = []
        self.tokens: set[str | None] = set()
        self.endpoint = ""

    def downloads(self) -> list[str]:
        return sorted({p.split("/resolve/")[1] for p in self.paths if "/resolve/" in p})


@contextmanager
def hub_double():
    double = HubDouble()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = self.path.partition("?")[0]
            double.paths.append(path)
            double.tokens.add(self.headers.get("Authorization"))
            status, code = double.refusal
            if status:
                self.answer(status, b"", {"X-Error-Code": code})
            elif path.startswith("/api/models/org/name/revision/"):
                self.info(path.rpartition("/")[2])
            elif path.startswith("/org/name/resolve/"):
                commit, _, name = path.removeprefix("/org/name/resolve/").partition("/")
                content = double.files[name]
                etag = f'"{len(content)}-{name.replace("/", "-")}"'
                self.answer(200, content, {"ETag": etag, "X-Repo-Commit": commit})
            else:
                self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

        def info(self, revision):
            commit = double.revisions.get(revision)
            if commit is None:
                self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
                return
            siblings = [{"rfilename": name} for name in double.files]
            found = {"id": "org/name", "sha": commit, "siblings": siblings}
            self.answer(200, json.dumps(found).encode(), {"Content-Type": "application/json"})
            double.on_info()

        def answer(self, status, content, headers):
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_):
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    double.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield double
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
