"""Tell rounding from other errors: compare a graph's errors with and without rounding.

Rounding to FP16 or INT8 hides a fault that does less than it does. Without rounding (see
`weights/unrounded.py`) such a fault is all that remains. Errors add up in squares, so a fault that
doubles the squared error of an output makes up half of it.

Rewritten FP16 graphs of a ViT and a ResNet were measured at less than 1e-6 of the squared error, or
0.27 where rounded biases were not traced; faults that double the error at 0.33 and more.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from enginery.core.artifact.manifest import GraphRecord
from enginery.reports.validation import OutputMetrics, RoundingMetrics, ValidationCaseResult

_LARGEST_SHARE, _WITH_ROUNDED = 0.1, 0.6
"""Of the squared error that may come from something else than rounding; the second, if weights were
not traced, and so stay rounded."""
_NEGLIGIBLE = 0.02
"""Share of the limit of the error below which a graph without rounding is exact. Its error is then
that of FP32, and if most nodes compute in FP32, so is that of the graph."""


def derived_record(record: GraphRecord, change: str, *, fp32_outputs: bool) -> GraphRecord:
    """Return the record of a graph made from another; its file name says what it is.

    Args:
        record: the other graph's record.
        change: how the graph differs, such as `in FP32`.
        fp32_outputs: whether outputs in FP16 and BF16 have become FP32.
    """
    low = ("float16", "bfloat16") if fp32_outputs else ()
    outputs = tuple(
        replace(spec, dtype="float32") if spec.dtype in low else spec for spec in record.outputs
    )
    return record.model_copy(update={"file": f"{record.file} {change}", "outputs": outputs})


def compare_rounding(
    graph: str,
    cases: Sequence[ValidationCaseResult],
    unrounded: Sequence[ValidationCaseResult],
    *,
    all_exact: bool,
) -> list[RoundingMetrics]:
    """Compare the errors of a graph's outputs with those of the graph without rounding.

    Args:
        graph: the file name of the graph.
        cases: its results.
        unrounded: the results of the other graph on the same inputs.
        all_exact: whether all weights of the other graph are the reference's.
    """
    pairs: dict[str, list[tuple[OutputMetrics, OutputMetrics]]] = defaultdict(list)
    for case, other in zip(cases, unrounded, strict=True):
        for mine, plain in zip(case.outputs, other.outputs, strict=False):
            if math.isfinite(mine.rms_error) and math.isfinite(plain.rms_error):
                pairs[mine.output].append((mine, plain))
    # Weights that were not traced stay rounded in the other graph, too, so more remains there.
    max_share = _LARGEST_SHARE if all_exact else _WITH_ROUNDED
    metrics = []
    for name, both in pairs.items():
        # Errors add up in squares: a fault that doubles the squared error makes up half of it.
        total = sum(mine.rms_error**2 for mine, _ in both)
        plain_error = sum(plain.rms_error**2 for _, plain in both)
        # Below this, the error of the other graph is that of FP32.
        exact = sum((_NEGLIGIBLE * plain.rms_limit) ** 2 for _, plain in both)
        share = plain_error / total if total else float(plain_error > 0)
        problem = ""
        if share > max_share and plain_error > exact:
            problem = (
                f"{share:.0%} of the squared error does not come from rounding, at most "
                f"{max_share:.0%} expected"
            )
        metrics.append(RoundingMetrics(graph, name, share, problem))
    return metrics
