"""Embed a file of sentences with `enginery predict` on the device."""

from __future__ import annotations

import csv
import json
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.gpu_check.inputs import sentences
from benchmarks.gpu_check.work import Work
from enginery import load_model
from enginery.api import predict_file

_CLOSE = 0.01


def run(work: Work) -> None:
    """Predict a file, without and with CUDA graphs."""
    work.case("IOBinding", partial(_predict, work, cuda_graph=False), seconds=10.0)
    if work.on_gpu:
        work.case("CUDA graph", partial(_predict, work, cuda_graph=True), seconds=10.0)


def _predict(work: Work, *, cuda_graph: bool) -> None:
    """Measure the throughput, and compare the first vectors with those of `load_model`."""
    artifact = work.artifact("fp16")
    texts = sentences()
    count = work.settings.rows
    with tempfile.TemporaryDirectory(prefix="enginery-gpu-check-") as scratch:
        source, output = Path(scratch) / "texts.csv", Path(scratch) / "vectors.jsonl"
        with source.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            writer.writerow(["text"])
            writer.writerows([texts[row % len(texts)]] for row in range(count))
        report = predict_file(
            artifact, source, output, providers=work.provider, cuda_graph=cuda_graph
        )
        with output.open(encoding="utf-8") as stream:
            first = [json.loads(next(stream)) for _ in range(16)]
    found = np.asarray([row["embedding"] for row in first], np.float64)
    with load_model(artifact, providers=work.provider) as model:
        expected = np.asarray(model(list(texts[:16])), np.float64)
    apart = float(np.abs(found - expected).max() / np.abs(expected).max())
    work.add(
        "predicted",
        {
            "model": work.model,
            "way": "CUDA graph" if cuda_graph else "IOBinding",
            "rows": count,
            "per_second": report.phrases_per_second,
            "workers": report.workers,
        },
    )
    work.check(
        f"predict's vectors are those of load_model{', CUDA graph' if cuda_graph else ''}",
        passed=apart <= _CLOSE and not report.bad_rows,
        found=f"{report.phrases_per_second:.0f} rows/s with {report.workers} workers, "
        f"{report.bad_rows} bad rows, largest difference {apart:.2g} of the largest value",
    )
