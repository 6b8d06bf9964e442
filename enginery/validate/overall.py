"""Compare each output over all real inputs together, for the budget of a quantized artifact.

All rows count as one long vector, so that each weighs by its size. The cosine of a single row of
three scores near zero would mean nothing. 1 - cosine is about half the squared relative error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.manifest import GraphRecord
from enginery.core.artifact.reports import OverallMetrics
from enginery.core.model.feeds import Feeds
from enginery.validate.cases.padding import find_padding_mask
from enginery.validate.metrics.differences import CosineSums, compute_differences
from enginery.validate.reference import ReferenceOutputs


class OverallComparison:
    """Accumulate the cosine of each output over cases, without keeping the arrays."""

    def __init__(self) -> None:
        self._products: dict[tuple[str, str], CosineSums] = {}
        self._inputs: dict[tuple[str, str], int] = {}

    def add(
        self,
        record: GraphRecord,
        feeds: Feeds,
        outputs: Mapping[str, NDArray[Any]],
        expected: ReferenceOutputs,
    ) -> None:
        """Add the float outputs of one case. Outputs of another shape fail elsewhere."""
        for spec in record.outputs:
            if spec.name not in expected.files:
                continue
            mine, theirs = outputs[spec.name], expected.load(spec.name)
            if mine.shape != theirs.shape or not np.issubdtype(theirs.dtype, np.floating):
                continue
            found = compute_differences(mine, theirs, find_padding_mask(spec, record.inputs, feeds))
            key = (record.file, spec.name)
            self._products[key] = self._products.get(key, CosineSums()) + found.products
            self._inputs[key] = self._inputs.get(key, 0) + (len(mine) if mine.ndim else 1)

    def metrics(self, *, min_cosine: float) -> list[OverallMetrics]:
        """Return the metrics of each output; empty without real inputs."""
        return [
            _check_cosine(graph, output, self._inputs[graph, output], products.cosine, min_cosine)
            for (graph, output), products in self._products.items()
        ]


def _check_cosine(
    graph: str, output: str, inputs: int, cosine: float, min_cosine: float
) -> OverallMetrics:
    problem = ""
    if not cosine >= min_cosine:
        problem = (
            f"cosine {cosine:.4f} over {inputs} real inputs, expected at least {min_cosine:.4f}"
        )
    return OverallMetrics(graph, output, inputs, cosine, min_cosine, problem)
