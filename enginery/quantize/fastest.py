"""Choose between static and dynamic INT8 for the CPU by running both on this machine.

Static INT8 has constant scales; dynamic INT8 computes them from each batch, which costs accuracy,
but needs no smoothing and no quantized convolutions. Which one is faster depends on the model and
on the processor. Of those that meet the accuracy budget, the fastest is kept.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal

from enginery.core.artifact.artifact import REPORTS
from enginery.core.errors import CheckFailedError, EngineryError
from enginery.quantize.calibration.data import Batch, make_batches
from enginery.quantize.job import QuantizeJob, QuantizeResult
from enginery.quantize.source_graph import SourceGraph
from enginery.runtime.machine import usable_cpus
from enginery.runtime.onnxruntime.tracing import GraphTracer

SchemeName = Literal["int8", "dynamic"]
Ratios = Sequence[float]
"""How many times as fast as FP32 a graph is, in each round."""

_NAMES = {"int8": "static INT8", "dynamic": "dynamic INT8"}
_MAX_BYTES = 2 << 30
"""Size of the graphs up to which dynamic INT8 is tried."""
_ROUNDS = 5
_SECONDS = 2.0
"""About how long FP32 runs in a round."""


def quantize_to_fastest(
    makers: Mapping[SchemeName, Callable[[QuantizeJob], QuantizeResult]], job: QuantizeJob
) -> tuple[SchemeName, QuantizeResult]:
    """Quantize with each scheme, and leave the files of the fastest in the job's directory.

    Args:
        makers: the function that quantizes, by scheme. The first counts if none is faster.
        job: the quantization, with calibration inputs.

    Returns:
        The scheme, and its result.

    Raises:
        CheckFailedError: no scheme meets the accuracy budget.
        EngineryError: what the first scheme raises.
    """
    source, directory = job.source, job.directory
    first = next(iter(makers))
    results: dict[SchemeName, QuantizeResult] = {}
    failures: dict[str, Exception] = {}
    large = sum(map(source.graph_bytes, source.manifest.graphs)) > _MAX_BYTES
    for scheme, make in makers.items():
        if scheme == "dynamic" and large:
            failures[scheme] = EngineryError(
                "its quantizer would hold more than 2 GB of weights several times in memory."
            )
            continue
        (directory / scheme / REPORTS).mkdir(parents=True)
        scheme_job = replace(
            job.in_folder(scheme),
            config=replace(job.config, scheme=scheme),
            directory=directory / scheme,
        )
        try:
            results[scheme] = make(scheme_job)
        except Exception as error:  # ONNX Runtime's quantizer raises many unrelated types
            # The other schemes only compete: no failure of theirs stops the first one.
            if scheme == first and not isinstance(error, CheckFailedError):
                raise
            failures[scheme] = error
    if not results:
        raise failures[first]
    with job.progress.task("measuring speed"):
        ratios = _measure(job, {scheme: directory / scheme for scheme in results})
    preferred = first if first in results else next(iter(results))
    # Another scheme has to beat the first one's fastest round in its slowest.
    faster = [s for s in results if min(ratios[s]) > max(ratios[preferred])]
    chosen = max(faster, key=lambda scheme: statistics.median(ratios[scheme]), default=preferred)
    notes = [_describe(ratios), *(_explain(scheme, e) for scheme, e in failures.items())]
    notes += [
        f"{_NAMES[s]} was not chosen: {_why_not(ratios[s], ratios[chosen])}"
        for s in results
        if s != chosen
    ]
    if statistics.median(ratios[chosen]) < 1:
        notes.append(f"{_NAMES[chosen]} is slower than FP32 on this machine")
        job.progress.say(f"quantize: {notes[-1]}")
    for scheme in makers:
        if scheme == chosen:
            _move_files(directory / scheme, directory)
        shutil.rmtree(directory / scheme, ignore_errors=True)
    result = results[chosen]
    report = replace(result.report, notes=[*result.report.notes, *notes])
    return chosen, replace(result, report=report, notes=[*result.notes, *notes])


def _describe(ratios: Mapping[str, Ratios]) -> str:
    factors = ", ".join(f"{_NAMES[s]} {statistics.median(part):.2f}" for s, part in ratios.items())
    return (
        f"times as fast as FP32 on the {usable_cpus()} cores of this machine, over held-out "
        f"rows: {factors}"
    )


def _why_not(ratios: Ratios, chosen: Ratios) -> str:
    if statistics.median(ratios) < statistics.median(chosen):
        return "it is slower"
    return "it was not faster in every round"


def _explain(scheme: str, error: Exception) -> str:
    reason = error.message if isinstance(error, EngineryError) else f"it failed: {error}"
    return f"{_NAMES[scheme]} was not chosen: {reason}"


def _measure(job: QuantizeJob, folders: Mapping[str, Path]) -> dict[str, Ratios]:
    """Run FP32 and each quantized artifact in turns over held-out rows."""
    source, data = job.source, job.require_data()
    schemes = ("fp32", *folders)
    rounds = [dict.fromkeys(schemes, 0.0) for _ in range(_ROUNDS)]
    for record in source.manifest.graphs:
        graph = SourceGraph.of(source, record)
        _, held_out = make_batches(source, record, data, seed=job.config.seed)
        with ExitStack() as stack:
            runs = {
                scheme: stack.enter_context(
                    GraphTracer(folder / record.file, graph.outputs, optimized=True)
                )
                for scheme, folder in {"fp32": source.path, **folders}.items()
            }
            timed = _timed_batches(runs["fp32"], held_out)
            for run in runs.values():  # the first run of a shape takes longer
                _seconds(run, timed)
            # In turns, so that other work on the machine slows all of them down.
            for seconds in rounds:
                for scheme, run in runs.items():
                    seconds[scheme] += _seconds(run, timed)
    return {scheme: [seconds["fp32"] / seconds[scheme] for seconds in rounds] for scheme in folders}


def _timed_batches(fp32: GraphTracer, held_out: Sequence[Batch]) -> list[Batch]:
    """Return the first batches, with which FP32 runs for about `_SECONDS`."""
    timed: list[Batch] = []
    spent = 0.0
    for batch in held_out:
        # Not timed: the first run of a shape takes longer.
        fp32(batch.load())
        spent += _seconds(fp32, [batch])
        timed.append(batch)
        if spent > _SECONDS:
            break
    return timed


def _seconds(run: GraphTracer, batches: Sequence[Batch]) -> float:
    spent = 0.0
    for batch in batches:
        feeds = batch.load()
        started = time.perf_counter()
        run(feeds)
        spent += time.perf_counter() - started
    return spent


def _move_files(source: Path, target: Path) -> None:
    """Move all files of a directory to another, which may have some of its folders."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            new = target / path.relative_to(source)
            new.parent.mkdir(parents=True, exist_ok=True)
            path.rename(new)
