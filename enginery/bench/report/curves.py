"""Figures of a benchmark: latency, throughput and speedup.

A figure is a function that draws on matplotlib axes. Error bars are the confidence intervals of the
medians and ratios. An interval that is wider than its ratio has no marker, because the ratio is
unclear. A ratio without an interval, because there were too few rounds, is a hollow marker.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from enginery.core.figures import MARKERS, Draw
from enginery.reports.benchmark import (
    BenchCase,
    BenchResult,
    ImagesResult,
    Measurement,
    is_clear_ratio,
)

FIGURES = ("latency-by-batch", "latency-by-sequence", "throughput", "speedup", "images")
"""Names of all figures."""

_SHORT_AXIS = 6
"""Ratio of the ends of a log axis below which its labels have even steps."""


def draw_figures(result: BenchResult) -> dict[str, tuple[str, Draw]]:
    """Return name -> (caption, function that draws it), for the figures with data."""
    figures: dict[str, tuple[str, Draw]] = {}
    for axis, other, words in (
        ("batch", "sequence", "Median latency by batch size"),
        ("sequence", "batch", "Median latency by sequence length"),
    ):
        if len({case.sizes.get(axis) for case in result.cases} - {None}) > 1:
            at, cases = _cases_at_middle(result, other)
            figures[f"latency-by-{axis}"] = words + at, partial(_latency, result, cases, axis)
    if len({case.rows for case in result.cases}) > 1:
        at, cases = _cases_at_middle(result, "sequence")
        draw = partial(_throughput, result, cases)
        figures["throughput"] = f"Inputs per second by batch size{at}", draw
    if any(case.comparisons for case in result.cases):
        pytorch = [record.name for record in result.contenders if record.kind == "pytorch"]
        base = (pytorch or [result.contenders[0].name])[0]
        figures["speedup"] = (
            f"Speedup over {base} at every shape; bars are confidence intervals. A bar without a "
            "marker is wider than the ratio, which is unclear; a hollow marker has too few rounds "
            "for a bar",
            partial(_speedup, result, base),
        )
    if result.images and len(result.images.images) > 1:
        words = "Median time of each image by its number of pixels"
        figures["images"] = words, partial(_images, result.images)
    return figures


def middle_size(result: BenchResult, dim: str) -> int | None:
    """Return the middle one of the sizes of a dim, or None if the graph does not have it."""
    sizes = sorted({case.sizes[dim] for case in result.cases if dim in case.sizes})
    return sizes[len(sizes) // 2] if sizes else None


def _cases_at_middle(result: BenchResult, dim: str) -> tuple[str, list[BenchCase]]:
    """Return the cases at the middle size of a dim, and that size in words."""
    size = middle_size(result, dim)
    cases = [case for case in result.cases if case.sizes.get(dim) == size]
    return f" at {dim} {size}" if size else "", cases


def _points(cases: Sequence[BenchCase], name: str) -> list[tuple[BenchCase, Measurement]]:
    return [(case, m) for case in cases for m in case.measurements if m.contender == name]


def _latency(result: BenchResult, cases: Sequence[BenchCase], axis: str, axes: Any) -> None:
    for record in result.contenders:
        points = sorted(
            (case.sizes[axis], m.latency.median_ms, m.latency.interval_ms)
            for case, m in _points(cases, record.name)
        )
        if points:
            sizes, medians, _ = zip(*points, strict=True)
            lows, highs = zip(
                *(bounds or (median, median) for _, median, bounds in points), strict=True
            )
            below = [median - low for median, low in zip(medians, lows, strict=True)]
            above = [high - median for median, high in zip(medians, highs, strict=True)]
            axes.errorbar(sizes, medians, yerr=[below, above], capsize=3, label=record.name)
    _log_axes(axes, {case.sizes[axis] for case in result.cases if axis in case.sizes})
    axes.set(xlabel=axis, ylabel="latency, ms")


def _throughput(result: BenchResult, cases: Sequence[BenchCase], axes: Any) -> None:
    for record in result.contenders:
        points = sorted((case.rows, m.inputs_per_second) for case, m in _points(cases, record.name))
        if points:
            axes.plot(*zip(*points, strict=True), label=record.name)
    _log_axes(axes, {case.rows for case in result.cases})
    axes.set(xlabel="batch", ylabel="inputs/s")


def _log_axes(axes: Any, sizes: Collection[int]) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(sizes), [str(size) for size in sorted(sizes)])
    axes.xaxis.set_minor_locator(NullLocator())
    _label_plainly(axes.yaxis)


def _label_plainly(axis: Any) -> None:
    """Label a log axis with plain numbers.

    Powers of ten are too far apart on most of these axes: 1, 2 and 5 times each are labelled, and
    on a short axis even steps.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

    low, high = axis.get_view_interval()
    is_short = high / low < _SHORT_AXIS
    axis.set_major_locator(MaxNLocator(5) if is_short else LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_locator(NullLocator())


def _speedup(result: BenchResult, base: str, axes: Any) -> None:
    """Draw a row for each shape, with a marker and an interval for each backend."""
    names = [record.name for record in result.contenders if record.name != base]
    for index, name in enumerate(names):
        color, marker = f"C{index}", MARKERS[index % len(MARKERS)]
        axes.plot([], [], color + marker, label=name)
        offset = (index - (len(names) - 1) / 2) * 0.6 / max(1, len(names))
        for row, case in enumerate(result.cases):
            for comparison in case.comparisons:
                if {comparison.contender, comparison.base} != {name, base}:
                    continue
                value, interval = comparison.speedup_of(name)
                low, high = interval or (value, value)
                mark = axes.errorbar(
                    [value],
                    [row + offset],
                    xerr=[[max(0, value - low)], [max(0, high - value)]] if interval else None,
                    capsize=2,
                    color=color,
                    marker=marker,
                    linestyle="none",
                    fillstyle="full" if interval else "none",
                )
                if interval and not is_clear_ratio(value, interval):
                    mark.lines[0].set_visible(False)  # the interval alone: the ratio is unclear
    axes.axvline(1, color="0.5", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(result.cases)), [case.shape for case in result.cases])
    axes.invert_yaxis()
    axes.set(xlabel=f"times as fast as {base}", ylabel=result.cases[0].dims)
    # On a log axis, half as fast is as far from 1 as twice as fast.
    axes.set_xscale("log")
    _label_plainly(axes.xaxis)


def _images(images: ImagesResult, axes: Any) -> None:
    height = 2 if images.layout == "first" else 1
    for name in images.totals:
        points = sorted(
            (image.shape[height] * image.shape[height + 1] / 1e6, image.median_ms[name])
            for image in images.images
        )
        axes.plot(*zip(*points, strict=True), linestyle="none", label=name)
    axes.set(xlabel="input, megapixels", ylabel="time, ms")
    axes.set_ylim(bottom=0)


def height_of(name: str, result: BenchResult) -> float:
    """Return the height of a figure in inches; the speedup figure grows with the shapes."""
    return max(2.6, 0.42 * len(result.cases) + 1.1) if name == "speedup" else 3.0
