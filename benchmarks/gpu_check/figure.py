"""Draw the times of MiniLM on a GPU beside PyTorch, plain ONNX Runtime and the CPU.

    $ python -m benchmarks.gpu_check.figure docs/gpu.svg benchmarks/results/gpu-check-….json …

Times are medians, host to host, from the parts `speed` and `speedup` of all files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.records import rows
from benchmarks.gpu_check.variants import BARE_FP16, GRAPH, SDPA
from enginery.core.figures import save_figure

_MODEL = "minilm"
_CPU = "CPU FP32"
_SIDES = {
    _CPU: "CPU, 16 cores, FP32",
    SDPA: "PyTorch, SDPA, FP16",
    BARE_FP16: "ONNX Runtime, FP16",
    GRAPH: "enginery, CUDA graph, FP16",
}
_WIDTH = 0.2
"""Width of a bar, in distances between shapes."""


def medians(documents: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the medians in ms: shape, such as `1×128`, -> side -> time."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for document in documents:
        for key in ("points", "speedups"):
            for row in rows(document["parts"], key):
                if row["model"] != _MODEL:
                    continue
                shape = found.setdefault((row["sequence"], row["batch"]), {})
                for side in _SIDES:
                    if latency := row["latency"].get(f"{side}, host"):
                        shape.setdefault(side, latency["median_ms"])
    return {f"{batch}×{length}": found[length, batch] for length, batch in sorted(found)}


def draw(path: Path, documents: Sequence[Mapping[str, Any]]) -> bool:
    """Write the figure; return False without matplotlib."""
    times = medians(documents)
    gpu = next(document["gpu"] for document in documents)
    shapes = list(times)

    def draw_bars(axes: Any) -> None:
        for index, (side, label) in enumerate(_SIDES.items()):
            there = [i for i, shape in enumerate(shapes) if side in times[shape]]
            values = [times[shapes[i]][side] for i in there]
            places = [i + (index - (len(_SIDES) - 1) / 2) * _WIDTH for i in there]
            bars = axes.bar(places, values, _WIDTH, label=label)
            axes.bar_label(bars, [f"{value:.3g}" for value in values], fontsize=7)
        axes.set_xticks(range(len(shapes)), shapes)
        axes.set(yscale="log", xlabel="batch × sequence", ylabel="ms, host to host")
        axes.set_title(f"all-MiniLM-L6-v2 on an {gpu}", fontsize=10)
        axes.grid(visible=False, axis="x")

    return save_figure(path, draw_bars, width=8, height=3.4)


if __name__ == "__main__":
    out, *files = map(Path, sys.argv[1:])
    if not draw(out, [json.loads(file.read_bytes()) for file in files]):
        sys.exit("matplotlib is not installed: pip install 'enginery[report]'")
