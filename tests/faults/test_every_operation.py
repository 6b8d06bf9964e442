"""Fail, or stop the process at, every operation on files; then run the same command again.

After each fault, the results are the earlier or the new ones, and the error names a path and the
cause. The next run has the same results as one that nothing disturbed, and leaves the same files.

The quick suite strikes one of twenty operations with each kind of fault, each kind and each
scenario from another one on. FAULTS_OFFSET=1 to 19 takes the others. `pytest -m slow
tests/faults` strikes every one; with `-s` it prints how many there are.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings

import pytest

from enginery.core.errors import EngineryError
from tests.faults.file_operations import STOPPED, FailFrom, FailOnce, FileOperations, Stop
from tests.faults.scenarios import scenarios

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads descriptors from /proc")

OFFSET = int(os.environ.get("FAULTS_OFFSET", "0"))
NAMES = [scenario.name for scenario in scenarios(None)]
STEP = 20
QUICK = ("store", "annotate", "publish", "pull")
SLOW = ("optimize", "optimize over another artifact", "predict over an older output")
FAULTS = {
    "fails once": lambda number: FailOnce(number, errno.EIO),
    "is denied once": lambda number: FailOnce(number, errno.EACCES),
    "full disk or quota": lambda number: FailFrom(number, (errno.ENOSPC, errno.EDQUOT)[number % 2]),
    "read-only disk": lambda number: FailFrom(number, errno.EROFS),
    "broken disk": lambda number: FailFrom(number, errno.EIO),
    "killed": Stop,
}


def strike(sandbox, scenario, kind, number):
    """Run a scenario with a fault at this operation; return False if there is no such operation."""
    sandbox.restore(scenario)
    fault = FAULTS[kind](number)
    if kind == "killed":
        is_there = run_and_stop(sandbox, scenario, fault)
    else:
        is_there = run_and_fail(sandbox, scenario, fault)
    sandbox.check(scenario)
    if is_there:
        scenario.run(sandbox.root)
    sandbox.check_finished(scenario)
    return is_there


def run_and_fail(sandbox, scenario, fault):
    with FileOperations(sandbox.root, fault) as operations:
        said = error_of(scenario, sandbox)
    assert operations.fired or not said, "nothing was wrong"
    assert not said or os.strerror(fault.code) in said, f"the cause is not named: {said}"
    assert not said or str(sandbox.root) in said, f"no path is named: {said}"
    return operations.count >= fault.number


def error_of(scenario, sandbox):
    """Run a scenario; return the message of its error, empty if there is none."""
    try:
        scenario.run(sandbox.root)
    except EngineryError as error:
        return str(error)
    return ""


def run_and_stop(sandbox, scenario, fault):
    operations = FileOperations(sandbox.root, fault)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns about threads of other tests
        child = os.fork()
    if child == 0:
        status = 1
        try:
            with operations:
                said = error_of(scenario, sandbox)
            # The process that was stopped may be a child of this one, which then says so.
            status = STOPPED if f"status {STOPPED}" in said else int(bool(said))
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    operations.close()
    ended = os.waitstatus_to_exitcode(status)
    assert ended in (0, STOPPED), f"the process ended with {ended}"
    # A child of this process that has handed over its results may be stopped unnoticed.
    return operations.count >= fault.number


def mark_of(name):
    if name in QUICK:
        return ()
    return pytest.mark.slow if name in SLOW else pytest.mark.more


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(name, marks=mark_of(name)) for name in NAMES],
    indirect=True,
)
def test_some_of_the_operations(sandbox, scenario):
    with FileOperations(sandbox.root) as operations:
        scenario.run(sandbox.root)
    first = OFFSET + NAMES.index(scenario.name)
    for place, kind in enumerate(FAULTS):
        for number in range((first + 3 * place) % STEP + 1, operations.count + 2, STEP):
            assert strike(sandbox, scenario, kind, number) == (number <= operations.count)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("scenario", NAMES, indirect=True)
def test_every_operation(sandbox, scenario, kind):
    number = 1
    while strike(sandbox, scenario, kind, number):
        number += 1
    print(f"\n{scenario.name}: {kind}: {number - 1} faults")  # noqa: T201
