"""A malicious registry: false digests, sizes and tars must not escape `out` or fill the disk."""

from __future__ import annotations

import gzip
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
from enginery.publish.publication import LISTING
from enginery.publish.targets.oci.image import CONTENT, FILES, INDEX, LAYER, MANIFEST, TITLE
from enginery.publish.targets.oci.layers import (
    PulledLayer,
    check_layer_size,
    parse_layers,
    unpack,
    unpack_listing,
)
from tests.publish.products import UNVALIDATED

URL = "oci://here/m:1"


def tar(*members, kind=tarfile.REGTYPE, form=tarfile.PAX_FORMAT, pax=None) -> bytes:
    """Return a tar with files of these names, or names and contents."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as archive:
        for member in members:
            name, content = member if isinstance(member, tuple) else (member, b"x")
            info = tarfile.TarInfo(name)
            info.type, info.size = kind, len(content)
            info.pax_headers = pax or {}
            if kind != tarfile.REGTYPE:
                info.linkname, info.size = "/etc/passwd", 0
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def described(content: bytes, **changes) -> dict:
    """Return the descriptor of a layer with the listing."""
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    said = {FILES: json.dumps({LISTING: "0" * 64}), TITLE: "report.tar"}
    return {
        "mediaType": LAYER,
        "digest": digest,
        "size": len(content),
        "annotations": said,
    } | changes


def document(*layers: dict) -> dict:
    return {"layers": list(layers), "annotations": {CONTENT: "0" * 64}}


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


def unpacked(content: bytes, out, files):
    path = out.with_name("layer.tar")
    path.write_bytes(content)
    unpack(path, out, {name: FileRecord(sha256="", size_bytes=n) for name, n in files.items()}, URL)


# What the manifest says


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": "/tmp/x/backup"},
        {"digest": "sha256:../../backup"},
        {"digest": None},
        {"digest": f"sha256:{'A' * 64}"},
        {"digest": f"sha256:{'0' * 64}/x"},
        {"size": -1},
        {"size": "7"},
        {"size": None},
        {"size": True},
        {"size": 1.5},
        {"size": []},
    ],
)
def test_invalid_digest_or_size_is_an_error(changes):
    with pytest.raises(RegistryError, match="has a blob with digest"):
        parse_layers(document(described(b"x", **changes)), URL)


def test_missing_digest_is_an_error():
    layer = described(b"x")
    del layer["digest"]
    with pytest.raises(RegistryError, match="with digest None"):
        parse_layers(document(layer), URL)


@pytest.mark.parametrize("files", ["[not json", "[]", "7", '"x"', "[" * 100_000])
def test_invalid_list_of_files_is_an_error(files):
    with pytest.raises(
        RegistryError, match=r"enginery\.files of the layer .* is not a JSON object"
    ):
        parse_layers(document(described(b"x", annotations={FILES: files})), URL)


@pytest.mark.parametrize("layers", [None, {}, "x", [], ["x"], [None]])
def test_invalid_layers_are_not_of_enginery(layers):
    with pytest.raises(RegistryError, match="was not published by enginery"):
        parse_layers({"layers": layers, "annotations": {CONTENT: "0"}}, URL)


def test_image_without_listing_is_an_error():
    with pytest.raises(RegistryError, match=r"no layer has reports/publication\.json"):
        parse_layers(document(described(b"x", annotations={})), URL)


def test_layer_with_the_listing_comes_first():
    other = described(b"y", annotations={TITLE: "weights.tar"})
    assert [x.title for x in parse_layers(document(other, described(b"x")), URL)] == [
        "report.tar",
        "weights.tar",
    ]


# What a lying registry cannot do


def test_digest_with_a_path_reaches_no_file(tmp_path):
    pytest.importorskip("oras", reason="pip install 'enginery[oci]'")
    victim = tmp_path / "backup.tar"
    victim.write_bytes(b"precious")
    layer = described(b"x", digest=str(tmp_path / "backup"))
    answers = {"/manifests/1": (MANIFEST, json.dumps(document(layer)).encode())}
    with lying(answers) as (url, asked):
        with pytest.raises(RegistryError, match="has a blob with digest"):
            stage.pull(url, tmp_path / "out", UNVALIDATED)
        assert not any("/blobs/" in path for path in asked)
    assert victim.read_bytes() == b"precious"


@pytest.mark.more
@pytest.mark.parametrize("first", [{}, {"digest": "../../x", "size": 1}, "x", {"size": 1}])
def test_index_without_a_digest_is_an_error(tmp_path, first):
    pytest.importorskip("oras", reason="pip install 'enginery[oci]'")
    index = {"manifests": [first], "annotations": {CONTENT: "0"}}
    with (
        lying({"/manifests/1": (INDEX, json.dumps(index).encode())}) as (url, asked),
        pytest.raises(RegistryError, match="has a blob with digest"),
    ):
        stage.pull(url, tmp_path / "out", UNVALIDATED)
    assert not any(".." in path for path in asked)


def test_blob_longer_than_its_size_is_not_downloaded(tmp_path, home):
    pytest.importorskip("oras", reason="pip install 'enginery[oci]'")
    content = tar("a")
    layer = described(content, size=len(content) - 1)
    answers = {
        "/manifests/1": (MANIFEST, json.dumps(document(layer)).encode()),
        layer["digest"]: ("application/octet-stream", content),
    }
    with (
        lying(answers) as (url, _),
        pytest.raises(ArtifactError, match=r"sent more than \d+ bytes"),
    ):
        stage.pull(url, tmp_path / "out", UNVALIDATED)
    assert not list((home / "pulls").iterdir())
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


# Tars


@pytest.mark.parametrize("name", ["../outside", "/absolute", "a/../../b", "."])
def test_layer_cannot_write_outside(name, tmp_path):
    with pytest.raises(ArtifactError, match="is not a regular file inside the package"):
        unpacked(tar(name), tmp_path / "out", {name: 1})
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
)
def test_layer_has_only_files_and_directories(kind, tmp_path):
    with pytest.raises(ArtifactError, match="is not a regular file"):
        unpacked(tar("a", kind=kind), tmp_path / "out", {"a": 1})


def test_only_listed_files_are_unpacked(tmp_path):
    content = tar("stranger", ("d/a", b"abc"), ("e/b", b""))
    for packed in (content, gzip.compress(content)):
        unpacked(packed, tmp_path / "out", {"d/a": 3, "e/b": 0})
        found = {
            p.relative_to(tmp_path / "out").as_posix(): p.read_bytes()
            for p in (tmp_path / "out").rglob("*")
            if p.is_file()
        }
        assert found == {"d/a": b"abc", "e/b": b""}
        assert not (tmp_path / "out/stranger").exists()


def test_file_larger_than_listed_is_not_unpacked(tmp_path):
    with pytest.raises(ArtifactError, match=r"a has 2 bytes, expected 1"):
        unpacked(tar(("a", b"xx")), tmp_path / "out", {"a": 1})
    assert not (tmp_path / "out/a").exists()


def test_gzip_bomb_is_an_error(tmp_path):
    half = bytes(40 << 20)
    bomb = gzip.compress(tar(("stranger", half), ("other", half), "a"))
    assert len(bomb) < 1 << 20
    with pytest.raises(ArtifactError, match="unpacks to more bytes than"):
        unpacked(bomb, tmp_path / "out", {"a": 1})


def test_huge_tar_headers_are_an_error(tmp_path):
    bomb = gzip.compress(tar("a", pax={"comment": "x" * (8 << 20)}))
    with pytest.raises(ArtifactError, match="unpacks to more bytes than"):
        unpacked(bomb, tmp_path / "out", {"a": 100 << 20})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no tar",
        tar(("a", bytes(4096)))[:600],
        gzip.compress(tar(("a", bytes(4096))))[:-20],
        gzip.compress(tar("a"))[:12] + b"\xff" * 40,
        b"\x1f\x8b\x08",
    ],
    ids=["empty", "text", "short", "gzip without its end", "gzip with other bytes", "gzip alone"],
)
def test_broken_layer_is_an_error(content, tmp_path):
    with pytest.raises(ArtifactError, match="is not a valid tar"):
        unpacked(content, tmp_path / "out", {"a": 4096})


def test_listing_is_unpacked_first(tmp_path):
    path = tmp_path / "layer.tar"
    path.write_bytes(tar(("big", bytes(1 << 20)), (LISTING, b"{}")))
    unpack_listing(path, tmp_path / "out", URL)
    assert [p.name for p in (tmp_path / "out").rglob("*") if p.is_file()] == ["publication.json"]


def test_member_of_a_petabyte_is_an_error(tmp_path):
    """tarfile would skip it in blocks of 10 kB, at the end of the stream too."""
    for size in (10**15, -1):
        content = tar(("other", b"x"), pax={"size": str(size)})
        with pytest.raises(ArtifactError, match=r"more than all files|not a valid tar"):
            unpacked(content, tmp_path / "out", {"a": 10})


def test_member_larger_than_the_stream_is_an_error(tmp_path):
    content = tar(("other", b"x"), pax={"size": str(2**26)})
    with pytest.raises(ArtifactError, match="a layer is not a valid tar"):
        unpacked(content, tmp_path / "out", {"a": 10})


def layer_of(size_bytes: int) -> PulledLayer:
    return PulledLayer("sha256:" + "0" * 64, size_bytes, "weights", {})


def test_layer_larger_than_the_disk_is_not_downloaded(tmp_path):
    with pytest.raises(RegistryError, match=r"the layer weights has .* and .* free"):
        check_layer_size(layer_of(10**15), None, tmp_path, "m")


def test_layer_larger_than_the_listed_files_is_not_downloaded(tmp_path):
    files = {"a": FileRecord(sha256="", size_bytes=10)}
    listing = SimpleNamespace(files=files)
    check_layer_size(layer_of(10), listing, tmp_path, "m")
    with pytest.raises(RegistryError, match="more than all files in"):
        check_layer_size(layer_of(1 << 27), listing, tmp_path, "m")


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
