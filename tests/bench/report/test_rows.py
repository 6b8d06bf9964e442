"""What the terminal and the page say of a bench beside its times."""

from __future__ import annotations

from dataclasses import asdict, replace

from enginery.bench.config import BenchConfig
from enginery.bench.report.notes import fallback_notes, stage_notes
from enginery.bench.report.rows import lines, tables
from enginery.runtime.onnxruntime.placement import PlacedNode, Placement
from enginery.runtime.providers.known import CPU, CUDA
from tests.bench.made import made_case, made_contender, made_result

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
MISSED = "cuda requested, but libcudart.so.13 was not found"
FELL = {"name": CPU, "reason": MISSED}


def test_placement_has_work_copies_and_the_nodes_that_fell_by_name():
    record = made_contender("enginery", placement=PLACED)
    found = tables(made_result(contenders=[record]))
    assert [
        (r["provider"], r["nodes"], r["for shapes"], r["multiply-adds"], r["share"])
        for r in found["Placement"]
    ] == [("cuda", "1", "0", "90", "90.0%"), ("cpu", "2", "1", "10", "10.0%")]
    assert found["Compute on the CPU"] == [
        {"contender": "enginery", "node": "norm", "op": "LpNormalization", "multiply-adds": "10"}
    ]
    (copies,) = found["Copies between devices"]
    assert copies["copies in a run"] == "9"
    assert copies["nodes"].startswith("Memcpy_token_0, Memcpy_token_1, ")
    assert copies["nodes"].endswith(" and 1 more")


def test_placement_that_could_not_be_read_is_said():
    record = made_contender("enginery", no_placement="it broke.")
    said = lines(made_result(contenders=[record]))
    assert "where the nodes of enginery run is not known: it broke" in said
    # A result of before the placement was kept whole is shown without it.
    old = made_contender("enginery", placement=[{"name": CPU, "nodes": 3}])
    assert "Placement" not in tables(made_result(contenders=[old]))


def test_a_fallback_is_a_note_with_its_reason_and_stands_beside_the_provider():
    contenders = [made_contender(n, provider=FELL) for n in ("enginery", "onnxruntime")]
    result = made_result(contenders=contenders)
    config = BenchConfig(cuda_graph=True)
    notes = stage_notes(result.machine, [], contenders, config)
    assert notes == [
        f"enginery, onnxruntime on cpu: {MISSED}",
        "no CUDA graph was recorded: cpu has none",
    ]
    assert f"note: {notes[0]}" in lines(replace(result, notes=notes))
    assert [row["because"] for row in tables(result)["Contenders"]] == [MISSED] * 2
    asked = {"name": CPU, "reason": "requested"}
    assert fallback_notes([("enginery", [asked]), ("pytorch", [])]) == []


def test_on_a_busy_machine_each_difference_says_so():
    case = made_case({"batch": 1}, {"a": 1.0, "b": 2.0}, pairs=[("a", "b")])
    result = made_result(contenders=[made_contender("a"), made_contender("b")], cases=[case])
    (row,) = tables(result)["Beside one another"]
    assert row["is"] == "2.00 times as fast (2.00 to 2.00)"
    busy = replace(result, machine={**result.machine, "load": 8.1})
    (row,) = tables(busy)["Beside one another"]
    assert row["is"] == "2.00 times as fast (2.00 to 2.00); on a busy machine"


def test_shapes_that_ran_without_a_graph_are_named_once():
    cases = []
    for batch in (1, 2, 3):
        case = made_case({"batch": batch, "sequence": 16}, {"enginery": 1.0})
        notes = ["ran without a CUDA graph"] if batch > 1 else []
        found = [replace(one, notes=notes) for one in case.measurements]
        cases.append(replace(case, measurements=found))
    said = lines(made_result(contenders=[made_contender("enginery")], cases=cases))
    assert "enginery ran without a CUDA graph: at 2×16, 3×16" in said


def test_a_contender_that_failed_on_the_images_is_said():
    from tests.bench.test_page import with_images

    result = with_images()
    images = replace(result.images, problems={"onnxruntime": "0.png: it broke."})
    assert "onnxruntime did not run: 0.png: it broke." in lines(replace(result, images=images))
    assert asdict(images)["layout"] == "first"
