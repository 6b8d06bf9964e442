"""Sentence embeddings against PyTorch's: what a search over them would notice.

>>> comparison = EmbeddingComparison.of(artifact)
>>> comparison.add(feeds, outputs, expected)
>>> comparison.metrics(min_cosine=0.9999999).neighbour_agreement
1.0
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact import Artifact
from enginery.core.feeds import Feeds
from enginery.core.reports import EmbeddingMetrics
from enginery.runtime.pooling import Pooling, read_pooling
from enginery.validate.reference import Expected

_OUTPUT = "last_hidden_state"
_ROUNDING = 1e-12


class EmbeddingComparison:
    """Collects the pooled vectors of both sides, case by case."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._mine: list[NDArray[np.float64]] = []
        self._theirs: list[NDArray[np.float64]] = []

    @classmethod
    def of(cls, artifact: Artifact) -> EmbeddingComparison | None:
        """For a sentence-transformers model, pooled as its modules say; None for other models.

        Raises:
            ArtifactError: a module is one that is not run here.
        """
        if not (artifact.path / "modules.json").is_file():
            return None
        return cls(read_pooling(artifact.path))

    def add(self, feeds: Feeds, outputs: Mapping[str, NDArray[Any]], expected: Expected) -> None:
        """Takes one case; one without token vectors on both sides, of one shape, is left out."""
        if _OUTPUT not in outputs or _OUTPUT not in expected.files or "attention_mask" not in feeds:
            return
        theirs = expected.load(_OUTPUT)
        if outputs[_OUTPUT].shape == theirs.shape:
            mask = feeds["attention_mask"]
            self._mine.append(self._pooling(outputs[_OUTPUT], mask).astype(np.float64))
            self._theirs.append(self._pooling(theirs, mask).astype(np.float64))

    def metrics(self, *, min_cosine: float, of_mean: bool = False) -> EmbeddingMetrics | None:
        """All sentences of all cases; None where there were none.

        With `of_mean` it is the mean cosine that must be `min_cosine`, and not the least; another
        nearest neighbour is then counted, ties by rounding aside, and fails nothing.
        """
        if not self._mine:
            return None
        mine, theirs = (_unit(np.concatenate(side)) for side in (self._mine, self._theirs))
        cosines = np.sum(mine * theirs, axis=1)
        agreement = _neighbour_agreement(mine, theirs, 1 - _ROUNDING if of_mean else min_cosine)
        # NaN is not at least anything.
        problem = ""
        if of_mean and not cosines.mean() >= min_cosine:
            problem = f"mean cosine {cosines.mean():.4f}, expected at least {min_cosine:.4f}"
        elif not of_mean and not cosines.min() >= min_cosine:
            problem = f"cosine {cosines.min():.7f}, expected at least {min_cosine:.7f}"
        elif agreement < 1.0 and not of_mean:
            problem = f"the nearest neighbour is another one for {1 - agreement:.2%}"
        return EmbeddingMetrics(
            sentences=len(mine),
            min_cosine=float(cosines.min()),
            mean_cosine=float(cosines.mean()),
            neighbour_agreement=agreement,
            problem=problem,
        )


def _unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(norms, 1e-12))


def _neighbour_agreement(
    mine: NDArray[np.float64], theirs: NDArray[np.float64], min_cosine: float
) -> float:
    """The share of rows whose nearest other row is the same one, or as near in the reference.

    Two unit vectors of cosine c lie sqrt(2 - 2c) apart, so two similarities may change by that
    much each where every cosine is at least `min_cosine`: a gap below twice that is a tie. Data
    with the same text twice are full of ties.
    """
    if len(mine) < 2:
        return 1.0
    rows = np.arange(len(mine))
    similarity, expected = mine @ mine.T, theirs @ theirs.T
    for matrix in (similarity, expected):
        np.fill_diagonal(matrix, -np.inf)
    gap = expected.max(axis=1) - expected[rows, similarity.argmax(axis=1)]
    tie = 4 * math.sqrt(2 * max(0.0, 1 - min_cosine))
    # NaN never is a tie.
    return float(np.mean(gap <= tie))
