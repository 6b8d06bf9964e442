"""enginery beside what one would take for sentence embeddings on a CPU, with all-MiniLM-L6-v2.

    $ python -m benchmarks.peers --work DIR --mode batch --rounds 5
    $ python -m benchmarks.peers --work DIR --mode serve --rounds 5 --seconds 10

`batch` encodes texts from Python, `serve` loads servers through wrk with one text a request. Every
contender has a virtual environment of its own below `--work`, which later runs use again; one that
cannot be made is left out with the reason. Contenders run in new processes and take turns: each
other round has the reverse order, and the first is not counted. The ratio to sentence-transformers
within a round is what counts.

Texts are sentences of the docstrings of Python's standard library under 140 characters; enginery's
INT8 is calibrated on others. Embeddings are compared with those of sentence-transformers in FP32.
`--work` receives the tables, the raw numbers and a figure.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.int8_cpu import LONGEST
from benchmarks.peers import report
from benchmarks.peers.contenders import BASELINE, LIBRARIES, SERVERS, Library, Server
from benchmarks.peers.environments import (
    UnavailableError,
    convert,
    installed_versions,
    make_environment,
    make_models,
)
from benchmarks.peers.measure import encode, serve
from benchmarks.quantize_minilm import CALIBRATION, sentences
from enginery.runtime.machine import read_cpuinfo

CHECKED = 64
"""Texts whose embeddings from each server are compared."""
MIN_TEXTS = 2048
"""Texts of the load of the servers, at least."""

Contender = Library | Server
Measured = tuple[dict[str, Any], NDArray[np.float32]]


def main() -> None:
    """Measure the contenders of a mode in rounds; print and write the report."""
    given = parse()
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    everything = sentences()
    order = np.random.default_rng(given.seed).permutation(len(everything))
    shuffled = [everything[place] for place in order]
    models = make_models(work, shuffled[:CALIBRATION])
    short = [text for text in shuffled[CALIBRATION:] if len(text) < LONGEST]
    texts = short[: given.rows if given.mode == "batch" else max(MIN_TEXTS, CHECKED)]
    reasons: dict[str, str] = {}
    pythons = prepare(chosen(given), work, models, reasons)
    with tempfile.TemporaryDirectory() as scratch:
        rounds, reference = measure(given, pythons, models, texts, Path(scratch), reasons)
    write(given, work, rounds, pythons, reasons, len(texts), reference)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="directory that is kept")
    parser.add_argument("--mode", choices=("batch", "serve"), default="batch")
    parser.add_argument("--rounds", type=int, default=5, help="beside the first, not counted")
    parser.add_argument("--rows", type=int, default=4096, help="texts to encode")
    parser.add_argument("--seconds", type=float, default=10, help="of each load of a server")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders, by their names")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the texts")
    given = parser.parse_args()
    if given.mode == "serve" and not shutil.which("wrk"):
        parser.error("wrk is not installed: apt install wrk")
    if given.rounds < 1:
        parser.error("--rounds is at least 1")
    known = [one.name for one in contenders(given.mode)]
    if unknown := [name for name in given.only or () if name not in known]:
        parser.error(f"unknown contenders {unknown}; known: {known}")
    return given


def contenders(mode: str) -> Sequence[Contender]:
    """Return the contenders of a mode; the first is the one that ratios are to."""
    return LIBRARIES if mode == "batch" else SERVERS


def chosen(given: argparse.Namespace) -> list[Contender]:
    """Return the contenders that were asked for."""
    return [one for one in contenders(given.mode) if not given.only or one.name in given.only]


def prepare(
    wanted: list[Contender], work: Path, models: dict[str, Path], reasons: dict[str, str]
) -> dict[Contender, Path]:
    """Return the Python of each contender; add the reasons of those that cannot be had."""
    pythons: dict[Contender, Path] = {}
    for one in wanted:
        try:
            python = make_environment(one.environment, work)
            if one.model == "ctranslate2":
                convert(python, models["source"], models["ctranslate2"])
            pythons[one] = python
        except UnavailableError as error:
            leave_out(one, f"its environment cannot be made: {error}", reasons)
    return pythons


def leave_out(one: Contender, reason: str, reasons: dict[str, str]) -> None:
    reasons[one.name] = reason
    print(f"{one.name} is left out: {reason}", file=sys.stderr)


def measure(
    given: argparse.Namespace,
    pythons: dict[Contender, Path],
    models: dict[str, Path],
    texts: list[str],
    scratch: Path,
    reasons: dict[str, str],
) -> tuple[report.Rounds, str]:
    """Return the figures of each round without the first, and the name of the reference."""
    file = scratch / "texts.json"
    file.write_text(json.dumps(texts), encoding="utf-8")
    rounds: report.Rounds = []
    vectors: dict[str, NDArray[np.float32]] = {}
    for number in range(given.rounds + 1):
        running = [one for one in pythons if one.name not in reasons]
        found: dict[str, dict[str, Any]] = {}
        for one in running if number % 2 else reversed(running):
            try:
                figures, vectors[one.name] = run(one, pythons[one], models, given, number)(
                    texts, file, scratch
                )
            except UnavailableError as error:
                leave_out(one, str(error), reasons)
                continue
            found[one.name] = {**figures, "load": os.getloadavg()[0]}
            print(f"round {number}, {one.name}: {json.dumps(figures)}", file=sys.stderr, flush=True)
        if not vectors:
            raise SystemExit("No contender could be measured.")
        reference = next(one.name for one in pythons if one.name in vectors)
        for name, figures in found.items():
            figures.update(report.compare(vectors[name], vectors[reference]))
        if number:  # the first fills the file cache and the stores of optimized graphs
            rounds.append(found)
    rounds = [{n: f for n, f in found.items() if n not in reasons} for found in rounds]
    return rounds, reference


def run(
    one: Contender, python: Path, models: dict[str, Path], given: argparse.Namespace, number: int
) -> Callable[[list[str], Path, Path], Measured]:
    """Return the function that measures a contender on texts."""
    model = models[one.model]

    def measured(texts: list[str], file: Path, scratch: Path) -> Measured:
        if isinstance(one, Library):
            return encode(one, python, model, file, scratch)
        return serve(
            one,
            python,
            model,
            texts,
            scratch,
            connections=given.connections,
            seconds=given.seconds,
            seed=number,
            checked=CHECKED,
        )

    return measured


def write(
    given: argparse.Namespace,
    work: Path,
    rounds: report.Rounds,
    pythons: dict[Contender, Path],
    reasons: dict[str, str],
    rows: int,
    reference: str,
) -> None:
    """Print the report, and write it with the raw numbers and a figure."""
    processor, features = read_cpuinfo()
    versions = {one.environment.name: installed_versions(python) for one, python in pythons.items()}
    most = str(max(given.connections))
    if given.mode == "batch":
        lines = report.library_table(rounds, LIBRARIES, BASELINE)
        title = f"{rows:,} texts, rows/s"
        rates = {name: [r[name]["rate"] for r in rounds] for name in rounds[0]}
    else:
        lines = report.server_table(rounds, SERVERS, given.connections, SERVERS[0].name)
        title = f"requests/s, {most} connections"
        rates = {name: [r[name]["closed"][most]["rate"] for r in rounds] for name in rounds[0]}
    names = [one.name for one in contenders(given.mode) if one.name in rates]
    text = "\n".join(
        [
            f"{processor}, {os.cpu_count()} CPUs ({', '.join(features)}); {rows:,} texts; "
            f"{len(rounds)} rounds, median (least–most); cosines to {reference}.",
            "",
            *lines,
            *(f"\nLeft out: {name}: {reason}" for name, reason in reasons.items()),
        ]
    )
    print(text)
    (work / f"{given.mode}.md").write_text(text + "\n", encoding="utf-8")
    raw = {
        "arguments": {name: str(value) for name, value in vars(given).items()},
        "processor": processor,
        "features": features,
        "versions": versions,
        "left_out": reasons,
        "rounds": rounds,
    }
    (work / f"{given.mode}.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    report.draw(title, {name: rates[name] for name in names}, work / f"{given.mode}.svg")


if __name__ == "__main__":
    main()
