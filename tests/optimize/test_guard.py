"""The overflow guard with graphs that it cannot repair, and with branches."""

import json

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from enginery import export_model
from enginery.cli import main
from enginery.core.errors import ExportError, InputError
from enginery.optimize import stage
from enginery.optimize.config import OptimizeConfig
from enginery.optimize.divergence import find_divergences, relative_error
from tests.passes.graphs import graph, saved
from tests.tiny import tiny_artifact


@pytest.fixture
def large_output(tmp_path):
    """Export an artifact whose output exceeds FP16: x -> MatMul -> Mul by a million."""
    text = "g (float[batch, 8] x) => (float[batch, 8] y) { h = MatMul (x, w)  y = Mul (h, big) }"
    model = graph(text, w=np.eye(8), big=np.float32(1e6))
    return export_model(str(saved(model, tmp_path / "large.onnx")))


def record(artifact):
    return json.loads((artifact.path / stage.REPORT).read_text())["graphs"][0]


def test_overflowing_output_names_the_node_that_is_fp32_already(large_output, tmp_path):
    config = OptimizeConfig(io_dtype="same")
    artifact = stage.run(large_output, config, tmp_path / "out")
    found = record(artifact)
    assert found["unrepaired"][0]["node"] == "mul_1"
    assert found["unrepaired"][0]["fixed"] is True
    assert found["rounds"] <= 1, "there was nothing to repair"
    verdict = artifact.failed_verdict()
    assert verdict is not None
    assert "y: " in verdict.summary
    assert (
        "NaN or infinite; it diverges from FP32 at the node mul_1, which is FP32 already"
        in verdict.summary
    )
    assert verdict.summary.endswith("use --io-dtype fp32")


def test_same_output_passes_in_fp32(large_output, tmp_path):
    artifact = stage.run(large_output, OptimizeConfig(), tmp_path / "out")
    assert artifact.failed_verdict() is None
    assert [island["node"] for island in record(artifact)["islands"]] == ["mul_1"]


