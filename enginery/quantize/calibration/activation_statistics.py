"""Statistics of the FP32 graph's activations on calibration inputs.

The first pass collects the minimum and maximum of each channel and a fixed-size sample of rows.
The second pass collects a histogram of magnitudes after smoothing. Memory does not grow with the
number of calibration rows. Positions that the attention mask marks as padding are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import InputError
from enginery.core.model.feeds import Feeds
from enginery.passes.qdq.layers import Layer
from enginery.passes.qdq.scales import ActivationQuantParams
from enginery.passes.qdq.scheme import Scheme, Vector
from enginery.quantize.calibration.data import Batch
from enginery.quantize.calibration.ranges import Histogram
from enginery.runtime.onnxruntime.tracing import GraphTracer

_SAMPLE_ROWS = 512
_SAMPLE_BYTES = 4 << 20

Advance = Callable[[], None]


@dataclass
class ChannelStatistics:
    """Minimum and maximum of each channel of an activation, and a random sample of its rows."""

    width: int
    """Number of channels; 1 for the input of a convolution, which has a single scale."""
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
    def largest_magnitude(self) -> float:
        """Largest magnitude over all channels."""
        return float(max(np.abs(self.smallest).max(), np.abs(self.largest).max()))

    @property
    def capacity(self) -> int:
        """Maximum number of rows in the sample."""
        return max(16, min(_SAMPLE_ROWS, _SAMPLE_BYTES // (4 * self.width)))

    @property
    def sample(self) -> Vector:
        """Uniform random sample of the added rows: float32 (at most `capacity`, width)."""
        return self._sample

    def add(self, rows: Vector) -> None:
        """Add rows (n, width) to the statistics."""
        if len(rows) == 0:
            return
        np.minimum(self.smallest, rows.min(axis=0), out=self.smallest)
        np.maximum(self.largest, rows.max(axis=0), out=self.largest)
        self.rows += len(rows)
        if self.width == 1:
            return
        # Reservoir sampling: each row gets a random key, and the rows with the smallest keys are
        # kept. This is a uniform sample, although the number of rows is not known in advance.
        keys = np.concatenate([self._keys, self._generator.random(len(rows))])
        # Sorted, so that the keys stay in the order of `_sample`: kept rows first, then new ones.
        chosen = np.sort(np.argsort(keys, kind="stable")[: self.capacity])
        old = chosen[chosen < len(self._keys)]
        new = chosen[chosen >= len(self._keys)] - len(self._keys)
        self._sample = np.concatenate([self._sample[old], rows[new]])
        self._keys = keys[chosen]


def collect_channel_statistics(
    model: Path,
    tensors: Mapping[str, bool],
    batches: Sequence[Batch],
    *,
    seed: int,
    advance: Advance = lambda: None,
) -> dict[str, ChannelStatistics]:
    """Run the first pass: collect statistics of tensors, see `quantized_tensors`.

    Raises:
        InputError: an activation is not finite, or was never computed.
    """
    statistics: dict[str, ChannelStatistics] = {}
    for name, rows in _trace_activations(model, tensors, batches, advance):
        if name not in statistics:
            statistics[name] = ChannelStatistics(rows.shape[1], seed)
        statistics[name].add(rows)
    for name in tensors:
        # In a branch that no input takes, or all of its rows are padding.
        if name not in statistics or statistics[name].rows == 0:
            raise InputError(
                f"no calibration input computes activation '{name}', so it has no range."
            )
        # Minimum and maximum are NaN if a value is, so that no pass over the values is needed.
        if not (
            np.isfinite(statistics[name].smallest).all()
            and np.isfinite(statistics[name].largest).all()
        ):
            raise InputError(
                f"activation '{name}' has NaN or infinite values on the calibration inputs, so it "
                "has no range.",
                do="Validate the model first: enginery validate ARTIFACT",
            )
    return statistics


def collect_histograms(
    model: Path,
    tensors: Mapping[str, bool],
    batches: Sequence[Batch],
    statistics: Mapping[str, ChannelStatistics],
    transforms: Mapping[str, ActivationQuantParams],
    *,
    advance: Advance = lambda: None,
) -> dict[str, Histogram]:
    """Run the second pass: collect a histogram of every tensor after its smoothing."""
    histograms = {
        name: Histogram.empty(largest_scaled_magnitude(statistics[name], transforms[name]))
        for name in tensors
    }
    for name, rows in _trace_activations(model, tensors, batches, advance):
        histograms[name].add(scale_and_shift(rows, transforms[name]))
    return histograms


@dataclass
class ChannelMeans:
    """The mean of each channel of a convolution's input, exact and quantized."""

    exact: NDArray[np.float64]
    quantized: NDArray[np.float64]
    count: int = 0
    """Values of each channel so far."""

    def add(self, images: Vector, params: ActivationQuantParams, scheme: Scheme) -> None:
        """Add values (batch, channels, …)."""
        axes = (0, *range(2, images.ndim))
        count = images.size // images.shape[1]
        rounded = params.fake_quantize(images, scheme)
        # The mean over all batches, moved by this one's share: no sum grows with the data.
        share = count / (self.count + count)
        self.exact += share * (images.mean(axis=axes, dtype=np.float64) - self.exact)
        self.quantized += share * (rounded.mean(axis=axes, dtype=np.float64) - self.quantized)
        self.count += count


