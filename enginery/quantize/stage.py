"""The quantize stage: quantize an FP32 artifact to INT8 or FP8.

The new artifact has the quantized graph, `reports/quantization.json`, `reports/quantization.svg`
and `reports/ranges.json`. It is saved only if the accuracy budget is met and TensorRT parses the
graph and, unless `capability` is `none`, builds a trial engine. Dynamic INT8, for the CPU, is in
`quantize/dynamic.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from enginery.core.accuracy import AccuracyMetrics, LayerError
from enginery.core.artifact.artifact import REPORTS, Artifact, commit_artifact, staging
from enginery.core.artifact.fingerprint import (
    Fingerprint,
    option_fields,
    stage_fingerprint,
    stage_tools,
)
from enginery.core.artifact.manifest import GraphRecord, StageRecord
from enginery.core.errors import ArtifactError, CheckFailedError, OptionError
from enginery.core.figures import NOT_DRAWN
from enginery.core.progress import SILENT, Progress
from enginery.core.scratch import temporary_directory
from enginery.core.subprocess import peak_rss_bytes
from enginery.core.tolerance import MIN_MEAN_COSINE
from enginery.passes.ir.graph_file import check_graph, write_graph
from enginery.passes.ir.opset import convert_opset
from enginery.passes.qdq.layer_errors import (
    MAX_ROWS,
    add_float_layers,
    float_layers,
    float_operands,
    measure_layer_errors,
)
from enginery.passes.qdq.layers import Layer, find_layers
from enginery.quantize.accuracy import (
    AccuracyBudget,
    find_builtin_batches,
    measure_builtin,
    measure_file,
)
from enginery.quantize.calibrate import (
    AccuracySearch,
    BeyondLayers,
    calibrate,
    check_patterns,
    quantize_graph,
)
from enginery.quantize.calibration.data import CalibrationData, make_batches, read_data
from enginery.quantize.calibration.result import RANGES, Calibration
from enginery.quantize.config import (
    QuantizeConfig,
    check_options,
    list_capabilities,
    require_no_budget,
    residual_precision,
)
from enginery.quantize.dynamic import quantize_dynamic
from enginery.quantize.job import QuantizeJob, QuantizeResult, scheme_from_config
from enginery.quantize.report import QuantizedGraph, make_report, save_curve
from enginery.quantize.source_graph import SourceGraph, require_calibratable
from enginery.quantize.trial import build_trials, check_trial_options
from enginery.reports.layer_errors import save_layer_errors
from enginery.reports.quantization import EngineTrial, QuantizationReport
from enginery.runtime.graph_roles import answer_graph, input_graph

STAGE = "quantize"
STAGE_VERSION = "18"
"""Incremented when the same inputs give a different artifact; part of the fingerprint."""

REPORT = f"{REPORTS}/{QuantizationReport.FILE}"
CURVE = f"{REPORTS}/quantization.svg"
TOOLS = ("onnx", "onnx-ir", "numpy", "ml_dtypes", "tensorrt-rtx-cu13-bindings")
_MIN_OPSET = 19
"""First opset whose Q and DQ support FP16 scales and FP8; graphs of earlier ones are converted."""


def fingerprint(
    source: Artifact, config: QuantizeConfig, data: CalibrationData | None
) -> Fingerprint:
    """Return the cache key: the graph, the content of the inputs, the options and the tools.

    Raises:
        OptionError: an option is invalid.
    """
    check_options(config)
    return stage_fingerprint(
        STAGE,
        STAGE_VERSION,
        {"artifact": source.content_sha256()},
        option_fields(
            config,
            data=data.content if data else "none",
        ),
        stage_tools(TOOLS),
    )


def read_calibration(
    source: Artifact, config: QuantizeConfig, inputs: Iterable[Any] | None = None
) -> CalibrationData | None:
    """Read the calibration inputs for `fingerprint` and `run`; see `read_data`.

    Returns:
        None for dynamic quantization without inputs.

    Raises:
        OptionError: an option is invalid, or there are no inputs.
        ArtifactError: the artifact cannot be quantized.
        InputError: an input cannot be read.
    """
    check_options(config)
    require_quantizable(source, config)
    if config.scheme != "dynamic":
        check_trial_options(source, config)
    if config.scheme == "dynamic" and inputs is None and not config.data:
        # Dynamic INT8 is not calibrated; inputs would only measure its accuracy.
        require_no_budget(config)
        return None
    return read_data(source, config, inputs)


def run(
    source: Artifact,
    config: QuantizeConfig,
    out: Path,
    *,
    data: CalibrationData | None,
    key: Fingerprint | None = None,
    progress: Progress = SILENT,
) -> Artifact:
    """Quantize an artifact and write the new one to `out`. If anything fails, nothing is written.

    Args:
        source: artifact with an FP32 graph that has not been fused.
        config: the options.
        out: directory of the new artifact.
        data: result of `read_calibration`.
        key: result of `fingerprint`; computed if None.
        progress: receives progress messages.

    Raises:
        OptionError: an option is invalid, or a pattern of `exclude` matches no layer.
        InputError: the inputs cannot be used.
        ArtifactError: the artifact cannot be quantized.
        RejectedArtifactError: the artifact's validation failed.
        CheckFailedError: no combination of quantized layers meets the accuracy budget, or the
            saved graph does not.
        ExportError: the graph cannot be converted to the opset that Q and DQ need.
        ProviderError: TensorRT does not support the graph, or cannot build an engine.
        EngineryError: there is no space for FP32's outputs in the temporary directory.
    """
    started = time.monotonic()
    source.require_passed(allow_failed=config.allow_failed)
    require_quantizable(source, config)
    key = key or fingerprint(source, config, data)
    with staging(out, key.inputs) as directory:
        source.copy_side_files(directory)
        (directory / REPORTS).mkdir()
        with temporary_directory("quantize") as scratch:
            job = QuantizeJob(source, config, data, key.fields, directory, scratch, progress)
            result = (quantize_dynamic if config.scheme == "dynamic" else _quantize_static)(job)
        report, notes = result.report, result.notes
        fused = config.scheme == "dynamic" or scheme_from_config(config).supports_fusions
        first = SourceGraph.of(source, input_graph(source.manifest.graphs))
        # On the inputs of `validate`, so that it knows what to expect.
        builtin = measure_builtin(first, directory / first.record.file, fused=fused)
        if builtin is not None and builtin.cosine < MIN_MEAN_COSINE:
            notes.append(
                f"mean cosine {builtin.cosine:.4f} on built-in inputs, but `enginery validate` "
                f"expects {MIN_MEAN_COSINE:g} there: calibrate on more and other inputs"
            )
        report = replace(report, builtin=builtin, notes=list(notes))
        (directory / REPORT).write_bytes(report.to_json())
        stage = StageRecord.of(
            key,
            config,
            started=started,
            tools=stage_tools(TOOLS),
            peak_rss_bytes=peak_rss_bytes(),
            notes=(report.summary, *notes),
        )
        changes = {
            "precision": "int8" if config.scheme == "dynamic" else config.scheme,
            "residual": residual_precision(config),
            "target": config.target,
            "graphs": result.graphs,
            "stages": (*source.manifest.stages, stage),
            # Verdicts on the source artifact do not apply to this one.
            "verdicts": (),
        }
        commit_artifact(directory, source.manifest.model_copy(update=changes))
    progress.say(f"quantize: {report.summary}")
    return Artifact.open(out)


def _quantize_static(job: QuantizeJob) -> QuantizeResult:
    """Insert Q/DQ nodes into each graph, with ranges from the calibration inputs."""
    source, config, data = job.source, job.config, job.require_data()
    notes = [data.description]
    if data.kind == "random":
        notes.append("calibrated on random inputs: only for trying things out")
        job.progress.say(
            "quantize: calibrated on random inputs; do not use this artifact in production"
        )
    records = source.manifest.graphs
    # The files with FP32's outputs have the same names for each graph.
    jobs = [job.in_folder(f"graph-{index}") for index in range(len(records))]
    graphs = []
    for graph_job, record in zip(jobs, records, strict=True):
        graph, note = _convert(graph_job, record)
        graphs.append(graph)
        if note:
            notes.append(note)
    if config.exclude:
        names = [layer.name for graph in graphs for layer in find_layers(graph.read())]
        check_patterns(names, config.exclude)
    quantized = [
        _quantize_graph(graph_job, graph) for graph_job, graph in zip(jobs, graphs, strict=True)
    ]
    calibration = Calibration.merge([graph.calibration for graph in quantized])
    answers = quantized[records.index(answer_graph(records))]
    if config.target == "cpu":
        notes.append("activations are stored as uint8, for ONNX Runtime's CPU kernels")
    elif not list_capabilities(config):
        notes.append(
            "no trial engine was built, because 'capability' is none: TensorRT has not checked "
            "this graph"
        )
    notes += [note for graph in quantized for note in graph.more.notes()]
    rows = answers.measured.evaluator.rows
    notes += AccuracyBudget.notes(config, answer_graph(records), rows)
    if not save_curve(job.directory / CURVE, answers.measured, config.scheme):
        notes.append(NOT_DRAWN)
    (job.directory / REPORTS / RANGES).write_bytes(calibration.to_json())
    report = make_report(job, quantized, answers, calibration, notes)
    errors = report.layer_errors or report.builtin_layer_errors
    save_layer_errors(
        job.directory / REPORTS,
        {name: measured.error for name, measured in errors.items()},
        meaning="relative error of the layer alone",
    )
    return QuantizeResult(tuple(graph.record for graph in quantized), report, notes)


def _convert(job: QuantizeJob, record: GraphRecord) -> tuple[SourceGraph, str]:
    """Return a graph in the opset that Q and DQ need, and a note; empty if it has that opset.

    Raises:
        ExportError: the graph cannot be converted, or its outputs change.
    """
    graph = SourceGraph.of(job.source, record)
    if record.opset >= _MIN_OPSET:
        return graph, ""
    note = (
        f"converted from opset {record.opset} to {_MIN_OPSET}, because earlier Q and DQ support "
        "neither FP16 scales nor FP8: the outputs are those of the graph before"
    )
    job.progress.say(f"quantize: {note}")
    batches, _ = make_batches(job.source, record, job.require_data(), seed=job.config.seed)
    path = job.scratch / record.file
    data_files = convert_opset(graph.path, path, _MIN_OPSET, [batches[0].load()])
    inside = Path(record.file).parent
    names = tuple((inside / name).as_posix() for name in data_files)
    converted = record.model_copy(update={"opset": _MIN_OPSET, "data_files": names})
    return SourceGraph(job.source, converted, path), note


def _quantize_graph(job: QuantizeJob, source: SourceGraph) -> QuantizedGraph:
    """Write a graph with Q/DQ nodes to the job's directory, and measure it."""
    config = job.config
    model = source.read()
    layers = find_layers(model)
    calibration, measured = calibrate(job, source, model, layers)
    quantized = calibration.quantized_layers(layers)
    # Before the graph is quantized in place.
    fp32_operands = float_operands(model, quantized)
    record, more = _write_graph(job, model, quantized, calibration, source.record)
    graph = job.directory / record.file
    fused = job.scheme.supports_fusions
    accuracy = measure_file(graph, measured.evaluator, fused=fused)
    # For TensorRT, the search has not measured the residual additions.
    if more and not measured.budget.is_met_by(accuracy):
        # The layers alone may still meet the budget.
        calibration = replace(calibration, beyond_layers=False)
        model = source.read()
        fp32_operands = float_operands(model, quantized)
        record, more = _write_graph(job, model, quantized, calibration, source.record)
        accuracy = measure_file(graph, measured.evaluator, fused=fused)
    _check_accuracy(accuracy, measured, config)
    trials: list[EngineTrial] = []
    if config.target == "tensorrt":
        with job.progress.task("building a trial engine"):
            trials = build_trials(graph, source, config, quantized)
    # The graph is saved by now; these nodes only measure.
    add_float_layers(model, float_layers(model, quantized, fp32_operands))
    with job.progress.task("measuring each layer"):
        layer_errors, builtin_layer_errors = _measure_layers(job, model, source, measured)
    return QuantizedGraph(
        record=record,
        layers=layers,
        calibration=calibration,
        measured=measured,
        accuracy=accuracy,
        trials=trials,
        layer_errors=layer_errors,
        builtin_layer_errors=builtin_layer_errors,
        more=more,
    )


