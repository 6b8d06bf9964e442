"""Time text graphs in turns in ONNX Runtime on the CPU: artifacts of one model, made differently.

    $ python -m benchmarks.graphs_in_turns build/minilm build/minilm-cpu --sizes 21x24 1x512

Each round opens every graph and runs it a few times on the same random tokens. The ratio to the
first graph within a round is what counts; the table has its median, least and most.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from enginery import Artifact
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions

RUNS = 8
"""Of each graph in a round, after as many that are not timed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("artifacts", nargs="+")
    parser.add_argument("--sizes", nargs="+", default=["21x24"], help="rows × tokens of a row")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=11)
    given = parser.parse_args()
    print("| rows × tokens | threads | artifact | ms | times as fast, by round |\n|-|-:|-|-:|-|")
    for size in given.sizes:
        rows, tokens = (int(part) for part in size.split("x"))
        for threads in given.threads:
            measured = time_in_turns(given.artifacts, (rows, tokens), threads, given.rounds)
            first = measured[given.artifacts[0]]
            for name, times in measured.items():
                ratios = [a / b for a, b in zip(first, times, strict=True)]
                print(
                    f"| {rows} × {tokens} | {threads} | {name} | "
                    f"{1000 * statistics.median(times):.1f} | {statistics.median(ratios):.2f} "
                    f"({min(ratios):.2f}–{max(ratios):.2f}) |",
                    flush=True,
                )


def time_in_turns(
    paths: list[str], shape: tuple[int, int], threads: int, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of one run of each artifact, by round."""
    ids = np.random.default_rng(0).integers(1000, 20000, shape)
    values = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}
    found: dict[str, list[float]] = {path: [] for path in paths}
    for _ in range(rounds):
        for path in paths:
            # One session at a time: the idle threads of another one would wait in busy loops.
            with OrtRunner(Artifact.open(path), RunnerOptions(threads=threads)) as runner:
                feeds = {
                    spec.name: values[spec.name].astype(spec.dtype) for spec in runner.record.inputs
                }
                for _ in range(RUNS):
                    runner(feeds)
                started = time.perf_counter()
                for _ in range(RUNS):
                    runner(feeds)
                found[path].append((time.perf_counter() - started) / RUNS)
    return found


if __name__ == "__main__":
    main()
