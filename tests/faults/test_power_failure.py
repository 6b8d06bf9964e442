"""Cut the power after every change of a file, and check everything that the disk may then hold.

Whatever opens is the earlier or the new content. Once the command has reported success, it is the
new one. The same command then succeeds, and leaves the same files.
"""

from __future__ import annotations

import sys

import pytest

from tests.faults.file_operations import FileOperations
from tests.faults.power_failure import Recorder
from tests.faults.scenarios import scenarios

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads descriptors from /proc")

NAMES = [scenario.name for scenario in scenarios(None)]
QUICK = ("store", "annotate", "publish", "predict")


def cut_power(sandbox, scenario, *, step, run_again):
    """Check the trees after every `step`-th event and after the last; return their number.

    The command is run again on every `run_again`-th tree.
    """
    recorder = Recorder(sandbox.root)
    with FileOperations(sandbox.root, after=recorder.record):
        scenario.run(sandbox.root)
    last, seen = len(recorder.events), set()
    for length in (*range(0, last, step), last):
        for tree in recorder.trees(length):
            if (listing := (length == last, tree.listing())) in seen:
                continue
            seen.add(listing)
            tree.write(sandbox.root)
            if length == last:
                sandbox.check_survived(scenario)
            else:
                sandbox.check(scenario)
            if len(seen) % run_again == 0:
                scenario.run(sandbox.root)
                sandbox.check_finished(scenario)
    return len(seen)


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.more) for name in NAMES],
    indirect=True,
)
def test_power_failure_at_some_moments(sandbox, scenario):
    assert cut_power(sandbox, scenario, step=4 * scenario.step, run_again=40) > 1


@pytest.mark.slow
@pytest.mark.parametrize("scenario", NAMES, indirect=True)
def test_power_failure_at_every_moment(sandbox, scenario):
    trees = cut_power(sandbox, scenario, step=1, run_again=4)
    print(f"\n{scenario.name}: {trees} trees")  # noqa: T201
