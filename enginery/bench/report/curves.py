"""Figures of a benchmark: latency, throughput and speedup.

A figure is a function that draws on matplotlib axes. Error bars are the confidence intervals of the
medians and ratios. An interval that is wider than its ratio has no marker, because the ratio is
unclear. A ratio without an interval, because there were too few rounds, is a hollow marker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from enginery.core.figures import MARKERS, Draw
from enginery.reports.benchmark import BenchCase, BenchResult, Measurement, is_clear_ratio

Point = tuple[BenchCase, Measurement]

FIGURES = ("latency-by-batch", "latency-by-sequence", "throughput", "speedup", "images")
"""Names of all figures."""

_AXES = ("batch", "sequence")


def draw_figures(result: BenchResult) -> dict[str, Draw]:
    """Return name -> function that draws the figure, for the figures with data."""
    figures: dict[str, Draw] = {}
    for axis, other in (_AXES, _AXES[::-1]):
        sizes = {case.sizes.get(axis) for case in result.cases} - {None}
        if len(sizes) > 1:
            fixed = middle_size(result, other)
            figures[f"latency-by-{axis}"] = partial(_latency, result, axis, other, fixed)
    if len({case.rows for case in result.cases}) > 1:
        fixed = middle_size(result, "sequence")
        figures["throughput"] = partial(_throughput, result, fixed)
    if any(case.comparisons for case in result.cases):
        figures["speedup"] = partial(_speedup, result, reference_of(result))
    if result.images and len(result.images.images) > 1:
        figures["images"] = partial(_images, result)
    return figures


def reference_of(result: BenchResult) -> str:
    """Return the backend that ratios are relative to: PyTorch if it ran, otherwise the first."""
    names = [record.name for record in result.contenders if record.kind == "pytorch"]
    return (names or [result.contenders[0].name])[0]


def caption(name: str, result: BenchResult) -> str:
    """Return the caption of a figure, which is also its text alternative."""
    batch, sequence = middle_size(result, "batch"), middle_size(result, "sequence")
    at = {
        "latency-by-batch": f" at sequence {sequence}" if sequence else "",
        "latency-by-sequence": f" at batch {batch}" if batch else "",
        "throughput": f" at sequence {sequence}" if sequence else "",
    }.get(name, "")
    words = {
        "latency-by-batch": "Median latency by batch size",
        "latency-by-sequence": "Median latency by sequence length",
        "throughput": "Inputs per second by batch size",
        "speedup": f"Speedup over {reference_of(result)} at every shape",
        "images": "Median time of each image by its number of pixels",
    }
    if name == "speedup":
        return (
            f"{words[name]}; bars are confidence intervals. A bar without a marker is wider than "
            "the ratio, which is unclear; a hollow marker has too few rounds for a bar"
        )
    return f"{words[name]}{at}"


def middle_size(result: BenchResult, dim: str) -> int | None:
    """Return the middle one of the sizes of a dim, or None if the graph does not have it."""
    sizes = sorted({case.sizes[dim] for case in result.cases if dim in case.sizes})
    return sizes[len(sizes) // 2] if sizes else None


def _points(result: BenchResult, name: str, fixed: Mapping[str, int | None]) -> list[Point]:
    return [
        (case, measurement)
        for case in result.cases
        if all(case.sizes.get(dim) == size for dim, size in fixed.items())
        for measurement in case.measurements
        if measurement.contender == name
    ]


def _latency(result: BenchResult, axis: str, other: str, fixed: int | None, axes: Any) -> None:
    for record in result.contenders:
        points = sorted(
            _points(result, record.name, {other: fixed}), key=lambda point: point[0].sizes[axis]
        )
        if not points:
            continue
        values = [measurement.latency.median_ms for _, measurement in points]
        spans = [
            measurement.latency.interval_ms or (value, value)
            for (_, measurement), value in zip(points, values, strict=True)
        ]
        bars = [
            [value - low for value, (low, _) in zip(values, spans, strict=True)],
            [high - value for value, (_, high) in zip(values, spans, strict=True)],
        ]
        axes.errorbar(
            [case.sizes[axis] for case, _ in points],
            values,
            yerr=bars,
            capsize=3,
            label=record.name,
        )
    _log_axes(axes, sorted({case.sizes[axis] for case in result.cases if axis in case.sizes}))
    axes.set(xlabel=axis, ylabel="latency, ms")


def _throughput(result: BenchResult, fixed: int | None, axes: Any) -> None:
    for record in result.contenders:
        points = sorted(
            _points(result, record.name, {"sequence": fixed}), key=lambda point: point[0].rows
        )
        axes.plot(
            [case.rows for case, _ in points],
            [measurement.inputs_per_second for _, measurement in points],
            label=record.name,
        )
    _log_axes(axes, sorted({case.rows for case in result.cases}))
    axes.set(xlabel="batch", ylabel="inputs/s")


def _log_axes(axes: Any, sizes: Sequence[int]) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    _label_decades(axes.yaxis, *axes.get_ylim())


def _label_decades(axis: Any, low: float, high: float) -> None:
    """Label a log axis with plain numbers.

    A range below a factor of 30 has at most two powers of ten, and a wider one may have a single
    one, so minor ticks are labelled too: all below a factor of 4, otherwise those at 2 and 5 times
    each power.
    """
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    powers = math.floor(math.log10(high)) - math.ceil(math.log10(low)) + 1
    if high / low < 30 or powers < 2:
        every = high / low < 4
        axis.set_minor_formatter(
            FuncFormatter(lambda value, _: f"{value:g}" if every else _label_2_and_5(value))
        )
        axis.set_tick_params(which="minor", labelsize=8)
    else:
        axis.set_minor_formatter(NullFormatter())


def _label_2_and_5(value: float) -> str:
    text = f"{value:.1e}"
    return f"{value:g}" if text[0] in "25" and text[2] == "0" else ""


def _speedup(result: BenchResult, reference: str, axes: Any) -> None:
    """Draw a row for each shape, with a marker and an interval for each backend."""
    names = [record.name for record in result.contenders if record.name != reference]
    for index, name in enumerate(names):
        axes.plot([], [], f"C{index}{MARKERS[index % len(MARKERS)]}", label=name)
    labels = []
    for row, case in enumerate(result.cases):
        labels.append(case.shape)
        for index, name in enumerate(names):
            comparison = next(
                (c for c in case.comparisons if {c.contender, c.base} == {name, reference}), None
            )
            if comparison is None:
                continue
            value, interval = comparison.speedup_of(name)
            low, high = interval or (value, value)
            offset = (index - (len(names) - 1) / 2) * 0.6 / max(1, len(names))
            style = {
                "color": f"C{index}",
                "marker": MARKERS[index % len(MARKERS)],
                "linestyle": "none",
                "fillstyle": "full" if interval else "none",
            }
            mark = axes.errorbar(
                [value],
                [row + offset],
                xerr=[[max(0, value - low)], [max(0, high - value)]] if interval else None,
                capsize=2,
                **style,
            )
            if interval and not is_clear_ratio(value, interval):
                mark.lines[0].set_visible(False)  # the interval alone: the ratio is unclear
    axes.axvline(1, color="0.5", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set(xlabel=f"times as fast as {reference}", ylabel=result.cases[0].dims)
    # On a log axis, half as fast is as far from 1 as twice as fast.
    axes.set_xscale("log")
    _label_decades(axes.xaxis, *axes.get_xlim())


def _images(result: BenchResult, axes: Any) -> None:
    if result.images is None:
        return
    height = 2 if result.images.layout == "first" else 1
    for name in result.images.totals:
        points = sorted(
            (image.shape[height] * image.shape[height + 1] / 1e6, image.median_ms[name])
            for image in result.images.images
        )
        axes.plot(*zip(*points, strict=True), linestyle="none", label=name)
    axes.set(xlabel="input, megapixels", ylabel="time, ms")
    axes.set_ylim(bottom=0)


def height_of(name: str, result: BenchResult) -> float:
    """Return the height of a figure in inches; the speedup figure grows with the shapes."""
    return max(2.6, 0.42 * len(result.cases) + 1.1) if name == "speedup" else 3.0
