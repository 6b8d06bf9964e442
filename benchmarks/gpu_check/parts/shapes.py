"""Embed batches of shapes that the model has not seen before, and each again right after.

A batch has 1 to 32 texts of one length, and no two batches have both in common. `load_model` has
warmed up before. A runtime that prepares something for every shape is slower the first time.
"""

from __future__ import annotations

import random
import time
from functools import partial

import numpy as np

from benchmarks.gpu_check.work import Work
from enginery import load_model

_MAX_ROWS = 32
_MIN_TOKENS, _MAX_TOKENS = 4, 128
_QUICK_TOKENS = 32
_MIN_COSINE = 0.999


def run(work: Work) -> None:
    """Measure all shapes."""
    work.case("random shapes", partial(_measure, work), seconds=10.0)


def _measure(work: Work) -> None:
    longest = _QUICK_TOKENS if work.quick else _MAX_TOKENS
    shapes = [(r, t) for r in range(1, _MAX_ROWS + 1) for t in range(_MIN_TOKENS, longest + 1)]
    chosen = random.Random(0).sample(shapes, work.settings.shapes)
    new_ms, seen_ms = [], []
    cosine = 1.0
    began = time.perf_counter()
    with load_model(work.artifact("fp16"), providers=work.provider) as model:
        model.warm_up()
        ready_seconds = time.perf_counter() - began
        model.embed(["The engine is warm."])
        for rows, tokens in chosen:
            texts = [" ".join(["the"] * (tokens - 2))] * rows
            vectors = []
            for times in (new_ms, seen_ms, seen_ms):
                before = time.perf_counter()
                vectors.append(model.embed(texts, normalize=True))
                times.append((time.perf_counter() - before) * 1e3)
            again = (vectors[0] * vectors[-1]).sum(axis=1)
            of_one_text = vectors[0] @ vectors[0][0]
            cosine = min(cosine, float(again.min()), float(of_one_text.min()))
    row = {
        "model": work.model,
        "shapes": len(chosen),
        "ready_seconds": ready_seconds,
        "new_ms": {name: float(np.percentile(new_ms, share)) for name, share in _SHARES.items()},
        "seen_ms": {name: float(np.percentile(seen_ms, share)) for name, share in _SHARES.items()},
        "new_times_ms": [[*shape, ms] for shape, ms in zip(chosen, new_ms, strict=True)],
    }
    work.add("shapes", row)
    work.check(
        f"all rows of {len(chosen)} shapes of {work.model} have one vector, twice",
        passed=cosine >= _MIN_COSINE,
        found=f"cosine {cosine:.6f}, expected at least {_MIN_COSINE}; "
        f"new ones {row['new_ms']['p50']:.2f} ms, p99 {row['new_ms']['p99']:.2f}; "
        f"seen ones {row['seen_ms']['p50']:.2f} ms, p99 {row['seen_ms']['p99']:.2f}; "
        f"ready after {ready_seconds:.1f} s",
    )


_SHARES = {"p50": 50, "p99": 99, "max": 100}
