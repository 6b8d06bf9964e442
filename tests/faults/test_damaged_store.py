"""A store of which any file is damaged: the entry is named and made anew, and never used."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from enginery.cli import main
from enginery.core.artifact.artifact import Artifact, staging
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.fingerprint import Fingerprint
from enginery.core.errors import EngineryError
from enginery.core.progress import Silent
from enginery.core.store.optimized_graph import MODEL_FILE, OptimizedGraph, write_record
from enginery.core.store.store import ARTIFACTS, ENGINES, GRAPHS, Store
from enginery.predict.journal import lock_output, remove_leftovers
from tests.core.artifacts import FINGERPRINT, make
from tests.engine.made import PLAN, engine_record, write_engine
from tests.progress import Said

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="modes and owners of POSIX")
NOBODY = 65534


@pytest.fixture
def home(monkeypatch):
    """Use a store that other users can reach, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory(prefix="store-") as directory:
        Path(directory).chmod(0o777)
        home = Path(directory, "home")
        home.mkdir()
        home.chmod(0o777)
        monkeypatch.setenv("ENGINERY_HOME", str(home))
        yield home


def make_engine(out: Path) -> Engine:
    model = out.parent.parent / "model"
    artifact = Artifact.open(model) if model.is_dir() else make(model)
    fingerprint = KINDS["engine"][1]
    record = engine_record(
        artifact,
        plan=PLAN,
        key=fingerprint.key,
        fields=fingerprint.fields,
        graph_sha256="a" * 64,
        profiles=("batch=1",),
    )
    return Engine.open(write_engine(out, record, plan=PLAN))


def make_graph(out: Path) -> OptimizedGraph:
    with staging(out) as directory:
        (directory / MODEL_FILE).write_bytes(b"graph")
        (directory / "model.onnx.data").write_bytes(b"weights")
        write_record(directory, KINDS["graph"][1], "minilm")
    return OptimizedGraph.open(out)


KINDS = {
    "artifact": (ARTIFACTS, FINGERPRINT, make, ("manifest.json", "model.onnx", "config.json")),
    "engine": (
        ENGINES,
        Fingerprint("tensorrt-rtx", {"graph": "a" * 64, "profiles": "batch=1"}),
        make_engine,
        ("engine.json", "model.plan"),
    ),
    "graph": (
        GRAPHS,
        Fingerprint("graph", {"graph": "a" * 64}),
        make_graph,
        ("graph.json", "model.onnx", "model.onnx.data"),
    ),
}
FILES = [(kind, file) for kind, (*_, files) in KINDS.items() for file in files]


def obtain(kind: str, progress=None) -> tuple[Path, bool]:
    entry_type, fingerprint, build, _ = KINDS[kind]
    found, built = Store().obtain(
        entry_type, fingerprint, "m", build, progress=progress or Silent()
    )
    return found.path, built


