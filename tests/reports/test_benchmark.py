"""Tables and lines of a benchmark, and its notes."""

from __future__ import annotations

from dataclasses import replace

from enginery.bench.config import BenchConfig
from enginery.bench.report.notes import fallback_notes, stage_notes
from enginery.runtime.providers.known import CPU
from tests.bench.sample_results import (
    make_backend_record,
    make_case,
    make_result,
)

REASON = "cuda requested, but libcudart.so.13 was not found"
FALLBACK = {"name": CPU, "reason": REASON}


def tables(result):
    return {table.title: table.rows for table in result.tables()}


def test_reason_of_a_fallback_is_in_the_notes_and_the_table():
    contenders = [make_backend_record(n, provider=FALLBACK) for n in ("enginery", "onnxruntime")]
    result = make_result(contenders=contenders)
    config = BenchConfig(cuda_graph=True)
    notes = stage_notes(result.machine, [], contenders, config)
    assert notes == [
        f"enginery, onnxruntime on cpu: {REASON}",
        "no CUDA graph was captured: cpu does not support them",
    ]
    assert f"note: {notes[0]}" in replace(result, notes=notes).lines()
    assert [row["reason"] for row in tables(result)["Backends"]] == [REASON] * 2
    requested = {"name": CPU, "reason": "requested"}
    assert fallback_notes([("enginery", [requested]), ("pytorch", [])]) == []


def test_comparisons_mention_a_busy_machine():
    case = make_case({"batch": 1}, {"a": 1.0, "b": 2.0}, pairs=[("a", "b")])
    result = make_result(
        contenders=[make_backend_record("a"), make_backend_record("b")], cases=[case]
    )
    (row,) = tables(result)["Comparison"]
    assert row["result"] == "2.00x as fast (2.00x to 2.00x)"
    busy = replace(result, machine={**result.machine, "load": 8.1})
    (row,) = tables(busy)["Comparison"]
    assert row["result"] == "2.00x as fast (2.00x to 2.00x); on a busy machine"