def collect_channel_means(
    model: Path,
    layers: Sequence[Layer],
    batches: Sequence[Batch],
    ranges: Mapping[str, ActivationQuantParams],
    scheme: Scheme,
    *,
    advance: Advance = lambda: None,
) -> dict[str, ChannelMeans]:
    """Return the means of the inputs of convolutions, by activation."""
    names = list(dict.fromkeys(layer.activation for layer in layers))
    means_by_name: dict[str, ChannelMeans] = {}
    with GraphTracer(model, names, optimized=True) as tracer:
        for batch in batches:
            values = tracer(batch.load())
            # Popped, so that the activations are freed one after the other.
            for name in list(values):
                images = np.asarray(values.pop(name), dtype=np.float32)
                # One array for each mean, because both are updated in place.
                zeros = np.zeros(images.shape[1])
                means = means_by_name.setdefault(name, ChannelMeans(zeros, zeros.copy()))
                means.add(images, ranges[name], scheme)
            advance()
    return means_by_name


def scale_and_shift(rows: Vector, params: ActivationQuantParams) -> Vector:
    """Apply the multiplier and the offset to rows (n, K)."""
    if params.multiplier is not None:
        rows = rows * params.multiplier
    return rows if params.offset is None else rows + params.offset


def largest_scaled_magnitude(channels: ChannelStatistics, params: ActivationQuantParams) -> float:
    """Return the exact largest magnitude of the activation after scaling and shifting."""
    ends = np.stack([channels.smallest, channels.largest])
    return float(np.abs(scale_and_shift(ends, params)).max())


def _trace_activations(
    model: Path, tensors: Mapping[str, bool], batches: Sequence[Batch], advance: Advance
) -> Iterator[tuple[str, Vector]]:
    with GraphTracer(model, list(tensors), optimized=True) as tracer:
        for batch in batches:
            feeds = batch.load()
            values = tracer(feeds)
            for name in list(values):
                yield name, unpadded_rows(values.pop(name), feeds, by_channel=tensors[name])
            advance()


def unpadded_rows(value: NDArray[Any], feeds: Feeds, *, by_channel: bool) -> Vector:
    """Reshape an activation to rows (n, K) without padding; (n, 1) unless `by_channel`.

    The attention mask applies to activations of shape (batch, sequence, K), and to the same
    flattened to (batch * sequence, K).
    """
    value = np.asarray(value, dtype=np.float32)
    mask = feeds.get("attention_mask")
    if mask is not None and not mask.all():
        real = mask.astype(bool)
        if value.ndim >= 3 and value.shape[:2] == real.shape:
            value = value[real]
        elif value.ndim == 2 and len(value) == real.size and len(real) > 1:
            value = value[real.ravel()]
    return value.reshape(-1, value.shape[-1] if by_channel else 1)
