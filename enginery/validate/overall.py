"""Each output over all real inputs together: what a quantized artifact's budget is about.

>>> overall = OverallComparison()
>>> overall.add(record, feeds, outputs, expected)
>>> overall.metrics(min_cosine=0.98)[0].cosine
0.9935

One row of three scores near zero has a cosine that says nothing; all rows as one long vector weigh
by their size. 1 - cosine is about half of the squared relative error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.feeds import Feeds
from enginery.core.manifest import GraphRecord
from enginery.core.reports import OverallMetrics
from enginery.validate.differences import Products, differences
from enginery.validate.padding import kept_positions
from enginery.validate.reference import Expected


class OverallComparison:
    """Adds up the cases of all graphs; what they hold is not kept."""

    def __init__(self) -> None:
        self._products: dict[tuple[str, str], Products] = {}
        self._inputs: dict[tuple[str, str], int] = {}

    def add(
        self,
        record: GraphRecord,
        feeds: Feeds,
        outputs: Mapping[str, NDArray[Any]],
        expected: Expected,
    ) -> None:
        """Takes the float outputs of one case; one whose shape differs fails on its own."""
        for spec in record.outputs:
            if spec.name not in expected.files:
                continue
            mine, theirs = outputs[spec.name], expected.load(spec.name)
            if mine.shape != theirs.shape or not np.issubdtype(theirs.dtype, np.floating):
                continue
            found = differences(mine, theirs, kept_positions(spec, record.inputs, feeds))
            key = (record.file, spec.name)
            self._products[key] = self._products.get(key, Products()) + found.products
            self._inputs[key] = self._inputs.get(key, 0) + (len(mine) if mine.ndim else 1)

    def metrics(self, *, min_cosine: float) -> list[OverallMetrics]:
        """One for each output; none where there were no real inputs."""
        return [
            _judged(graph, output, self._inputs[graph, output], products.cosine, min_cosine)
            for (graph, output), products in self._products.items()
        ]


def _judged(
    graph: str, output: str, inputs: int, cosine: float, min_cosine: float
) -> OverallMetrics:
    problem = ""
    if not cosine >= min_cosine:
        problem = (
            f"cosine {cosine:.4f} over {inputs} real inputs, expected at least {min_cosine:.4f}"
        )
    return OverallMetrics(graph, output, inputs, cosine, min_cosine, problem)
