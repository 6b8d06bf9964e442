"""Dynamic INT8 for the CPU: quantize every graph of an artifact without calibration.

Inputs are optional. If there are any, the accuracy is measured on them and must meet the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from enginery.core.accuracy import AccuracyMetrics
from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import ArtifactError, CheckFailedError
from enginery.passes.ir.graph_file import read_graph
from enginery.passes.qdq.dynamic import count_integer_nodes, quantize_dynamically
from enginery.quantize.accuracy import AccuracyBudget, AccuracyEvaluator
from enginery.quantize.calibrate import check_patterns
from enginery.quantize.calibration.data import CalibrationData, make_batches
from enginery.quantize.config import QuantizeConfig
from enginery.quantize.job import QuantizeJob, QuantizeResult
from enginery.quantize.report import describe_accuracy
from enginery.quantize.source_graph import SourceGraph, require_calibratable
from enginery.reports.quantization import QuantizationReport
from enginery.runtime.graph_roles import answer_graph, input_graph
from enginery.runtime.onnxruntime.tracing import GraphTracer


def quantize_dynamic(job: QuantizeJob) -> QuantizeResult:
    """Quantize each graph of the artifact.

    Raises:
        OptionError: a pattern of `exclude` matches no layer.
        ArtifactError: no graph has a matrix product to quantize.
        CheckFailedError: the outputs on the inputs do not meet the accuracy budget.
    """
    source, config, data = job.source, job.config, job.data
    excluded = _excluded_nodes(source, config.exclude)
    records, products = [], {}
    for record in source.manifest.graphs:
        path = job.directory / record.file
        with job.progress.task(f"quantizing {record.file}"):
            names = quantize_dynamically(
                source.path / record.file, path, excluded.get(record.file, ())
            )
        products[record.file] = count_integer_nodes(path)
        folder = Path(record.file).parent
        data_files = tuple((folder / name).as_posix() for name in names)
        records.append(record.model_copy(update={"data_files": data_files}))
    # ONNX Runtime's quantizer skips a product without a constant weight, and raises nothing.
    if not any(products.values()):
        unquantizable = "that 'exclude' leaves" if config.exclude else "with a constant weight"
        raise ArtifactError(
            f"{source.path} has no MatMul {unquantizable}, so nothing can be quantized."
        )
    notes = [
        "activation scales are computed at run time; only ONNX Runtime's CPU provider runs this"
    ]
    counts = ", ".join(
        f"{sum(n.values())} integer products in {file}" for file, n in products.items()
    )
    parts = [f"dynamic INT8 for the CPU: {counts}"]
    accuracy = encoder_accuracy = None
    if data is None:
        notes.append("accuracy was not measured: no inputs were given")
    else:
        # The inputs have to lead to those of every graph.
        require_calibratable(source)
        accuracies = {}
        for record in records:
            graph, folder = SourceGraph.of(source, record), job.scratch / record.file
            folder.mkdir(parents=True)
            measured = _measure(graph, job.directory / record.file, config, data, folder)
            accuracies[record.file] = measured
            name = f"{record.file}: " if len(records) > 1 else ""
            parts.append(f"{name}{describe_accuracy(measured)}")
        answering = answer_graph(source.manifest.graphs)
        accuracy = accuracies[answering.file]
        # The decoder computes the answers; its encoder is reported beside it.
        if len(records) > 1:
            encoder_accuracy = accuracies[input_graph(source.manifest.graphs).file]
        notes += [data.description, *AccuracyBudget.notes(config, answering, accuracy.rows)]
    report = QuantizationReport(
        summary="; ".join(parts),
        scheme="dynamic",
        products=products,
        notes=list(notes),
        fields=dict(job.fields),
        accuracy=accuracy,
        encoder_accuracy=encoder_accuracy,
    )
    return QuantizeResult(tuple(records), report, notes)


def _excluded_nodes(source: Artifact, patterns: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of the nodes that stay in FP32, by graph."""
    if not patterns:
        return {}
    # More nodes are quantized than static INT8 has layers, such as a classifier's last product.
    nodes = {
        record.file: [str(node.name) for node in read_graph(source.path / record.file).graph]
        for record in source.manifest.graphs
    }
    check_patterns([name for names in nodes.values() for name in names], patterns)
    return {
        file: [name for name in names if any(fnmatchcase(name, p) for p in patterns)]
        for file, names in nodes.items()
    }


def _measure(
    source: SourceGraph, graph: Path, config: QuantizeConfig, data: CalibrationData, scratch: Path
) -> AccuracyMetrics:
    calibrating, held_out = make_batches(source.artifact, source.record, data, seed=config.seed)
    # Nothing was calibrated, so all rows can measure, unless others are named for that.
    held_out_rows = {row for batch in held_out for row in batch.rows}
    unseen = [batch for batch in calibrating if not held_out_rows & set(batch.rows)]
    if data.calibrating is not None:
        unseen = []
    with (
        GraphTracer(source.path, source.outputs, optimized=True) as reference,
        GraphTracer(graph, source.outputs, optimized=True) as quantized,
    ):
        evaluator = AccuracyEvaluator.of(
            source,
            [*unseen, *held_out],
            reference,
            scratch=scratch,
            labels=data.labels,
        )
        budget = AccuracyBudget.of(config, evaluator.measure_reference())
        accuracy = evaluator.measure(quantized)
    if not budget.is_met_by(accuracy):
        raise CheckFailedError(
            f"dynamic INT8 does not meet the budget, a {budget}: "
            f"found {describe_accuracy(accuracy)}.",
            do=f"{budget.remedy}, or keep FP32.",
        )
    return accuracy
