"""Rows of padded batches equal the same rows alone; what deviates is compared with PyTorch."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from enginery import quantize_model, validate_model
from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord, PaddingRecord
from enginery.core.model.feeds import FeedLimits
from enginery.core.shapes import Profile, TensorSpec
from enginery.core.tolerance import Tolerance
from enginery.reports.validation import GraphCoverage, OutputMetrics, ValidationCaseResult
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.validate.compare import ComparisonLimits, GraphComparison
from enginery.validate.consistency import (
    ConsistencyScan,
    PaddedDim,
    ScanResult,
    ScanShape,
    judge_decisions,
)
from enginery.validate.metrics.outputs import NoiseFloor
from enginery.validate.reference import ReferenceOutputs, ReferenceRun
from enginery.validate.weights.stored import find_sizes
from tests.validate.faults import edits as faults

FEATURES = ("bert", "feature-extraction")


@pytest.fixture
def scan(exported):
    """Return a function: the scan of a model's graph, whose runs it counts."""
    opened = []

    def make(model, **options):
        artifact = exported(*model)
        limits = FeedLimits.from_artifact(artifact)
        runner = OrtRunner(artifact)
        opened.append(runner)
        return ConsistencyScan(runner, runner.record, limits, seed=0, **options)

    yield make
    for runner in opened:
        runner.close()


def test_one_of_two_rows_is_padded_by_one_position():
    spec = (TensorSpec("input_ids", "int64", ("batch", "sequence")),)
    mask = (TensorSpec("attention_mask", "int64", ("batch", "sequence")),)
    record = GraphRecord(file="model.onnx", opset=20, inputs=spec + mask, outputs=(), data_files=())
    scan = ConsistencyScan(pytest.fail, record, FeedLimits(), seed=0)
    for length in (2, 8, 33):
        feeds = scan.batch_case(ScanShape(2, length)).make()
        assert feeds["attention_mask"].sum(axis=1).max() == length - 1


def where(size, operation, limit, times):
    """Return nodes that compute `condition`: a size of input_ids compared with a limit.

    With `times`, both are multiplied, so that the graph does not hold the size.
    """
    axis = {"batch": 0, "length": 1}[size]
    return [
        helper.make_node("Shape", ["input_ids"], ["its_sizes"]),
        faults.constant("its_axis", np.int64(axis)),
        helper.make_node("Gather", ["its_sizes", "its_axis"], ["its_size"]),
        faults.constant("its_times", np.int64(times)),
        helper.make_node("Mul", ["its_size", "its_times"], ["its_multiple"]),
        faults.constant("its_limit", np.int64(limit * times)),
        helper.make_node(operation, ["its_multiple", "its_limit"], ["condition"]),
    ]


def weaken_attention(size, operation, limit, factor=0.7, times=1):
    """Multiply one layer's attention by a factor under a condition on the size of the input."""

    def edit(model):
        node = next(node for node in model.graph.node if node.op_type == "Softmax")
        output, node.output[0] = node.output[0], "attention_before"
        nodes = [
            *where(size, operation, limit, times),
            faults.constant("weaker", np.float32(factor)),
            faults.constant("same", np.float32(1)),
            helper.make_node("Where", ["condition", "weaker", "same"], ["factor_in_fp32"]),
            helper.make_node("CastLike", ["factor_in_fp32", "attention_before"], ["factor"]),
            helper.make_node("Mul", ["attention_before", "factor"], [output]),
        ]
        position = 1 + list(model.graph.node).index(node)
        for added in reversed(nodes):
            model.graph.node.insert(position, added)

    return edit


