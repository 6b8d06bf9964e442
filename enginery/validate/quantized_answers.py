"""Compare the answers of a quantized graph with the reference's, over all real inputs.

The metrics are those that the quantize stage measures: the cosine of each row, its mean and its
minimum, and whether nearest neighbours stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import ArtifactError, raise_system_error
from enginery.core.model.feeds import Feeds
from enginery.reports.validation import QuantizedAccuracy
from enginery.runtime.agreement import AnswerAgreement
from enginery.validate.metrics.budget import AccuracyExpectation
from enginery.validate.reference import ReferenceOutputs


class AnswerComparison:
    """Compare the answers of both sides, case by case."""

    def __init__(self, agreement: AnswerAgreement) -> None:
        self._agreement = agreement

    @classmethod
    def of(cls, artifact: Artifact) -> AnswerComparison:
        """Return a comparison for an artifact; token vectors count if no pooling is supported."""
        try:
            return cls(AnswerAgreement.of(artifact.path))
        except ArtifactError as error:
            raise_system_error(error)
            return cls(AnswerAgreement(None))

    def add(
        self, feeds: Feeds, outputs: Mapping[str, NDArray[Any]], expected: ReferenceOutputs
    ) -> None:
        """Add one case. Outputs of another shape or type fail elsewhere."""
        theirs = {name: expected.load(name) for name in outputs.keys() & expected.files.keys()}
        alike = {
            name: array
            for name, array in theirs.items()
            if array.shape == outputs[name].shape and np.issubdtype(array.dtype, np.floating)
        }
        mine = {name: outputs[name].astype(np.float32) for name in alike}
        self._agreement.add(mine, alike, feeds)

    def metrics(self, expectation: AccuracyExpectation) -> QuantizedAccuracy | None:
        """Return the metrics and how they compare with the limits; None without real inputs."""
        if not self._agreement.rows:
            return None
        accuracy = self._agreement.metrics()
        # Fewer rows leave the mean less certain, so that the limits depend on their number.
        limits = expectation.limits(accuracy.rows)
        problem = ""
        # `not >=` is true for NaN.
        if not accuracy.cosine >= limits.cosine:
            problem = f"mean cosine {accuracy.cosine:.4f}, expected at least {limits.cosine:.4f}"
        elif limits.worst_cosine is not None and not accuracy.worst_cosine >= limits.worst_cosine:
            problem = (
                f"smallest cosine {accuracy.worst_cosine:.4f}, expected at least "
                f"{limits.worst_cosine:.4f}"
            )
        elif (
            limits.neighbours is not None
            and (accuracy.neighbour_agreement or 0) < limits.neighbours
        ):
            problem = (
                f"{accuracy.neighbour_agreement:.1%} of the nearest neighbours are the same, "
                f"expected at least {limits.neighbours:.1%}"
            )
        return QuantizedAccuracy(
            found=accuracy,
            expected=expectation.measured,
            cosine_limit=limits.cosine,
            worst_cosine_limit=limits.worst_cosine,
            neighbours_limit=limits.neighbours,
            problem=problem,
        )
