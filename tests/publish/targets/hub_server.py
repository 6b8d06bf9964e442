"""A Hugging Face Hub on 127.0.0.1, as far as publishing and downloading models goes.

Repositories with branches, tags and commits; files over 1 MiB go through LFS, as on the Hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

LARGE_BYTES = 1 << 20


class Repository:
    """A repository: commits by id, each with the content of every file."""

    def __init__(self, *, private: bool) -> None:
        self.private = private
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.messages: list[str] = []
        self.commit("main", {".gitattributes": b"*.onnx filter=lfs\n"}, "initial commit")

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        seed = f"{len(self.commits)} {message} {sorted(files)}"
        commit = hashlib.sha1(seed.encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.branches[branch] = commit
        self.messages.append(message)
        return commit

    def resolve(self, revision: str) -> str | None:
        known = {**self.branches, **self.tags, **{commit: commit for commit in self.commits}}
        return known.get(revision)


class HubServer:
    """State of the server, and the requests that it received."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.lfs: dict[str, bytes] = {}
        self.refusal: tuple[int, str, str] = (0, "", "")
        """Status, X-Error-Code and message of all responses; none if the status is 0."""
        self.on_commit = lambda: None
        """Called before each commit; an exception breaks the connection."""
        self.on_info = lambda: None
        """Called after each response about a model."""
        self.requests: list[str] = []
        self.uploads: list[str] = []
        self.tokens: set[str | None] = set()
        self.endpoint = ""


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%s" % (len(content), content)).hexdigest()


