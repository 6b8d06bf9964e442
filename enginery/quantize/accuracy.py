"""Accuracy of a quantized graph: its outputs against the FP32 graph's on the same inputs.

A sentence-transformers model is compared by its pooled embeddings, any other model by the float
outputs of its graph, without padded positions. The reference is the FP32 graph in ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.reports import AccuracyMetrics
from enginery.core.model.feeds import Feeds
from enginery.quantize.calibration.data import Batch
from enginery.runtime.text.pooling import Pooling, read_pooling

_MOST_ELEMENTS = 1 << 16
"""Limit for one row of one output. Longer rows are subsampled: a language model has a logit for
every token of its vocabulary at every position."""
_TIE = 1e-6
"""Similarities closer than this count as equal."""

Outputs = Mapping[str, NDArray[Any]]
Graph = Callable[[Feeds], Outputs]
Rows = list[NDArray[np.float32]]
"""One array per input row: (positions, dim), or (1, dim)."""


class AccuracyEvaluator:
    """Compare graphs with the stored outputs of a reference graph."""

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
        cls,
        artifact: Artifact,
        batches: Sequence[Batch],
        reference: Graph,
        *,
        labels: Sequence[int] = (),
    ) -> AccuracyEvaluator:
        """Run the reference over the batches and store its outputs.

        Raises:
            ArtifactError: the model uses a pooling that is not supported.
        """
        embeds = (artifact.path / "modules.json").is_file()
        evaluator = cls(batches, labels, read_pooling(artifact.path) if embeds else None)
        evaluator._outputs = tuple(spec.name for spec in artifact.manifest.graphs[0].outputs)
        evaluator._expected = evaluator._collect_rows(reference, evaluator.batches)
        return evaluator

    @property
    def rows(self) -> int:
        """Number of input rows in the batches."""
        return sum(len(batch.rows) for batch in self.batches)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the graph outputs that are compared."""
        return self._outputs

    def measure_reference(self) -> AccuracyMetrics:
        """Compare the reference with itself and with the labels."""
        return self._compare(self._expected, self.batches)

    def measure(self, graph: Graph, *, batches: int = 0) -> AccuracyMetrics:
        """Compare a graph on all batches, or on the first `batches` of them."""
        part = self.batches[:batches] if batches else self.batches
        return self._compare(self._collect_rows(graph, part), part)

    def _compare(self, found: Mapping[str, Rows], part: Sequence[Batch]) -> AccuracyMetrics:
        cosines = {
            name: [_cosine(a, b) for a, b in zip(rows, self._expected[name], strict=False)]
            for name, rows in found.items()
        }
        means = [float(np.mean(values)) for values in cosines.values()]
        worst = [float(np.min(values)) for values in cosines.values()]
        pooled = self._pooling is not None
        return AccuracyMetrics(
            rows=sum(len(batch.rows) for batch in part),
            cosine=min(means, default=1.0),
            worst_cosine=min(worst, default=1.0),
            neighbour_agreement=self._neighbour_agreement(found) if pooled else None,
            argmax_agreement=None if pooled else self._argmax_agreement(found),
            label_accuracy=self._label_accuracy(found, part),
        )

    def _collect_rows(self, graph: Graph, batches: Sequence[Batch]) -> dict[str, Rows]:
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
            name: _subsample([_unpadded(row, index, mask) for index, row in enumerate(value)])
            for name, value in outputs.items()
            if value.dtype.kind == "f" and value.ndim >= 1 and value.size
        }

    def _neighbour_agreement(self, found: Mapping[str, Rows]) -> float | None:
        rows = found.get("embedding")
        if rows is None or len(rows) < 2:
            return None
        mine = _normalize(np.concatenate(rows))
        theirs = _normalize(np.concatenate(self._expected["embedding"][: len(rows)]))
        similar, expected = mine @ mine.T, theirs @ theirs.T
        np.fill_diagonal(similar, -np.inf)
        np.fill_diagonal(expected, -np.inf)
        chosen = expected[np.arange(len(mine)), similar.argmax(axis=1)]
        # Duplicate texts tie, and either neighbour is correct.
        return float(np.mean(chosen >= expected.max(axis=1) - _TIE))

    def _argmax_agreement(self, found: Mapping[str, Rows]) -> float | None:
        agreed = [
            np.mean(_argmax_of_finite(mine) == theirs.argmax(axis=-1))
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
            int(_argmax_of_finite(logits.ravel())) == self._labels[row]
            for row, logits in zip(order, answers["logits"], strict=False)
        ]
        return float(np.mean(right))


def _argmax_of_finite(scores: NDArray[np.float32]) -> NDArray[np.intp]:
    """Return the argmax along the last axis, or -1 where a score is NaN or infinite."""
    return np.where(np.isfinite(scores).all(axis=-1), scores.argmax(axis=-1), -1)


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
