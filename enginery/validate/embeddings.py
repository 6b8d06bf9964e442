"""Sentence embeddings against PyTorch's: what a search over them would notice.

>>> compare_embeddings(artifact, real).neighbour_agreement
1.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact import Artifact
from enginery.core.feeds import Feeds
from enginery.runtime.pooling import Pooling, read_pooling
from enginery.validate.report import EmbeddingMetrics

Outputs = Mapping[str, NDArray[Any]]


def compare_embeddings(
    artifact: Artifact, real: Sequence[tuple[Feeds, Outputs, Outputs]]
) -> EmbeddingMetrics | None:
    """Pools both sides as the model's own configuration says, and compares.

    Args:
        artifact: whose modules.json names the pooling; without one there is nothing to compare.
        real: feeds, the graph's outputs and PyTorch's, for each real case.
    """
    if not (artifact.path / "modules.json").is_file():
        return None
    pooling = read_pooling(artifact.path)
    pairs = [
        (_pooled(pooling, feeds, mine), _pooled(pooling, feeds, theirs))
        for feeds, mine, theirs in real
        if "last_hidden_state" in mine and "last_hidden_state" in theirs
    ]
    if not pairs:
        return None
    mine = np.concatenate([pair[0] for pair in pairs])
    theirs = np.concatenate([pair[1] for pair in pairs])
    cosines = np.sum(_unit(mine) * _unit(theirs), axis=1)
    same = _nearest(mine) == _nearest(theirs)
    return EmbeddingMetrics(
        sentences=len(mine),
        min_cosine=float(cosines.min()),
        mean_cosine=float(cosines.mean()),
        neighbour_agreement=float(same.mean()),
    )


def _pooled(pooling: Pooling, feeds: Feeds, outputs: Outputs) -> NDArray[np.float64]:
    vectors = pooling(outputs["last_hidden_state"], feeds["attention_mask"])
    return vectors.astype(np.float64)


def _unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(norms, 1e-12))


def _nearest(vectors: NDArray[np.float64]) -> NDArray[np.intp]:
    """The index of each row's nearest other row; all equal for a single one."""
    unit = _unit(vectors)
    similarity = unit @ unit.T
    np.fill_diagonal(similarity, -np.inf)
    return np.asarray(similarity.argmax(axis=1))
