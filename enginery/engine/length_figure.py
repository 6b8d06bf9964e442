"""The figure of token lengths and their buckets, for a report.

    >>> save_length_figure(Path("reports/lengths.svg"), buckets)
    True

Bars are rows by length; each bucket is a span, gray and white in turn, with the share of padding in
it: nothing depends on color.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from enginery.core.figures import save_figure
from enginery.engine.buckets import Buckets

_BARS = 60
"""At most, over all lengths."""
_HEADROOM = 1.8
"""Of the axis above the highest bar, for the labels."""


def save_length_figure(path: Path, buckets: Buckets) -> bool:
    """Draws the histogram and the buckets as SVG; False, and no file, without matplotlib."""
    return save_figure(path, lambda axes: _draw(axes, buckets))


def _draw(axes: Any, buckets: Buckets) -> None:
    longest = buckets.buckets[-1].longest
    # A power of two, so that the boundaries of buckets, multiples of eight, part no bar.
    width = 1 << max(0, (longest - 1) // _BARS).bit_length()
    lengths, rows = np.array(buckets.lengths), np.array(buckets.counts)
    # A bar holds the lengths up to its right edge, as a bucket does.
    bars = np.bincount(np.maximum(lengths - 1, 0) // width, weights=rows)
    for index, bucket in enumerate(buckets.buckets):
        axes.axvspan(
            bucket.shortest - 1, bucket.longest, color="0.88" if index % 2 == 0 else "1.0", zorder=0
        )
        axes.axvline(bucket.longest, color="0.4", linewidth=0.8, linestyle="--", zorder=1)
        axes.annotate(
            f"to {bucket.longest}: {bucket.padding:.0%} padding",
            ((bucket.shortest - 1 + bucket.longest) / 2, 0.98),
            xycoords=("data", "axes fraction"),
            rotation=90, ha="center", va="top", fontsize=8,
        )  # fmt: skip
    axes.bar(np.arange(len(bars)) * width, bars, width, align="edge", color="0.25", zorder=2)
    axes.set(
        xlim=(0, max(longest, len(bars) * width)),
        ylim=(0, bars.max() * _HEADROOM),
        xlabel="length, tokens",
        ylabel="rows",
    )
    axes.set_title(
        f"{buckets.padding:.0%} padding with {len(buckets.buckets)} "
        f"bucket{'s' * (len(buckets.buckets) > 1)}, "
        f"{1 - buckets.tokens / buckets.padded_by_one:.0%} with one",
        fontsize=10,
    )
    axes.grid(visible=False)
