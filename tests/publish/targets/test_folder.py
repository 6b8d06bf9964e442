"""The folder registry: versions, `latest`, damage, concurrent and killed writers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import ArtifactError, OptionError, RegistryError
from enginery.core.json_file import CHECKSUM_KEY, append_checksum
from enginery.core.scratch import locked
from enginery.publish.config import PublishConfig
from enginery.publish.publication import LISTING, Publication
from enginery.publish.stage import pull, run
from enginery.publish.targets import folder
from enginery.publish.targets.folder import path_from_url, read_latest
from tests.core.artifacts import publishable, start, validated

ROOT = Path(__file__).parents[3]

PUBLISH = """
import sys
from enginery.core.artifact.artifact import Artifact
from enginery.publish.config import PublishConfig
from enginery.publish.stage import run
for path in sys.argv[2:]:
    print(run(Artifact.open(path), sys.argv[1], PublishConfig(name="m")).version, flush=True)
"""


def model(path, graph=b"graph"):
    return validated(publishable(path, graph=graph))


@pytest.fixture
def artifact(tmp_path):
    return model(tmp_path / "artifact")


@pytest.fixture
def registry(tmp_path):
    return tmp_path / "a registry"


def publish(artifact, registry, **options):
    return run(artifact, str(registry), PublishConfig(**{"name": "m", **options}))


def versions(registry):
    return sorted(p.name for p in (registry / "m").iterdir() if p.is_dir() and not p.is_symlink())


def test_version_is_an_artifact_with_card_and_link(artifact, registry):
    published = publish(artifact, registry)
    assert (published.version, published.is_new) == ("1", True)
    assert published.url == (registry / "m/1").as_uri()
    assert Artifact.open(registry / "m/latest", verify=True).manifest == artifact.manifest
    assert (registry / "m/1/README.md").read_text().startswith("---\n")
    assert (registry / "m/latest").readlink() == Path("1")
    assert {path.name for path in (registry / "m").iterdir()} == {"1", "latest"}


def test_same_content_is_one_version(artifact, registry):
    first = publish(artifact, registry)
    before = {p: p.stat().st_mtime_ns for p in registry.rglob("*") if p.is_file()}
    again = publish(artifact, registry.as_uri())
    assert (again.url, again.version, again.is_new) == (first.url, "1", False)
    assert {p: p.stat().st_mtime_ns for p in registry.rglob("*") if p.is_file()} == before


def test_other_content_is_the_next_version_and_latest(artifact, registry, tmp_path):
    publish(artifact, registry)
    assert publish(model(tmp_path / "b", b"other"), registry).version == "2"
    assert read_latest(registry / "m") == "2"
    assert publish(artifact, registry).version == "1"
    assert read_latest(registry / "m") == "2", "what was there already is not news"


def test_named_version_and_its_errors(artifact, registry, tmp_path):
    other = model(tmp_path / "b", b"other")
    assert publish(artifact, registry, version="1.2.0").version == "1.2.0"
    with pytest.raises(RegistryError, match=r"has other content: model\.onnx differ"):
        publish(other, registry, version="1.2.0")
    with pytest.raises(RegistryError, match=r"already has this content as version 1\.2\.0"):
        publish(artifact, registry, version="2")
    assert versions(registry) == ["1.2.0"]


def test_edits_of_artifact_and_pulled_copy_do_not_change_the_version(registry, tmp_path):
    large = model(tmp_path / "large", b"x" * (1 << 20))
    publish(large, registry)
    out = pull(str(registry / "m"), tmp_path / "out", PublishConfig()).path
    for place in (large.path, out):
        with (place / "model.onnx").open("r+b") as stream:
            stream.write(b"edit")
    Artifact.open(registry / "m/1", verify=True)


def test_all_users_can_read_a_version(artifact, registry):
    (artifact.path / "model.onnx").chmod(0o600)
    publish(artifact, registry)
    files = [path for path in (registry / "m/1").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o644}


def test_alias_is_an_error_and_a_link_of_your_own_names_a_version(artifact, registry, tmp_path):
    with pytest.raises(OptionError, match="a folder has only versions and 'latest'"):
        publish(artifact, registry, alias="production")
    publish(artifact, registry)
    (registry / "m/production").symlink_to("1")
    assert pull(f"{registry}/m/production", tmp_path / "out", PublishConfig()).manifest
    publish(model(tmp_path / "b", b"other"), registry)
    assert (registry / "m/production").readlink() == Path("1")


def test_without_links_latest_is_a_file(artifact, registry, tmp_path, monkeypatch):
    def refused(self, *args, **options):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(Path, "symlink_to", refused)
    publish(artifact, registry)
    assert (registry / "m/latest").read_text() == "1\n"
    for name in ("m", "m/latest"):
        assert pull(f"{registry}/{name}", tmp_path / "out" / name, PublishConfig()).manifest
    publish(model(tmp_path / "b", b"other"), registry)
    assert (registry / "m/latest").read_text() == "2\n"


@pytest.mark.parametrize("name", ["m", "m/1", "m/latest"])
def test_every_form_of_address_pulls_the_version(artifact, registry, tmp_path, name):
    publish(artifact, registry)
    pulled = pull(f"{registry.as_uri()}/{name}", tmp_path / "out", PublishConfig())
    assert pulled.manifest == artifact.manifest
    assert (pulled.path / "README.md").is_file()


# Damage


@pytest.mark.parametrize("name", ["model.onnx", "README.md", "manifest.json", "config.json"])
def test_damaged_version_is_an_error_and_is_not_written_again(artifact, registry, tmp_path, name):
    publish(artifact, registry)
    (registry / "m/1" / name).write_text("{ }")
    with pytest.raises(ArtifactError, match="remove the version's folder"):
        pull(str(registry / "m/1"), tmp_path / "out", PublishConfig())
    with pytest.raises(ArtifactError, match=rf"{name} has 3 bytes.* Remove .*m/1, and publish"):
        publish(artifact, registry)
    assert (registry / "m/1" / name).read_text() == "{ }"
    (registry / "m/1").rename(tmp_path / "removed")
    assert publish(artifact, registry).is_new
    assert pull(str(registry / "m"), tmp_path / "out", PublishConfig()).manifest


def test_version_without_listing_is_neither_used_nor_overwritten(artifact, registry, tmp_path):
    publish(artifact, registry)
    (registry / "m/1" / LISTING).write_text("{")
    with pytest.raises(RegistryError, match=r"publication\.json is missing or cannot be read"):
        publish(artifact, registry, version="1")
    assert publish(artifact, registry).version == "2"
    assert read_latest(registry / "m") == "2"


@pytest.mark.parametrize("name", ["model.onnx", "reports"])
def test_link_in_a_version_is_not_followed(artifact, registry, tmp_path, name):
    publish(artifact, registry)
    place = registry / "m/1" / name
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match=f"{name} is a symbolic link"):
        pull(str(registry / "m/1"), tmp_path / "out", PublishConfig())


@pytest.mark.parametrize("name", ["model.onnx", "README.md", "manifest.json", "config.json"])
def test_changed_file_is_an_error_with_its_name(artifact, registry, tmp_path, name):
    publish(artifact, registry)
    file = registry / "m/1" / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match=f"{name} was altered"):
        pull(str(registry / "m"), tmp_path / "out", PublishConfig())
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".tmp-*"))


STRANGE = [
    "../../victim",
    "/tmp/victim",
    "..",
    "a/../../victim",
    "a\\..\\victim",
    "C:victim",
    "a\0b",
    "",
    "./a",
    "a//b",
    "model.onnx/inside",
]


@pytest.mark.parametrize("name", STRANGE)
def test_listing_with_an_outside_path_writes_nothing_there(artifact, registry, tmp_path, name):
    publish(artifact, registry)
    listing = registry / "m/1" / LISTING
    said = json.loads(listing.read_text())
    said["files"][name] = said["files"]["model.onnx"]
    del said[CHECKSUM_KEY]
    listing.write_bytes(append_checksum(json.dumps(said, indent=2)))
    home = tmp_path / "home"
    home.mkdir()
    (home / "victim").write_text("precious")
    # Where the listing's own place would be copied from, and where to.
    (registry / "victim").write_bytes((artifact.path / "model.onnx").read_bytes())
    with pytest.raises(ArtifactError, match=r"is not a safe path|inside is missing"):
        pull((registry / "m/1").as_uri(), home / "build/out", PublishConfig())
    assert (home / "victim").read_text() == "precious"
    assert not (home / "build/out").exists()


def test_invalid_listing_is_an_error(artifact, registry, tmp_path):
    publish(artifact, registry)
    (registry / "m/1" / LISTING).write_text("{}")
    with pytest.raises(ArtifactError, match=r"publication\.json"):
        pull(str(registry / "m/1"), tmp_path / "out", PublishConfig())


# Addresses


def test_errors_of_addresses_list_existing_models_and_versions(artifact, registry, tmp_path):
    publish(artifact, registry, version="best")
    for address, said in [
        (registry, f"{registry} has m."),
        (registry / "m/7", "has best."),
        (registry / "m/bset", "did you mean 'best'?"),
        (registry / "mm", "did you mean 'm'?"),
        (tmp_path / "nowhere", "is not a published model"),
    ]:
        with pytest.raises(RegistryError) as error:
            pull(str(address), tmp_path / "out", PublishConfig())
        assert said in str(error.value)


def test_versions_and_artifacts_cannot_be_registries(artifact, registry, tmp_path):
    publish(artifact, registry)
    with pytest.raises(OptionError, match="is a model in the registry"):
        publish(artifact, registry / "m")
    for path in (registry / "m/1", artifact.path):
        with pytest.raises(RegistryError, match="is an artifact"):
            publish(artifact, path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RegistryError, match="is a file"):
        publish(artifact, tmp_path / "file")


@pytest.mark.parametrize("url", ["file:///x%00b", "/x\0b"])
def test_address_with_a_nul_character_is_an_error(artifact, url, tmp_path):
    for verb in (
        lambda: run(artifact, url, PublishConfig()),
        lambda: pull(url, tmp_path / "out", PublishConfig()),
    ):
        with pytest.raises(OptionError, match="NUL character"):
            verb()


def test_address_that_is_too_long_is_an_error(artifact, tmp_path):
    url = f"{tmp_path}/{'a' * 300}"
    for verb in (
        lambda: run(artifact, url, PublishConfig()),
        lambda: pull(url, tmp_path / "out", PublishConfig()),
    ):
        with pytest.raises(RegistryError, match="File name too long"):
            verb()


def test_file_address_with_a_host_is_an_error():
    with pytest.raises(OptionError, match="names the host 'server'"):
        path_from_url("file://server/models")
    assert path_from_url("file:///a%20b") == Path("/a b")
    assert path_from_url("file://localhost/a") == Path("/a")
    assert path_from_url("file:///C:/models") == Path("C:/models")


# Several writers, and dead ones


@pytest.mark.more
def test_concurrent_writers_publish_each_content_once(artifact, registry, tmp_path):
    other = model(tmp_path / "b", b"other")
    orders = [(artifact, other), (other, artifact), (artifact, other), (other, artifact)]
    children = [start(PUBLISH, registry, *(a.path for a in order)) for order in orders]
    said = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0] * 4, said
    assert versions(registry) == ["1", "2"]
    for version in ("1", "2"):
        Artifact.open(registry / "m" / version, verify=True)
    found = {out.split()[orders[n].index(artifact)] for n, (out, _) in enumerate(said)}
    assert len(found) == 1, "one content has one version for all writers"


def test_latest_is_moved_after_a_writer_that_was_killed_before(artifact, registry, tmp_path):
    """It had announced version 2, which the next writer sees; or the version did not appear."""
    publish(artifact, registry)
    other = model(tmp_path / "b", b"other")
    (registry / "m/.tmp-latest").symlink_to("2")
    publish(artifact, registry)
    assert read_latest(registry / "m") == "1"
    publish(other, registry)
    (registry / "m/.tmp-latest").symlink_to("2")
    (registry / "m/latest").unlink()
    (registry / "m/latest").symlink_to("1")
    publish(artifact, registry)
    assert read_latest(registry / "m") == "2"
    assert not list((registry / "m").glob(".tmp-*"))


def test_latest_that_moves_during_a_pull_does_not_mix_versions(
    artifact, registry, tmp_path, monkeypatch
):
    publish(artifact, registry)
    other, copy = model(tmp_path / "b", b"other"), folder.shutil.copyfile

    def moving(source, target):
        monkeypatch.setattr(folder.shutil, "copyfile", copy)
        publish(other, registry)
        return copy(source, target)

    monkeypatch.setattr(folder.shutil, "copyfile", moving)
    pulled = pull(f"{registry}/m/latest", tmp_path / "out", PublishConfig())
    assert pulled.content_sha256() == artifact.content_sha256()
    assert read_latest(registry / "m") == "2"


def test_file_changed_while_publishing_is_an_error(artifact, registry, tmp_path):
    from enginery.core.progress import SILENT
    from enginery.publish.package import Package
    from enginery.publish.targets.folder import FolderRegistry

    config = PublishConfig(name="m")
    package = Package.of(artifact, config, tmp_path)
    graph = artifact.path / "model.onnx"
    graph.write_bytes(graph.read_bytes()[::-1])
    with pytest.raises(ArtifactError, match=r"as it is now: model\.onnx was altered"):
        FolderRegistry(str(registry), config).publish(package, config, SILENT)
    assert not (registry / "m/1").exists()


@pytest.mark.more
def test_waiting_writer_is_reported(artifact, registry, tmp_path):
    (registry / "m").mkdir(parents=True)
    with locked(registry / "m/version"):
        child = subprocess.Popen(
            [sys.executable, "-m", "enginery", "publish", artifact.path, registry, "--name", "m"],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for line in child.stderr:
            if "waiting: another process writes" in line:
                break
        else:
            pytest.fail("it never waited")
    out, _ = child.communicate()
    assert (child.returncode, out) == (0, f"{(registry / 'm/1').as_uri()}\n")


def test_listing_that_is_a_named_pipe_does_not_block(tmp_path):
    (tmp_path / LISTING).parent.mkdir()
    os.mkfifo(tmp_path / LISTING)
    with pytest.raises(
        ArtifactError, match=r"publication\.json cannot be read: it is a named pipe"
    ):
        Publication.read(tmp_path, "it")
