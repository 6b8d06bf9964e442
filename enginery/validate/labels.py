"""Count the labelled rows that the reference and the artifact classify correctly.

The counts are reported beside the verdict and do not decide it: outputs that agree have the same
accuracy, and whether a loss is acceptable depends on what the model is used for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.accuracy import LabelMetrics, measure_accuracy
from enginery.runtime.agreement import argmax_of_finite
from enginery.validate.reference import ReferenceOutputs

_OUTPUT = "logits"


class LabelComparison:
    """Collect which rows each side has right, case by case."""

    def __init__(self) -> None:
        self._mine: list[bool] = []
        self._theirs: list[bool] = []

    def add(
        self,
        labels: Sequence[int],
        outputs: Mapping[str, NDArray[Any]],
        expected: ReferenceOutputs,
    ) -> None:
        """Add a case, whose first rows have these labels; its other rows are padding."""
        if _OUTPUT in outputs and _OUTPUT in expected.files:
            self._mine += _are_right(outputs[_OUTPUT], labels)
            self._theirs += _are_right(expected.load(_OUTPUT), labels)

    def metrics(self, column: str, reference: str) -> LabelMetrics | None:
        """Return the accuracies; None if no labelled row was compared.

        Args:
            column: the column of the labels.
            reference: name of the reference.
        """
        if not self._mine:
            return None
        return measure_accuracy(column, {reference: self._theirs, "this artifact": self._mine})


def _are_right(logits: NDArray[Any], labels: Sequence[int]) -> list[bool]:
    """Return whether the best class is the label; scores that are not finite are wrong."""
    scores = logits[: len(labels)].reshape(len(labels), -1)
    right: list[bool] = (argmax_of_finite(scores) == np.asarray(labels)).tolist()
    return right
