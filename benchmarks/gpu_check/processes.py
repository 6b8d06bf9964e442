"""Run the units one after the other, each in its own process.

    run_units(chosen_units("speed"), results.path, until=time.monotonic() + 480)

The processes write the results themselves. A process that crashes or hangs in a case is a failed
check of that case, and a new process continues with the next one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.gpu_check.results import FINISHED, Results
from benchmarks.gpu_check.settings import Unit
from enginery.core.subprocess import describe_exit

MODULE = "benchmarks.gpu_check.work"
_OUT_OF_TIME = "no time was left"


def run_units(units: Sequence[Unit], path: Path, *, until: float, module: str = MODULE) -> Results:
    """Run the units that are not finished and return the results.

    Args:
        units: the units in their order.
        path: file of the results.
        until: `time.monotonic()` at which the last process must have ended.
        module: module that the processes run.
    """
    for unit in units:
        results = Results.read(path)
        record = results.unit(unit.name)
        moved = unit.part.name == "models" and not _all_exist(record)
        if record["status"] == "done" and not moved:
            continue
        if moved:
            record["cases"] = {}
        record |= {"status": "unfinished", "problem": "interrupted"}
        results.write()
        began = time.monotonic()
        while _run_once(unit, path, until=until, module=module):
            pass
        results = Results.read(path)
        results.unit(unit.name)["seconds"] += time.monotonic() - began
        results.document["seconds"] += time.monotonic() - began
        results.write()
    return Results.read(path)


def _run_once(unit: Unit, path: Path, *, until: float, module: str) -> bool:
    """Run a process for a unit; return True if another one has to continue it."""
    left = until - time.monotonic()
    status, stopped = None, ""
    if left > 1:
        status, stopped = _run_process(unit, path, until=until, module=module)
    results = Results.read(path)
    record = results.unit(unit.name)
    if status == 0 and (record["status"] in FINISHED or record["problem"] != "interrupted"):
        return False
    if status is None and not stopped:
        record |= {"status": "unfinished", "problem": _OUT_OF_TIME}
        results.write()
        return False
    problem = stopped or f"the process {describe_exit(status or 0)}"
    running = [name for name, case in record["cases"].items() if not case["finished"]]
    for name in running:
        case = record["cases"][name]
        case["checks"].append({"check": name, "passed": False, "found": problem})
        case["finished"] = True
        print(f"{unit.name}: FAILED: {name}: {problem}", flush=True)
    if not running:
        record |= {"status": "crashed", "problem": problem}
    results.write()
    return bool(running)


def _run_process(unit: Unit, path: Path, *, until: float, module: str) -> tuple[int | None, str]:
    """Return the exit status and, if a case took too long, a sentence about it.

    The status is None if the process was ended.
    """
    seconds = until - time.monotonic()
    # It sees what this process sees, wherever it was started.
    imports = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": imports}
    if unit.part.name == "models":  # exports fork, which tokenizers that use threads warn about
        environment["TOKENIZERS_PARALLELISM"] = "false"
    with subprocess.Popen(
        [sys.executable, "-m", module, str(path), unit.name, f"{seconds:.1f}"],
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    ) as child:
        try:
            started = time.time()
            while (left := until - time.monotonic()) > 0:
                with suppress(subprocess.TimeoutExpired):
                    return child.wait(timeout=min(left, 0.5)), ""
                # Each case writes the file at its beginning and its end.
                since = time.time() - max(path.stat().st_mtime, started)
                if since > unit.part.case_seconds:
                    return None, f"stopped after {since:.0f} s without a result"
            return None, ""
        finally:
            # With the compilers that it started; they are in its process group.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def _all_exist(record: dict[str, object]) -> bool:
    """Return True if all artifacts of a finished unit `models` still exist."""
    cases = record["cases"]
    assert isinstance(cases, dict)
    paths = [path for case in cases.values() for path in case.get("artifacts", {}).values()]
    return all(Path(path).exists() for path in paths)
