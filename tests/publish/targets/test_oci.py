"""OCI registries, tested with Debian's docker-registry; without it, only addresses."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tarfile
import tracemalloc
import urllib.request
from dataclasses import replace

import pytest
import requests

from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import OptionError, RegistryError
from enginery.publish import stage
from enginery.publish.config import PublishConfig
from enginery.publish.publication import Publication
from tests.publish.products import UNVALIDATED, Heard, altered, large, with_an_engine
from tests.publish.targets.servers import docker_registry, free_port, token_registry, wordy_registry

pytest.importorskip("oras", reason="pip install 'enginery[oci]'")

from enginery.publish.targets.oci.image import MANIFEST, Blob, digest_of
from enginery.publish.targets.oci.registry import OciRegistry


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    """Run a registry for this module; yield its address and the folder of its files."""
    directory = tmp_path_factory.mktemp("registry")
    with docker_registry(directory) as host:
        yield host, directory / "blobs"


@pytest.fixture(autouse=True)
def no_login(tmp_path, monkeypatch):
    """Hide the user's Docker login from the tests."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))


@pytest.fixture
def artifact(exported) -> Artifact:
    return exported("bert", "feature-extraction")


def fetch(host: str, path: str) -> dict:
    request = urllib.request.Request(f"http://{host}/v2/{path}", headers={"Accept": MANIFEST})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def layer_named(host: str, repository: str, title: str) -> dict:
    """Return the descriptor of a layer; the tag is 1."""
    manifest = fetch(host, f"{repository}/manifests/1")
    return next(
        layer
        for layer in manifest["layers"]
        if layer["annotations"]["org.opencontainers.image.title"] == title
    )


@pytest.mark.parametrize(
    "url",
    [
        "oci://host",
        "oci://host/Upper:1",
        "oci://host/name:",
        "oci://host/name@sha256:12",
        "oci:///n",
        "oci://host/na me",
        "oci://user@host/name",
    ],
)
def test_invalid_address_is_an_error_with_an_example(url):
    with pytest.raises(OptionError, match=r"expected oci://registry/name:tag"):
        OciRegistry(url, UNVALIDATED)


def test_pulled_package_equals_the_published_one(registry, artifact, tmp_path):
    host, _ = registry
    heard = Heard()
    published = stage.run(artifact, f"oci://{host}/org/back:1", UNVALIDATED, progress=heard)
    assert published.is_new
    assert published.url.startswith(f"oci://{host}/org/back@sha256:")
    done, total = next(steps for name, steps in heard.tasks.items() if name.startswith("uploading"))
    assert done == total > 0
    for out, url in (("a", published.url), ("b", f"oci://{host}/org/back:1")):
        pulled = stage.pull(url, tmp_path / out, UNVALIDATED)
        assert pulled.content_sha256() == artifact.content_sha256()


@pytest.mark.more
def test_layout_of_the_hub_is_published_once_and_pulled_as_it_was(registry, artifact, tmp_path):
    host, _ = registry
    url, hub = f"oci://{host}/org/hub:1", replace(UNVALIDATED, layout="hub")
    whole = large(artifact, tmp_path / "large")
    assert stage.run(whole, url, hub).is_new
    assert not stage.run(whole, url, hub).is_new
    assert stage.pull(url, tmp_path / "all", hub).model == tmp_path / "all/onnx/model.onnx"
    back = stage.pull(url, tmp_path / "one", hub, variant="fp32")
    assert back.model == tmp_path / "one/model.onnx"


