"""How near the answers of one graph are to those of another, on real inputs.

    >>> judge = Judge.of(artifact, batches, reference, labels=())
    >>> judge.measure(lambda feeds: quantized(feeds)).cosine
    0.9987

A sentence-transformers model is judged by its pooled vectors, any other by its graph's float
outputs, without the positions of padding. The reference is the FP32 graph in ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact import Artifact
from enginery.core.feeds import Feeds
from enginery.core.reports import Accuracy
from enginery.quantize.data import Batch
from enginery.runtime.pooling import Pooling, read_pooling

_MOST_ELEMENTS = 1 << 16
"""Of one row of one output. Beyond, positions are thinned: a vocabulary has many logits."""
_TIE = 1e-6

Outputs = Mapping[str, NDArray[Any]]
Graph = Callable[[Feeds], Outputs]
Rows = list[NDArray[np.float32]]
"""One array a row: (positions, dim), or (1, dim)."""


class Judge:
    """Holds the reference's answers."""

    def __init__(
        self, batches: Sequence[Batch], labels: Sequence[int], pooling: Pooling | None
    ) -> None:
        self.batches = list(batches)
        self._labels = labels
        self._pooling = pooling
        self._expected: dict[str, Rows] = {}
        self._outputs: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, artifact: Artifact, batches: Sequence[Batch], reference: Graph, *,
        labels: Sequence[int] = (),
    ) -> Judge:  # fmt: skip
        """Runs the reference over the batches.

        Raises:
            ArtifactError: the model's pooling is one that is not known.
        """
        embeds = (artifact.path / "modules.json").is_file()
        judge = cls(batches, labels, read_pooling(artifact.path) if embeds else None)
        judge._outputs = tuple(spec.name for spec in artifact.manifest.graphs[0].outputs)
        judge._expected = judge._answers(reference, judge.batches)
        return judge

    @property
    def rows(self) -> int:
        """How many inputs it measures on."""
        return sum(len(batch.rows) for batch in self.batches)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs that are compared, by their names in the graph."""
        return self._outputs

    def measure_reference(self) -> Accuracy:
        """The reference against itself, and against the labels."""
        return self._compare(self._expected, self.batches)

    def measure(self, graph: Graph, *, batches: int = 0) -> Accuracy:
        """Compares a graph on all batches, or on the first so many."""
        part = self.batches[:batches] if batches else self.batches
        return self._compare(self._answers(graph, part), part)

    def _compare(self, found: Mapping[str, Rows], part: Sequence[Batch]) -> Accuracy:
        cosines = {
            name: [_cosine(a, b) for a, b in zip(rows, self._expected[name], strict=False)]
            for name, rows in found.items()
        }
        means = [float(np.mean(values)) for values in cosines.values()]
        worst = [float(np.min(values)) for values in cosines.values()]
        pooled = self._pooling is not None
        return Accuracy(
            rows=sum(len(batch.rows) for batch in part),
            cosine=min(means, default=1.0),
            worst_cosine=min(worst, default=1.0),
            neighbour_agreement=self._neighbours(found) if pooled else None,
            argmax_agreement=None if pooled else self._argmax_agreement(found),
            label_accuracy=self._label_accuracy(found, part),
        )

    def _answers(self, graph: Graph, batches: Sequence[Batch]) -> dict[str, Rows]:
        answers: dict[str, Rows] = {}
        for batch in batches:
            feeds = batch.load()
            for name, rows in self._rows(graph(feeds), feeds).items():
                answers.setdefault(name, []).extend(rows)
        return answers

    def _rows(self, outputs: Outputs, feeds: Feeds) -> dict[str, Rows]:
        mask = feeds.get("attention_mask")
        tokens = outputs.get("last_hidden_state")
        if self._pooling is not None and tokens is not None and mask is not None:
            return {"embedding": [v[None] for v in self._pooling(tokens, mask)]}
        return {
            name: _thin([_unpadded(row, index, mask) for index, row in enumerate(value)])
            for name, value in outputs.items()
            if value.dtype.kind == "f" and value.ndim >= 1 and value.size
        }

    def _neighbours(self, found: Mapping[str, Rows]) -> float | None:
        rows = found.get("embedding")
        if rows is None or len(rows) < 2:
            return None
        mine = _unit(np.concatenate(rows))
        theirs = _unit(np.concatenate(self._expected["embedding"][: len(rows)]))
        similar, expected = mine @ mine.T, theirs @ theirs.T
        np.fill_diagonal(similar, -np.inf)
        np.fill_diagonal(expected, -np.inf)
        chosen = expected[np.arange(len(mine)), similar.argmax(axis=1)]
        # The same text twice is a tie, and either is right.
        return float(np.mean(chosen >= expected.max(axis=1) - _TIE))

    def _argmax_agreement(self, found: Mapping[str, Rows]) -> float | None:
        agreed = [
            np.mean(_largest(mine) == theirs.argmax(axis=-1))
            for name, rows in found.items()
            for mine, theirs in zip(rows, self._expected[name], strict=False)
            if "logits" in name and mine.shape[-1] > 1
        ]
        return float(np.mean(agreed)) if agreed else None

    def _label_accuracy(
        self, answers: Mapping[str, Rows], batches: Sequence[Batch]
    ) -> float | None:
        if not self._labels or "logits" not in answers:
            return None
        order = [row for batch in batches for row in batch.rows]
        right = [
            int(_largest(logits.ravel())) == self._labels[row]
            for row, logits in zip(order, answers["logits"], strict=False)
        ]
        return float(np.mean(right))


def _largest(scores: NDArray[np.float32]) -> NDArray[np.intp]:
    """The place of the largest score along the last axis; -1 where one is NaN or infinite."""
    return np.where(np.isfinite(scores).all(axis=-1), scores.argmax(axis=-1), -1)


def _unpadded(row: NDArray[Any], index: int, mask: NDArray[Any] | None) -> NDArray[np.float32]:
    """One row of an output as (positions, dim), without the positions that are padding."""
    values = np.asarray(row, dtype=np.float32)
    if mask is not None and values.ndim >= 1 and len(values) == mask.shape[1]:
        values = values[mask[index].astype(bool)]
    return values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(1, -1)


def _thin(rows: Rows) -> Rows:
    thinned = []
    for row in rows:
        most = max(1, _MOST_ELEMENTS // row.shape[-1])
        step = -(-len(row) // most)
        thinned.append(np.ascontiguousarray(row[::step]))
    return thinned


def _cosine(mine: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    """Of two arrays as one vector each; NaN and infinities count as no agreement at all."""
    a, b = mine.ravel().astype(np.float64), theirs.ravel().astype(np.float64)
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    if norms == 0.0:
        return float(np.array_equal(a, b))
    cosine = float(a @ b) / norms
    return cosine if np.isfinite(cosine) else -1.0


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = vectors.astype(np.float64)
    return np.asarray(wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12))