def require_quantizable(source: Artifact, config: QuantizeConfig) -> None:
    """Check that the scheme can quantize the artifact.

    Raises:
        OptionError: the accuracy budget is one of a classifier, but the artifact is none.
        ArtifactError: it is already quantized, is not FP32, or was fused for another target; or
            there are calibration inputs, and they do not lead to the inputs of every graph.
    """
    manifest = source.manifest
    if manifest.is_quantized:
        raise ArtifactError(
            f"{source.path} is already quantized.", do="Start from the exported artifact."
        )
    # Q and DQ have to be inserted before layers are fused.
    targets = ("onnx", "cpu") if config.scheme == "dynamic" else ("onnx", "tensorrt")
    if manifest.precision != "fp32" or manifest.target not in targets:
        raise ArtifactError(
            f"{source.path} is {manifest.precision} for {manifest.target}; quantizing for "
            f"{config.target} expects FP32 for {' or '.join(targets)}.",
            do="Start from the exported artifact: enginery export MODEL --dtype fp32",
        )
    # Dynamic INT8 without inputs calibrates and measures nothing.
    if config.scheme != "dynamic" or config.data:
        require_calibratable(source)
    for option in ("accuracy_budget", "label_column"):
        if getattr(config, option) and len(manifest.graphs) > 1:
            raise OptionError(
                f"option '{option}' is '{getattr(config, option)}', but {source.path} has "
                "several graphs, whose outputs are neither right nor wrong.",
                do="Set a minimum cosine instead: --min-cosine 0.998",
            )


