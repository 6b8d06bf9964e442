"""Files and directories that are being written, and the lock beside them."""

import errno
import fcntl
import signal
import threading
from pathlib import Path

import pytest

from enginery.core.scratch import locked, remove_leftovers
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
