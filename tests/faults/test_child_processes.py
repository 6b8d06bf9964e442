"""Fail, or stop the process at, operations on files in the child processes of stages.

The same holds as in `test_every_operation`: the results are the earlier or the new ones, the error
names a path and the cause, and the next run has the same results and leaves the same files.

`validate` reads much in its own process, too: a file that is denied there must not become a note.
Of these reads every tenth is struck.

The quick suite strikes one operation of each child process with each of three kinds of fault, and
FAULTS_OFFSET=1, 2, … takes others. `pytest -m slow` strikes every one; of PyTorch's process, which
does little but read feeds and write outputs, every tenth. `-s` prints how many there are.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.faults.file_operations import READING, FileOperations
from tests.faults.scenarios import scenarios_with_children
from tests.faults.test_every_operation import FAULTS, OFFSET, strike

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads descriptors from /proc")

NAMES = [scenario.name for scenario in scenarios_with_children(None)]
LONG = ("export", "validate")
KINDS = list(FAULTS)


def numbers_in_children(sandbox, scenario) -> list[int]:
    with FileOperations(sandbox.root) as operations:
        scenario.run(sandbox.root)
    sandbox.check_finished(scenario)
    return operations.numbers_in_children


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(name, marks=pytest.mark.more if name in LONG else ()) for name in NAMES],
    indirect=True,
)
def test_some_operations_of_child_processes(sandbox, scenario):
    numbers, first = numbers_in_children(sandbox, scenario), OFFSET + NAMES.index(scenario.name)
    for place in range(3):
        number = numbers[(17 * first + len(numbers) * place // 3) % len(numbers)]
        assert strike(sandbox, scenario, KINDS[(first + 2 * place) % len(KINDS)], number)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scenario", NAMES, indirect=True)
def test_every_operation_of_child_processes(sandbox, scenario, kind):
    numbers = numbers_in_children(sandbox, scenario)
    if scenario.name == "validate":
        numbers = numbers[KINDS.index(kind) :: 10]
    for number in numbers:
        assert strike(sandbox, scenario, kind, number)
    print(f"\n{scenario.name}: {kind}: {len(numbers)} faults in child processes")  # noqa: T201


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["validate"], indirect=True)
def test_reads_beside_child_processes(sandbox, scenario):
    numbers = []

    def note(kind, paths):
        if kind in READING and "home" not in Path(paths[0]).relative_to(sandbox.root).parts:
            numbers.append(operations.count)

    with FileOperations(sandbox.root, after=note) as operations:
        scenario.run(sandbox.root)
    assert len(numbers) > 20
    for number in numbers[OFFSET::10]:
        assert strike(sandbox, scenario, "is denied once", number)