def _write_graph(
    job: QuantizeJob,
    model: ir.Model,
    quantized: Sequence[Layer],
    calibration: Calibration,
    old: GraphRecord,
) -> tuple[GraphRecord, BeyondLayers]:
    """Write the quantized graph; return its record and what is quantized besides the layers."""
    beyond_layers = calibration.beyond_layers and job.config.scheme == "int8"
    more = quantize_graph(model, quantized, calibration, job.config, beyond_layers=beyond_layers)
    path = job.directory / old.file
    path.parent.mkdir(parents=True, exist_ok=True)
    data_files = write_graph(model, path)
    check_graph(path)
    folder = Path(old.file).parent
    changes = {
        "opset": model.opset_imports[""],
        "data_files": tuple((folder / name).as_posix() for name in data_files),
    }
    return old.model_copy(update=changes), more


def _check_accuracy(
    accuracy: AccuracyMetrics, measured: AccuracySearch, config: QuantizeConfig
) -> None:
    """Raise CheckFailedError if the saved graph does not meet the accuracy budget."""
    if not measured.budget.is_met_by(accuracy):
        residual = residual_precision(config)
        before = "Simulated" if residual == "fp32" else f"Before casting the rest to {residual}"
        raise CheckFailedError(
            f"the saved graph does not meet the budget, a {measured.budget}: its mean cosine is "
            f"{accuracy.cosine:.5f}. {before}, it was {measured.result.accuracy.cosine:.5f}.",
            do=f"{measured.budget.remedy}."
            if residual == "fp32"
            else f"{measured.budget.remedy}, or keep the rest in FP32 with --residual fp32.",
        )


def _measure_layers(
    job: QuantizeJob, model: ir.Model, source: SourceGraph, measured: AccuracySearch
) -> tuple[dict[str, LayerError], dict[str, LayerError]]:
    """Measure the layers of a graph with `add_float_layers` on held-out and on built-in inputs."""
    path = job.scratch / "layers" / "model.onnx"
    path.parent.mkdir()
    write_graph(model, path, max_inline_bytes=0)
    fused = job.scheme.supports_fusions
    # About `MAX_ROWS` rows, spread over the batches.
    evaluator = measured.evaluator
    held_out = evaluator.batches[:: -(-evaluator.rows // MAX_ROWS)]
    return (
        measure_layer_errors(path, [batch.load for batch in held_out], fused=fused),
        measure_layer_errors(path, [b.load for b in find_builtin_batches(source)], fused=fused),
    )