@pytest.mark.more
@pytest.mark.parametrize(
    ("fault", "found_at"),
    [
        (("batch", "Greater", 16), "batch 17,"),
        # padded rows of two tokens are right
        (("length", "Equal", 2), "sequence 2"),
        pytest.param(("batch", "Equal", 32), "batch 32,", marks=pytest.mark.slow),
        pytest.param(("length", "Greater", 64), "sequence 67", marks=pytest.mark.slow),
        pytest.param(("length", "Equal", 36), "sequence 36", marks=pytest.mark.slow),
    ],
)
def test_fault_at_some_sizes_fails(exported, copied, fault, found_at):
    artifact = faults.break_graph(copied(exported(*FEATURES)), weaken_attention(*fault))
    report = validate_model(artifact)
    assert not report.passed
    assert {"one", "small", "odd", "ragged"}.isdisjoint(
        case.name for case in report.cases if not case.passed
    )
    assert any(
        case.name.startswith("decision at") and found_at in case.name
        for case in report.cases
        if not case.passed
    )


@pytest.mark.slow
def test_thorough_runs_every_length(exported, copied):
    artifact = faults.break_graph(
        copied(exported(*FEATURES)), weaken_attention("length", "Equal", 100, times=3)
    )
    # The number is not in the graph, but its own comparison shows the size.
    assert not validate_model(artifact, effort="normal").passed
    report = validate_model(artifact, effort="thorough")
    assert {"length 100", "batch 2 padded to 100"} <= {
        case.name for case in report.cases if not case.passed
    }
    lengths = {length for _, length in report.coverage[0].consistent}
    assert lengths >= set(range(2, 129)) - {100, 101}


@pytest.mark.parametrize(("noise", "passes"), [(0.0, False), (1e-3, True)])
def test_pytorchs_own_error_on_confirmed_inputs_counts(scan, tmp_path, noise, passes):
    """PyTorch may be less accurate there than on all other inputs."""
    scanned = ScanResult(deviating={ScanShape(2, 4): 1.0})
    found = scan(FEATURES)
    name = "last_hidden_state"

    def run_reference(cases):
        outputs = []
        for index, case in enumerate(cases):
            file = tmp_path / f"{index}.npy"
            np.save(file, found._run(case.make())[name] + np.float32(1e-3))
            outputs.append(ReferenceOutputs({name: file}))
        return ReferenceRun("PyTorch", outputs, {name: NoiseFloor(noise, 1.0 - noise, noise)}, [])

    elsewhere = ReferenceRun("PyTorch", [], {name: NoiseFloor(0.0, 1.0, 0.0)}, [])
    limits = ComparisonLimits(Tolerance.for_precision("fp32"))
    results = found.confirm(scanned, GraphComparison(elsewhere, limits), run_reference)
    assert results
    assert all(case.passed == passes for case in results)


@pytest.mark.more
def test_wrong_last_row_fails(exported, copied):
    """Only batches of more than 20 rows have it, which no other case has."""

    def edit(model):
        faults.after(
            model.graph,
            "last_hidden_state",
            lambda before: [
                *where("batch", "Greater", 20, 1),
                helper.make_node("Identity", [before], ["plain"]),
                faults.constant("starts", np.int64([0])),
                faults.constant("ends", np.int64([-1])),
                helper.make_node("Slice", ["plain", "starts", "ends"], ["but_last"]),
                faults.constant("last_starts", np.int64([-1])),
                faults.constant("last_ends", np.int64([10**6])),
                helper.make_node("Slice", ["plain", "last_starts", "last_ends"], ["last"]),
                faults.constant("zero", np.float32(0)),
                faults.constant("one", np.float32(1)),
                helper.make_node("Where", ["condition", "zero", "one"], ["factor"]),
                helper.make_node("Mul", ["last", "factor"], ["last_row"]),
                helper.make_node("Concat", ["but_last", "last_row"], ["out"], axis=0),
            ],
        )

    report = validate_model(faults.break_graph(copied(exported(*FEATURES)), edit))
    assert "batch 2" in report.summary


def test_report_lists_the_sizes(exported, copied):
    (found,) = validate_model(copied(exported(*FEATURES)), force=True).coverage
    assert (found.graph, found.dim, found.reason) == ("model.onnx", "sequence", "")
    assert {(1, 1), (2, 8), (3, 17), (4, 24), (1, 128)} <= set(found.compared)
    assert {length for batch, length in found.consistent if batch == 2} >= {*range(1, 41), 128}
    assert {batch for batch, length in found.consistent if length == 4} >= {*range(2, 34), 65}
    assert found.deviating == []


