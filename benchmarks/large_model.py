"""Time and memory of every step in the README for a model of more than 2 GB.

    $ python -m benchmarks.large_model /tmp/large

The model is BERT with random weights. A protobuf file is limited to 2 GB, so the weights are in
external data, which each tool reads in its own way. Memory is the largest sum of the resident sets
of a command and its children, sampled ten times per second; shared pages count in each process. The
directory needs 25 GB.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

TEXTS = [
    "The engine is warm and the pump runs again.",
    "Who built the bridge?",
    "Rain, and a bell.",
]
PORT = 8765


@dataclass
class Step:
    """A command to measure."""

    name: str
    seconds: float
    peak_bytes: int
    output: str


def main(folder: Path) -> list[Step]:
    """Run every step in `folder` and return its measurements; raise an error if one fails."""
    model = save_model(folder / "large-bert")
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    (folder / "texts.csv").write_text("text\n" + "\n".join(f'"{text}"' for text in TEXTS * 6))
    big, fp16, int8 = (str(folder / name) for name in ("big", "big-fp16", "big-int8"))
    texts = ["--column", "text"]
    profile = ["--profile", "batch=1:1:2,sequence=8:16:32", "--capability", "8.9"]
    shelf, data = (folder / "registry").as_uri(), str(folder / "texts.csv")
    steps = [
        run("export", "export", str(model), "--task", "feature-extraction", "--out", big),
        run("validate", "validate", big),
        run("inspect --verify", "inspect", big, "--verify"),
        run(
            "optimize fp16",
            "optimize",
            big,
            "--target",
            "tensorrt",
            "--precision",
            "fp16",
            "--out",
            fp16,
        ),
        run("validate fp16", "validate", fp16),
        run(
            "quantize",
            "quantize",
            big,
            "--data",
            data,
            *texts,
            "--rows",
            "8",
            "--min-cosine",
            "0.5",
            "--out",
            int8,
        ),
        run("build fp16", "build", fp16, *profile, "--out", fp16),
        run("build int8", "build", int8, *profile, "--out", int8),
        run(
            "predict",
            "predict",
            big,
            "--input",
            data,
            *texts,
            "--out",
            str(folder / "answers.jsonl"),
            "--force",
        ),
        run("serve", "serve", big, "--port", str(PORT), until=_answered),
        run("publish", "publish", big, f"{shelf}/", "--license", "mit"),
        run("pull", "pull", f"{shelf}/large-bert", str(folder / "pulled")),
        run(
            "optimize pulled",
            "optimize",
            str(folder / "pulled"),
            "--target",
            "tensorrt",
            "--precision",
            "fp16",
            "--out",
            str(folder / "pulled-fp16"),
            "--force",
        ),
    ]
    for step in steps:
        share = step.peak_bytes / weights
        print(
            f"{step.name:18} {step.seconds:7.1f} s {step.peak_bytes / 1e9:6.2f} GB {share:5.2f} x"
        )
    print(f"weights {weights / 1e9:.2f} GB")
    return steps


def save_model(directory: Path) -> Path:
    """Save a BERT of 2.4 GB with a tokenizer, unless it exists."""
    import torch
    from transformers import BertConfig, BertModel

    from tests.tiny import save_tiny

    if (directory / "model.safetensors").is_file():
        return directory
    save_tiny("bert", "feature-extraction", directory)
    size = json.loads((directory / "config.json").read_text())
    config = BertConfig(
        vocab_size=size["vocab_size"],
        hidden_size=2048,
        num_hidden_layers=12,
        num_attention_heads=16,
        intermediate_size=8192,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(directory, max_shard_size="10GB")
    return directory


def run(name: str, *words: str, until: Callable[[], bool] | None = None) -> Step:
    """Run a command of `enginery`; end a server when `until` returns True."""
    started = time.monotonic()
    command = [sys.executable, "-m", "enginery", *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, _resident(process.pid))
            if until is not None and until():
                process.terminate()
                until = None
            time.sleep(0.1)
        output = process.stdout.read() if process.stdout else ""
    if process.returncode not in (0, -15):
        raise SystemExit(f"{name}: status {process.returncode}\n{output[-3000:]}")
    print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return Step(name, time.monotonic() - started, peak, output)


def _answered() -> bool:
    body = json.dumps({"inputs": TEXTS[0]}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/embed", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return len(json.loads(answer.read())[0]) == 2048
    except OSError:
        return False


def _resident(pid: int) -> int:
    total = 0
    try:
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            total += one.memory_info().rss
    except psutil.Error:
        pass
    return total


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    main(place)
    shutil.rmtree(place / "registry", ignore_errors=True)
