"""A malicious registry: false digests, sizes and tars must not escape `out` or fill the disk."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from enginery.core.artifact.manifest import FileRecord
from enginery.core.errors import ArtifactError, RegistryError
from enginery.publish import stage
from enginery.publish.package import CONTENT
from enginery.publish.publication import LISTING, Publication
from enginery.publish.targets.oci.image import (
    FILES,
    LAYER,
    MANIFEST,
    ImageManifest,
    Layer,
    digest_of,
    read_listing,
)
from enginery.publish.targets.oci.registry import require_space
from tests.publish.products import UNVALIDATED

URL = "oci://here/m:1"
FILE = b"abc"


def listing(files: dict[str, bytes] | None = None) -> str:
    """Return a listing of files of these contents."""
    records = {
        name: FileRecord(sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))
        for name, content in (files or {"d/a": FILE}).items()
    }
    return (
        Publication(name="m", content_sha256="0" * 64, content={}, validated=True, files=records)
        .to_json()
        .decode()
    )


def layer_of(files: dict[str, bytes]) -> Layer:
    return Layer("files.tar", {name: len(content) for name, content in files.items()})


def tar(files: dict[str, bytes]) -> bytes:
    """Return the tar of files, as Python's tarfile writes it."""
    whole, directories = io.BytesIO(), set()
    with tarfile.open(fileobj=whole, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in files.items():
            if "/" in name and (folder := name.split("/")[0]) not in directories:
                directories.add(folder)
                info = tarfile.TarInfo(f"{folder}/")
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(info)
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    # tarfile fills the last record of 10 KiB.
    return whole.getvalue().rstrip(b"\0").ljust(layer_of(files).size_bytes, b"\0")


def described(content: bytes, **changes) -> dict:
    """Return the descriptor of a layer."""
    return {"mediaType": LAYER, "digest": digest_of(content), "size": len(content)} | changes


def document(*layers: dict, config: bytes = b"{}") -> dict:
    return {
        "config": {"digest": digest_of(config), "size": len(config)},
        "layers": list(layers),
        "annotations": {CONTENT: "0" * 64},
    }


@contextmanager
def lying(answers: dict[str, tuple[str, bytes]]):
    """Run a registry with given responses; yield its address and the requested paths."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            kind, body = next(
                (a for end, a in answers.items() if self.path.endswith(end)), ("text/plain", b"")
            )
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_):
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"oci://127.0.0.1:{server.server_port}/org/m:1", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def image(layer: dict, content: bytes, text: str | None = None) -> dict[str, tuple[str, bytes]]:
    """Return the responses of a registry with an image of one layer and a listing."""
    config = json.dumps({FILES: listing() if text is None else text}).encode()
    return {
        "/manifests/1": (MANIFEST, json.dumps(document(layer, config=config)).encode()),
        digest_of(config): ("application/octet-stream", config),
        str(layer["digest"]): ("application/octet-stream", content),
    }


# What the manifest says


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": "/tmp/x/backup"},
        {"digest": "sha256:../../backup"},
        {"digest": None},
        {"digest": f"sha256:{'A' * 64}"},
        {"size": -1},
        {"size": "7"},
        {"size": True},
        {"size": 1.5},
    ],
)
def test_invalid_digest_or_size_is_not_of_enginery(changes):
    content = json.dumps(document(described(b"x", **changes))).encode()
    assert ImageManifest.read(content) is None


@pytest.mark.parametrize("layers", [None, {}, "x", ["x"], [None]])
def test_invalid_layers_are_not_of_enginery(layers):
    content = json.dumps(document() | {"layers": layers}).encode()
    assert ImageManifest.read(content) is None
    assert ImageManifest.read(json.dumps(document() | {"annotations": {}}).encode()) is None
    assert ImageManifest.read(json.dumps(document()).encode()) is not None


@pytest.mark.parametrize("config", [b"{}", b'{"enginery.files": 7}'])
def test_config_without_a_listing_is_not_of_enginery(config, tmp_path):
    with pytest.raises(RegistryError, match="was not published by enginery"):
        read_listing(config, tmp_path, URL)


@pytest.mark.parametrize("text", ["", "{}", "\ud800", listing().replace("d/a", "../a")])
def test_invalid_listing_is_an_error(text, tmp_path):
    with pytest.raises(ArtifactError, match=r"reports/publication\.json"):
        read_listing(json.dumps({FILES: text}).encode(), tmp_path / "out", URL)


# What a lying registry cannot do


def test_digest_with_a_path_reaches_no_file(tmp_path):
    pytest.importorskip("oras", reason="pip install 'enginery[oci]'")
    victim = tmp_path / "backup.tar"
    victim.write_bytes(b"precious")
    layer = described(b"x", digest=str(tmp_path / "backup"))
    with lying(image(layer, b"x")) as (url, asked):
        with pytest.raises(RegistryError, match="was not published by enginery"):
            stage.pull(url, tmp_path / "out", UNVALIDATED)
        assert not any("/blobs/" in path for path in asked)
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize("config", [{}, {"digest": "../../x", "size": 1}, "x", {"size": 1}])
def test_config_without_a_digest_is_an_error(tmp_path, config):
    pytest.importorskip("oras", reason="pip install 'enginery[oci]'")
    broken = document(described(b"x")) | {"config": config}
    with (
        lying({"/manifests/1": (MANIFEST, json.dumps(broken).encode())}) as (url, asked),
        pytest.raises(RegistryError, match="was not published by enginery"),
    ):
        stage.pull(url, tmp_path / "out", UNVALIDATED)
    assert not any(".." in path for path in asked)


def test_altered_config_is_an_error(tmp_path):
    pytest.importorskip("oras", reason="pip install 'enginery[oci]'")
    content = tar({"d/a": FILE})
    answers = image(described(content), content)
    digest = next(name for name in answers if name.startswith("sha256:"))
    answers[digest] = ("application/octet-stream", answers[digest][1] + b" ")
    with (
        lying(answers) as (url, _),
        pytest.raises(RegistryError, match=r"was altered: its digest is sha256:"),
    ):
        stage.pull(url, tmp_path / "out", UNVALIDATED)


def test_blob_longer_than_its_size_is_not_downloaded(tmp_path):
    pytest.importorskip("oras", reason="pip install 'enginery[oci]'")
    content = tar({"d/a": FILE, LISTING: listing().encode()})
    with (
        lying(image(described(content), content + b"x")) as (url, _),
        pytest.raises(ArtifactError, match=r"sent more than \d+ bytes"),
    ):
        stage.pull(url, tmp_path / "out", UNVALIDATED)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"d/a": b"abd"}, "d/a was altered: its sha256 is"),
        ({"d/b": FILE}, "the layer files.tar was altered before d/a"),
    ],
    ids=["content", "name"],
)
def test_altered_layer_is_an_error_with_its_name(tmp_path, files, problem):
    pytest.importorskip("oras", reason="pip install 'enginery[oci]'")
    content = tar({**files, LISTING: listing().encode()})
    with (
        lying(image(described(content), content)) as (url, _),
        pytest.raises(ArtifactError, match=problem),
    ):
        stage.pull(url, tmp_path / "out", UNVALIDATED)
    assert not (tmp_path / "out").exists()


def test_download_stops_at_the_first_excess_byte(tmp_path, monkeypatch):
    from enginery.publish.targets.oci.client import OciClient

    taken = []

    class Endless:
        status_code = 200

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return

        raw = property(lambda self: self)

        def read1(self, size, *, decode_content):
            assert decode_content
            taken.append(size)
            return bytes(size) if len(taken) < 1000 else b""

    client = object.__new__(OciClient)
    client.host, client.repository, client._base = "here", "m", "http://here/v2/m"
    monkeypatch.setattr(client, "_request", lambda *_, **__: Endless())
    with pytest.raises(ArtifactError, match="sent more than 10 bytes"):
        client.download("sha256:0", tmp_path / "blob", 10)
    assert len(taken) == 1
    assert not (tmp_path / "blob").exists()


# Layers


def test_only_the_files_of_a_layer_are_written(tmp_path):
    files = {"d/a": FILE, LISTING: b"another", "e/b": b""}
    path = tmp_path / "layer.tar"
    path.write_bytes(tar(files))
    layer_of(files).unpack(path, tmp_path / "out", URL, do="")
    written = {p for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert {p.relative_to(tmp_path / "out").as_posix() for p in written} == {"d/a", "e/b"}
    assert (tmp_path / "out/d/a").read_bytes() == FILE


@pytest.mark.parametrize("place", [0, 100, 600, 1100])
def test_layer_with_other_headers_is_not_unpacked(place, tmp_path):
    """Whatever a tar can say, such as a link, a path or a size, is in its headers."""
    files = {"d/a": FILE, "d/b": FILE}
    content = bytearray(tar(files))
    content[place if place != 1100 else 1024 + 512] ^= 1
    path = tmp_path / "layer.tar"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"the layer files\.tar was altered before d/"):
        layer_of(files).unpack(path, tmp_path / "out", URL, do="")


@pytest.mark.parametrize("content", [b"", b"no tar", tar({"d/a": bytes(4096)})[:600]])
def test_short_layer_is_not_unpacked(content, tmp_path):
    path = tmp_path / "layer.tar"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match="was altered before d/a"):
        layer_of({"d/a": bytes(4096)}).unpack(path, tmp_path / "out", URL, do="")


def test_layers_of_other_sizes_are_not_downloaded(tmp_path):
    pytest.importorskip("oras", reason="pip install 'enginery[oci]'")
    content = tar({"d/a": FILE}) + bytes(512)
    with lying(image(described(content), content)) as (url, asked):
        with pytest.raises(RegistryError, match=r"have \[3072\] bytes, expected \[\d+\] for the f"):
            stage.pull(url, tmp_path / "out", UNVALIDATED)
        assert not any(digest_of(content) in path for path in asked)


def test_layer_larger_than_the_disk_is_not_downloaded(tmp_path):
    with pytest.raises(RegistryError, match=r"the layer weights and its files need .* and .* free"):
        require_space(Layer("weights", {"a": 10**15}), tmp_path, "m")


def test_slow_registry_has_a_limit_of_time(tmp_path, monkeypatch):
    """A registry that sends a byte now and then is left when the time for the pull is over."""
    from enginery.publish.targets.oci.client import OciClient

    class Slow:
        status_code = 200
        sent = 0
        raw = property(lambda self: self)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def read1(self, size, *, decode_content):
            self.sent += 1
            return b"x" if self.sent < 10_000 else b""

    client = object.__new__(OciClient)
    client.host, client.repository, client._base = "here", "m", "http://here/v2/m"
    response = Slow()
    monkeypatch.setattr(client, "_request", lambda *_, **__: response)
    with pytest.raises(RegistryError, match=r"here is too slow: a blob of 1000000 bytes"):
        client.download("sha256:0", tmp_path / "blob", 10**6, deadline=0)
    assert response.sent == 1


@pytest.mark.parametrize("message", ["no\nerror: forged", "a\x1b]52;c;eA==\x07b", "x" * 9000])
def test_message_of_a_registry_is_one_line(tmp_path, message):
    from enginery.publish.targets.oci.client import OciClient

    client = object.__new__(OciClient)
    client.host, client.repository = "here", "m"
    answer = SimpleNamespace(
        status_code=404, reason="", json=lambda: {"errors": [{"message": message}]}
    )
    with pytest.raises(RegistryError) as error:
        client._check(answer)
    assert error.value.message.isprintable()
    assert len(error.value.message) < 400
