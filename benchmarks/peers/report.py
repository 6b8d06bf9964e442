"""Write what was measured: a Markdown table, the raw numbers as JSON, and a figure as SVG."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.contenders import Library, Server
from enginery.core.figures import COLORS, save_figure

LEAST_MEAN_COSINE = 0.99
"""Contenders below it are marked: their embeddings are not those of the model."""

Rounds = list[dict[str, dict[str, Any]]]
"""For each round, the figures of each contender by name."""


def compare(vectors: NDArray[Any], reference: NDArray[Any]) -> dict[str, float]:
    """Return the mean and the least cosine between vectors and the reference's."""
    cosines = (_normal(vectors) * _normal(reference)).sum(axis=1)
    return {"mean_cosine": float(cosines.mean()), "least_cosine": float(cosines.min())}


def _normal(vectors: NDArray[Any]) -> NDArray[Any]:
    found: NDArray[Any] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return found


def spread(values: list[float], digits: int = 0) -> str:
    """Return `median (least–most)`, or the value if there is one."""
    middle = f"{statistics.median(values):,.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"


def _ratios(rounds: Rounds, name: str, baseline: str, pick: Any) -> list[float]:
    """Return a contender's figure divided by the baseline's, by round."""
    return [pick(r[name]) / pick(r[baseline]) for r in rounds if baseline in r]


def library_table(rounds: Rounds, libraries: tuple[Library, ...], baseline: str) -> list[str]:
    """Return the lines of the table of libraries, for those that were measured."""
    lines = [
        f"| library | computes in | rows/s | to {baseline}, by round | peak MiB | first answer, s "
        "| mean cosine | least |",
        "|-|-|-:|-:|-:|-:|-:|-:|",
    ]
    for library in libraries:
        if library.name not in rounds[0]:
            continue
        found = [r[library.name] for r in rounds]
        ratios = _ratios(rounds, library.name, baseline, lambda figures: figures["rate"])
        lines.append(
            f"| {library.name} | {library.computes_in} | {spread([f['rate'] for f in found])} "
            f"| {spread(ratios, 2) if ratios else '–'} "
            f"| {spread([f['memory_mib'] for f in found])} "
            f"| {spread([f['boot'] for f in found], 2)} | {_cosines(found)} |"
        )
    return lines


def server_table(
    rounds: Rounds, servers: tuple[Server, ...], connections: list[int], baseline: str
) -> list[str]:
    """Return the lines of the table of servers, for those that were measured."""
    heads = " | ".join(f"{count} conn., req/s" for count in connections)
    most = str(max(connections))
    lines = [
        f"| server | computes in | {heads} | to {baseline} at {most}, by round "
        f"| p50 / p99, ms at {most} | peak MiB | first answer, s | mean cosine | least |",
        f"|-|-|{'-:|' * len(connections)}-:|-:|-:|-:|-:|-:|",
    ]
    for server in servers:
        if server.name not in rounds[0]:
            continue
        found = [r[server.name] for r in rounds]
        rates = " | ".join(
            spread([f["closed"][str(count)]["rate"] for f in found]) for count in connections
        )
        ratios = _ratios(rounds, server.name, baseline, lambda f: f["closed"][most]["rate"])
        tail = " / ".join(
            f"{statistics.median(f['closed'][most][name] for f in found):.1f}"
            for name in ("p50", "p99")
        )
        failed = sum(
            f["closed"][c]["refused"] + f["closed"][c]["broken"] for f in found for c in f["closed"]
        )
        lines.append(
            f"| {server.name}{f' ({failed:.0f} requests failed)' if failed else ''} "
            f"| {server.computes_in} | {rates} | {spread(ratios, 2) if ratios else '–'} | {tail} "
            f"| {spread([f['memory_mib'] for f in found])} "
            f"| {spread([f['boot'] for f in found], 2)} | {_cosines(found)} |"
        )
    return lines


def _cosines(found: list[dict[str, Any]]) -> str:
    mean = min(f["mean_cosine"] for f in found)
    mark = " **below 0.99**" if mean < LEAST_MEAN_COSINE else ""
    return f"{mean:.5f}{mark} | {min(f['least_cosine'] for f in found):.4f}"


def draw(title: str, rates: dict[str, list[float]], path: Path) -> None:
    """Draw the median throughput of each contender as a bar, with the least and the most round.

    Args:
        title: what is measured, with its unit.
        rates: contender -> throughput by round.
        path: the SVG file.
    """
    names = list(reversed(rates))
    rounds = [rates[name] for name in names]
    middle = [statistics.median(each) for each in rounds]
    low = [m - min(each) for m, each in zip(middle, rounds, strict=True)]
    high = [max(each) - m for m, each in zip(middle, rounds, strict=True)]
    colors = [COLORS[0] if "enginery" in name else "gray" for name in names]

    def draw_bars(axes: Any) -> None:
        bars = axes.barh(names, middle, xerr=[low, high], color=colors, error_kw={"capsize": 2})
        axes.bar_label(bars, [f"{value:,.0f}" for value in middle], label_type="center", color="w")
        axes.set_title(title, fontsize=10)
        axes.grid(visible=False, axis="y")

    save_figure(path, draw_bars, width=8, height=0.8 + 0.35 * len(names))
