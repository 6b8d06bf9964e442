"""How well the answers of two graphs to the same inputs agree, row by row.

    pooling = read_model_pooling(artifact.path)
    found, expected = (answer_rows(graph(feeds), feeds, pooling) for graph in (int8, fp32))
    compare_answers(found, expected).cosine

The answers of a sentence-transformers model are its pooled embeddings; those of any other model are
the float outputs of its graph, without padded positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.reports import AccuracyMetrics
from enginery.core.model.feeds import Feeds
from enginery.core.model.files import module_kinds
from enginery.runtime.text.pooling import Pooling, read_pooling

EMBEDDING = "embedding"

_MOST_ELEMENTS = 1 << 16
"""Limit for one row of one output. Longer rows are subsampled: a language model has a logit for
every token of its vocabulary at every position."""
_TIE = 1e-6
"""Similarities closer than this count as equal."""

Outputs = Mapping[str, NDArray[Any]]
Rows = list[NDArray[np.float32]]
"""One array per input row: (positions, dim), or (1, dim)."""


def read_model_pooling(directory: Path) -> Pooling | None:
    """Return the pooling of a sentence-transformers model; None for other models.

    Raises:
        ArtifactError: the model uses a pooling that is not supported.
    """
    return read_pooling(directory) if "Pooling" in module_kinds(directory) else None


def answer_rows(outputs: Outputs, feeds: Feeds, pooling: Pooling | None) -> dict[str, Rows]:
    """Return the answers to each row of a batch, by the name of the output."""
    mask = feeds.get("attention_mask")
    tokens = outputs.get("last_hidden_state")
    if pooling is not None and tokens is not None and mask is not None:
        return {EMBEDDING: [vector[None] for vector in pooling(tokens, mask)]}
    return {
        name: _subsample([_unpadded(row, index, mask) for index, row in enumerate(value)])
        for name, value in outputs.items()
        if value.dtype.kind == "f" and value.ndim >= 1 and value.size
    }


def compare_answers(
    found: Mapping[str, Rows], expected: Mapping[str, Rows], *, label_accuracy: float | None = None
) -> AccuracyMetrics:
    """Compare answers with those of a reference; rows that only one of them has do not count.

    Args:
        found: output -> the answers to each row.
        expected: those of the reference.
        label_accuracy: share of right answers, for the result.
    """
    cosines = {
        name: np.array([_cosine(a, b) for a, b in zip(rows, expected[name], strict=False)])
        for name, rows in found.items()
        if rows
    }
    lowest = min(cosines.values(), key=lambda values: float(values.mean()), default=np.ones(1))
    return AccuracyMetrics(
        rows=max((len(rows) for rows in found.values()), default=0),
        cosine=float(lowest.mean()),
        worst_cosine=float(min((values.min() for values in cosines.values()), default=1.0)),
        neighbour_agreement=_neighbour_agreement(found, expected),
        argmax_agreement=None if EMBEDDING in found else _argmax_agreement(found, expected),
        label_accuracy=label_accuracy,
        deviation=float(lowest.std(ddof=1)) if len(lowest) > 1 else None,
    )


def argmax_of_finite(scores: NDArray[np.float32]) -> NDArray[np.intp]:
    """Return the argmax along the last axis, or -1 where a score is NaN or infinite."""
    return np.where(np.isfinite(scores).all(axis=-1), scores.argmax(axis=-1), -1)


def _neighbour_agreement(found: Mapping[str, Rows], expected: Mapping[str, Rows]) -> float | None:
    rows = found.get(EMBEDDING)
    if rows is None or len(rows) < 2:
        return None
    mine = _normalize(np.concatenate(rows))
    theirs = _normalize(np.concatenate(expected[EMBEDDING][: len(rows)]))
    similar, wanted = mine @ mine.T, theirs @ theirs.T
    np.fill_diagonal(similar, -np.inf)
    np.fill_diagonal(wanted, -np.inf)
    chosen = wanted[np.arange(len(mine)), similar.argmax(axis=1)]
    # Duplicate texts tie, and either neighbour is correct.
    return float(np.mean(chosen >= wanted.max(axis=1) - _TIE))


def _argmax_agreement(found: Mapping[str, Rows], expected: Mapping[str, Rows]) -> float | None:
    agreed = [
        np.mean(argmax_of_finite(mine) == theirs.argmax(axis=-1))
        for name, rows in found.items()
        for mine, theirs in zip(rows, expected[name], strict=False)
        if "logits" in name and mine.shape[-1] > 1
    ]
    return float(np.mean(agreed)) if agreed else None


def _unpadded(row: NDArray[Any], index: int, mask: NDArray[Any] | None) -> NDArray[np.float32]:
    """Return one row of an output as (positions, dim), without padded positions."""
    values = np.asarray(row, dtype=np.float32)
    if mask is not None and values.ndim >= 1 and len(values) == mask.shape[1]:
        values = values[mask[index].astype(bool)]
    return values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(1, -1)


def _subsample(rows: Rows) -> Rows:
    thinned = []
    for row in rows:
        most = max(1, _MOST_ELEMENTS // row.shape[-1])
        step = -(-len(row) // most)
        thinned.append(np.ascontiguousarray(row[::step]))
    return thinned


def _cosine(mine: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    """Return the cosine of two flattened arrays; -1 if it is not finite."""
    a, b = mine.ravel().astype(np.float64), theirs.ravel().astype(np.float64)
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    if norms == 0.0:
        return float(np.array_equal(a, b))
    cosine = float(a @ b) / norms
    return cosine if np.isfinite(cosine) else -1.0


def _normalize(vectors: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = vectors.astype(np.float64)
    return np.asarray(wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12))
