"""Test and measure the GPU path; write a JSON file and a Markdown page.

    $ python -m benchmarks.gpu_check
    $ python -m benchmarks.gpu_check --only doctor,models,agreement --models build/gpu-models
    $ python -m benchmarks.gpu_check --device cpu --quick     # a dry run

The exit status is 0 if every check passed, 1 if a check failed or a part did not finish, and 2 if
the command could not start. See docs/gpu-check.md.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.goals import judge
from benchmarks.gpu_check.page import page
from benchmarks.gpu_check.parts import Outcome, chosen_parts, failures, run_parts
from benchmarks.gpu_check.settings import PARTS, TEXT_MODELS, settings_for
from enginery.bench.measurement.machine import describe_machine
from enginery.core.artifact.staging import write_atomically
from enginery.core.errors import ProviderError
from enginery.core.home import enginery_home
from enginery.core.json_file import json_bytes
from enginery.runtime.providers.gpus import visible_gpus

DRY_RUN = "on the CPU: a dry run"
_DOCS = Path("docs/benchmarks")
_FOR_WRITING = 5.0
"""Seconds that are reserved for writing the last files."""


def main(words: list[str] | None = None) -> int:
    """Run the parts and return the exit status."""
    given = _arguments(words)
    began = time.monotonic()
    started = datetime.now(UTC)
    try:
        parts = chosen_parts(given.only)
        gpu = visible_gpus()[0].name if given.device == "cuda" else ""
        if given.max_minutes <= 0:
            raise ValueError(f"--max-minutes is {given.max_minutes:g}, expected more than 0.")
        out = Path(given.out) if given.out else _default_out(given.device)
        out.mkdir(parents=True, exist_ok=True)
    except (ProviderError, ValueError, OSError) as error:
        print(_refusal(error, given.device), file=sys.stderr)
        return 2
    models = Path(given.models) if given.models else enginery_home() / "gpu-check"
    models.mkdir(parents=True, exist_ok=True)
    # Nothing here needs a network, and a library that asks for one would wait for it.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    stem = out / f"gpu-check-{slug(gpu or 'cpu')}-{started:%Y-%m-%d}"
    document: dict[str, Any] = {
        "device": given.device,
        "dry_run": "" if gpu else DRY_RUN,
        "gpu": gpu,
        "quick": given.quick,
        "started": started.isoformat(timespec="seconds"),
        "complete": False,
        "machine": describe_machine(),
    }

    def write(outcomes: dict[str, Outcome], *, complete: bool = False) -> None:
        seconds = time.monotonic() - began
        points = [
            point for outcome in outcomes.values() for point in outcome["found"].get("points", [])
        ]
        goals = judge(
            points,
            TEXT_MODELS,
            seconds=seconds,
            gpu=gpu,
            max_minutes=given.max_minutes,
            shapes=len(settings_for(quick=given.quick).points),
        )
        document.update(
            seconds=seconds,
            complete=complete,
            parts=outcomes,
            failures=failures(outcomes),
            goals=[vars(goal) for goal in goals],
        )
        write_atomically(stem.with_name(f"{stem.name}.json"), json_bytes(document))
        write_atomically(stem.with_name(f"{stem.name}.md"), page(document).encode())

    with tempfile.TemporaryDirectory(prefix="enginery-gpu-check-") as scratch:
        request = {
            "device": given.device,
            "quick": given.quick,
            "models": str(models.resolve()),
            "reuse": bool(given.models),
        }
        outcomes = run_parts(
            parts,
            request,
            Path(scratch),
            models=TEXT_MODELS,
            done=write,
            until=began + given.max_minutes * 60 - _FOR_WRITING,
        )
        write(outcomes, complete=True)
    return _print_summary(document, stem)


def _print_summary(document: dict[str, Any], stem: Path) -> int:
    """Print a summary of the run."""
    for goal in document["goals"]:
        print(f"goal: {goal['goal']}: {goal['figure']}: {goal['verdict']}")
    found = document["failures"]
    for failure in found:
        print(f"FAILED: {failure}")
    checks = sum(len(part["found"]["checks"]) for part in document["parts"].values())
    note = f" ({document['dry_run']})" if document["dry_run"] else ""
    print(f"{checks} checks, {len(found)} failures, {document['seconds']:.0f} s{note}")
    print(f"{stem}.json\n{stem}.md")
    return 1 if found else 0


def slug(name: str) -> str:
    """Return a name for files: `nvidia-h200` for `NVIDIA H200`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unnamed"


def _default_out(device: str) -> Path:
    return _DOCS if device == "cuda" else enginery_home() / "gpu-check" / "dry-run"


def _refusal(error: Exception, device: str) -> str:
    if isinstance(error, ProviderError):
        return (
            f"gpu-check needs an NVIDIA GPU with its driver (libcuda): {error} "
            f"For a dry run: --device {device and 'cpu'} --quick"
        )
    return f"gpu-check cannot start: {error}"


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu for a dry run of the parts that do not need CUDA",
    )
    parser.add_argument("--quick", action="store_true", help="tiny models and shapes")
    parser.add_argument(
        "--only", default="", metavar="PART,…", help=", ".join(part.name for part in PARTS)
    )
    parser.add_argument(
        "--models",
        default="",
        metavar="DIR",
        help="keep the artifacts in this directory, and use those that are already there",
    )
    parser.add_argument(
        "--out", default="", metavar="DIR", help=f"directory for the two files; with a GPU {_DOCS}"
    )
    parser.add_argument("--max-minutes", type=float, default=8.0)
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