@pytest.mark.more
def test_version_is_a_tag_that_never_moves(registry, artifact, tmp_path):
    host, _ = registry
    url, other = f"oci://{host}/versions", altered(artifact, tmp_path / "other")
    first = stage.run(artifact, url, replace(UNVALIDATED, version="1.0", alias="production"))
    assert not stage.run(artifact, url, replace(UNVALIDATED, version="1.0")).is_new
    with pytest.raises(RegistryError, match=r"versions:1\.0 exists with other content"):
        stage.run(other, url, replace(UNVALIDATED, version="1.0"))
    with pytest.raises(RegistryError, match=r"alias '1\.0' is the name of a version"):
        stage.run(other, url, replace(UNVALIDATED, version="2.0", alias="1.0"))
    with pytest.raises(RegistryError, match=r"versions:1\.0 exists with other content"):
        stage.run(other, f"{url}:1.0", UNVALIDATED)
    with pytest.raises(OptionError, match=r"is '2\.0', which is also the tag"):
        stage.run(other, url, replace(UNVALIDATED, version="2.0", alias="2.0"))
    second = stage.run(other, url, replace(UNVALIDATED, version="2.0", alias="production"))
    for tag, is_first in (("1.0", True), ("2.0", False), ("production", False), ("latest", False)):
        for address in (f"{url}:{tag}", f"{url}@{tag}"):
            pulled = stage.pull(address, tmp_path / "out", UNVALIDATED)
            assert (pulled.content_sha256() == artifact.content_sha256()) is is_first, address
    assert not (stage.pull(first.url, tmp_path / "out", UNVALIDATED).path / "notes.json").exists()
    newest = stage.pull(url, tmp_path / "out", UNVALIDATED)
    assert newest.content_sha256() == other.content_sha256()
    assert first.url != second.url


def test_tag_can_become_a_version(registry, artifact, tmp_path):
    host, _ = registry
    url = f"oci://{host}/became"
    stage.run(artifact, f"{url}:1.0", UNVALIDATED)
    assert not stage.run(artifact, url, replace(UNVALIDATED, version="1.0")).is_new
    with pytest.raises(RegistryError, match="a version is never moved"):
        stage.run(altered(artifact, tmp_path / "other"), f"{url}:1.0", UNVALIDATED)


def test_index_with_the_same_content_is_replaced_by_an_image(registry, artifact):
    from enginery.publish.targets.oci.client import OciClient

    host, _ = registry
    first = stage.run(artifact, f"oci://{host}/index:1", UNVALIDATED)
    document = fetch(host, "index/manifests/1")
    (client, digest) = OciClient(host, "index", insecure=True), first.url.partition("@")[2]
    content = client.manifest(digest)
    inside = {"mediaType": MANIFEST, "digest": digest, "size": len(content)}
    index = {
        "schemaVersion": 2,
        "mediaType": MANIFEST.replace("manifest", "index"),
        "manifests": [{**inside, "platform": {"architecture": "amd64", "os": "linux"}}],
        "annotations": document["annotations"],
    }
    request = urllib.request.Request(
        f"http://{host}/v2/index/manifests/1",
        json.dumps(index).encode(),
        {"Content-Type": index["mediaType"]},
        method="PUT",
    )
    urllib.request.urlopen(request).close()
    again = stage.run(artifact, f"oci://{host}/index:1", UNVALIDATED)
    assert again.url == first.url
    assert again.notes[-1].startswith("1 pointed to sha256:")


def test_address_without_a_tag_lists_existing_tags(registry, artifact, tmp_path):
    host, _ = registry
    stage.run(artifact, f"oci://{host}/tags:b", UNVALIDATED)
    with pytest.raises(RegistryError, match=r"tag or digest latest\. Name one of its tags: b\."):
        stage.pull(f"oci://{host}/tags", tmp_path / "out", UNVALIDATED)


def test_lost_layer_is_uploaded_again(registry, artifact, tmp_path):
    host, _ = registry
    url = f"oci://{host}/lost:1"
    whole = altered(artifact, tmp_path / "lost", '{"lost": 1}')
    first = stage.run(whole, url, UNVALIDATED)
    layer = layer_named(host, "lost", "files.tar")
    request = urllib.request.Request(
        f"http://{host}/v2/lost/blobs/{layer['digest']}", method="DELETE"
    )
    urllib.request.urlopen(request).close()
    with pytest.raises(RegistryError):
        stage.pull(url, tmp_path / "out", UNVALIDATED)
    heard = Heard()
    again = stage.run(whole, url, UNVALIDATED, progress=heard)
    assert (again.url, again.is_new) == (first.url, False)
    assert any("the registry has lost files.tar" in message for message in heard.news)
    stage.pull(url, tmp_path / "out", UNVALIDATED)


