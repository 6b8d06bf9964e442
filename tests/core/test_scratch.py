"""Files and directories that are being written, and the lock beside them."""

import errno
import fcntl
import signal
import threading
from pathlib import Path

import pytest

from enginery.core.scratch import Scratch, locked, remove_leftovers, replace_synced
from tests.core.artifacts import start

HOLD = """
import sys
from enginery.core.scratch import locked
with locked(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.readline()
"""


def is_locked(path):
    try:
        with locked(path):
            return False
    except TimeoutError:
        return True


def test_one_process_at_a_time_and_nothing_is_left(tmp_path, monkeypatch):
    out = tmp_path / "out.csv"
    child = start(HOLD, out)
    assert child.stdout.readline() == "locked\n"
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "other-home"))
    assert is_locked(out)
    assert not is_locked(tmp_path / "other.csv")
    child.communicate("\n")
    assert not is_locked(out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["link.csv", "folder/out.csv", "real/../real/out.csv", "relative"])
def test_paths_of_one_file_have_one_lock(tmp_path, monkeypatch, name):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.csv").symlink_to("real/out.csv")
    (tmp_path / "folder").symlink_to("real")
    monkeypatch.chdir(tmp_path / "real")
    path = "out.csv" if name == "relative" else tmp_path / name
    with locked(tmp_path / "real" / "out.csv"):
        assert is_locked(path)
    assert not is_locked(path)
    assert list((tmp_path / "real").iterdir()) == []


def test_killed_holder_leaves_a_lock_that_the_next_one_takes_and_removes(tmp_path):
    out = tmp_path / "out.csv"
    for take_over in (lambda: is_locked(out), lambda: not remove_leftovers(tmp_path, "out.csv")):
        child = start(HOLD, out)
        child.stdout.readline()
        assert remove_leftovers(tmp_path, "out.csv") == 0
        assert is_locked(out)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert [path.name for path in tmp_path.iterdir()] == [".tmp-out.csv-lock"]
        take_over()
        assert list(tmp_path.iterdir()) == []


def test_waiting_is_said_and_the_lock_is_had_afterwards(tmp_path):
    out, waiting = tmp_path / "out", threading.Event()
    child = start(HOLD, out)
    child.stdout.readline()

    def release():
        waiting.wait()
        child.communicate("\n")

    thread = threading.Thread(target=release)
    thread.start()
    with locked(out, waiting.set):
        assert child.poll() is not None or child.wait() is not None
    thread.join()
    assert waiting.is_set()
    assert list(tmp_path.iterdir()) == []


def test_on_a_file_system_without_locks_the_store_has_the_lock(tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    flock = fcntl.flock

    def refuse(descriptor, operation):
        if "home" not in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path / "out"):
        assert is_locked(tmp_path / "out")
        assert not is_locked(tmp_path / "other")
    assert not is_locked(tmp_path / "out")


def test_lock_of_a_directory_that_was_replaced_is_not_removed(tmp_path):
    """The other directory may be locked by another process."""
    (tmp_path / "artifact").mkdir()
    with locked(tmp_path / "artifact" / "manifest.json"):
        (tmp_path / "artifact").rename(tmp_path / "old")
        (tmp_path / "artifact").mkdir()
        child = start(HOLD, tmp_path / "artifact" / "manifest.json")
        child.stdout.readline()
    assert is_locked(tmp_path / "artifact" / "manifest.json")
    child.communicate("\n")
    assert list((tmp_path / "artifact").iterdir()) == []


@pytest.mark.parametrize("is_file", [False, True])
def test_closed_scratch_leaves_nothing_and_a_renamed_one_its_target(tmp_path, is_file):
    target = tmp_path / "out"
    for content in (b"old", b"new"):
        with Scratch.beside(target, is_file=is_file) as abandoned:
            assert abandoned.path.exists()
        with Scratch.beside(target, is_file=is_file) as scratch:
            (scratch.path if is_file else scratch.path / "graph").write_bytes(content)
            replace_synced(scratch.path, target)
        assert (target if is_file else target / "graph").read_bytes() == content
        assert list(tmp_path.iterdir()) == [target]


def test_scratch_that_cannot_be_locked_is_an_error_that_names_it(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match=r"Input/output error: '.*\.tmp-out-"):
        Scratch.beside(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_without_locks_nothing_of_others_is_removed(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with Scratch.beside(tmp_path / "out") as first, Scratch.beside(tmp_path / "out") as second:
        assert remove_leftovers(tmp_path) == 0
        assert {first.path, second.path} == set(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []


def test_size_of_leftovers_is_that_of_their_files(tmp_path):
    (tmp_path / ".tmp-out-0123456789ab").mkdir()
    (tmp_path / ".tmp-out-0123456789ab" / "a.json").write_bytes(b"{}")
    (tmp_path / ".tmp-out-ba9876543210").write_bytes(b"half")
    assert remove_leftovers(tmp_path, "out") == 6
    assert list(tmp_path.iterdir()) == []
