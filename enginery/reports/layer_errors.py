"""The figure `reports/layer-errors.svg`: how far each layer's output is from FP32's.

`optimize` and `quantize` draw it, and the report page shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from enginery.core.figures import save_figure

FILE = "layer-errors.svg"
_NAMED = 3
"""Layers that are named, those with the largest errors."""


def save_layer_errors(folder: Path, errors: Mapping[str, float], *, meaning: str) -> bool:
    """Draw the relative error of each layer; return False without layers or matplotlib.

    Args:
        folder: the artifact's `reports/`.
        errors: layer, in graph order -> error.
        meaning: what an error contains, the title of the axis.
    """
    drawn = {name: error for name, error in errors.items() if error > 0}  # the axis is logarithmic
    return bool(drawn) and save_figure(folder / FILE, partial(_draw, drawn, meaning))


def _draw(errors: Mapping[str, float], meaning: str, axes: Any) -> None:
    positions = {name: position for position, name in enumerate(errors, start=1)}
    axes.plot([*positions.values()], [*errors.values()], linestyle="none", markersize=4)
    for name in sorted(errors, key=errors.__getitem__, reverse=True)[:_NAMED]:
        # A name on the side where there is space for it.
        on_left = positions[name] > len(errors) / 2
        axes.annotate(
            name if len(name) <= 48 else f"…{name[-47:]}",
            (positions[name], errors[name]),
            xytext=(-6 if on_left else 6, 0),
            textcoords="offset points",
            ha="right" if on_left else "left",
            va="center",
            fontsize=7,
        )
    axes.set_yscale("log")
    axes.set(xlabel="layer, in the order of the graph", ylabel=meaning)