def test_digest_is_the_same_in_another_registry(registry, artifact, tmp_path):
    host, _ = registry
    with docker_registry(tmp_path) as other:
        found = [
            stage.run(artifact, f"oci://{name}/twice:1", UNVALIDATED) for name in (host, other)
        ]
    assert found[0].url.partition("@")[2] == found[1].url.partition("@")[2]


def test_image_has_a_layer_per_group(registry, artifact, tmp_path):
    host, _ = registry
    whole = with_an_engine(large(artifact, tmp_path / "large"), tmp_path / "engines")
    published = stage.run(whole, f"oci://{host}/groups:1", UNVALIDATED)
    manifest = fetch(host, "groups/manifests/1")
    config = fetch(host, f"groups/blobs/{manifest['config']['digest']}")
    assert config["rootfs"]["diff_ids"] == [layer["digest"] for layer in manifest["layers"]]
    assert json.loads(config["enginery.files"])["name"] == "bert-feature-extraction"
    titles = [
        layer["annotations"]["org.opencontainers.image.title"] for layer in manifest["layers"]
    ]
    (engine,) = (title for title in titles if title.startswith("engine-"))
    assert titles == [engine, "graph.tar", "weights.tar", "files.tar"]
    target = manifest["annotations"][f"enginery.engine.{engine[7:-4]}"]
    assert "hardware-bound: tensorrt-rtx 1.7.1.116, compute capability 8.9" in target
    assert any("hardware-bound" in note for note in published.notes)


def test_image_is_its_directory_for_other_readers(registry, artifact, tmp_path):
    """A container runtime unpacks the layers above each other, and so does this test."""
    host, _ = registry
    stage.run(artifact, f"oci://{host}/plain:1", UNVALIDATED)
    for layer in fetch(host, "plain/manifests/1")["layers"]:
        with (
            urllib.request.urlopen(f"http://{host}/v2/plain/blobs/{layer['digest']}") as stream,
            tarfile.open(fileobj=stream, mode="r|") as archive,
        ):
            archive.extractall(tmp_path / "root", filter="data")
    listing = Publication.read(tmp_path / "root", "root")
    listing.verify(tmp_path / "root", "root")
    assert Artifact.open(tmp_path / "root", verify=True).content_sha256() == (
        artifact.content_sha256()
    )


def test_layers_of_an_earlier_version_are_not_uploaded_again(registry, artifact, tmp_path):
    host, blobs = registry
    first = large(artifact, tmp_path / "first")
    stage.run(first, f"oci://{host}/layers:1", UNVALIDATED)
    before = {path for path in blobs.rglob("data") if path.stat().st_size > 1 << 20}
    sent = []
    from enginery.publish.targets.oci import client as oci_client

    original = oci_client.OciClient.upload

    def counted(self, blob):
        sent.append(len(blob))
        original(self, blob)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oci_client.OciClient, "upload", counted)
        stage.run(altered(first, tmp_path / "second"), f"oci://{host}/layers:2", UNVALIDATED)
    assert sent
    assert max(sent) < 1 << 20
    assert before == {path for path in blobs.rglob("data") if path.stat().st_size > 1 << 20}


def test_tag_of_the_address_moves_with_a_note(registry, artifact, tmp_path):
    host, _ = registry
    url = f"oci://{host}/moves:stable"
    first = stage.run(artifact, url, UNVALIDATED)
    second = stage.run(altered(artifact, tmp_path / "other"), url, UNVALIDATED)
    digest = first.url.partition("@")[2]
    assert second.notes[-1] == f"stable pointed to {digest} before"
    pulled = stage.pull(url, tmp_path / "out", UNVALIDATED)
    assert (pulled.path / "notes.json").is_file()


