"""The folder registry: versions, aliases, damage, concurrent and killed writers."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import ArtifactError, OptionError, RegistryError
from enginery.core.json_file import CHECKSUM_KEY, append_checksum
from enginery.publish.config import PublishConfig
from enginery.publish.publication import LISTING, Publication
from enginery.publish.stage import pull, run
from enginery.publish.targets import folder
from enginery.publish.targets.folder import path_from_url
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

HANGS = """
import sys, time
from enginery.core.artifact.artifact import Artifact
from enginery.publish.targets import folder
from enginery.publish.config import PublishConfig
from enginery.publish.stage import run
whole, count = folder.write_file, 0
def stuck(file, target):
    global count
    count += 1
    if count == 3:
        print("half", flush=True)
        time.sleep(600)
    whole(file, target)
folder.write_file = stuck
run(Artifact.open(sys.argv[2]), sys.argv[1], PublishConfig(name="m"))
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


def index(registry):
    return json.loads((registry / "index.json").read_text())["models"]["m"]


def test_version_is_an_artifact_with_card_link_and_index(artifact, registry):
    published = publish(artifact, registry, alias="production")
    assert (published.version, published.is_new) == ("1", True)
    assert published.url == (registry / "m/1").as_uri()
    assert Artifact.open(registry / "m/latest", verify=True).manifest == artifact.manifest
    assert (registry / "m/1/README.md").read_text().startswith("---\n")
    assert (registry / "m/latest").readlink() == Path("1")
    assert (registry / "m/production").readlink() == Path("1")
    said = index(registry)
    assert (said["latest"], said["aliases"]) == ("1", {"production": "1"})
    assert said["versions"]["1"]["validated"] is True


def test_same_content_is_one_version(artifact, registry):
    first = publish(artifact, registry)
    before = {p: p.stat().st_mtime_ns for p in registry.rglob("*") if p.is_file()}
    again = publish(artifact, registry.as_uri())
    assert (again.url, again.version, again.is_new) == (first.url, "1", False)
    assert {p: p.stat().st_mtime_ns for p in registry.rglob("*") if p.is_file()} == before


def test_other_content_is_the_next_version_and_latest(artifact, registry, tmp_path):
    publish(artifact, registry)
    assert publish(model(tmp_path / "b", b"other"), registry).version == "2"
    assert index(registry)["latest"] == "2"
    assert publish(artifact, registry).version == "1"
    assert index(registry)["latest"] == "2", "what was there already is not news"


def test_named_version_and_its_errors(artifact, registry, tmp_path):
    other = model(tmp_path / "b", b"other")
    assert publish(artifact, registry, version="1.2.0").version == "1.2.0"
    with pytest.raises(RegistryError, match=r"has other content: model\.onnx differ"):
        publish(other, registry, version="1.2.0")
    with pytest.raises(RegistryError, match=r"already has this content as version 1\.2\.0"):
        publish(artifact, registry, version="2")
    with pytest.raises(OptionError, match="is the name of a version"):
        publish(other, registry, alias="1.2.0")
    publish(artifact, registry, alias="best")
    with pytest.raises(OptionError, match="is the name of an alias"):
        publish(other, registry, version="best")
    assert versions(registry) == ["1.2.0"]


def test_alias_moves_atomically(artifact, registry, tmp_path):
    publish(artifact, registry, alias="best")
    publish(model(tmp_path / "b", b"other"), registry, alias="best")
    assert index(registry)["aliases"] == {"best": "2"}
    assert not list((registry / "m").glob(".tmp-*"))


def test_without_links_latest_is_a_file(artifact, registry, tmp_path, monkeypatch):
    def refused(self, *args, **options):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(Path, "symlink_to", refused)
    publish(artifact, registry, alias="best")
    assert (registry / "m/latest").read_text() == "1\n"
    for name in ("m", "m@best", "m/best", "m/latest"):
        assert pull(f"{registry}/{name}", tmp_path / "out" / name, PublishConfig()).manifest


@pytest.mark.parametrize("name", ["m", "m/1", "m@1", "m/latest", "m@latest", "m@best", "m/best"])
def test_every_form_of_address_pulls_the_version(artifact, registry, tmp_path, name):
    publish(artifact, registry, alias="best")
    pulled = pull(f"{registry.as_uri()}/{name}", tmp_path / "out", PublishConfig())
    assert pulled.manifest == artifact.manifest
    assert (pulled.path / "README.md").is_file()


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


# Damage


