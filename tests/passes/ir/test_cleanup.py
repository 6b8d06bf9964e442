"""Clean-up: smaller graphs with the same outputs and the same interface."""

import numpy as np
import onnx_ir as ir
import pytest

from enginery.passes.ir.cleanup import clean_graph, non_standard_nodes
from enginery.passes.ir.nodes import ensure_unique_node_names, infer_types
from tests.passes.graphs import graph, ops, run, saved

TEXT = """
g (float[batch, 4] x) => (float[batch, 4] y, float[batch, 4] z) {
  two = Add (one, one)
  a = Identity (x)
  b = Cast <to: int = 1> (a)
  c = Mul (b, two)
  d = Mul (b, two)
  dead = Exp (x)
  y = Add (c, d)
  z = Identity (x)
}
"""
X = np.float32([[1, 2, 3, 4]])


def test_constants_fold_and_redundant_nodes_go_and_outputs_stay(tmp_path):
    model = graph(TEXT, one=np.float32([1.0]))
    infer_types(model)
    cleaned = clean_graph(model)
    assert [node.op_type for node in model.graph] == ["Mul", "Add", "Identity"]
    assert (cleaned.before, cleaned.after) == (8, 3)
    assert cleaned.removed["Identity"] == 1
    after = run(saved(model, tmp_path / "after.onnx"), x=X)
    np.testing.assert_array_equal(after[0], 4 * X)
    np.testing.assert_array_equal(after[1], X)


def test_interface_keeps_its_names_types_and_dims():
    model = graph(TEXT, one=np.float32([1.0]))
    infer_types(model)
    clean_graph(model)
    values = [*model.graph.inputs, *model.graph.outputs]
    assert [value.name for value in values] == ["x", "y", "z"]
    assert all(str(value.shape) == "[batch,4]" for value in values)


def test_output_dims_keep_their_names():
    """A Cast to the same type goes, and what it cast becomes the output."""
    text = """g (float[batch, past, 4] a, float[batch, sequence, 4] b)
      => (float[batch, "past + sequence", 4] y) {
      c = Concat <axis: int = 1> (a, b)
      y = Cast <to: int = 1> (c)
    }"""
    model = graph(text)
    infer_types(model)
    clean_graph(model)
    assert str(model.graph.outputs[0].shape) == "[batch,past + sequence,4]"


@pytest.mark.parametrize(
    ("window", "ceil", "replaced"),
    [((9, 9), 1, True), ((7, 5), 0, True), ((7, 7), 1, True), ((7, 4), 1, False)],
)
def test_a_pool_over_the_whole_input_becomes_global(tmp_path, window, ceil, replaced):
    text = f"""g (float[n, 3, 7, 5] x) => (float[n, 3, h, w] y) {{
      y = AveragePool <kernel_shape: ints = [{window[0]}, {window[1]}], ceil_mode: int = {ceil},
                       strides: ints = [9, 9], count_include_pad: int = 1> (x)
    }}"""
    model = graph(text)
    infer_types(model)
    before = saved(model, tmp_path / "before.onnx")
    clean_graph(model)
    assert [node.op_type == "GlobalAveragePool" for node in model.graph] == [replaced]
    after = saved(model, tmp_path / "after.onnx")
    x = np.random.default_rng(0).normal(size=(2, 3, 7, 5)).astype(np.float32)
    np.testing.assert_allclose(run(after, x=x)[0], run(before, x=x)[0], atol=1e-6)


@pytest.mark.parametrize(
    ("window", "ceil", "replaced"), [(2560, 1, True), (2560, 0, False), (9, 1, False)]
)
def test_a_pool_over_an_input_of_unknown_size(window, ceil, replaced):
    """Without ceil_mode, a window beyond the input has no output."""
    text = f"""g (float[n, 3, height, width] x) => (float[n, 3, h, w] y) {{
      y = AveragePool <kernel_shape: ints = [{window}, {window}], ceil_mode: int = {ceil},
                       strides: ints = [{window}, {window}]> (x)
    }}"""
    model = graph(text)
    infer_types(model)
    clean_graph(model)
    assert [node.op_type == "GlobalAveragePool" for node in model.graph] == [replaced]


def test_identity_in_a_branch_may_return_an_outer_value(tmp_path):
    text = """g (float[4] x, bool c) => (float[4] y) {
      h = Exp (x)
      y = If (c) <
        then_branch = t () => (float[4] a) { a = Tanh (h) },
        else_branch = e () => (float[4] d) { d = Identity (h) }
      > }"""
    model = graph(text)
    infer_types(model)
    clean_graph(model)
    feeds = {"x": np.zeros(4, np.float32), "c": np.array(False)}
    assert run(saved(model, tmp_path / "m.onnx"), **feeds)[0].tolist() == [1.0] * 4


def test_ops_of_other_domains_are_listed():
    model = graph(TEXT, one=np.float32([1.0]))
    fused = ir.node(
        "FusedMatMul", model.graph.node("exp_5").inputs, domain="com.microsoft", name="fused_0"
    )
    model.graph.append(fused)
    assert non_standard_nodes(model) == ["fused_0 (com.microsoft::FusedMatMul)"]


def test_nodes_get_unique_names():
    model = graph("g (float[4] x) => (float[4] y) { a = Exp (x)  b = Exp (a)  y = Exp (b) }")
    for node, name in zip(model.graph, ("", "Exp_1", "Exp_1"), strict=True):
        node.name = name
    ensure_unique_node_names(model)
    names = [node.name for node in model.graph]
    assert len(set(names)) == 3
    assert names[1] == "Exp_1", "the first that has a name keeps it"


@pytest.mark.parametrize("kind", ["bert", "gpt2", "swin"])
def test_exported_models_shrink(exported, kind, tmp_path):
    from enginery.passes.ir.graph_file import read_graph

    tasks = {"bert": "text-classification", "gpt2": "text-generation"}
    artifact = exported(kind, tasks.get(kind, "image-classification"))
    model = read_graph(artifact.model)
    infer_types(model)
    cleaned = clean_graph(model)
    assert cleaned.after < 0.8 * cleaned.before
    saved(model, tmp_path / "m.onnx")
    assert not ops(model, "Constant")
