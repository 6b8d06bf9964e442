"""Dynamic INT8 for the CPU: every graph of an artifact, without calibration.

Takes an FP32 artifact, exported or fused for the CPU; leaves its graphs in a staging directory.

    >>> graphs, report, notes = make_dynamic(source, config, directory, data, fields, progress)
    >>> report.summary
    'dynamic INT8 for the CPU: 36 integer products in model.onnx; mean cosine 0.99812 to FP32 …'

Inputs are not needed. Where there are some, the answers are measured on them, and must hold the
budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from enginery.core.artifact import Artifact
from enginery.core.errors import ArtifactError, CheckFailedError
from enginery.core.manifest import GraphRecord
from enginery.core.progress import Progress
from enginery.core.reports import Accuracy, QuantizationReport
from enginery.passes.dynamic_quantization import count_integer_nodes, quantize_dynamically
from enginery.quantize.accuracy import Judge
from enginery.quantize.config import QuantizeConfig
from enginery.quantize.data import CalibrationData, make_batches
from enginery.quantize.report import accuracy_words, budget_notes
from enginery.quantize.search import Budget
from enginery.runtime.tracing import GraphTracer


def make_dynamic(
    source: Artifact,
    config: QuantizeConfig,
    directory: Path,
    data: CalibrationData | None,
    fields: Mapping[str, str],
    progress: Progress,
) -> tuple[tuple[GraphRecord, ...], QuantizationReport, list[str]]:
    """Quantizes each graph; returns the records, the report, and notes.

    Raises:
        ArtifactError: no graph has a product to quantize.
        CheckFailedError: the answers are too far from FP32's on the inputs.
    """
    records, products = [], {}
    for record in source.manifest.graphs:
        path = directory / record.file
        with progress.task(f"quantizing {record.file}"):
            names = quantize_dynamically(source.path / record.file, path)
        products[record.file] = count_integer_nodes(path)
        folder = Path(record.file).parent
        data_files = tuple((folder / name).as_posix() for name in names)
        records.append(record.model_copy(update={"data_files": data_files}))
    if not any(products.values()):
        raise ArtifactError(f"{source.path} has no MatMul with a stored weight to quantize.")
    notes = ["scales are computed as inputs come; ONNX Runtime's CPU alone runs this"]
    said = ", ".join(
        f"{sum(n.values())} integer products in {file}" for file, n in products.items()
    )
    words = [f"dynamic INT8 for the CPU: {said}"]
    accuracy = None
    if data is None:
        notes.append("its accuracy was not measured: no inputs were given")
    else:
        accuracy, budget = _measure(source, directory / records[0].file, config, data)
        notes += [data.description, *budget_notes(budget, accuracy.rows)]
        words.append(accuracy_words(accuracy))
    report = QuantizationReport(
        summary="; ".join(words),
        scheme="dynamic",
        products=products,
        notes=list(notes),
        fields=dict(fields),
        accuracy=accuracy,
    )
    return tuple(records), report, notes


def _measure(
    source: Artifact, graph: Path, config: QuantizeConfig, data: CalibrationData
) -> tuple[Accuracy, Budget]:
    calibrating, held_out = make_batches(source, source.manifest.graphs[0], data, seed=config.seed)
    # Nothing was calibrated, so that every row is one that the graph has not seen.
    seen = {row for batch in held_out for row in batch.rows}
    others = [batch for batch in calibrating if not seen & set(batch.rows)]
    outputs = [spec.name for spec in source.manifest.graphs[0].outputs]
    with (
        GraphTracer(source.model, outputs, optimized=True) as reference,
        GraphTracer(graph, outputs, optimized=True) as quantized,
    ):
        judge = Judge.of(source, [*others, *held_out], reference, labels=data.labels)
        budget = Budget.of(config, judge.measure_reference())
        found = judge.measure(quantized)
    if not budget.holds(found):
        raise CheckFailedError(
            f"dynamic INT8 does not keep a {budget}: its {accuracy_words(found)}.",
            do="Lower the budget, or stay with FP32.",
        )
    return found, budget
