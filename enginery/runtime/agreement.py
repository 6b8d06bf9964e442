"""How well the answers of two graphs to the same inputs agree, row by row.

    agreement = AnswerAgreement.of(artifact.path)
    for feeds in batches:
        agreement.add(int8(feeds), fp32(feeds), feeds)
    agreement.metrics().cosine

The answers of a sentence-transformers model are its pooled embeddings. Those of any other model are
the float outputs of its graph without padded positions, whole: the cosine of a row is that of all
its numbers. Nothing is pooled or sampled: most positions of a text recognizer answer "no character"
and agree even if the text does not. Of a detector whose outputs are known (`detections.py`), the
boxes are compared as well: a cosine says little about them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.accuracy import AccuracyMetrics
from enginery.core.model.feeds import Feeds
from enginery.core.model.files import ModelConfig, has_embedding_modules
from enginery.runtime.detections import read_detections
from enginery.runtime.text.pooling import Pooling, read_pooling

_EMBEDDING = "embedding"
_TIE = 1e-6
"""Similarities closer than this count as equal."""

Outputs = Mapping[str, NDArray[Any]]
_Rows = list[NDArray[np.float32]]
"""One array per input row: (positions, dim), or (1, dim)."""


def read_model_pooling(directory: Path) -> Pooling | None:
    """Return the pooling of a sentence-transformers model; None for other models.

    Raises:
        ArtifactError: the model uses a pooling that is not supported.
    """
    return read_pooling(directory) if has_embedding_modules(directory) else None


class AnswerAgreement:
    """Compare answers with those of a reference, batch by batch.

    Only figures and embeddings are kept: a language model has a logit for every token of its
    vocabulary at every position.
    """

    def __init__(self, pooling: Pooling | None, labels: int = 0) -> None:
        """Start without answers.

        Args:
            pooling: result of `read_model_pooling`.
            labels: number of labels in the model's config; 0 if it has none.
        """
        self._pooling = pooling
        self._labels = labels
        self._same_boxes = self._boxes = 0
        self._cosines: dict[str, list[float]] = {}
        self._argmax: list[float] = []
        self._vectors: _Rows = []
        self._expected: _Rows = []

    @classmethod
    def of(cls, directory: Path) -> AnswerAgreement:
        """Return the comparison for a model's directory.

        Raises:
            ArtifactError: the model uses a pooling that is not supported.
        """
        return cls(read_model_pooling(directory), len(ModelConfig.read(directory).id2label))

    @property
    def rows(self) -> int:
        """Number of rows that were compared."""
        return max((len(cosines) for cosines in self._cosines.values()), default=0)

    def add(self, outputs: Outputs, expected: Outputs, feeds: Feeds) -> None:
        """Compare the outputs for one batch; outputs that only one of both has do not count."""
        self._add_boxes(outputs, expected, feeds)
        expected_rows = _answer_rows(expected, feeds, self._pooling)
        for name, rows in _answer_rows(outputs, feeds, self._pooling).items():
            pairs = list(zip(rows, expected_rows.get(name, []), strict=False))
            self._cosines.setdefault(name, []).extend(_cosine(a, b) for a, b in pairs)
            if name == _EMBEDDING:
                self._vectors += [actual for actual, _ in pairs]
                self._expected += [target for _, target in pairs]
            elif "logits" in name:
                self._argmax += [
                    float(np.mean(argmax_of_finite(actual) == target.argmax(axis=-1)))
                    for actual, target in pairs
                    if actual.shape == target.shape and actual.shape[-1] > 1
                ]

    def _add_boxes(self, outputs: Outputs, expected: Outputs, feeds: Feeds) -> None:
        actual, target = (read_detections(o, feeds, self._labels) for o in (outputs, expected))
        for detections, reference in zip(actual or (), target or (), strict=False):
            self._same_boxes += detections.count_same(reference)
            self._boxes += len(detections.boxes) + len(reference.boxes)

    def metrics(self, *, label_accuracy: float | None = None) -> AccuracyMetrics:
        """Return the metrics over all rows; of several outputs, those of the least similar one.

        Args:
            label_accuracy: share of right answers, for the result.
        """
        cosines = [np.array(values) for values in self._cosines.values() if values]
        lowest = min(cosines, key=lambda values: float(values.mean()), default=np.ones(1))
        return AccuracyMetrics(
            rows=self.rows,
            cosine=float(lowest.mean()),
            worst_cosine=float(min((values.min() for values in cosines), default=1.0)),
            neighbour_agreement=(
                neighbour_agreement(self._vectors, self._expected) if self._vectors else None
            ),
            argmax_agreement=float(np.mean(self._argmax)) if self._argmax else None,
            label_accuracy=label_accuracy,
            # F1 = 2 TP / (2 TP + FP + FN): the denominator is the number of boxes of both.
            box_f1=2 * self._same_boxes / self._boxes if self._boxes else None,
            deviation=float(lowest.std(ddof=1)) if len(lowest) > 1 else None,
        )


def argmax_of_finite(scores: NDArray[np.float32]) -> NDArray[np.intp]:
    """Return the argmax along the last axis, or -1 where a score is NaN or infinite."""
    return np.where(np.isfinite(scores).all(axis=-1), scores.argmax(axis=-1), -1)


def _answer_rows(outputs: Outputs, feeds: Feeds, pooling: Pooling | None) -> dict[str, _Rows]:
    """Return the answers to each row of a batch, by the name of the output."""
    mask = feeds.get("attention_mask")
    tokens = outputs.get("last_hidden_state")
    if pooling is not None and tokens is not None and mask is not None:
        return {_EMBEDDING: [vector[None] for vector in pooling(tokens, mask)]}
    return {
        name: [_unpadded(row, index, mask) for index, row in enumerate(value)]
        for name, value in outputs.items()
        if value.dtype.kind == "f" and value.ndim >= 1 and value.size
    }


def neighbour_agreement(
    vectors: Sequence[NDArray[Any]], expected: Sequence[NDArray[Any]], *, tie: float = _TIE
) -> float | None:
    """Return the share of rows whose nearest neighbour is the reference's, or ties with it.

    Args:
        vectors: arrays of (rows, dim).
        expected: the same of the reference.
        tie: similarities that are closer than this count as equal; duplicate texts are equal.

    Returns:
        0 to 1; None if there are fewer than two rows.
    """
    units, expected_units = (normalize(np.concatenate(rows)) for rows in (vectors, expected))
    if len(units) < 2:
        return None
    similar, expected_similar = units @ units.T, expected_units @ expected_units.T
    # No text is its own neighbour.
    np.fill_diagonal(similar, -np.inf)
    np.fill_diagonal(expected_similar, -np.inf)
    # (rows,): how similar the reference finds the neighbours that the vectors choose.
    chosen = expected_similar[np.arange(len(units)), similar.argmax(axis=1)]
    # NaN is never a tie.
    return float(np.mean(expected_similar.max(axis=1) - chosen <= tie))


def _unpadded(row: NDArray[Any], index: int, mask: NDArray[Any] | None) -> NDArray[np.float32]:
    """Return one row of an output as (positions, dim), without padded positions."""
    values = np.asarray(row, dtype=np.float32)
    # An output whose first dim is not the sequence has no padded positions.
    if mask is not None and values.ndim >= 1 and len(values) == mask.shape[1]:
        values = values[mask[index].astype(bool)]
    return values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(1, -1)


def _cosine(mine: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    """Return the cosine of two flattened arrays; -1 if it is not finite, or the shapes differ."""
    if mine.shape != theirs.shape:
        return -1.0
    a, b = mine.ravel().astype(np.float64), theirs.ravel().astype(np.float64)
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    # Vectors of zeros have no direction: they agree if both are.
    if norms == 0.0:
        return float(np.array_equal(a, b))
    cosine = float(a @ b) / norms
    return cosine if np.isfinite(cosine) else -1.0


def normalize(vectors: NDArray[Any]) -> NDArray[np.float64]:
    """Return vectors (rows, dim) of length 1; those of zeros as they are."""
    wide = vectors.astype(np.float64)
    return np.asarray(wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12))
