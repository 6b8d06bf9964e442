"""Embedding tables in INT8."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from enginery.passes.qdq.embeddings import quantize_embeddings

TABLE = np.random.default_rng(0).normal(size=(50, 16)).astype(np.float32)
TABLE[7] = 0
TABLE[8] *= 100
IDS = np.array([[0, 7, 8, 49], [-1, -50, 3, 3]])


def read(nodes, output="float[a, b, 16] y"):
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 20]>
        g (int64[a, b] ids) => ({output}) {{ {nodes} }}"""
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(TABLE, "table"))
    return ir.from_proto(proto)


def run(model):
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"ids": IDS})[0]


@pytest.mark.parametrize(
    "nodes",
    [
        "y = Gather(table, ids)",
        "a = Gather<axis = -2>(table, ids)\n b = Gather(table, ids)\n y = Add(a, b)",
    ],
    ids=["output", "twice"],
)
def test_each_row_is_rounded_by_its_own_scale(nodes):
    model, plain = read(nodes), read(nodes)
    assert quantize_embeddings(model, min_elements=800) == ["table"]
    result, expected = run(model), run(plain)
    largest = np.abs(expected).max(axis=-1, keepdims=True)
    assert np.all(np.abs(result - expected) <= largest * (0.5 / 127 + 2.0**-20))
    assert not result[0, 1].any()
    assert "table" not in model.graph.initializers
    assert model.graph.initializers["table_quantized"].dtype == ir.DataType.INT8


@pytest.mark.parametrize(
    ("nodes", "output"),
    [
        ("a = Gather(table, ids)\n b = Transpose(table)\n y = MatMul(a, b)", "float[a, b, 50] y"),
        ("y = Gather<axis = 1>(table, ids)", "float[50, a, b] y"),
        ("y = GatherElements(table, ids)", "float[a, b] y"),
    ],
    ids=["tied to the head", "columns", "elements"],
)
def test_other_uses_of_a_table_keep_it(nodes, output):
    model = read(nodes, output)
    assert quantize_embeddings(model, min_elements=1) == []
    assert "table" in model.graph.initializers


def test_a_small_table_stays():
    assert quantize_embeddings(read("y = Gather(table, ids)"), min_elements=801) == []
    assert quantize_embeddings(read("y = Gather(table, ids)")) == []


def test_a_table_that_is_an_input_or_whose_names_are_taken_stays():
    for add in (
        lambda graph: graph.input.append(
            onnx.helper.make_tensor_value_info("table", onnx.TensorProto.FLOAT, TABLE.shape)
        ),
        lambda graph: graph.initializer.append(
            onnx.numpy_helper.from_array(np.ones(1, np.float32), "table_scale")
        ),
    ):
        proto = ir.to_proto(read("y = Gather(table, ids)"))
        add(proto.graph)
        assert quantize_embeddings(ir.from_proto(proto), min_elements=1) == []


@pytest.mark.parametrize(
    ("value", "quantized"), [(np.inf, False), (np.nan, False), (np.finfo(np.float32).min, True)]
)
def test_numbers_of_any_size_are_kept(value, quantized, monkeypatch):
    table = TABLE.copy()
    table[3, :4] = value
    monkeypatch.setattr("tests.passes.qdq.test_embeddings.TABLE", table)
    model, plain = read("y = Gather(table, ids)"), read("y = Gather(table, ids)")
    assert bool(quantize_embeddings(model, min_elements=1)) == quantized
    np.testing.assert_allclose(run(model)[1, 2, :4], run(plain)[1, 2, :4], rtol=1e-6)
