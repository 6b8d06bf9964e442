"""What a build made, what it left out, and what its profiles cover, as numbers.

>>> report = BuildReport.of(engines, earlier, left_out, requested, fields)
>>> report.summary
'2 engines, 1 of them from the store; model.onnx for 8.9: 46 layers, 2 fused attentions, …'
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from enginery.core.engine import Engine
from enginery.core.figures import save_figure
from enginery.engine.buckets import Buckets
from enginery.engine.build import GraphCoverage
from enginery.engine.key import Requested

NOT_RUN = "no engine of this package has been run on a GPU yet"
_FIRST_PROFILE = (
    "ONNX Runtime reaches the first profile of an engine alone; without --no-engine-per-profile "
    "each has an engine of its own"
)
_BARS = 60
"""At most, over all lengths."""
_HEADROOM = 1.8
"""Of the axis above the highest bar, for the labels."""


@dataclass(frozen=True)
class BuildReport:
    """The content of `reports/engines.json`."""

    summary: str
    notes: tuple[str, ...]
    """What a person should know, each once."""
    document: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        engines: Sequence[tuple[Engine, bool]],
        earlier: Sequence[Engine],
        left_out: Sequence[GraphCoverage],
        requested: Requested,
        fields: Mapping[str, str],
    ) -> BuildReport:
        """Puts together what the stage found.

        Args:
            engines: those that were asked for, and whether each was built now.
            earlier: the artifact's other engines, of builds before this one.
            left_out: graphs that have no engine, with the reasons.
            requested: what was asked for.
            fields: of the stage's fingerprint.
        """
        said = [_built(engines), *(_words(engine) for engine, _ in engines)]
        said += [f"{graph.graph} has no engine: {graph.refused[0]}" for graph in left_out]
        summary = "; ".join(said)
        profiles = {request.graph.file: request.checked for request in requested.requests}
        notes = [note for found in profiles.values() for note in (*found.warnings, *found.notes)]
        if any(len(engine.record.profiles) > 1 for engine, _ in engines):
            notes.append(_FIRST_PROFILE)
        if requested.buckets:
            notes.append(f"profiles from data: {requested.buckets}")
        notes += [
            f"{graph.graph} stays ONNX: ONNX Runtime would run TensorRT on the {graph.partitions} "
            "parts that it takes, building them as it loads"
            for graph in left_out
        ]
        notes = [*dict.fromkeys(notes), NOT_RUN]
        document: dict[str, Any] = {
            "summary": summary,
            "engines": [
                {"directory": e.name, "from_store": not built, **e.record.model_dump(mode="json")}
                for e, built in engines
            ],
            "earlier_engines": [engine.name for engine in earlier],
            "left_out": [asdict(graph) for graph in left_out],
            "profiles": {graph: asdict(found) for graph, found in profiles.items()},
            "lengths": asdict(requested.buckets) if requested.buckets else None,
            "notes": notes,
            "fields": dict(fields),
        }
        return cls(summary, tuple(notes), document)

    def to_json(self) -> bytes:
        """For programs."""
        return json.dumps(self.document, indent=2, ensure_ascii=False).encode() + b"\n"


def _built(engines: Sequence[tuple[Engine, bool]]) -> str:
    cached = sum(not built for _, built in engines)
    from_store = f", {cached} of them from the store" if cached else ""
    return f"{len(engines)} engine{'' if len(engines) == 1 else 's'}{from_store}"


def _words(engine: Engine) -> str:
    record = engine.record
    targets = ", ".join(record.capabilities) or "every GPU from 8.0 on"
    return (
        f"{record.graph} for {targets}: {sum(record.layers.values())} layers, "
        f"{record.fused_attentions} fused attentions, plan of {record.plan_size_bytes} bytes"
    )


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
