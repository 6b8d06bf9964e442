"""Kill a command again and again: the disk holds no more than after one kill."""

from __future__ import annotations

import os
import random
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from enginery.cli import main
from enginery.core.errors import EngineryError
from enginery.core.scratch import temporary_directory
from tests.core.artifacts import start
from tests.faults.file_operations import FileOperations, Stop
from tests.faults.scenarios import scenarios
from tests.faults.test_every_operation import run_and_stop

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads descriptors from /proc")

NAMES = [scenario.name for scenario in scenarios(None)]
CHEAP = ("store", "store with --force", "annotate", "publish", "pull", "predict")


def temporary(sandbox) -> list[str]:
    """Return the temporary files and directories."""
    names = [path.relative_to(sandbox.root).as_posix() for path in sandbox.root.rglob("*")]
    return [n for n in names if n.startswith("tmp/") or "/.tmp-" in f"/{n}"]


def kill_often(sandbox, scenario, kills):
    """Kill a command at `kills` places, one after the other, and let it end at last.

    No two of its runs leave the same temporary file or directory.
    """
    with FileOperations(sandbox.root) as operations:
        scenario.run(sandbox.root)
    draw = random.Random(kills)
    sandbox.restore(scenario)
    for _ in range(kills):
        run_and_stop(sandbox, scenario, Stop(draw.randrange(1, operations.count + 1)))
        left = temporary(sandbox)
        names = Counter(re.sub(r"-[0-9a-f]{12}(?=/|$)", "", name) for name in left)
        assert max(names.values(), default=0) <= 1, left
    scenario.run(sandbox.root)
    sandbox.check_finished(scenario)


@pytest.mark.more
@pytest.mark.parametrize("scenario", CHEAP[2:4], indirect=True)
def test_a_few_kills_leave_no_more_than_one(sandbox, scenario):
    kill_often(sandbox, scenario, 12)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", NAMES, indirect=True)
def test_hundred_kills_leave_no_more_than_one(sandbox, scenario):
    kill_often(sandbox, scenario, 100)


@pytest.mark.more
@pytest.mark.parametrize("scenario", ["store with --force", "annotate", "publish"], indirect=True)
def test_prune_removes_what_killed_runs_left_in_the_store_and_the_temporary_folder(
    sandbox, scenario, capsys
):
    with FileOperations(sandbox.root) as operations:
        scenario.run(sandbox.root)
    sandbox.restore(scenario)
    seen = set()
    for number in range(1, operations.count, operations.count // 12):
        run_and_stop(sandbox, scenario, Stop(number))
        seen |= set(temporary(sandbox))
    assert seen
    with pytest.raises(SystemExit) as ended:
        main(["store", "prune", "--max-size", "1TB", "--json"])
    assert not ended.value.code
    left = [name for name in temporary(sandbox) if name.startswith(("home", "tmp"))]
    assert left == []


HOLD = """
import sys
from enginery.core.scratch import temporary_directory
with temporary_directory("example") as scratch:
    print(scratch, flush=True)
    sys.stdin.readline()
"""


def test_temporary_directory_of_a_living_process_is_left_alone_and_that_of_a_dead_one_removed(
    sandbox, monkeypatch
):
    sandbox.empty()
    with start(HOLD) as living, start(HOLD) as dead:
        kept, left = (child.stdout.readline().strip() for child in (living, dead))
        dead.kill()
        dead.wait()
        with temporary_directory("other"):
            found = {str(path) for path in (sandbox.root / "tmp").iterdir()}
            assert kept in found
            assert left not in found
        living.communicate("\n")
    assert list((sandbox.root / "tmp").iterdir()) == []


def test_directories_of_others_in_the_temporary_folder_are_left_alone(sandbox):
    sandbox.empty()
    names = ["enginery-child-abcd1234", "enginery-notes", "other-0123456789ab", "tmp0123"]
    for name in names:
        (sandbox.root / "tmp" / name).mkdir()
    (sandbox.root / "tmp" / "enginery-child-0123456789ab").symlink_to(sandbox.root / "home")
    with temporary_directory("example"):
        pass
    found = {path.name for path in (sandbox.root / "tmp").iterdir()}
    assert found == {*names, "enginery-child-0123456789ab"}
    assert (sandbox.root / "home").is_dir()


def test_directory_that_another_process_removes_before_it_is_locked_is_made_again(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    opened = os.open
    removed = []

    def remove_first(path, flags, *options, **keywords):
        if not removed and Path(path).name.startswith("enginery-race-"):
            removed.append(path)
            Path(path).rmdir()
        return opened(path, flags, *options, **keywords)

    monkeypatch.setattr(os, "open", remove_first)
    with temporary_directory("race") as directory:
        assert directory.is_dir()
    assert removed
    assert directory != removed[0]


def test_temporary_folder_that_is_gone_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(EngineryError, match="cannot be used"), temporary_directory("gone"):
        pass