@pytest.mark.more
@pytest.mark.parametrize("name", ["model.onnx", "README.md", "manifest.json", "config.json"])
def test_damaged_version_is_repaired_by_publishing_again(artifact, registry, tmp_path, name):
    publish(artifact, registry, alias="best")
    publish(model(tmp_path / "b", b"other"), registry)
    before = (registry / "m/1" / LISTING).stat().st_mtime_ns
    (registry / "m/1" / name).write_text("{ }")
    with pytest.raises(ArtifactError, match="publish it again"):
        pull(str(registry / "m/1"), tmp_path / "out", PublishConfig())
    again = publish(artifact, registry)
    assert (again.version, again.is_new) == ("1", False)
    assert pull(str(registry / "m@best"), tmp_path / "out", PublishConfig()).manifest
    assert index(registry)["latest"] == "2", "what was mended is not news"
    assert (registry / "m/1" / LISTING).stat().st_mtime_ns == before
    assert {p.name for p in (registry / "m").iterdir()} == {"1", "2", "latest", "best", ".lock"}


def test_version_without_listing_is_neither_used_nor_overwritten(artifact, registry, tmp_path):
    publish(artifact, registry)
    (registry / "m/1" / LISTING).write_text("{")
    with pytest.raises(RegistryError, match=r"publication\.json is missing or cannot be read"):
        publish(artifact, registry, version="1")
    assert publish(artifact, registry).version == "2"
    assert index(registry)["latest"] == "2"


def test_moved_version_stays_if_the_folder_cannot_be_listed_once(
    artifact, registry, tmp_path, monkeypatch
):
    """A killed writer has moved version 1; the next one must not take it for a leftover."""
    publish(artifact, registry)
    (registry / "m/1").rename(registry / "m/.old-1")
    failures = [OSError(errno.EACCES, "Permission denied")]

    def failing_once(function):
        def call(path="."):
            if failures and Path(path) == registry / "m":
                raise failures.pop()
            return function(path)

        return call

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, failing_once(getattr(os, name)))
    with pytest.raises(RegistryError, match="Permission denied"):
        publish(artifact, registry)
    assert (registry / "m/.old-1").is_dir()
    publish(artifact, registry)
    assert (registry / "m/1").is_dir()


def test_writer_killed_between_two_renames_loses_nothing(artifact, registry, tmp_path):
    publish(artifact, registry)
    (registry / "m/1").rename(registry / "m/.old-1")
    assert publish(artifact, registry).is_new is False
    assert pull(str(registry / "m/1"), tmp_path / "out", PublishConfig()).manifest
    assert not list((registry / "m").glob(".old-*"))


@pytest.mark.parametrize(("name", "version"), [("model.onnx", "1"), ("reports", "2")])
def test_link_in_a_version_is_not_followed(artifact, registry, tmp_path, name, version):
    """A version with a damaged file is repaired; one with an unreadable listing is ignored."""
    publish(artifact, registry)
    place = registry / "m/1" / name
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match=f"{name} is a symbolic link"):
        pull(str(registry / "m/1"), tmp_path / "out", PublishConfig())
    assert publish(artifact, registry).version == version
    assert pull(str(registry / "m"), tmp_path / "out", PublishConfig()).manifest


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


def test_missing_truncated_and_unlisted_files(artifact, registry, tmp_path):
    publish(artifact, registry)
    place = registry / "m/1"
    (place / "extra.bin").write_bytes(b"?")
    pulled = pull(str(registry / "m"), tmp_path / "one", PublishConfig())
    assert not (pulled.path / "extra.bin").exists()
    (place / "config.json").write_bytes(b"{")
    with pytest.raises(ArtifactError, match=r"config\.json has 1 bytes"):
        pull(str(registry / "m"), tmp_path / "two", PublishConfig())
    (place / "config.json").unlink()
    with pytest.raises(ArtifactError, match=r"config\.json is missing"):
        pull(str(registry / "m"), tmp_path / "two", PublishConfig())
    (place / LISTING).unlink()
    with pytest.raises(RegistryError, match="is not a published model"):
        pull(str(registry / "m/1"), tmp_path / "two", PublishConfig())


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
    with pytest.raises(ArtifactError, match=r"is not a safe path|a file and as a directory"):
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
    publish(artifact, registry, alias="best")
    for address, said in [
        (registry, "expected the address of a model in it. Add a model to the address: m"),
        (registry / "m/7", "has no version or alias '7'"),
        (f"{registry}/m@bset", "did you mean 'best'?"),
        (registry / "mm", "did you mean 'm'?"),
        (tmp_path / "nowhere", "is not a published model"),
    ]:
        with pytest.raises(RegistryError) as error:
            pull(str(address), tmp_path / "out", PublishConfig())
        assert said in str(error.value)


def test_versions_and_artifacts_cannot_be_registries(artifact, registry, tmp_path):
    publish(artifact, registry)
    for inside in ("m", "m/1"):
        with pytest.raises(OptionError, match="is inside the registry"):
            publish(artifact, registry / inside)
    with pytest.raises(RegistryError, match="is an artifact"):
        publish(artifact, artifact.path)
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


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_folder_that_cannot_be_written_is_an_error(artifact, registry):
    registry.mkdir(mode=0o500)
    with pytest.raises(RegistryError, match="Permission denied"):
        publish(artifact, registry)


