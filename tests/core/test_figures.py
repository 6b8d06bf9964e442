from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from enginery.core import figures
from enginery.core.figures import figure_svg, save_figure


def draw(axes):
    axes.plot([1, 2, 4], [3.0, 1.0, 2.0], label="fp16")
    axes.set(xlabel="sequence & more", ylabel="latency, ms")


def test_figure_is_svg_with_its_text_as_text():
    root = ET.fromstring(figure_svg(draw))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    words = {"".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"sequence & more", "latency, ms", "fp16"} <= words


def test_same_numbers_give_same_bytes():
    assert figure_svg(draw) == figure_svg(draw)


def test_size_is_in_inches():
    root = ET.fromstring(figure_svg(draw, width=5, height=2))
    assert root.get("width") == "360pt"
    plain = ET.fromstring(figure_svg(lambda axes: axes.plot([1, 2]), width=5, height=2))
    assert (plain.get("width"), plain.get("height")) == ("360pt", "144pt")


@pytest.mark.parametrize(
    "names", [["a"], ["a", "b", "c"], ["a name of forty characters " + "x" * 20] * 7]
)
def test_legend_stands_above_the_axes_and_inside_the_figure(names):
    drawn = []

    def draw_curves(axes):
        drawn.append(axes)
        for index, name in enumerate(names):
            axes.plot([1, 2], [index, 9 - index], label=name)

    figure_svg(draw_curves, width=4.8, height=3.0)
    (axes,) = drawn
    (legend,) = axes.figure.legends
    assert axes.get_legend() is None
    assert legend.get_window_extent().y0 >= axes.get_window_extent().y1
    assert legend.get_window_extent().y1 <= axes.figure.bbox.y1 + 1
    assert legend.get_window_extent().x1 <= axes.figure.bbox.x1 + 1
    assert axes.get_window_extent().height > 100


def test_save_makes_the_folder(tmp_path):
    path = tmp_path / "reports" / "latency.svg"
    assert save_figure(path, draw)
    assert path.read_text(encoding="utf-8") == figure_svg(draw)


def test_without_matplotlib_no_file_and_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "can_draw", lambda: False)
    assert not save_figure(tmp_path / "latency.svg", draw)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["matplotlib.pyplot", "tkinter"])
def test_drawing_starts_no_window_system(module):
    import subprocess
    import sys

    code = (
        "import sys; from enginery.core.figures import figure_svg; "
        f"figure_svg(lambda axes: axes.plot([1, 2])); sys.exit({module!r} in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