@pytest.mark.more
@pytest.mark.parametrize(("size", "limit"), [("length", 100), ("batch", 31)])
def test_sizes_at_which_the_graph_begins_to_do_something_else_run(exported, copied, size, limit):
    """A size that no list has is found, because the graph holds the number."""
    broken = copied(exported(*FEATURES))
    broken = faults.break_graph(broken, weaken_attention(size, "Equal", limit))
    report = validate_model(broken, effort="quick")
    assert not report.passed
    assert str(limit) in report.summary


@pytest.mark.slow
def test_model_that_reads_padding_in_pytorch_passes_with_a_note(exported, copied):
    """ConvBERT convolves over padded positions."""
    report = validate_model(copied(exported("convbert", "feature-extraction")))
    assert report.passed, report.summary
    assert report.coverage[0].deviating
    assert any("differ from their rows alone" in note for note in report.notes)


@pytest.mark.more
def test_quantized_batch_is_judged_by_its_rows_alone(exported, tmp_path):
    """No limit on a single case is tight enough: what fails is that batches are worse than rows."""
    int8 = quantize_model(
        exported(*FEATURES), scheme="dynamic", target="cpu", out=tmp_path / "made"
    )
    options = {"effort": "quick", "min_cosine": 0.5}
    sound = validate_model(int8.copy_to(tmp_path / "sound"), **options)
    assert sound.passed, sound.summary
    broken = int8.copy_to(tmp_path / "broken")
    broken = faults.break_graph(broken, weaken_attention("batch", "Greater", 16, factor=0))
    report = validate_model(broken, **options)
    assert not report.passed
    assert "for rows alone" in report.summary


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["electra", pytest.param("mpnet", marks=pytest.mark.slow)])
def test_dynamic_int8_of_a_classifier_passes(exported, tmp_path, kind):
    """Its scales depend on the batch, and the cosine of a few logits differs between rows."""
    model = exported(kind, "text-classification")
    int8 = quantize_model(model, scheme="dynamic", target="cpu", out=tmp_path / "made")
    report = validate_model(int8)
    assert report.passed, report.summary
    (note,) = [note for note in report.notes if "differ from their rows alone" in note]
    assert note.endswith("are not much farther from its outputs than rows alone")


@pytest.mark.parametrize(
    ("name", "cosine", "passes"),
    [
        ("id 711, told apart", 0.99, True),
        ("id 711, told apart", 0.97, False),
        ("decision at batch 17, sequence 9", 0.97, False),
        ("batch 4 padded to 24", 0.97, True),  # ordinary inputs are the measure
    ],
)
def test_quantized_decisions_are_judged_by_other_inputs(name, cosine, passes):
    def result(name, cosine, kind="sweep"):
        metrics = OutputMetrics(
            output="logits",
            shape=(4, 9),
            max_abs=0.1,
            p99_abs=0.1,
            max_rel=0.1,
            cosine=cosine,
            argmax_agreement=1.0,
            nonfinite=0,
            noise_floor=0.0,
            limit=float("inf"),
            cosine_limit=0.5,
            problem="",
        )
        return ValidationCaseResult("model.onnx", name, kind, {}, [metrics], "")

    others = [result("odd", 0.99), result("longest", 0.999), result("real 1", 0.5, "real")]
    *_, judged = judge_decisions([*others, result(name, cosine)])
    assert judged.passed == passes
    if not passes:
        assert judged.outputs[0].problem == "cosine 0.9700, but at least 0.9900 for other inputs"


def test_graph_with_a_fixed_batch_is_scanned_over_its_lengths(exported):
    artifact = exported(*FEATURES)
    graph = artifact.manifest.graphs[0]
    specs = {
        side: tuple(type(s)(s.name, s.dtype, (1, *s.dims[1:])) for s in getattr(graph, side))
        for side in ("inputs", "outputs")
    }
    limits = FeedLimits.from_artifact(artifact)
    fixed = ConsistencyScan(lambda feeds: {}, graph.model_copy(update=specs), limits, seed=0)
    shapes = fixed.shapes("quick", [])
    assert {shape.batch for shape in shapes} == {1}
    (padded,) = fixed.batch_case(ScanShape(1, 64)).make()["attention_mask"]
    assert 0 < padded.sum() < 64