def test_full_disk_is_an_error_and_leaves_no_version(artifact, registry, monkeypatch):
    from enginery.publish import package_files

    def full(source, target):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(package_files.shutil, "copyfile", full)
    with pytest.raises(RegistryError, match="No space left on device"):
        publish(artifact, registry)
    assert versions(registry) in ([], [p.name for p in (registry / "m").glob(".part-*")])


# Several writers, and dead ones


@pytest.mark.more
def test_concurrent_writers_publish_each_content_once(artifact, registry, tmp_path):
    other = model(tmp_path / "b", b"other")
    orders = [(artifact, other), (other, artifact), (artifact, other), (other, artifact)]
    children = [start(PUBLISH, registry, *(a.path for a in order)) for order in orders]
    said = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0] * 4, said
    assert versions(registry) == ["1", "2"]
    assert sorted(index(registry)["versions"]) == ["1", "2"]
    for version in ("1", "2"):
        Artifact.open(registry / "m" / version, verify=True)
    found = {out.split()[orders[n].index(artifact)] for n, (out, _) in enumerate(said)}
    assert len(found) == 1, "one content has one version for all writers"


@pytest.mark.more
def test_concurrent_writers_of_two_models_are_both_in_the_index(artifact, registry, tmp_path):
    code = PUBLISH.replace('name="m"', "name=path.rpartition('-')[2]")
    places = [model(tmp_path / f"x-{name}", name.encode()).path for name in "abcd"]
    children = [start(code, registry, place) for place in places]
    said = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0] * 4, said
    assert sorted(json.loads((registry / "index.json").read_text())["models"]) == list("abcd")


def test_killed_writer_leaves_no_version_and_the_next_one_resumes(artifact, registry, tmp_path):
    child = start(HANGS, registry, artifact.path)
    assert child.stdout.readline() == "half\n"
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    (part,) = (registry / "m").glob(".part-*")
    kept = {p.name: p.stat().st_ino for p in part.iterdir() if p.is_file()}
    assert len(kept) == 2
    with pytest.raises(RegistryError):
        pull(str(registry / "m"), tmp_path / "out", PublishConfig())
    assert publish(artifact, registry).version == "1"
    for name, inode in kept.items():
        assert (registry / "m/1" / name).stat().st_ino == inode, "what was there is kept"
    assert not list((registry / "m").glob(".part-*"))
    Artifact.open(registry / "m/1", verify=True)


def test_files_of_a_killed_writer_are_verified(artifact, registry):
    child = start(HANGS, registry, artifact.path)
    child.stdout.readline()
    child.kill()
    child.communicate()
    (part,) = (registry / "m").glob(".part-*")
    (part / "config.json").write_bytes(b"[]")
    (part / "left.tmp").write_bytes(b"")
    publish(artifact, registry)
    assert (registry / "m/1/config.json").read_text() == "{}"
    assert not (registry / "m/1/left.tmp").exists()


def test_index_is_repaired_after_a_killed_writer(artifact, registry, tmp_path):
    publish(artifact, registry)
    publish(model(tmp_path / "b", b"other"), registry)
    (registry / "index.json").unlink()
    folder.set_alias(registry / "m", "latest", "1")
    publish(model(tmp_path / "b", b"other"), registry)
    assert index(registry)["latest"] == "2"
    assert sorted(index(registry)["versions"]) == ["1", "2"]


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


def test_latest_never_moves_back(artifact, registry, tmp_path):
    from enginery.core.progress import SILENT
    from enginery.publish.package import Package
    from enginery.publish.targets.folder import FolderRegistry

    config = PublishConfig(name="m")
    other = model(tmp_path / "b", b"other")
    packages = []
    for made in (artifact, other):
        scratch = tmp_path / f"scratch-{len(packages)}"
        scratch.mkdir()
        packages.append(Package.of(made, config, scratch))
    target = FolderRegistry(str(registry), config)
    for package in (packages[1], packages[0], packages[1]):  # the older package comes second
        target.publish(package, config, SILENT)
    assert index(registry)["latest"] == "2"


def test_latest_of_a_copied_registry_does_not_move(artifact, registry, tmp_path):
    publish(artifact, registry)
    publish(model(tmp_path / "b", b"other"), registry)
    os.utime(registry / "m/1" / LISTING)
    publish(artifact, registry)
    assert index(registry)["latest"] == "2"


def test_clock_that_is_ahead_does_not_keep_a_version_newest(artifact, registry, tmp_path):
    publish(artifact, registry)
    ahead = (registry / "m/1" / LISTING).stat().st_mtime_ns + 10**12
    os.utime(registry / "m/1" / LISTING, ns=(ahead, ahead))
    publish(model(tmp_path / "b", b"other"), registry)
    (registry / "m/latest").unlink()
    publish(artifact, registry)
    assert index(registry)["latest"] == "2"


@pytest.mark.more
def test_waiting_writer_is_reported(artifact, registry, tmp_path):
    from filelock import FileLock

    (registry / "m").mkdir(parents=True)
    lock = FileLock(registry / "m/.lock")
    with lock:
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