@contextmanager
def hub_server():
    hub = HubServer()

    class Handler(BaseHTTPRequestHandler):
        def handle_request(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = unquote(self.path.partition("?")[0])
            hub.requests.append(f"{self.command} {path}")
            if not path.startswith("/lfs/"):
                hub.tokens.add(self.headers.get("Authorization"))
            status, code, message = hub.refusal
            if status:
                self.answer(status, {"error": message}, {"X-Error-Code": code})
                return
            for method, pattern, name in ROUTES:
                found = re.fullmatch(pattern, path)
                if found and method in (self.command, "*"):
                    getattr(self, name)(body, *found.groups())
                    return
            self.answer(404, {"error": f"no route {path}"})

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request  # noqa: N815

        def create(self, body):
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in hub.repositories:
                self.answer(409, {"error": "exists", "url": f"{hub.endpoint}/{name}"})
                return
            hub.repositories[name] = Repository(private=asked.get("private", False))
            self.answer(200, {"url": f"{hub.endpoint}/{name}"})

        def metadata(self, body):
            self.answer(200, {"errors": [], "warnings": []})

        def info(self, body, name, revision="main"):
            repository = self.repository(name)
            if repository is None:
                return
            commit = repository.resolve(revision)
            if commit is None:
                self.answer(404, {"error": "no revision"}, {"X-Error-Code": "RevisionNotFound"})
                return
            siblings = []
            for file, content in repository.commits[commit].items():
                entry = {"rfilename": file, "size": len(content), "blobId": blob_id(content)}
                if len(content) >= LARGE_BYTES:
                    digest = hashlib.sha256(content).hexdigest()
                    entry["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 130}
                siblings.append(entry)
            self.answer(
                200,
                {"id": name, "sha": commit, "siblings": siblings, "private": repository.private},
            )
            hub.on_info()

        def refs(self, body, name):
            repository = self.repository(name)
            if repository is None:
                return
            kinds = {"branches": ("heads", repository.branches), "tags": ("tags", repository.tags)}
            listed = {
                kind: [
                    {"name": n, "ref": f"refs/{at}/{n}", "targetCommit": c} for n, c in refs.items()
                ]
                for kind, (at, refs) in kinds.items()
            }
            self.answer(200, {**listed, "converts": []})

        def tag(self, body, name, revision):
            repository = self.repository(name)
            if self.command == "DELETE":
                del repository.tags[revision]
                self.answer(200, {})
                return
            new = json.loads(body)["tag"]
            if new in repository.tags:
                self.answer(409, {"error": "exists"})
                return
            repository.tags[new] = repository.resolve(revision)
            self.answer(200, {})

        def branch(self, body, name, branch):
            repository = self.repository(name)
            repository.branches.setdefault(branch, repository.branches["main"])
            self.answer(200, {})

        def preupload(self, body, name, revision):
            repository = self.repository(name)
            there = repository.commits[repository.resolve(revision)]
            modes = []
            for file in json.loads(body)["files"]:
                is_large = file["size"] >= LARGE_BYTES
                mode = {
                    "path": file["path"],
                    "uploadMode": "lfs" if is_large else "regular",
                    "shouldIgnore": False,
                }
                if file["path"] in there:
                    content = there[file["path"]]
                    mode["oid"] = (
                        hashlib.sha256(content).hexdigest() if is_large else blob_id(content)
                    )
                modes.append(mode)
            self.answer(200, {"files": modes})

        def batch(self, body, name):
            objects = []
            for item in json.loads(body)["objects"]:
                if item["oid"] not in hub.lfs:
                    href = f"{hub.endpoint}/lfs/{item['oid']}"
                    item["actions"] = {"upload": {"href": href, "header": {}}}
                objects.append(item)
            self.answer(200, {"transfer": "basic", "objects": objects})

        def store(self, body, oid):
            assert hashlib.sha256(body).hexdigest() == oid
            hub.lfs[oid] = body
            hub.uploads.append(oid)
            self.answer(200, {})

        def commit(self, body, name, revision):
            try:
                hub.on_commit()
            except ConnectionError:
                self.close_connection = True
                self.connection.close()
                return
            repository = self.repository(name)
            lines = [json.loads(line) for line in body.splitlines() if line]
            header = next(line["value"] for line in lines if line["key"] == "header")
            head = repository.branches[revision]
            if header.get("parentCommit") not in (None, head):
                self.answer(412, {"error": "the branch has moved"})
                return
            files = dict(repository.commits[head])
            for line in lines:
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = hub.lfs[value["oid"]]
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
            made = repository.commit(revision, files, header["summary"])
            self.answer(
                200,
                {
                    "commitUrl": f"{hub.endpoint}/{name}/commit/{made}",
                    "commitOid": made,
                    "pullRequestUrl": None,
                },
            )

        def resolve(self, body, name, revision, file):
            repository = self.repository(name)
            commit = repository and repository.resolve(revision)
            if not commit or file not in repository.commits[commit]:
                self.answer(404, {}, {"X-Error-Code": "EntryNotFound"})
                return
            content = repository.commits[commit][file]
            self.send(200, content, {"ETag": f'"{blob_id(content)}"', "X-Repo-Commit": commit})

        def repository(self, name):
            repository = hub.repositories.get(name)
            if repository is None:
                self.answer(404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"})
            return repository

        def answer(self, status, document, headers=None):
            message = {"X-Error-Message": document["error"]} if "error" in document else {}
            kind = {"Content-Type": "application/json"}
            self.send(status, json.dumps(document).encode(), {**kind, **message, **(headers or {})})

        def send(self, status, content, headers):
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_):
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


_NAME = r"([^/]+/[^/]+)"
ROUTES = (
    ("POST", "/api/repos/create", "create"),
    ("POST", "/api/validate-yaml", "metadata"),
    ("GET", rf"/api/models/{_NAME}", "info"),
    ("GET", rf"/api/models/{_NAME}/revision/(.+)", "info"),
    ("GET", rf"/api/models/{_NAME}/refs", "refs"),
    ("*", rf"/api/models/{_NAME}/tag/(.+)", "tag"),
    ("POST", rf"/api/models/{_NAME}/branch/(.+)", "branch"),
    ("POST", rf"/api/models/{_NAME}/preupload/(.+)", "preupload"),
    ("POST", rf"/api/models/{_NAME}/commit/(.+)", "commit"),
    ("POST", rf"/{_NAME}\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/lfs/([0-9a-f]{64})", "store"),
    ("*", rf"/{_NAME}/resolve/([^/]+)/(.+)", "resolve"),
)
