"""Embed a file of sentences with `enginery predict` on the device."""

from __future__ import annotations

import csv
import json
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_check.inputs import joined_sentences
from benchmarks.gpu_check.work import Work
from enginery import load_model
from enginery.api import predict_file

_WORDS = 20
_DISTINCT = 20_000
"""Sentences, which are repeated."""
_COMPARED = 64
_MIN_COSINE = 0.999
_FORMATS = {"Parquet": ".parquet", "JSON lines": ".jsonl"}


def run(work: Work) -> None:
    """Predict files of every size into every format."""
    for rows in work.settings.rows:
        for form in _FORMATS:
            predict = partial(_predict, work, rows, form)
            work.case(f"{form}, {rows} rows", predict, seconds=10.0)


def _predict(work: Work, rows: int, form: str) -> None:
    """Measure the throughput, and compare vectors of both ends with those of `load_model`."""
    artifact = work.artifact("fp16")
    distinct = joined_sentences(min(_DISTINCT, rows), words=_WORDS)
    texts = [distinct[row % len(distinct)] for row in range(rows)]
    with tempfile.TemporaryDirectory(prefix="enginery-gpu-check-") as scratch:
        source, output = Path(scratch) / "texts.csv", Path(scratch) / f"vectors{_FORMATS[form]}"
        with source.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            writer.writerow(["text"])
            writer.writerows([text] for text in texts)
        began = time.perf_counter()
        report = predict_file(artifact, source, output, providers=work.provider)
        seconds = time.perf_counter() - began
        count = min(_COMPARED, rows // 2)
        found = np.asarray(list(_ends(output, rows, count)), np.float64)
        size = output.stat().st_size
    with load_model(artifact, providers=work.provider) as model:
        expected = np.asarray(model.embed(texts[:count] + texts[-count:]), np.float64)
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    cosine = float(((found * expected).sum(axis=1) / norms).min())
    work.add(
        "predicted",
        {
            "model": work.model,
            "way": form,
            "rows": rows,
            "per_second": report.rows_per_second,
            "seconds": seconds,
            "workers": report.workers,
            "bytes": size,
        },
    )
    work.check(
        f"predict's vectors are those of load_model, {form}, {rows} rows",
        passed=cosine >= _MIN_COSINE and not report.bad_rows,
        found=f"{report.rows_per_second:.0f} rows/s with {report.workers} workers, "
        f"{seconds:.1f} s in all, {report.bad_rows} bad rows, cosine at least {cosine:.6f}",
    )


def _ends(output: Path, rows: int, count: int) -> Iterator[Any]:
    """Return the vectors of the first and the last rows."""
    if output.suffix == ".jsonl":
        with output.open(encoding="utf-8") as stream:
            lines = list(islice(stream, count))
            lines += list(islice(stream, rows - 2 * count, None))
        yield from (json.loads(line)["embedding"] for line in lines)
        return
    from pyarrow import parquet

    column = parquet.read_table(output, columns=["embedding"])["embedding"]
    yield from column.slice(0, count).to_pylist()
    yield from column.slice(rows - count).to_pylist()
