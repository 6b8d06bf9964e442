"""Run the parts one after the other, each in its own process and within its time limit.

    outcome = run_part(PARTS[0], request, seconds=60)
    outcome["status"], outcome["problem"]  # ('stopped', 'stopped after 60 s')

The results that a process wrote before it ended are used in any case.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.settings import PARTS, Part
from enginery.core.subprocess import describe_exit

MODULE = "benchmarks.gpu_check.work"
Outcome = dict[str, Any]


def chosen_parts(names: str) -> list[Part]:
    """Return the parts of `--only` and those they need, in the order of `PARTS`; all by default.

    Raises:
        ValueError: a name is unknown.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = [part.name for part in PARTS]
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"unknown part '{unknown[0]}', expected one of {', '.join(known)}.")
    if any(part.needs_models for part in PARTS if part.name in wanted):
        wanted.append("models")
    return [part for part in PARTS if not wanted or part.name in wanted]


def run_parts(
    parts: list[Part],
    request: Mapping[str, Any],
    scratch: Path,
    *,
    until: float,
    models: tuple[str, ...],
    done: Callable[[dict[str, Outcome]], None],
    module: str = MODULE,
) -> dict[str, Outcome]:
    """Run the parts and return the results of each by name.

    Args:
        parts: the parts in their order.
        request: fields of `Work` that all parts share.
        scratch: directory of the requests and results.
        until: `time.monotonic()` at which the last part must have ended.
        models: models for the parts that run once for each model.
        done: called with all outcomes after every process.
        module: module that the processes run.
    """
    outcomes: dict[str, Outcome] = {}
    artifacts: dict[str, Any] = {}
    for index, part in enumerate(parts):
        later = sum(other.least_seconds for other in parts[index + 1 :])
        runs = models if part.by_model else ("",)
        for place, model in enumerate(runs):
            left = until - time.monotonic()
            # A short run shrinks every part alike.
            share = min(later, left * later / (later + part.least_seconds))
            seconds = (left - share) / (len(runs) - place)
            name = f"{part.name} {model}".strip()
            fields = {
                **request,
                "part": part.name,
                "seconds": seconds,
                "only_model": model,
                "artifacts": artifacts,
            }
            outcomes[name] = run_part(name, fields, scratch, module=module)
            found = outcomes[name]["found"]
            if part.name == "models":
                artifacts = found.get("artifacts", {})
            done(outcomes)
    return outcomes


def run_part(
    name: str, fields: Mapping[str, Any], scratch: Path, *, module: str = MODULE
) -> Outcome:
    """Run a process; return its outcome, with the status done, failed, crashed or stopped."""
    stem = name.replace(" ", "-")
    request, result = scratch / f"{stem}.request.json", scratch / f"{stem}.json"
    request.write_text(json.dumps({**fields, "result": str(result)}), encoding="utf-8")
    result.unlink(missing_ok=True)
    seconds = float(fields["seconds"])
    before = time.monotonic()
    # It sees what this process sees, wherever it was started.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    status: int | None = None
    if seconds > 1:
        with subprocess.Popen(
            [sys.executable, "-m", module, str(request)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        ) as child:
            try:
                status = child.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                pass
            finally:
                # With the compilers that it started; they are in its process group.
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
    found, problem = _read(result)
    outcome = {
        "status": "done",
        "problem": "",
        "seconds": time.monotonic() - before,
        "found": found,
    }
    if status is None:
        outcome |= {"status": "stopped", "problem": f"stopped after {max(seconds, 0):.0f} s"}
        if seconds <= 1:
            outcome["problem"] = "it was not begun: no time was left"
    elif status:
        outcome |= {"status": "crashed", "problem": f"the process {describe_exit(status)}"}
    elif problem:
        outcome |= {"status": "crashed", "problem": problem}
    elif not all(check["passed"] for check in found["checks"]):
        outcome["status"] = "failed"
    return outcome


def failures(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return every failed check and every part that did not finish."""
    found = []
    for name, outcome in outcomes.items():
        if outcome["problem"]:
            found.append(f"{name}: {outcome['problem']}")
        found += [
            f"{check['check']}: {check['found']}"
            for check in outcome["found"]["checks"]
            if not check["passed"]
        ]
    return found


def _read(result: Path) -> tuple[dict[str, Any], str]:
    nothing: dict[str, Any] = {"checks": [], "notes": []}
    try:
        found = json.loads(result.read_bytes())
    except (OSError, ValueError) as error:
        return nothing, f"no result: {error}"
    return found, ""
