"""Draw the figures of reports as self-contained SVG files.

    def draw(axes):
        axes.plot([16, 128, 512], [0.4, 0.9, 3.1])
        axes.set(xlabel="sequence", ylabel="latency, ms")

    save_figure(Path("reports/latency.svg"), draw)    # True

The same numbers give the same bytes. Matplotlib is not part of the bare install: without it no
figure is drawn, and the report's JSON has the numbers. Text is written as text, which is smaller
than paths. Curves differ in their markers as well as in color. The legend stands above the axes,
where it covers no data.
"""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

Draw = Callable[[Any], None]
"""A function that draws on a `matplotlib.axes.Axes`."""

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colors that people with color blindness can tell apart. Source: Okabe and Ito, 2008."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_LEGEND_POINTS = 9.0
_LEGEND_LETTER, _LEGEND_LINE = 0.6 * _LEGEND_POINTS / 72, 1.6 * _LEGEND_POINTS / 72
"""Width of a letter and height of a line, in inches."""
_LEGEND_MARK = 0.6
"""Width of a marker with its space, in inches."""

NOT_DRAWN = "no figures were drawn: matplotlib is not installed (pip install 'enginery[report]')"

_STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.family": "sans-serif",
    "font.size": 10.0,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "enginery",  # otherwise ids are random and no two files are equal
}


def can_draw() -> bool:
    """Return True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def figure_svg(draw: Draw, *, width: float = 6.4, height: float = 3.6) -> str:
    """Return one figure as an SVG document.

    Args:
        draw: function that draws on the given axes, and labels what the legend has to name.
        width: in inches, of 72 points each.
        height: in inches, without the legend.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; see `can_draw`.
    """
    import matplotlib as mpl
    from cycler import cycler
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    cycle = cycler(color=COLORS) + cycler(marker=MARKERS)
    # Without pyplot: it keeps global state and may need a window system.
    with mpl.rc_context({**_STYLE, "axes.prop_cycle": cycle}):
        figure = Figure(figsize=(width, height))
        axes = figure.subplots()
        draw(axes)
        _add_legend(figure, axes)
        text = io.StringIO()
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _add_legend(figure: Any, axes: Any) -> None:
    """Put a legend above the axes; the figure grows by its lines."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    width, height = figure.get_size_inches()
    columns = min(len(labels), int(width / (_LEGEND_MARK + _LEGEND_LETTER * max(map(len, labels)))))
    figure.set_size_inches(width, height + _LEGEND_LINE * math.ceil(len(labels) / max(1, columns)))
    figure.legend(
        handles, labels, loc="outside upper left", ncols=max(1, columns), fontsize=_LEGEND_POINTS
    )


def save_figure(path: Path, draw: Draw, *, width: float = 6.4, height: float = 3.6) -> bool:
    """Write a figure to an .svg file and return True; return False without matplotlib."""
    if not can_draw():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(figure_svg(draw, width=width, height=height), encoding="utf-8")
    return True
