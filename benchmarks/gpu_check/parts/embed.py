"""Embed a list of sentences from Python, beside sentence-transformers.

sentence-transformers runs FP16 with SDPA in a process of its own, with the packages of the machine:
PYTHONPATH is not passed on. Where it is not installed, it is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_check.inputs import joined_sentences
from benchmarks.gpu_check.work import Work
from enginery import load_model

WORDS = 20
"""Words of a sentence on average, which are 33 tokens."""
_TURNS = 4
_BATCHES = (64, 256)
_MIN_COSINE = 0.999
_VECTORS = "vectors.npy"
_SCRIPT = Path(__file__).parents[1] / "sentence_transformers_embed.py"
_SECONDS = 100.0


def run(work: Work) -> None:
    """Measure `load_model(…).embed`, then sentence-transformers."""
    work.case("load_model", partial(_embed, work), seconds=10.0)
    work.case("sentence-transformers", partial(_embed_beside, work), seconds=20.0)


def vectors_path(work: Work) -> Path:
    """Return the file of enginery's vectors, which the next case compares."""
    return work.results.path.with_name(f"{work.results.path.stem}-{_VECTORS}")


def _embed(work: Work) -> None:
    texts = joined_sentences(work.settings.sentences, words=WORDS)
    rates = []
    with load_model(work.artifact("fp16"), providers=work.provider) as model:
        for _ in range(_TURNS):
            before = time.perf_counter()
            vectors = model.embed(texts, normalize=True)
            rates.append(len(texts) / (time.perf_counter() - before))
        alone = np.concatenate([model.embed([text], normalize=True) for text in texts[:32]])
    cosine = float((alone * vectors[:32]).sum(axis=1).min())
    np.save(vectors_path(work), vectors)
    _record(work, "enginery, load_model", rates)
    work.check(
        "a sentence has the vector that it has alone",
        passed=cosine >= _MIN_COSINE,
        found=f"{max(rates[1:]):.0f} rows/s (turns: {', '.join(f'{r:.0f}' for r in rates)}), "
        f"cosine {cosine:.6f}, expected at least {_MIN_COSINE}",
    )


def _embed_beside(work: Work) -> None:
    """Measure sentence-transformers, and compare its vectors."""
    source = work.results.artifacts(work.model)["source"]
    texts = joined_sentences(work.settings.sentences, words=WORDS)
    with tempfile.TemporaryDirectory(prefix="enginery-gpu-check-") as scratch:
        directory = Path(scratch)
        job = {"model": source, "device": work.device, "batches": _BATCHES, "texts": texts}
        (directory / "job.json").write_text(json.dumps(job))
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        # -P: the directory of the script is not searched for modules.
        child = subprocess.run(
            [sys.executable, "-P", str(_SCRIPT), str(directory)],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            cwd=directory,
            env=environment,
        )
        lines = child.stdout.splitlines()
        if child.returncode or not lines:
            last = (child.stderr.strip().splitlines() or ["no output"])[-1]
            work.note(f"sentence-transformers: left out, {last}")
            return
        results: list[dict[str, Any]] = [json.loads(line) for line in lines]
        theirs = np.load(directory / _VECTORS)
    for result in results:
        name = f"sentence-transformers {result['version']}, batches of {result['batch']}"
        _record(work, name, result["rates"])
    ours = np.load(vectors_path(work))
    cosines = (ours * theirs).sum(axis=1)
    work.check(
        "vectors are those of sentence-transformers",
        passed=float(cosines.min()) >= _MIN_COSINE,
        found=f"cosine {cosines.mean():.6f} on average, {cosines.min():.6f} at least",
    )


def _record(work: Work, side: str, rates: list[float]) -> None:
    row = {"model": work.model, "side": side, "rows": work.settings.sentences, "per_second": rates}
    work.add("embedded", row)
