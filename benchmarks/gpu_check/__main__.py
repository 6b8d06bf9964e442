"""Test and measure the GPU path; write a JSON file and a Markdown page.

    $ python -m benchmarks.gpu_check
    $ python -m benchmarks.gpu_check --only speed:minilm --models build/gpu-models
    $ python -m benchmarks.gpu_check --device cpu --quick     # a dry run

The results are written after every case, and the same command continues what is not finished. The
exit status is 0 if every check passed, 1 if a check failed or a part did not finish, and 2 if the
command could not start. See benchmarks/gpu_check/README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from benchmarks.gpu_check.processes import run_units
from benchmarks.gpu_check.results import Results
from benchmarks.gpu_check.settings import PARTS, chosen_units
from enginery.core.errors import ProviderError
from enginery.core.home import enginery_home
from enginery.runtime.providers.gpus import visible_gpus

_RESULTS = Path("benchmarks/results")


def main(words: list[str] | None = None) -> int:
    """Run the parts and return the exit status."""
    given = _arguments(words)
    began = time.monotonic()
    try:
        units = chosen_units(given.only)
        gpu = visible_gpus()[0].name if given.device == "cuda" else ""
        if given.carried and not given.models:
            raise ValueError("--carried needs the directory of the models: --models DIR.")
        if given.max_minutes <= 0:
            raise ValueError(f"--max-minutes is {given.max_minutes:g}, expected more than 0.")
        out = Path(given.out) if given.out else _default_out(given.device)
        out.mkdir(parents=True, exist_ok=True)
    except (ProviderError, ValueError, OSError) as error:
        print(_refusal(error), file=sys.stderr)
        return 2
    models = Path(given.models) if given.models else enginery_home() / "gpu-check"
    models.mkdir(parents=True, exist_ok=True)
    # Nothing here needs a network, and a library that asks for one would wait for it.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    request = {
        "device": given.device,
        "quick": given.quick,
        "models": str(models.resolve()),
        "reuse": bool(given.models),
        "carried": given.carried,
        "prototypes": str(Path(given.prototypes).resolve()) if given.prototypes else "",
    }
    results, said = Results.begin(out, request, gpu=gpu, fresh=given.fresh)
    print(said, flush=True)
    results.write()
    try:
        results = run_units(units, results.path, until=began + given.max_minutes * 60)
    except KeyboardInterrupt:
        results = Results.read(results.path)
        print("interrupted")
    return _print_summary(results, [unit.name for unit in units])


def _print_summary(results: Results, units: list[str]) -> int:
    """Print a summary of the chosen units; return the exit status."""
    document = results.document
    for goal in document["goals"]:
        print(f"goal: {goal['goal']}: {goal['figure']}: {goal['verdict']}")
    for failure in document["failures"]:
        print(f"FAILED: {failure}")
    parts = document["parts"]
    left = [name for name in units if parts.get(name, {}).get("status") not in ("done", "failed")]
    if left:
        print(f"not finished: {', '.join(left)}; the same command continues")
    cases = [case for part in parts.values() for case in part["cases"].values()]
    checks = sum(len(case["checks"]) for case in cases)
    note = f" ({document['dry_run']})" if document["dry_run"] else ""
    print(
        f"{len(cases)} cases, {checks} checks, {len(document['failures'])} failures, "
        f"{document['seconds']:.0f} s{note}"
    )
    print(f"{results.path}\n{results.path.with_suffix('.md')}")
    return 0 if all(parts.get(name, {}).get("status") == "done" for name in units) else 1


def _default_out(device: str) -> Path:
    return _RESULTS if device == "cuda" else enginery_home() / "gpu-check" / "dry-run"


def _refusal(error: Exception) -> str:
    if isinstance(error, ProviderError):
        return (
            f"gpu-check needs an NVIDIA GPU with its driver (libcuda): {error} "
            "For a dry run: --device cpu --quick"
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
        "--only",
        default="",
        metavar="PART,…",
        help=f"{', '.join(part.name for part in PARTS)}; or one model of a part, speed:minilm",
    )
    parser.add_argument(
        "--models",
        default="",
        metavar="DIR",
        help="keep the artifacts in this directory, and use those that are already there",
    )
    parser.add_argument(
        "--carried",
        action="store_true",
        help="make no model: use those that are in the directory of --models",
    )
    parser.add_argument(
        "--prototypes",
        default="",
        metavar="DIR",
        help="run the prototype scripts of this directory in the same run",
    )
    parser.add_argument(
        "--out",
        default="",
        metavar="DIR",
        help=f"directory for the two files; with a GPU {_RESULTS}",
    )
    parser.add_argument("--fresh", action="store_true", help="measure again instead of continuing")
    parser.add_argument("--max-minutes", type=float, default=8.0, help="time limit of this command")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
