"""Inputs that change while they are read, in every way that a file can change."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from enginery.core.artifact import inputs as module
from enginery.core.artifact.fingerprint import Fingerprint, data_sha256, sha256_of
from enginery.core.artifact.inputs import InputFiles
from enginery.core.artifact.staging import staging
from enginery.core.errors import ArtifactError, InputError


@pytest.fixture
def file(tmp_path):
    """Return a file in a folder, behind a link to the folder and a link to the file."""
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "model.bin").write_bytes(b"good")
    (tmp_path / "v2").mkdir()
    (tmp_path / "v2" / "model.bin").write_bytes(b"evil")
    (tmp_path / "current").symlink_to("v1")
    (tmp_path / "current" / "link.bin").symlink_to("model.bin")
    (tmp_path / "v2" / "link.bin").symlink_to("model.bin")
    return tmp_path / "current" / "link.bin"


@pytest.fixture
def inputs(file):
    """Return the inputs of a stage that has hashed the file."""
    recorded = InputFiles()
    with recorded.recording():
        sha256_of(file)
    return recorded


def in_place(root):
    (root / "v1/model.bin").write_bytes(b"evil")


def with_its_time(root):
    """Write other bytes, and restore the time that programs may set."""
    file = root / "v1/model.bin"
    before = file.stat()
    file.write_bytes(b"evil")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def appended(root):
    with (root / "v1/model.bin").open("ab") as stream:
        stream.write(b"er")


def replaced(root):
    shutil.copy2(root / "v2/model.bin", root / "v1/new")
    (root / "v1/new").replace(root / "v1/model.bin")


def replaced_and_put_back(root):
    (root / "v1/model.bin").rename(root / "v1/aside")
    shutil.copy2(root / "v2/model.bin", root / "v1/model.bin")
    (root / "v1/aside").replace(root / "v1/model.bin")


def folder_exchanged_and_put_back(root):
    (root / "v1").rename(root / "aside")
    (root / "v2").rename(root / "v1")
    (root / "v1").rename(root / "v2")
    (root / "aside").rename(root / "v1")


def link_to_the_folder_moved_and_put_back(root):
    for target in ("v2", "v1"):
        (root / "current").unlink()
        (root / "current").symlink_to(target)


def link_to_the_file_moved(root):
    (root / "v1/link.bin").unlink()
    (root / "v1/link.bin").symlink_to(root / "v2/model.bin")


CHANGES = [
    in_place,
    with_its_time,
    appended,
    replaced,
    replaced_and_put_back,
    folder_exchanged_and_put_back,
    link_to_the_folder_moved_and_put_back,
    link_to_the_file_moved,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_is_noticed(tmp_path, inputs, change):
    inputs.check()
    change(tmp_path)
    with pytest.raises(InputError, match=r"changed while it was read\. Run the command again"):
        inputs.check()


def test_removed_file_is_named(tmp_path, inputs):
    (tmp_path / "v1/model.bin").unlink()
    with pytest.raises(InputError, match=r"model\.bin was removed while it was read"):
        inputs.check()


def hard_link(root):
    os.link(root / "v1/model.bin", root / "copy")


def neighbour(root):
    (root / "v1/notes.txt").write_text("mine")
    (root / "v1/.tmp-notes.txt-0123456789ab").mkdir()


def read_again(root):
    (root / "v1/model.bin").read_bytes()
    os.utime(root / "v1")  # as `Store.find` does


@pytest.mark.parametrize("change", [hard_link, neighbour, read_again])
def test_what_leaves_the_content_is_no_change(tmp_path, inputs, change):
    change(tmp_path)
    inputs.check()


@pytest.mark.parametrize("content", [b"good", b"evil"])
def test_where_inodes_are_not_constant_the_content_counts(tmp_path, monkeypatch, content):
    """Some network file systems number a file anew each time that it is looked up."""
    file = tmp_path / "model.bin"
    file.write_bytes(b"good")
    recorded = InputFiles()
    with recorded.recording():
        sha256_of(file)
    before = recorded._states[str(file)]
    file.write_bytes(content)
    monkeypatch.setattr(
        module._State,
        "of",
        lambda path: replace(before, inode=7) if path == str(file) else recorded._states[path],
    )
    if content == b"good":
        recorded.check()
    else:
        with pytest.raises(InputError, match="changed while it was read"):
            recorded.check()


def test_a_folder_of_data_may_not_grow(tmp_path):
    (tmp_path / "a.png").write_bytes(b"a")
    recorded = InputFiles()
    with recorded.recording():
        data_sha256(tmp_path)
    recorded.check()
    (tmp_path / "b.png").write_bytes(b"b")
    recorded.check(first=10)  # between parts, only what was hashed is looked at
    with pytest.raises(InputError, match=r"b\.png came or went"):
        recorded.check()


def test_a_key_knows_what_it_was_computed_from(tmp_path, file, inputs):
    with InputFiles().recording():
        sha256_of(file)
        key = Fingerprint("export", {"source": "1"})
    assert key == Fingerprint("export", {"source": "1"})
    in_place(tmp_path)
    with pytest.raises(InputError):
        key.inputs.check()
    Fingerprint("export", {"source": "1"}).inputs.check()  # nothing was recorded


def test_nothing_is_stored_if_an_input_changed(tmp_path, inputs):
    def work():
        with staging(tmp_path / "out", inputs) as directory:
            (directory / "model.onnx").write_bytes(b"graph")
            in_place(tmp_path)

    with pytest.raises(InputError, match="changed while it was read"):
        work()
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_change_is_named_before_the_error_that_it_causes(tmp_path, inputs):
    def work():
        with staging(tmp_path / "out", inputs):
            in_place(tmp_path)
            raise ArtifactError("the model has no weights")

    with pytest.raises(InputError, match="changed while it was read") as caught:
        work()
    assert "no weights" in str(caught.value.__context__)


def test_a_store_that_is_removed_is_not_the_models_fault(tmp_path, inputs):
    def work():
        with staging(tmp_path / "store" / "out", inputs) as directory:
            shutil.rmtree(tmp_path / "store")
            (directory / "model.onnx").write_bytes(b"graph")

    with pytest.raises(ArtifactError, match=r"store was removed while the command wrote to it"):
        work()
    assert not (tmp_path / "store").exists()


def test_hashing_nothing_twice(tmp_path, file, inputs, monkeypatch):
    def hashed(*_):
        raise AssertionError("hashed again")

    monkeypatch.setattr(module.hashlib, "file_digest", hashed)
    with inputs.unchanged():
        assert Path(file).read_bytes() == b"good"


def test_folder_that_cannot_be_listed_again_is_named(tmp_path):
    inputs, listings = InputFiles(), iter([["a"], OSError(5, "Input/output error", "/data")])

    def list_names():
        names = next(listings)
        if isinstance(names, OSError):
            raise names
        return names

    inputs.add_listing(tmp_path, list_names)
    with pytest.raises(InputError, match=r"looked at again: Input/output error: /data\."):
        inputs.check()


def test_error_of_a_stage_is_kept_where_its_inputs_cannot_be_listed(tmp_path):
    inputs, listings = InputFiles(), iter([["a"]])
    inputs.add_listing(tmp_path, lambda: next(listings, None) or tmp_path.joinpath("no").iterdir())
    with pytest.raises(ArtifactError, match="the disk is full"), inputs.unchanged():
        raise ArtifactError("the disk is full.")


ON_OVERLAY = """
import sys
from pathlib import Path
from enginery.core.artifact.inputs import InputFiles, note_input

root = Path(sys.argv[1])
inputs = InputFiles()
with inputs.recording():
    note_input(root / "app" / "model" / "config.json")
(root / "app" / "cache" / "log").write_text("")  # copies `app` to the upper layer
inputs.check()
print("unchanged")
(root / "app" / "model" / "config.json").write_text("{ }")
inputs.check()
"""


def test_writing_beside_the_model_in_a_container_is_no_change(tmp_path):
    for folder in ("lower/app/model", "lower/app/cache", "upper", "work", "root"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "lower/app/model/config.json").write_text("{}")
    layers = "lowerdir=lower,upperdir=upper,workdir=work"
    script = f'mount -t overlay overlay -o {layers} root && exec "$@"'
    unshare = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*unshare, "true"], cwd=tmp_path, check=False).returncode
    ):
        pytest.skip("an overlay file system cannot be mounted here")
    command = [*unshare, sys.executable, "-c", ON_OVERLAY, "root"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.stdout == "unchanged\n"
    assert "config.json changed while it was read" in result.stderr
