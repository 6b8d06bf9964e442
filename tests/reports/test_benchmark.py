"""Tables and lines of a benchmark, and its notes."""

from __future__ import annotations

from dataclasses import asdict, replace

from enginery.bench.config import BenchConfig
from enginery.bench.report.notes import fallback_notes, stage_notes
from enginery.runtime.onnxruntime.placement import PlacedNode, Placement
from enginery.runtime.providers.known import CPU, CUDA
from tests.bench.sample_results import (
    make_backend_record,
    make_case,
    make_image_result,
    make_result,
)

PLACED = Placement(
    CUDA,
    (
        PlacedNode("MatMul_1", "MatMul", "", CUDA, 90, False),
        PlacedNode("Gather_2", "Gather", "", CPU, 0, True),
        PlacedNode("norm", "LpNormalization", "", CPU, 10, False),
    ),
    copies=tuple(f"Memcpy_token_{index}" for index in range(9)),
    counted=True,
).as_json()
REASON = "cuda requested, but libcudart.so.13 was not found"
FALLBACK = {"name": CPU, "reason": REASON}


def tables(result):
    return {table.title: table.rows for table in result.tables()}


def test_placement_tables():
    record = make_backend_record("enginery", placement=PLACED)
    found = tables(make_result(contenders=[record]))
    assert [
        (r["provider"], r["nodes"], r["for shapes"], r["multiply-adds"], r["share"])
        for r in found["Placement"]
    ] == [("cuda", "1", "0", "90", "90.0%"), ("cpu", "2", "1", "10", "10.0%")]
    assert found["Compute on the CPU"] == [
        {"backend": "enginery", "node": "norm", "op": "LpNormalization", "multiply-adds": "10"}
    ]
    (copies,) = found["Copies between devices"]
    assert copies["copies per run"] == "9"
    assert copies["nodes"].startswith("Memcpy_token_0, Memcpy_token_1, ")
    assert copies["nodes"].endswith(" and 1 more")


def test_unknown_placement_has_a_reason():
    record = make_backend_record("enginery", no_placement="it failed.")
    said = make_result(contenders=[record]).lines()
    assert "the placement of enginery is not known: it failed" in said


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


def test_one_line_lists_all_shapes_without_a_cuda_graph():
    cases = []
    for batch in (1, 2, 3):
        case = make_case({"batch": batch, "sequence": 16}, {"enginery": 1.0})
        notes = ["ran without a CUDA graph"] if batch > 1 else []
        found = [replace(one, notes=notes) for one in case.measurements]
        cases.append(replace(case, measurements=found))
    said = make_result(contenders=[make_backend_record("enginery")], cases=cases).lines()
    assert "enginery ran without a CUDA graph: at 2×16, 3×16" in said


def test_failure_on_the_images_is_reported():
    result = make_image_result()
    images = replace(result.images, problems={"onnxruntime": "0.png: it failed."})
    assert "onnxruntime did not run: 0.png: it failed." in replace(result, images=images).lines()
    assert asdict(images)["layout"] == "first"
