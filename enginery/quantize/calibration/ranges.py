"""Choose the quantized range of an activation from a histogram of its magnitudes.

>>> from enginery.passes.qdq.scheme import INT8
>>> histogram = Histogram.empty(largest=4.0)
>>> histogram.add(np.float32([0.1, 0.2, 3.9]))
>>> choose_range(histogram, "minmax", lambda limit: ActivationQuantParams(limit / 127), INT8)
4.0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import InputError
from enginery.passes.qdq.scales import ActivationQuantParams
from enginery.passes.qdq.scheme import Scheme
from enginery.quantize.config import Method

BINS = 2048
_MOMENTUM = 0.9
"""Weight of the earlier batches in the moving average; roughly the last ten batches count."""


@dataclass
class Histogram:
    """Histogram of one activation's magnitudes, in `BINS` equal bins from 0 to `largest`."""

    largest: float
    """Upper edge. It is known from the first pass, so that the bins never change."""
    counts: NDArray[np.int64]
    moving_average: float = 0.0
    """Moving average of the largest magnitude of each batch."""
    batches: int = 0

    @classmethod
    def empty(cls, largest: float) -> Histogram:
        """Make an empty histogram.

        Raises:
            InputError: `largest` is not finite.
        """
        if not np.isfinite(largest):
            raise InputError(
                "an activation has NaN or infinite values on the calibration inputs, so it has no "
                "range.",
                do="Validate the model first: enginery validate ARTIFACT",
            )
        # Bins need a width, also for an activation of zeros.
        return cls(max(float(largest), 1e-12), np.zeros(BINS, dtype=np.int64))

    def add(self, values: NDArray[np.float32]) -> None:
        """Count the magnitudes of one batch; values beyond `largest` go into the last bin."""
        if values.size == 0:
            return
        magnitudes = np.abs(values).ravel()
        top = float(magnitudes.max())
        index = (magnitudes * np.float32(BINS / self.largest)).astype(np.int32)
        # The largest magnitude itself is the upper edge of the last bin.
        np.minimum(index, BINS - 1, out=index)
        self.counts += np.bincount(index, minlength=BINS)
        # The first batch has no average before it.
        weight = _MOMENTUM if self.batches else 0.0
        self.moving_average = weight * self.moving_average + (1 - weight) * top
        self.batches += 1

    @property
    def centres(self) -> NDArray[np.float64]:
        return np.asarray((np.arange(BINS) + 0.5) * (self.largest / BINS), dtype=np.float64)


def choose_range(
    histogram: Histogram,
    method: Method,
    params_of: Callable[[float], ActivationQuantParams],
    scheme: Scheme,
    *,
    percentile: float = 99.999,
) -> float:
    """Return the magnitude beyond which the activation is clipped (TensorRT's dynamic range).

    Args:
        histogram: magnitudes of the activation.
        method: `minmax` is the largest magnitude; `moving-average`, the moving average of the
            batches' largest; `percentile`, the magnitude that `percentile` percent of the values
            do not exceed; `mse`, the one with the smallest squared rounding and clipping error;
            `entropy`, the one with the smallest Kullback-Leibler divergence between the original
            and the quantized distribution (Migacz, "8-bit inference with TensorRT", 2017).
        params_of: returns the parameters with which the activation is quantized if it is clipped at
            a magnitude.
        scheme: the quantized type.
        percentile: for the method `percentile`, in percent.
    """
    if method == "minmax" or not histogram.counts.any():
        return histogram.largest
    if method == "moving-average":
        return histogram.moving_average
    if method == "percentile":
        shares = np.cumsum(histogram.counts) / histogram.counts.sum()
        # The upper edge of the bin in which the share is reached.
        last = int(np.searchsorted(shares, percentile / 100))
        return float((min(last, BINS - 1) + 1) * histogram.largest / BINS)
    if method == "mse":
        return _minimize_squared_error(histogram, params_of, scheme)
    return _minimize_divergence(histogram, levels=int(scheme.largest) + 1)


def _minimize_squared_error(
    histogram: Histogram, params_of: Callable[[float], ActivationQuantParams], scheme: Scheme
) -> float:
    # (2, BINS): magnitudes have lost their signs, and a range for uint8 need not be symmetric.
    signed = np.asarray([histogram.centres, -histogram.centres], dtype=np.float32)
    counts = histogram.counts.astype(np.float64)
    # Steps of 1 % of the largest magnitude.
    candidates = histogram.largest * np.linspace(0.02, 1.0, 99)

    def error(limit: float) -> float:
        errors = params_of(limit).fake_quantize(signed, scheme) - signed
        # A sign that the activation does not have may be outside the range: ignore it.
        return float(counts @ np.square(errors).min(axis=0))

    return float(min(candidates, key=error))


def _minimize_divergence(histogram: Histogram, *, levels: int) -> float:
    """Return the clipping threshold of the entropy method.

    For each candidate threshold, the bins below it are merged into as many groups as INT8 has
    levels. Each group's count is then spread evenly over its non-empty bins: that is the
    distribution after quantization. The threshold whose distribution diverges least from the
    original, with clipped values counted in the last bin, wins.
    """
    counts = histogram.counts.astype(np.float64)
    best, best_divergence = BINS, np.inf
    # A step of 16 bins is one level of INT8 over the whole range.
    for bins in range(levels, BINS + 1, 16):
        counted = counts[:bins].copy()
        target = counted.copy()
        target[-1] += counts[bins:].sum()
        merged = np.arange(bins) * levels // bins
        # Bins that are empty in the original get nothing of their group's count.
        filled = (counted > 0).astype(np.float64)
        totals = np.bincount(merged, counted, levels)
        members = np.maximum(np.bincount(merged, filled, levels), 1.0)
        spread = (totals / members)[merged] * filled
        divergence = _divergence(target, spread)
        if divergence < best_divergence:
            best, best_divergence = bins, divergence
    return best * histogram.largest / BINS


def _divergence(target: NDArray[np.float64], model: NDArray[np.float64]) -> float:
    p, q = target / target.sum(), model / max(model.sum(), 1e-300)
    present = p > 0
    # Clipped values may fall into a bin that is empty in the model: avoid dividing by zero.
    return float(np.sum(p[present] * np.log(p[present] / np.maximum(q[present], 1e-12))))