@pytest.mark.more
def test_command_line_exits_with_1_and_names_the_node(large_output, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["optimize", str(large_output.path), "--io-dtype", "same", "--out", str(out)]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "it diverges from FP32 at the node mul_1, which is FP32 already" in said
    assert "use --io-dtype fp32" in said
    assert "Traceback" not in said


def test_error_with_all_nodes_in_fp32_names_the_first_one(tmp_path):
    """The remaining error is the rounding of the graph's input."""
    text = "g (float[n, 8] x) => (float[n, 8] y) { h = Sin (x)  y = Mul (h, w) }"
    source = export_model(str(saved(graph(text, w=np.float32(2)), tmp_path / "c.onnx")))
    config = OptimizeConfig(max_error=1e-6, keep_fp32=("sin_0", "mul_1"), io_dtype="same")
    artifact = stage.run(source, config, tmp_path / "out")
    summary = artifact.failed_verdict().summary
    assert "it diverges from FP32 at the node sin_0, which is FP32 already: the relative" in summary
    assert summary.endswith("that of its computed inputs 0")


def squares(path, columns="columns"):
    """Write x -> Mul x -> ReduceSum -> Tanh: a square of more than 255 overflows FP16."""
    text = f"g (float[batch, {columns}] x) => (float[batch, 1] y) {{ h = Mul (x, x)  "
    text += "s = ReduceSum <keepdims = 1> (h, axes)  y = Tanh (s) }"
    return export_model(str(saved(graph(text, axes=np.int64([1])), path)))


def kept(artifact):
    return {island["node"] for island in record(artifact)["islands"]}


@pytest.mark.more
def test_ranges_of_arrays_keep_nodes_in_fp32_that_generated_numbers_do_not(tmp_path):
    source = squares(tmp_path / "squares.onnx")
    generated = stage.run(source, OptimizeConfig(), tmp_path / "generated")
    assert (kept(generated), record(generated)["feeds"]) == (
        set(),
        "generated numbers, which real inputs may exceed",
    )
    numbers = np.random.default_rng(0).normal(0, 1, (7, 9))
    numbers[5, 2] = 300.0
    np.savez(tmp_path / "real.npz", x=numbers)
    artifact = stage.run(source, OptimizeConfig(data=str(tmp_path / "real.npz")), tmp_path / "real")
    assert kept(artifact) == {"mul_0", "reducesum_1", "tanh_2"}
    assert (record(artifact)["feeds"], record(artifact)["batches"]) == ("rows of real.npz", 2)
    assert record(artifact)["largest"] == pytest.approx(90_000, rel=0.01)
    some = OptimizeConfig(data=str(tmp_path / "real.npz"), rows=2)  # rows 0 and 3
    assert kept(stage.run(source, some, tmp_path / "some")) == set()


def test_arrays_that_do_not_fit_the_graph_are_an_error(tmp_path):
    source = squares(tmp_path / "squares.onnx", columns="5")
    np.savez(tmp_path / "real.npz", x=np.ones((2, 6)))
    with pytest.raises(InputError, match=r"real\.npz': x: found shape \(2, 6\), expected x"):
        stage.run(source, OptimizeConfig(data=str(tmp_path / "real.npz")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_data_that_the_graph_does_not_take_name_arrays_as_the_way(tmp_path):
    source = squares(tmp_path / "squares.onnx")
    (tmp_path / "rows.csv").write_text("text\nhello\n")
    with pytest.raises(
        InputError, match=r"takes x, but .* Save an array for each of them as \.npz"
    ):
        stage.run(source, OptimizeConfig(data=str(tmp_path / "rows.csv")), tmp_path / "out")


@pytest.mark.slow
def test_t5_merged_decoder_is_measured_in_its_branches(tiny_model, tmp_path):
    task = "text2text-generation-with-past"
    model = tiny_model("t5", "text2text-generation")
    source = tiny_artifact("t5", task, tmp_path / "merged", source=model)
    artifact = stage.run(source, OptimizeConfig(), tmp_path / "out")
    assert artifact.failed_verdict() is None
    graphs = json.loads((artifact.path / stage.REPORT).read_text())["graphs"]
    merged = next(found for found in graphs if "merged" in found["graph"])
    assert merged["tensors_measured"] > 300, "the tensors of both branches"
    assert merged["low_nodes"] > 150
    # A branch that none of the generated inputs took is not cast.
    unknown = [i for i in merged["islands"] if "range is unknown" in i["reason"]]
    assert len(unknown) + merged["low_nodes"] > 300
    model = onnx.load(artifact.path / merged["graph"])
    (branching,) = (n for n in model.graph.node if n.op_type == "If")
    assert len(branching.output) == len(source.graph(merged["graph"]).outputs)


def test_divergence_inside_a_branch_is_found(tmp_path):
    text = """<ir_version: 9, opset_import: ["" : 20]>
    g (float[n, 4] x, bool[1] c) => (float[n, 4] y) {
      y = If (c) <
        then_branch = a () => (float[n, 4] p) { far = Mul (x, big)  p = Tanh (far) },
        else_branch = b () => (float[n, 4] q) { q = Tanh (x) }
      >
    }"""
    paths = []
    for number in (2.0, np.inf):
        model = onnx.parser.parse_model(text)
        model.graph.initializer.append(numpy_helper.from_array(np.float32(number), "big"))
        paths.append(tmp_path / f"{number}.onnx")
        onnx.save(model, paths[-1])
    feeds = {"x": np.ones((2, 4), np.float32), "c": np.array([True])}
    (first, *_) = find_divergences(*paths, feeds, fixed=())
    assert (first.tensor, first.error, first.fixed) == ("far", np.inf, False)
    assert find_divergences(*paths, feeds, fixed={first.node})[0].fixed
    assert find_divergences(*paths, {**feeds, "c": np.array([False])}, fixed=()) == []


def test_different_shapes_are_an_infinite_error():
    assert relative_error(np.ones(3), np.ones(2)) == np.inf


@pytest.mark.more
@pytest.mark.parametrize(
    ("text", "weights", "why"),
    [
        (
            "g (double[n, 4] x) => (double[n, 4] y) { y = Mul (x, w) }",
            {"w": np.ones(4)},
            "it computes in float64, and only float32 is cast",
        ),
        (
            "g (int64[n, 4] x) => (int64[n, 4] y) { y = Mul (x, w) }",
            {"w": np.ones(4, np.int64)},
            "it has no node with floats",
        ),
    ],
)
def test_graph_of_which_no_node_can_be_cast_is_an_error(tmp_path, text, weights, why):
    path = tmp_path / "c.onnx"
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 20]>\n{text}')
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights.items())
    onnx.save(model, path)
    with pytest.raises(ExportError, match=f"no node of model.onnx can compute in fp16: {why}"):
        stage.run(export_model(str(path)), OptimizeConfig(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_graph_whose_nodes_are_all_in_a_loop_is_an_error_that_names_the_first(tmp_path):
    text = """<ir_version: 9, opset_import: ["" : 20]>
    g (float[n, 4] x, int64 count) => (float[n, 4] y) {
      go = Constant <value = bool {1}> ()
      y = Loop (count, go, x) <
        body = b (int64 i, bool c, float[n, 4] before) => (bool d, float[n, 4] after) {
          d = Identity (c)
          after = Mul (before, half)
        }
      >
    }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.float32(0.5), "half"))
    onnx.save(model, tmp_path / "loop.onnx")
    with pytest.raises(ExportError, match=r"stay FP32, such as .*: it is in the body of Loop"):
        stage.run(export_model(str(tmp_path / "loop.onnx")), OptimizeConfig(), tmp_path / "out")
