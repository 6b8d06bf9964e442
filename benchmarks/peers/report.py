"""Write what was measured: a Markdown table, the raw numbers as JSON, and a figure as SVG."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.contenders import Library, Server

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


def draw(figures: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw the throughput of each contender as bars, from the least to the most round.

    Args:
        figures: title of a panel with its unit -> contender -> throughput by round.
        path: the SVG file.
    """
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    heights = [len(panel) for panel in figures.values()]
    figure, panels = plt.subplots(
        len(figures),
        figsize=(8, 0.8 * len(figures) + 0.35 * sum(heights)),
        height_ratios=heights,
        squeeze=False,
    )
    for axes, (title, panel) in zip(panels[:, 0], figures.items(), strict=True):
        names = list(reversed(panel))
        middle = [statistics.median(panel[name]) for name in names]
        low = [m - min(panel[name]) for m, name in zip(middle, names, strict=True)]
        high = [max(panel[name]) - m for m, name in zip(middle, names, strict=True)]
        colors = ["tab:blue" if "enginery" in name else "tab:gray" for name in names]
        bars = axes.barh(names, middle, xerr=[low, high], color=colors, error_kw={"capsize": 2})
        axes.bar_label(bars, [f"{value:,.0f}" for value in middle], label_type="center", color="w")
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
