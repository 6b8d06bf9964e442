"""Report of a build: engines, unsupported graphs and profiles; and the figure of token lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from enginery.core.artifact.engine import Engine
from enginery.core.figures import save_figure
from enginery.engine.build import GraphCoverage
from enginery.engine.profiles.buckets import LengthBuckets
from enginery.engine.requests import RequestedEngines
from enginery.reports.engines import BuildReport, built_engine
from enginery.runtime.tensorrt.options import RTX, RTX_NOT_LISTED

_FIRST_PROFILE = (
    "ONNX Runtime uses only the first profile of an engine; without --no-engine-per-profile each "
    "profile gets its own engine"
)
_ONLY_CLASSIC = (
    "engines of TensorRT for RTX run in load_model, predict and `enginery serve`; Triton "
    "loads only those of classic TensorRT: on the server's GPU, build with "
    "--flavor tensorrt --capability current and the same profiles"
)
_NOT_LISTED = (
    f"NVIDIA's support matrix of TensorRT for RTX does not list compute capability "
    f"{RTX_NOT_LISTED} (A100, A30): on such a GPU use --flavor tensorrt, or the provider cuda"
)
_MAX_BARS = 60
_HEADROOM = 1.8
"""Height of the axis relative to the highest bar; leaves space for the labels."""


def make_report(
    engines: Sequence[tuple[Engine, bool]],
    earlier: Sequence[Engine],
    left_out: Sequence[GraphCoverage],
    requested: RequestedEngines,
    fields: Mapping[str, str],
) -> BuildReport:
    """Return the report.

    Args:
        engines: the requested engines, each with True if it was built now.
        earlier: the artifact's other engines, from earlier builds.
        left_out: graphs without an engine, with the reasons.
        requested: the requests.
        fields: fields of the stage's fingerprint.
    """
    parts = [_describe_count(engines), *(_describe_engine(engine) for engine, _ in engines)]
    parts += [f"{graph.graph} has no engine: {graph.refused[0]}" for graph in left_out]
    profiles = {request.graph.file: request.checked for request in requested.requests}
    notes = [note for checked in profiles.values() for note in (*checked.warnings, *checked.notes)]
    if any(len(engine.record.profiles) > 1 for engine, _ in engines):
        notes.append(_FIRST_PROFILE)
    for_rtx = [engine.record for engine, _ in engines if engine.record.flavor == RTX.name]
    if for_rtx:
        notes.append(_ONLY_CLASSIC)
    if any(RTX_NOT_LISTED in record.capabilities for record in for_rtx):
        notes.append(_NOT_LISTED)
    if requested.buckets:
        notes.append(f"profiles from data: {requested.buckets}")
    notes += [
        f"{graph.graph} stays ONNX: ONNX Runtime runs TensorRT on the {graph.partitions} "
        "supported subgraphs, and builds their engines when it loads the graph"
        for graph in left_out
    ]
    return BuildReport(
        summary="; ".join(parts),
        notes=[*dict.fromkeys(notes)],
        engines=[built_engine(engine, from_store=not is_new) for engine, is_new in engines],
        earlier_engines=[engine.name for engine in earlier],
        left_out=[asdict(graph) for graph in left_out],
        profiles={graph: asdict(checked) for graph, checked in profiles.items()},
        lengths=asdict(requested.buckets) if requested.buckets else None,
        fields=dict(fields),
    )


def _describe_count(engines: Sequence[tuple[Engine, bool]]) -> str:
    cached = sum(not built for _, built in engines)
    from_store = f", {cached} of them from the store" if cached else ""
    return f"{len(engines)} engine{'' if len(engines) == 1 else 's'}{from_store}"


def _describe_engine(engine: Engine) -> str:
    record = engine.record
    targets = ", ".join(record.capabilities) or "every GPU from 8.0 on"
    return (
        f"{record.graph} for {targets}: {sum(record.layers.values())} layers, "
        f"{record.fused_attentions} fused attentions, plan of {record.plan_size_bytes} bytes"
    )


def save_length_figure(path: Path, buckets: LengthBuckets) -> bool:
    """Plot the histogram of lengths and the buckets as SVG.

    Each bucket is a span, gray and white in turn, labeled with its share of padding.

    Returns:
        False if matplotlib is not installed; no file is written then.
    """
    return save_figure(path, lambda axes: _draw(axes, buckets))


def _draw(axes: Any, buckets: LengthBuckets) -> None:
    longest = buckets.buckets[-1].longest
    # A power of two, so that bucket ends, which are multiples of eight, do not split a bar.
    width = 1 << max(0, (longest - 1) // _MAX_BARS).bit_length()
    lengths, rows = np.array(buckets.lengths), np.array(buckets.counts)
    # Like a bucket, a bar includes its right edge.
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
            rotation=90,
            ha="center",
            va="top",
            fontsize=8,
        )
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
