"""Time graphs of texts and images in turns on the CPU: as exported, and fused by two ways.

    $ python -m benchmarks.fused_graphs build/graphs/*.onnx --sizes 1x24 8x64

`before` has the fusions of `onnxruntime.transformers` alone, as Optimum applies them; `now` is what
`enginery optimize --target cpu` writes. The table has milliseconds of processor time of one run on
one thread, the ratio to the exported graph, and the largest difference from its output.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from enginery.core.artifact.external_data import load_graph
from enginery.optimize.worker import Fusion, fuse, fuse_operators, optimize_basic
from enginery.passes.attention.fuse import count_fused

ROUNDS = 7
SECONDS = 0.15
"""Of each graph in a round."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("graphs", nargs="+", type=Path)
    parser.add_argument("--sizes", nargs="+", default=["8x64"], help="rows × tokens of a row")
    options = parser.parse_args()
    print("| graph | rows × tokens | form | attentions | ms | times as fast | difference |")
    print("|-|-|-|-:|-:|-:|-|")
    for graph in options.graphs:
        with tempfile.TemporaryDirectory() as scratch:
            forms = write_forms(graph, Path(scratch))
            for size in options.sizes:
                rows, tokens = (int(part) for part in size.split("x"))
                for form, cells in time_in_turns(forms, rows, tokens).items():
                    count = count_fused(load_graph(forms[form]))
                    print(
                        f"| {graph} | {rows} × {tokens} | {form} | {count} | {cells} |", flush=True
                    )


def write_forms(graph: Path, scratch: Path) -> dict[str, Path]:
    """Write a graph in each form; return the files by form."""
    basic, before = scratch / "basic.onnx", scratch / "before.onnx"
    optimize_basic(graph, basic)
    fuse_operators(basic, before, Fusion(graph.parent, scratch, "O2", "cuda"), attention=True)
    fuse(Fusion(graph.parent, scratch / "now", "O2", "cpu"), graph.name)
    return {"exported": graph, "before": before, "now": scratch / "now" / graph.name}


def time_in_turns(forms: dict[str, Path], rows: int, tokens: int) -> dict[str, str]:
    """Return the cells of the table for each form."""
    sessions = {form: open_session(path) for form, path in forms.items()}
    feeds = feeds_of(sessions["exported"], rows, tokens)
    outputs = {form: session.run(None, feeds)[0] for form, session in sessions.items()}
    started = time.process_time()
    sessions["exported"].run(None, feeds)
    runs = max(1, round(SECONDS / (time.process_time() - started)))
    times: dict[str, list[float]] = {form: [] for form in sessions}
    for _ in range(ROUNDS):
        for form, session in sessions.items():
            started = time.process_time()
            for _ in range(runs):
                session.run(None, feeds)
            times[form].append(1000 * (time.process_time() - started) / runs)
    cells = {}
    for form, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(times["exported"], own, strict=True))
        error = float(np.abs(outputs[form] - outputs["exported"]).max())
        cells[form] = f"{statistics.median(own):.1f} | {ratio:.2f} | {error:.0e}"
    return cells


def open_session(path: Path) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def feeds_of(session: Any, rows: int, tokens: int) -> dict[str, Any]:
    """Return random tokens without padding, or images; a graph's first dim is that of rows."""
    random = np.random.default_rng(0)
    feeds = {}
    for value in session.get_inputs():
        dims = [dim if isinstance(dim, int) else tokens for dim in value.shape]
        shape = [value.shape[0] if isinstance(value.shape[0], int) else rows, *dims[1:]]
        if value.type != "tensor(int64)":
            feeds[value.name] = random.standard_normal(shape).astype(np.float32)
        elif "mask" in value.name:
            feeds[value.name] = np.ones(shape, np.int64)
        else:
            feeds[value.name] = random.integers(3, 2900, shape) * ("type" not in value.name)
    return feeds


if __name__ == "__main__":
    main()