def test_coverage_in_words_and_as_a_table():
    found = GraphCoverage(
        "model.onnx", "sequence", [(1, 1), (4, 24)], [(2, 3), (2, 40), (9, 4)], [(3, 5)]
    )
    assert found.describe() == (
        "2 sizes compared with PyTorch; in 3 more (batch up to 9, sequence up to 40) "
        "rows equal those run alone"
    )
    table = {row["batch"]: row for row in found.grid()}
    assert table["1"]["sequence 1"] == "1 + 0"
    assert table["2–3"]["sequence 2–3"] == "0 + 1"
    assert table["2–3"]["sequence 4–7"] == "–, 1 deviate"
    assert table["4–7"]["sequence 16–31"] == "1 + 0"


@pytest.mark.parametrize(
    ("model", "dim", "left"),
    [
        (FEATURES, "sequence", False),
        (("gpt2", "text-generation-with-past"), "past_sequence", True),
        (("t5", "text2text-generation-with-past"), "encoder_sequence", False),
    ],
)
def test_padded_dim(exported, model, dim, left):
    graph = exported(*model).manifest.graphs[0]
    assert PaddedDim.of(graph) == PaddedDim(dim, left)


@pytest.mark.parametrize(("side", "left"), [("left", True), ("right", False), ("none", False)])
def test_texts_are_padded_as_the_runtime_pads_them(exported, side, left):
    artifact = exported(*FEATURES)
    graph = artifact.manifest.graphs[0]
    padding = PaddingRecord(side=side, token_id=7)
    graph = graph.model_copy(update={"padding": padding})
    assert PaddedDim.of(graph) == PaddedDim("sequence", left)
    manifest = artifact.manifest.model_copy(update={"graphs": (graph,)})
    before, limits = map(FeedLimits.from_artifact, (artifact, Artifact(artifact.path, manifest)))
    assert limits.pad_token_id == (before.pad_token_id if side == "none" else 7)


def test_images_have_no_padded_dim(scan):
    images = scan(("resnet", "image-classification"))
    assert images.dim == ""
    assert images.shapes("quick", []) == [ScanShape(size, 0) for size in (2, 3, 9, 17)]


def test_bounds_of_profiles_are_scanned(scan):
    shapes = scan(FEATURES).shapes("quick", [Profile.parse("batch=1:8:50,sequence=16:77:100")])
    assert {ScanShape(50, 4), ScanShape(2, 77), ScanShape(2, 100)} <= set(shapes)


def test_engine_without_single_rows_runs_the_same_row_twice(scan):
    profile = Profile.parse("batch=2:2:8,sequence=16:16:32")
    engine = scan(FEATURES, engines=[profile])
    shapes = engine.shapes("quick", [profile])
    assert min(shape.batch for shape in shapes) == 2
    assert min(shape.length for shape in shapes) == 16
    assert engine.alone_case(31).make()["input_ids"].shape == (2, 31)


def test_numbers_that_only_shape_a_reshape_are_no_special_sizes():
    """A comparison may begin at them, in a graph that holds them for it; a Reshape may not."""
    model = ir.from_onnx_text("""<ir_version: 9, opset_import: ["" : 20]>
    g (float[n, 384] x, int64[1] n) => (float[n, 12, 32] y, bool[1] z) {
      heads = Constant <value = int64[1] {12}> ()
      width = Constant <value = int64[1] {32}> ()
      shape = Concat <axis = 0> (n, heads, width)
      y = Reshape (x, shape)
      limit = Constant <value = int64[1] {96}> ()
      over = Greater (n, limit)
      more = Less (n, width)
      z = And (over, more)
    }""")
    assert find_sizes(model) == {12, 32, 96}
    assert find_sizes(model, shapes=False) == {32, 96}
