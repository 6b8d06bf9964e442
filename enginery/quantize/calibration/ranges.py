"""Choose the quantized range of an activation from a histogram of its magnitudes.

>>> from enginery.passes.qdq.scheme import INT8
>>> histogram = Histogram.empty(largest=4.0)
>>> histogram.add(np.float32([0.1, 0.2, 3.9]))
>>> choose_range(histogram, "minmax", INT8)
4.0
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import InputError
from enginery.passes.qdq.scheme import Scheme
from enginery.quantize.config import Method

BINS = 2048


@dataclass
class Histogram:
    """Histogram of one activation's magnitudes, in `BINS` equal bins from 0 to `largest`."""

    largest: float
    """Upper edge. It is known from the first pass, so that the bins never change."""
    counts: NDArray[np.int64]

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
        index = (magnitudes * np.float32(BINS / self.largest)).astype(np.int32)
        # The largest magnitude itself is the upper edge of the last bin.
        np.minimum(index, BINS - 1, out=index)
        self.counts += np.bincount(index, minlength=BINS)


def choose_range(
    histogram: Histogram, method: Method, scheme: Scheme, *, percentile: float = 99.999
) -> float:
    """Return the magnitude beyond which the activation is clipped (TensorRT's dynamic range).

    Args:
        histogram: magnitudes of the activation.
        method: `minmax` is the largest magnitude; `percentile`, the magnitude that `percentile`
            percent of the values do not exceed; `entropy`, the one with the smallest
            Kullback-Leibler divergence between the original and the quantized distribution (Migacz,
            "8-bit inference with TensorRT", 2017).
        scheme: the quantized type.
        percentile: for the method `percentile`, in percent.
    """
    if method == "minmax" or not histogram.counts.any():
        return histogram.largest
    if method == "percentile":
        shares = np.cumsum(histogram.counts) / histogram.counts.sum()
        # The upper edge of the bin in which the share is reached.
        last = int(np.searchsorted(shares, percentile / 100))
        return float((min(last, BINS - 1) + 1) * histogram.largest / BINS)
    return _minimize_divergence(histogram, levels=int(scheme.largest) + 1)


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
