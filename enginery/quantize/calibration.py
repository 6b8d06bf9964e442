"""Activations of the FP32 graph on real inputs, reduced to sizes that rows do not change.

Takes a graph and batches; leaves per activation the extremes of its channels and a fixed sample of
its rows (first pass), and a histogram of its scaled magnitudes (second pass).

    >>> seen = observe_channels(artifact.model, layers, batches, seed=0)
    >>> seen["/encoder/layer.0/Add_output_0"].largest.shape
    (384,)

Padding does not count: where a batch has an attention mask, the rows that it masks are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import InputError
from enginery.core.feeds import Feeds
from enginery.passes.layers import Layer
from enginery.passes.qdq import ActivationQuantParams
from enginery.passes.scheme import Vector
from enginery.quantize.data import Batch
from enginery.quantize.ranges import Histogram
from enginery.runtime.tracing import GraphTracer

_SAMPLE_ROWS = 512
_SAMPLE_BYTES = 4 << 20

Advance = Callable[[], None]


@dataclass
class Channels:
    """One activation: its channels' extremes, and some of its rows."""

    width: int
    """Channels; 1 for what enters a convolution, which has one scale for all."""
    seed: int
    smallest: Vector = field(init=False)
    largest: Vector = field(init=False)
    rows: int = 0
    _keys: NDArray[np.float64] = field(init=False)
    _sample: Vector = field(init=False)

    def __post_init__(self) -> None:
        self.smallest = np.full(self.width, np.inf, dtype=np.float32)
        self.largest = np.full(self.width, -np.inf, dtype=np.float32)
        self._keys = np.zeros(0)
        self._sample = np.zeros((0, self.width), dtype=np.float32)
        self._generator = np.random.default_rng(self.seed)

    @property
    def reach(self) -> float:
        """The largest magnitude of all channels."""
        return float(max(np.abs(self.smallest).max(), np.abs(self.largest).max()))

    @property
    def capacity(self) -> int:
        """The most rows that are kept."""
        return max(16, min(_SAMPLE_ROWS, _SAMPLE_BYTES // (4 * self.width)))

    @property
    def sample(self) -> Vector:
        """(at most `capacity`, width): rows drawn evenly from all that were added."""
        return self._sample

    def add(self, rows: Vector) -> None:
        """Takes rows (n, width).

        Every row draws a number, and those with the smallest are kept: an even sample of a stream.
        """
        if len(rows) == 0:
            return
        np.minimum(self.smallest, rows.min(axis=0), out=self.smallest)
        np.maximum(self.largest, rows.max(axis=0), out=self.largest)
        self.rows += len(rows)
        if self.width == 1:
            return
        keys = np.concatenate([self._keys, self._generator.random(len(rows))])
        kept = np.sort(np.argsort(keys, kind="stable")[: self.capacity])
        old = kept[kept < len(self._keys)]
        new = kept[kept >= len(self._keys)] - len(self._keys)
        self._sample = np.concatenate([self._sample[old], rows[new]])
        self._keys = keys[kept]


def observe_channels(
    model: Path,
    layers: Sequence[Layer],
    batches: Sequence[Batch],
    *,
    seed: int,
    advance: Advance = lambda: None,
) -> dict[str, Channels]:
    """The first pass: extremes and samples of every activation that enters one of the layers.

    Raises:
        InputError: an activation is not finite, or a layer never ran.
    """
    linear = _by_channel(layers)
    seen: dict[str, Channels] = {}
    for name, rows in _traced(model, linear, batches, advance):
        if name not in seen:
            seen[name] = Channels(rows.shape[1], seed)
        seen[name].add(rows)
    for name in linear:
        if name not in seen or seen[name].rows == 0:
            raise InputError(f"the calibration inputs never reach '{name}', so it has no range.")
        if not (np.isfinite(seen[name].smallest).all() and np.isfinite(seen[name].largest).all()):
            raise InputError(
                f"'{name}' is not finite on the calibration inputs, so it has no range.",
                do="Validate the model first: enginery validate ARTIFACT",
            )
    return seen


def observe_magnitudes(
    model: Path,
    layers: Sequence[Layer],
    batches: Sequence[Batch],
    seen: Mapping[str, Channels],
    transforms: Mapping[str, ActivationQuantParams],
    *,
    advance: Advance = lambda: None,
) -> dict[str, Histogram]:
    """The second pass: histograms of every activation as its layers will get it, scaled."""
    histograms = {
        name: Histogram.empty(largest_magnitude(seen[name], transforms[name])) for name in seen
    }
    for name, rows in _traced(model, _by_channel(layers), batches, advance):
        histograms[name].add(transformed(rows, transforms[name]))
    return histograms


def transformed(rows: Vector, ready: ActivationQuantParams) -> Vector:
    """Rows (n, K) after the multiplier and the offset."""
    if ready.multiplier is not None:
        rows = rows * ready.multiplier
    return rows if ready.offset is None else rows + ready.offset


def largest_magnitude(channels: Channels, ready: ActivationQuantParams) -> float:
    """The largest magnitude of the scaled activation: exact, as channels are scaled one by one."""
    ends = np.stack([channels.smallest, channels.largest])
    return float(np.abs(transformed(ends, ready)).max())


def _by_channel(layers: Sequence[Layer]) -> dict[str, bool]:
    """Activations, and whether all that takes them multiplies over the last axis."""
    linear: dict[str, bool] = {}
    for layer in layers:
        linear[layer.activation] = linear.get(layer.activation, True) and layer.linear
    return linear


def _traced(
    model: Path, linear: Mapping[str, bool], batches: Sequence[Batch], advance: Advance
) -> Iterator[tuple[str, Vector]]:
    with GraphTracer(model, list(linear), optimized=True) as tracer:
        for batch in batches:
            feeds = batch.load()
            values = tracer(feeds)
            for name in list(values):
                yield name, unpadded_rows(values.pop(name), feeds, by_channel=linear[name])
            advance()


def unpadded_rows(value: NDArray[Any], feeds: Feeds, *, by_channel: bool) -> Vector:
    """An activation as rows of channels, (n, K), without those of padding; (n, 1) for all at once.

    The mask speaks for (batch, sequence, K) and for the same flattened, (batch * sequence, K).
    """
    value = np.asarray(value, dtype=np.float32)
    mask = feeds.get("attention_mask")
    if mask is not None and not mask.all():
        kept = mask.astype(bool)
        if value.ndim >= 3 and value.shape[:2] == kept.shape:
            value = value[kept]
        elif value.ndim == 2 and len(value) == kept.size and len(kept) > 1:
            value = value[kept.ravel()]
    return value.reshape(-1, value.shape[-1] if by_channel else 1)
