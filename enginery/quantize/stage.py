"""The quantize stage: an FP32 artifact -> one with INT8 or FP8 weights that its target multiplies.

Takes an artifact and real inputs; leaves an artifact with its graph in INT8 and FP16,
`reports/quantization.json`, `reports/quantization.svg` and `reports/ranges.json`.

    >>> config = QuantizeConfig(calibration="reviews.csv")
    >>> artifact = run(Artifact.open("minilm"), config, Path("minilm-int8"))
    >>> artifact.manifest.target
    'tensorrt'

Nothing is saved unless the answers hold the budget, TensorRT's parser takes the graph, and an
engine of it has been built. Dynamic INT8, for the CPU, is in `quantize/dynamic.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from enginery.core.artifact import REPORTS, Artifact, commit_artifact, staging
from enginery.core.errors import ArtifactError, CheckFailedError, OptionError
from enginery.core.figures import NOT_DRAWN
from enginery.core.fingerprint import (
    Fingerprint,
    option_fields,
    runtime_version,
    sha256_of,
    tool_versions,
)
from enginery.core.manifest import GraphRecord, StageRecord
from enginery.core.memory import peak_rss_bytes
from enginery.core.options import options_dict
from enginery.core.progress import SILENT, Progress
from enginery.core.reports import Accuracy, QuantizationReport
from enginery.passes.cast import cast_graph
from enginery.passes.graph_file import check_graph, read_graph, write_graph
from enginery.passes.layers import Layer, find_layers
from enginery.passes.nodes import infer_types
from enginery.passes.qdq import insert_qdq
from enginery.quantize.accuracy import Judge
from enginery.quantize.calibrate import Measured, calibrate, excluded_layers, scheme_of
from enginery.quantize.config import QuantizeConfig, check_options
from enginery.quantize.data import CalibrationData, read_data
from enginery.quantize.dynamic import make_dynamic
from enginery.quantize.recorded import RANGES, Recorded, find_ranges
from enginery.quantize.report import budget_notes, make_report, save_curve
from enginery.quantize.trial import build_trials, check_trial
from enginery.runtime.tracing import GraphTracer

STAGE = "quantize"
STAGE_VERSION = "3"
"""Raised when the same inputs would give another artifact; part of the fingerprint."""

REPORT = f"{REPORTS}/{QuantizationReport.FILE}"
CURVE = f"{REPORTS}/quantization.svg"
TOOLS = ("onnx", "onnx-ir", "numpy", "ml_dtypes", "tensorrt-rtx-cu13-bindings")
_LEAST_OPSET = 19
"""From here on Q and DQ take FP16 scales, and FP8."""

# What the graph and its numbers do not depend on.
_NOT_IN_KEY = ("allow_failed", "calibration", "ranges")


def fingerprint(
    source: Artifact, config: QuantizeConfig, data: CalibrationData | None
) -> Fingerprint:
    """What the artifact depends on: the graph, the inputs' content, the options, the tools.

    Raises:
        OptionError: an option cannot be used.
        InputError: the ranges cannot be read.
    """
    check_options(config)
    options = {n: v for n, v in options_dict(config).items() if n not in _NOT_IN_KEY}
    return Fingerprint(
        STAGE,
        {
            "artifact": source.content_sha256(),
            "calibration": data.sha256 if data else "none",
            "ranges": sha256_of(find_ranges(config.ranges)) if config.ranges else "none",
            **option_fields(options),
            **runtime_version(),
            **tool_versions(TOOLS),
            "stage version": STAGE_VERSION,
        },
    )


def read_calibration(
    source: Artifact, config: QuantizeConfig, given: Iterable[Any] | None = None
) -> CalibrationData | None:
    """The calibration inputs that `fingerprint` and `run` take; see `read_data`."""
    check_options(config)
    require_quantizable(source, config)
    if config.ranges and given is not None:
        raise OptionError(
            "there are both calibration inputs and ranges, but with ranges nothing is measured.",
            do="Leave one out.",
        )
    if config.scheme != "dynamic":
        check_trial(source, config)
    if config.scheme == "dynamic" and given is None and not config.calibration:
        return None  # nothing is calibrated; inputs would only measure
    return read_data(source, config, given)


def run(
    source: Artifact,
    config: QuantizeConfig,
    out: Path,
    *,
    data: CalibrationData | None,
    progress: Progress = SILENT,
) -> Artifact:
    """Quantizes the artifact and leaves the new one at `out`, or nothing.

    Args:
        source: with an FP32 graph that no other stage has fused.
        config: the options.
        out: where the artifact goes.
        data: what `read_calibration` gave.
        progress: who is told what happens.

    Raises:
        OptionError: an option cannot be used, or names no layer.
        InputError: the inputs or the ranges cannot be used.
        ArtifactError: the artifact is not one to quantize.
        RejectedArtifactError: its validation failed.
        CheckFailedError: no mix holds the budget, or what was made of it does not.
        ProviderError: TensorRT refuses the graph, or builds no engine of it.
    """
    started = time.monotonic()
    source.require_passed(allow_failed=config.allow_failed)
    require_quantizable(source, config)
    key = fingerprint(source, config, data)
    with staging(out) as directory:
        source.copy_side_files(directory)
        (directory / REPORTS).mkdir()
        make = make_dynamic if config.scheme == "dynamic" else _make_static
        graphs, report, notes = make(source, config, directory, data, key.fields, progress)
        (directory / REPORT).write_bytes(report.to_json())
        stage = StageRecord(
            stage=STAGE,
            key=key.key,
            fields=key.fields,
            options=options_dict(config),
            tools={**runtime_version(), **tool_versions(TOOLS)},
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - started, 3),
            peak_rss_bytes=peak_rss_bytes(),
            notes=(report.summary, *notes),
        )
        changes = {
            "precision": "fp32" if config.scheme == "dynamic" else config.residual,
            "target": config.target,
            "graphs": graphs,
            "stages": (*source.manifest.stages, stage),
            "verdicts": (),
        }
        commit_artifact(directory, source.manifest.model_copy(update=changes))
    progress.say(f"quantize: {report.summary}")
    return Artifact.open(out)


def _make_static(
    source: Artifact,
    config: QuantizeConfig,
    directory: Path,
    data: CalibrationData | None,
    fields: Mapping[str, str],
    progress: Progress,
) -> tuple[tuple[GraphRecord, ...], QuantizationReport, list[str]]:
    """The graph with Q/DQ in `directory`; its record, the report, and notes."""
    model = read_graph(source.model)
    infer_types(model)
    layers = find_layers(model)
    recorded, measured = _recorded(source, model, layers, data, config, progress)
    quantized = recorded.quantized(layers)
    notes = [data.description if data else f"ranges from {find_ranges(config.ranges)}"]
    if data and data.kind == "random":
        notes.append("calibrated on made-up inputs: of no use but for trying things out")
        progress.say("quantize: calibrated on made-up inputs; do not use this artifact")
    record = _write(model, quantized, recorded, source, directory, config)
    graph = directory / record.file
    accuracy = _check_accuracy(graph, measured, config)
    with progress.task("building a trial engine"):
        trials = build_trials(graph, source, config, quantized)
    if not trials:
        notes.append("no engine was built, as asked: TensorRT has not seen this graph")
    if measured:
        notes += budget_notes(measured.budget, measured.judge.rows)
        if not save_curve(directory / CURVE, measured, config.scheme):
            notes.append(NOT_DRAWN)
    report = make_report(layers, recorded, measured, accuracy, trials, config, data, notes, fields)
    (directory / REPORTS / RANGES).write_bytes(recorded.to_json())
    return (record,), report, notes


def require_quantizable(source: Artifact, config: QuantizeConfig) -> None:
    """Raises ArtifactError unless these are FP32 graphs that the scheme can quantize.

    For Q/DQ one graph of standard ops, of opset 19 or later.
    """
    manifest = source.manifest
    if any(stage.stage == STAGE for stage in manifest.stages):
        raise ArtifactError(
            f"{source.path} is quantized already.", do="Start from the artifact that was exported."
        )
    targets = ("onnx", "cpu") if config.scheme == "dynamic" else ("onnx", "tensorrt")
    if manifest.precision != "fp32" or manifest.target not in targets:
        raise ArtifactError(
            f"{source.path} is {manifest.precision} for {manifest.target}; quantizing for "
            f"{config.target} starts from an FP32 graph for {' or '.join(targets)}.",
            do="Start from the artifact that was exported: enginery export MODEL --dtype fp32",
        )
    if config.scheme == "dynamic":
        return
    if len(manifest.graphs) != 1:
        graphs = ", ".join(graph.file for graph in manifest.graphs)
        raise ArtifactError(
            f"{source.path} has the graphs {graphs}; one is expected: a decoder is calibrated on "
            "what an encoder and its own past feed it, which no file of inputs holds."
        )
    if manifest.graphs[0].opset < _LEAST_OPSET:
        raise ArtifactError(
            f"{source.model} has opset {manifest.graphs[0].opset}, expected {_LEAST_OPSET} or "
            "later: before, Q and DQ have neither FP16 scales nor FP8.",
            do="Export again: enginery export MODEL --opset 20",
        )


def _recorded(
    source: Artifact,
    model: ir.Model,
    layers: Sequence[Layer],
    data: CalibrationData | None,
    config: QuantizeConfig,
    progress: Progress,
) -> tuple[Recorded, Measured | None]:
    if not config.ranges:
        if data is None:
            raise OptionError("there are neither calibration inputs nor ranges.")
        return calibrate(source, model, layers, data, config, progress=progress)
    scheme = scheme_of(config)
    recorded = Recorded.read(
        config.ranges, graph_sha256=sha256_of(source.model), scheme=scheme.name
    )
    excluded = excluded_layers(layers, config.exclude, None, scheme)
    left_out = {**recorded.left_out, **excluded}
    progress.say(f"quantize: ranges from {find_ranges(config.ranges)}, nothing is measured")
    return replace(recorded, left_out=left_out), None


def _write(
    model: ir.Model,
    quantized: Sequence[Layer],
    recorded: Recorded,
    source: Artifact,
    directory: Path,
    config: QuantizeConfig,
) -> GraphRecord:
    """Writes the quantized graph; returns its record."""
    old = source.manifest.graphs[0]
    insert_qdq(model, quantized, recorded.ranges, scheme=scheme_of(config),
               bias_deltas=recorded.bias_deltas)  # fmt: skip
    RemoveUnusedNodesPass()(model)
    if config.residual == "fp16":
        cast_graph(model, "fp16", keep_fp32=set(recorded.fp32_nodes))
    path = directory / old.file
    path.parent.mkdir(parents=True, exist_ok=True)
    data_files = write_graph(model, path)
    check_graph(path)
    folder = Path(old.file).parent
    return old.model_copy(
        update={
            "opset": model.opset_imports[""],
            "data_files": tuple((folder / name).as_posix() for name in data_files),
        }
    )


def _check_accuracy(
    graph: Path, measured: Measured | None, config: QuantizeConfig
) -> Accuracy | None:
    """Measures the graph as it is saved; raises CheckFailedError where it breaks the budget."""
    if measured is None:
        return None
    found = measure_file(graph, measured.judge, fused=scheme_of(config).supports_fusions)
    if not measured.budget.holds(found):
        raise CheckFailedError(
            f"the quantized graph does not keep a {measured.budget}: its mean cosine is "
            f"{found.cosine:.5f}, though quantization alone has "
            f"{measured.search.accuracy.cosine:.5f}.",
            do="Keep the rest in FP32 with --residual fp32, or lower the budget.",
        )
    return found


def measure_file(graph: Path, judge: Judge, *, fused: bool = True) -> Accuracy:
    """An ONNX file against the judge's reference, in ONNX Runtime on the CPU.

    Args:
        graph: the file.
        judge: holds the reference's answers.
        fused: whether ONNX Runtime's fusions are on.
    """
    with GraphTracer(graph, judge.outputs, optimized=fused) as session:
        return judge.measure(session)
