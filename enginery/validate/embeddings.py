"""Compare sentence embeddings with the reference's: cosines, agreement of nearest neighbours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.model.feeds import Feeds
from enginery.core.model.files import has_embedding_modules
from enginery.reports.validation import EmbeddingMetrics
from enginery.runtime.agreement import neighbour_agreement, normalize
from enginery.runtime.text.pooling import Pooling, read_pooling
from enginery.validate.reference import ReferenceOutputs

_OUTPUT = "last_hidden_state"
_ROUNDING = 1e-12


class EmbeddingComparison:
    """Collect the pooled embeddings of both sides, case by case."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._mine: list[NDArray[np.float64]] = []
        self._theirs: list[NDArray[np.float64]] = []

    @classmethod
    def of(cls, artifact: Artifact) -> EmbeddingComparison | None:
        """Return a comparison for a sentence-transformers model; None for other models.

        Raises:
            ArtifactError: the model has a module that is not supported.
        """
        if not has_embedding_modules(artifact.path):
            return None
        return cls(read_pooling(artifact.path))

    def add(
        self, feeds: Feeds, outputs: Mapping[str, NDArray[Any]], expected: ReferenceOutputs
    ) -> None:
        """Add one case. It is skipped unless both sides have token embeddings of the same shape."""
        if _OUTPUT not in outputs or _OUTPUT not in expected.files or "attention_mask" not in feeds:
            return
        theirs = expected.load(_OUTPUT)
        if outputs[_OUTPUT].shape == theirs.shape:
            mask = feeds["attention_mask"]
            self._mine.append(self._pooling(outputs[_OUTPUT], mask).astype(np.float64))
            self._theirs.append(self._pooling(theirs, mask).astype(np.float64))

    def metrics(self, *, min_cosine: float | None) -> EmbeddingMetrics | None:
        """Return the metrics over all sentences; None if there were none.

        Args:
            min_cosine: smallest cosine that passes, for every sentence; then nearest neighbours
                must be the same, too. None to report the metrics without a limit.
        """
        if not self._mine:
            return None
        mine, theirs = (normalize(np.concatenate(side)) for side in (self._mine, self._theirs))
        cosines = np.sum(mine * theirs, axis=1)
        least = 1 - _ROUNDING if min_cosine is None else min_cosine
        # Two unit vectors with cosine c are sqrt(2 - 2c) apart. If every cosine is at least
        # `least`, a similarity between two rows changes by at most twice that, and the gap between
        # two similarities by at most four times.
        tie = 4 * math.sqrt(2 * max(0.0, 1 - least))
        agreement = neighbour_agreement(self._mine, self._theirs, tie=tie)
        # A single sentence has no neighbours that could differ.
        agreement = 1.0 if agreement is None else agreement
        problem = ""
        # `not >=` is true for NaN.
        if min_cosine is not None and not cosines.min() >= min_cosine:
            problem = f"cosine {cosines.min():.7f}, expected at least {min_cosine:.7f}"
        elif min_cosine is not None and agreement < 1.0:
            problem = f"the nearest neighbour changed for {1 - agreement:.2%} of sentences"
        return EmbeddingMetrics(
            sentences=len(mine),
            min_cosine=float(cosines.min()),
            mean_cosine=float(cosines.mean()),
            neighbour_agreement=agreement,
            problem=problem,
        )
