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

from enginery.core.artifact.artifact import REPORTS, Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import CheckFailedError, EngineryError
from enginery.core.progress import Progress
from enginery.quantize.calibration.data import Batch, CalibrationData, make_batches
from enginery.quantize.config import QuantizeConfig
from enginery.quantize.source_graph import SourceGraph
from enginery.reports.quantization import QuantizationReport
from enginery.runtime.machine import usable_cpus
from enginery.runtime.onnxruntime.tracing import GraphTracer

Result = tuple[tuple[GraphRecord, ...], QuantizationReport, list[str]]
Make = Callable[
    [Artifact, QuantizeConfig, Path, CalibrationData | None, Mapping[str, str], Path, Progress],
    Result,
]

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
    makers: Mapping[SchemeName, Make],
    source: Artifact,
    config: QuantizeConfig,
    directory: Path,
    data: CalibrationData,
    fields: Mapping[str, str],
    scratch: Path,
    progress: Progress,
) -> tuple[SchemeName, Result]:
    """Quantize with each scheme, and leave the files of the fastest in `directory`.

    Args:
        makers: what quantizes to a directory, by scheme. The first counts if none is faster.
        source: the FP32 artifact.
        config: the options.
        directory: directory of the new artifact.
        data: the calibration inputs.
        fields: fields of the stage's fingerprint.
        scratch: a temporary directory.
        progress: receives progress messages.

    Returns:
        The scheme, and its records, report and notes.

    Raises:
        CheckFailedError: no scheme meets the accuracy budget.
        EngineryError: what the first scheme raises.
    """
    first = next(iter(makers))
    results: dict[SchemeName, Result] = {}
    failures: dict[str, Exception] = {}
    large = sum(map(source.graph_bytes, source.manifest.graphs)) > _MAX_BYTES
    for scheme, make in makers.items():
        if scheme == "dynamic" and large:
            failures[scheme] = EngineryError(
                "its quantizer would hold more than 2 GB of weights several times in memory."
            )
            continue
        folder, temporary = directory / scheme, scratch / scheme
        (folder / REPORTS).mkdir(parents=True)
        temporary.mkdir()
        scheme_config = replace(config, scheme=scheme)
        try:
            results[scheme] = make(source, scheme_config, folder, data, fields, temporary, progress)
        except Exception as error:  # ONNX Runtime's quantizer raises many unrelated types
            # The other schemes only compete: no failure of theirs stops the first one.
            if scheme == first and not isinstance(error, CheckFailedError):
                raise
            failures[scheme] = error
    if not results:
        raise failures[first]
    with progress.task("measuring speed"):
        ratios = _measure(source, {scheme: directory / scheme for scheme in results}, data, config)
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
        progress.say(f"quantize: {notes[-1]}")
    for scheme in makers:
        if scheme == chosen:
            _move_files(directory / scheme, directory)
        shutil.rmtree(directory / scheme, ignore_errors=True)
    records, report, scheme_notes = results[chosen]
    return chosen, (
        records,
        replace(report, notes=[*report.notes, *notes]),
        [*scheme_notes, *notes],
    )


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


def _measure(
    source: Artifact, folders: Mapping[str, Path], data: CalibrationData, config: QuantizeConfig
) -> dict[str, Ratios]:
    """Run FP32 and each quantized artifact in turns over held-out rows."""
    schemes = ("fp32", *folders)
    rounds = [dict.fromkeys(schemes, 0.0) for _ in range(_ROUNDS)]
    for record in source.manifest.graphs:
        graph = SourceGraph.of(source, record)
        _, held_out = make_batches(source, record, data, seed=config.seed)
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
            for seconds in rounds:
                for scheme, run in runs.items():
                    seconds[scheme] += _seconds(run, timed)
    return {scheme: [seconds["fp32"] / seconds[scheme] for seconds in rounds] for scheme in folders}


def _timed_batches(fp32: GraphTracer, held_out: Sequence[Batch]) -> list[Batch]:
    """Return the first batches, with which FP32 runs for about `_SECONDS`."""
    timed: list[Batch] = []
    spent = 0.0
    for batch in held_out:
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