def test_alias_points_to_the_version(registry, artifact, tmp_path):
    host, _ = registry
    stage.run(artifact, f"oci://{host}/alias:1", replace(UNVALIDATED, alias="production"))
    stage.run(artifact, f"oci://{host}/alias:1", replace(UNVALIDATED, alias="canary"))
    for alias in ("production", "canary"):
        stage.pull(f"oci://{host}/alias:{alias}", tmp_path / alias, UNVALIDATED)


def test_broken_download_is_resumed(registry, artifact, tmp_path, monkeypatch):
    from enginery.publish.targets.oci import client as oci_client

    host, _ = registry
    stage.run(large(artifact, tmp_path / "l"), f"oci://{host}/resume:1", UNVALIDATED)
    weights = layer_named(host, "resume", "weights.tar")
    client = oci_client.OciClient(host, "resume", insecure=True)
    original, ranges = oci_client.OciClient._request, []

    def broken(self, method, url, **options):
        ranges.append(options["headers"].get("Range"))
        if len(ranges) == 1:
            whole = original(self, method, url, **options).content
            (tmp_path / "blob").write_bytes(whole[: weights["size"] // 2])
            raise requests.ConnectionError("the connection broke")
        return original(self, method, url, **options)

    monkeypatch.setattr(oci_client.OciClient, "_request", broken)
    monkeypatch.setattr(oci_client, "_WAIT_SECONDS", 0)
    client.download(weights["digest"], tmp_path / "blob", weights["size"])
    assert ranges == [None, f"bytes={weights['size'] // 2}-"]
    assert digest_of((tmp_path / "blob").read_bytes()) == weights["digest"]


@pytest.mark.more
def test_killed_publish_is_resumed(registry, artifact, tmp_path, home):
    host, _ = registry
    whole = large(artifact, tmp_path / "l", seed=5)
    script = (
        "import os, signal, sys\n"
        "from enginery.core.artifact.artifact import Artifact\n"
        "from enginery.publish import stage\n"
        "from enginery.publish.targets.oci import client as oci_client\n"
        "from enginery.publish.config import PublishConfig\n"
        "sent = oci_client.OciClient.upload\n"
        "def once(self, *args):\n"
        "    sent(self, *args)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "oci_client.OciClient.upload = once\n"
        "stage.run(Artifact.open(sys.argv[1]), sys.argv[2],\n"
        "          PublishConfig(allow_failed=True, insecure=True))\n"
    )
    url = f"oci://{host}/killed:1"
    ended = subprocess.run(
        [sys.executable, "-c", script, str(whole.path), url], check=False, env=os.environ
    )
    assert ended.returncode == -9
    with pytest.raises(RegistryError, match="has no killed with the tag or digest 1"):
        stage.pull(url, tmp_path / "none", UNVALIDATED)
    published = stage.run(whole, url, UNVALIDATED)
    assert published.is_new
    assert stage.pull(url, tmp_path / "out", UNVALIDATED).content_sha256() == whole.content_sha256()


def test_unreachable_registry_fails_fast(artifact):
    with pytest.raises(RegistryError, match=r"127\.0\.0\.1:\d+ cannot be reached: .*refused"):
        stage.run(artifact, f"oci://127.0.0.1:{free_port()}/name:1", UNVALIDATED)


def test_plain_http_needs_insecure(registry, artifact):
    host, _ = registry
    secure = PublishConfig(allow_failed=True)
    with pytest.raises(RegistryError, match=r"cannot be reached.*pass --insecure"):
        stage.run(artifact, f"oci://{host}/name:1", secure)


def test_image_not_published_by_enginery_is_an_error(registry, artifact, tmp_path):
    from enginery.publish.targets.oci.client import OciClient

    host, _ = registry
    client = OciClient(host, "foreign", insecure=True)
    config = Blob("application/vnd.oci.image.config.v1+json", b"{}")
    client.upload(config)
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": config.descriptor(),
        "layers": [],
    }
    client.put_manifest("1", json.dumps(document).encode())
    with pytest.raises(RegistryError, match="was not published by enginery"):
        stage.pull(f"oci://{host}/foreign:1", tmp_path / "out", UNVALIDATED)


@pytest.mark.more
@pytest.mark.parametrize("place", ["/v2/", "/token", "/manifests/1", "/manifests/refused", "/tags"])
def test_size_of_responses_is_limited(place):
    from enginery.publish.targets.oci.client import OciClient

    def ask(host):
        client = OciClient(host, "model", insecure=True)
        return client.tags() if "tags" in place else client.manifest(place.rpartition("/")[2])

    with wordy_registry(place) as host:
        tracemalloc.start()
        try:
            with pytest.raises(RegistryError, match=rf"{host} sent more than 4194304 byt"):
                ask(host)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert most < 40e6


def test_login_is_dockers_and_not_in_messages(artifact, tmp_path, monkeypatch, caplog):
    caplog.set_level("DEBUG")
    directory = tmp_path / "private"
    directory.mkdir()
    with docker_registry(directory, password="correct-horse") as host:
        url = f"oci://{host}/private:1"
        with pytest.raises(
            RegistryError, match=rf"denies access to private \(401\).*docker login {host}"
        ):
            stage.run(artifact, url, UNVALIDATED)

        wrong = log_in(tmp_path, host, "wrong-horse")
        with pytest.raises(RegistryError, match=r"denies access to private \(401\)") as refused:
            stage.run(artifact, url, UNVALIDATED)
        auth = log_in(tmp_path, host, "correct-horse")
        assert stage.run(artifact, url, UNVALIDATED).is_new
        stage.pull(url, tmp_path / "out", UNVALIDATED)
    for secret in (wrong, auth, "correct-horse", "wrong-horse"):
        assert secret not in str(refused.value)
        assert secret not in caplog.text


def log_in(home, host, password):
    auth = base64.b64encode(f"ada:{password}".encode()).decode()
    (home / ".docker").mkdir(exist_ok=True)
    (home / ".docker/config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    return auth


def test_expired_token_is_renewed_and_not_sent_to_other_hosts(tmp_path):
    from enginery.publish.targets.oci.client import OciClient

    blob = Blob("text/plain", b"abc")
    with token_registry(uses=2) as (host, asked):
        auth = log_in(tmp_path, host, "correct-horse")
        client = OciClient(host, "model", insecure=True)
        for _ in range(5):
            assert not client.has_blob(blob.digest)
        client.upload(blob)
    logins = {path for _, path, said, _ in asked if said == f"Basic {auth}"}
    assert logins == {"/token"}
    assert [path for _, path, *_ in asked].count("/token") == 3
    assert asked[-1] == ("PUT", "/elsewhere/1", "", b"abc")


def test_rejected_token_fails_fast(tmp_path):
    from enginery.publish.targets.oci.client import OciClient

    with token_registry(uses=0) as (host, asked):
        log_in(tmp_path, host, "correct-horse")
        client = OciClient(host, "model", insecure=True)
        with pytest.raises(RegistryError, match=r"denies access to model \(401\).*docker login"):
            client.has_blob("sha256:0")
    assert [path for _, path, *_ in asked].count("/token") == 1


def test_publishing_to_a_digest_is_an_error(artifact):
    with pytest.raises(OptionError, match="has a digest, expected a tag"):
        stage.run(artifact, f"oci://127.0.0.1:1/name@sha256:{'0' * 64}", UNVALIDATED)


def test_tag_and_version_that_differ_are_an_error(artifact):
    both = replace(UNVALIDATED, version="2")
    with pytest.raises(OptionError, match="'version' is '2', but the address has the tag '1'"):
        stage.run(artifact, "oci://127.0.0.1:1/name:1", both)