def delete(file: Path) -> None:
    file.unlink()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def alter(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def fill_with_zeros(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def make_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def make_dangling_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("missing")


def make_named_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGES = [
    delete,
    truncate,
    empty,
    alter,
    fill_with_zeros,
    make_directory,
    make_dangling_link,
    make_named_pipe,
]
MOST_IN_MORE = [
    delete,
    alter,
    make_named_pipe,
    *(
        pytest.param(damage, marks=pytest.mark.more)
        for damage in DAMAGES
        if damage not in (delete, alter, make_named_pipe)
    ),
]


@pytest.mark.parametrize("damage", MOST_IN_MORE)
@pytest.mark.parametrize(("kind", "file"), FILES)
def test_entry_with_a_damaged_file_is_named_and_made_anew(home, kind, file, damage):
    path, _ = obtain(kind)
    damage(path / file)
    (entry,) = [entry for entry in Store().entries() if entry.path == path]
    assert file in entry.problem
    said = Said()
    again, built = obtain(kind, said)
    assert (again, built) == (path, True)
    assert f"{KINDS[kind][1].stage}: rebuilding: {path.name} is damaged" in said.messages
    assert obtain(kind) == (path, False)


@pytest.mark.parametrize("damage", MOST_IN_MORE)
@pytest.mark.parametrize(("kind", "file"), FILES)
def test_prune_removes_an_entry_with_a_damaged_file(home, kind, file, damage, capsys):
    path, _ = obtain(kind)
    damage(path / file)
    with pytest.raises(SystemExit) as ended:
        main(["store", "prune", "--max-size", "1TB", "--json"])
    assert not ended.value.code
    assert [Path(entry["path"]) for entry in json.loads(capsys.readouterr().out)["removed"]] == [
        path
    ]
    assert not path.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_entry_that_is_a_file_or_a_dangling_link_is_made_anew(home, kind):
    path, _ = obtain(kind)
    shutil.rmtree(path)
    path.write_bytes(b"a file")
    assert obtain(kind) == (path, True)
    shutil.rmtree(path)
    path.symlink_to("missing")
    assert obtain(kind) == (path, True)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", ["hashes.sqlite", "locks/export-m-*.lock"])
def test_damaged_cache_of_hashes_or_lock_does_no_harm(home, file, damage):
    path, _ = obtain("artifact")
    (damaged,) = home.glob(file)
    if not damaged.stat().st_size:
        damaged.write_bytes(b"locks are empty")
    damage(damaged)
    assert obtain("artifact") == (path, False)
    (path / "model.onnx").write_bytes(b"grape")
    said = _message(lambda: obtain("artifact"))
    # A lock that is no file cannot be taken, and is not ours to remove.
    assert not said or ("locks" in file and str(damaged) in said)
    assert said or obtain("artifact") == (path, False)


@pytest.mark.parametrize("damage", [each for each in DAMAGES if each != make_directory])
def test_damaged_note_of_predict_does_no_harm(home, tmp_path, damage):
    output = tmp_path / "out.csv"
    (tmp_path / "out.csv.parts").mkdir()
    (tmp_path / "out.csv.parts" / "part-000000").write_bytes(b"half")
    with lock_output(output):
        pass
    (note,) = (home / "predict").iterdir()
    damage(note)
    remove_leftovers()
    with lock_output(output):
        pass


# Other users. Root may read and write everything, so these tests run as another user.


def as_nobody(function) -> str:
    """Run a function as another user; return "" or its EngineryError."""
    if os.geteuid() != 0:
        return _message(function)
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns about threads of other tests
        child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writer, _message(function).encode())
        except BaseException as error:
            os.write(writer, f"raised {error!r}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    os.waitpid(child, 0)
    return said


def _message(function) -> str:
    try:
        function()
    except EngineryError as error:
        return str(error)
    return ""


def open_to_all(home: Path) -> None:
    for path in (home, *home.rglob("*")):
        path.chmod(path.stat().st_mode | (0o777 if path.is_dir() else 0o666))


@pytest.mark.parametrize(("kind", "file"), FILES)
def test_entry_with_a_file_that_may_not_be_read_is_made_anew(home, kind, file):
    path, _ = obtain(kind)
    open_to_all(home)
    (path / file).chmod(0)

    def again():
        assert obtain(kind) == (path, True)

    assert as_nobody(again) == ""
    assert obtain(kind) == (path, False)


@pytest.mark.parametrize("kind", KINDS)
def test_entry_whose_directory_may_not_be_read_is_an_error_in_words(home, kind):
    path, _ = obtain(kind)
    open_to_all(home)
    path.parent.chmod(0o755)
    path.chmod(0o700)
    if os.geteuid() != 0:
        path.chmod(0)
    said = as_nobody(lambda: obtain(kind))
    assert "Permission denied" in said
    assert str(path.parent) in said
    assert "Set ENGINERY_HOME" in said


@pytest.mark.parametrize("kind", KINDS)
def test_store_that_can_only_be_read_serves_what_it_has(home, kind):
    path, _ = obtain(kind)
    modes = {each: each.stat().st_mode for each in (home, *home.rglob("*"))}
    for each, mode in modes.items():
        each.chmod(stat.S_IMODE(mode) & ~0o222 | (0o555 if each.is_dir() else 0o444))
    try:

        def again():
            assert obtain(kind) == (path, False)

        assert as_nobody(again) == ""
        said = as_nobody(lambda: Store().obtain(KINDS[kind][0], OTHER, "m", make))
        assert "Permission denied" in said
        assert "Set ENGINERY_HOME" in said
    finally:
        for each, mode in modes.items():
            each.chmod(stat.S_IMODE(mode))


OTHER = Fingerprint("export", {"model": "org/name", "opset": "17"})


def test_users_of_one_group_share_a_store(home):
    before = os.umask(0o002)
    try:
        path, _ = obtain("artifact")
        group = [entry for entry in (home, *home.rglob("*")) if entry.name != "hashes.sqlite"]
        assert [str(each) for each in group if not each.stat().st_mode & stat.S_IWGRP] == []
    finally:
        os.umask(before)
    assert path.is_dir()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP])
def test_store_on_a_file_system_without_locks_is_refused(home, monkeypatch, code):
    path, _ = obtain("artifact")

    def refused(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refused)
    assert obtain("artifact") == (path, False)  # a hit needs no lock
    with pytest.raises(EngineryError, match=re.escape(os.strerror(code))) as raised:
        Store().obtain(ARTIFACTS, OTHER, "m", make)
    assert str(home) in raised.value.message
    assert "ENGINERY_HOME" in raised.value.do
