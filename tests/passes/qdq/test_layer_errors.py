"""Each layer of a Q/DQ graph is compared with the same layer in FP32 on the same input."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto

from enginery.core.accuracy import LayerError
from enginery.passes.cast.cast import cast_graph
from enginery.passes.ir.graph_file import write_graph
from enginery.passes.ir.nodes import infer_types
from enginery.passes.qdq.insert import insert_qdq
from enginery.passes.qdq.layer_errors import (
    add_float_layers,
    float_layers,
    float_operands,
    measure_layer_errors,
    row_errors,
)
from enginery.passes.qdq.layers import find_layers
from enginery.passes.qdq.scales import ActivationQuantParams
from enginery.runtime.onnxruntime.tracing import GraphTracer
from tests.passes.onnx_graphs import make_graph, node

K, N = 32, 48
GENERATOR = np.random.default_rng(0)
WEIGHT = GENERATOR.normal(size=(K, N)).astype(np.float32)
BIAS = GENERATOR.normal(size=N).astype(np.float32)
ROWS = GENERATOR.normal(size=(5, 7, K)).astype(np.float32)
IMAGES = GENERATOR.normal(size=(3, 16, 6, 5)).astype(np.float32)
FILTERS = GENERATOR.normal(size=(20, 16, 3, 3)).astype(np.float32)
PLAIN = ActivationQuantParams(float(np.abs(ROWS).max() / 127))
SMOOTHED = ActivationQuantParams(
    0.05,
    GENERATOR.uniform(0.5, 2, K).astype(np.float32),
    GENERATOR.normal(size=K).astype(np.float32),
)
DELTA = GENERATOR.normal(0, 0.01, N).astype(np.float32)

MATMUL = [node("MatMul", "x w", "y", name="layer")]
BIASED = [node("MatMul", "x w", "p", name="layer"), node("Add", "b p", "y", name="bias")]
SPLIT = [
    *BIASED[:1],
    node("Add", "b p", "s", name="bias"),
    node("Split", "s", "y z", axis=-1, num_outputs=2),
]
GEMM = [node("Gemm", "x w b", "y", name="layer", transB=1)]
CONV = [node("Conv", "x w b", "y", name="layer", pads=[1, 1, 1, 1])]


def graph_of(nodes, initializers, shape):
    outputs = ["y", "z"] if nodes is SPLIT else ["y"]
    floats = dict.fromkeys(outputs, (TensorProto.FLOAT, [None] * len(shape)))
    inputs = {"x": (TensorProto.FLOAT, shape)}
    return ir.from_proto(make_graph(nodes, initializers, inputs=inputs, outputs=floats))


def measured(model, feeds, params, tmp_path, *, fp16=False, deltas=None):
    """Quantize the only layer; return its error, and the quantized graph's output."""
    infer_types(model)
    layers = find_layers(model)
    known = float_operands(model, layers)
    insert_qdq(model, layers, {"x": params}, bias_deltas=deltas)
    if fp16:
        cast_graph(model, "fp16")
    add_float_layers(model, float_layers(model, layers, known))
    path = tmp_path / "model.onnx"
    write_graph(model, path, max_inline_bytes=0)
    errors = measure_layer_errors(path, [lambda: feeds])
    assert list(errors) == ["layer"]
    outputs = ["y", "z"] if "z" in {o.name for o in model.graph.outputs} else ["y"]
    with GraphTracer(path, outputs) as run:
        found = run(feeds)
    return errors["layer"], np.concatenate([found[name] for name in outputs], axis=-1)


def expected_error(found, plain, axis=-1):
    """The mean over rows of the mean over positions, for outputs without small positions."""
    ratios = np.linalg.norm(found - plain, axis=axis) / np.linalg.norm(plain, axis=axis)
    return ratios.reshape(len(ratios), -1).mean(axis=1)


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("params", [PLAIN, SMOOTHED])
@pytest.mark.parametrize("deltas", [None, {"layer": DELTA}])
@pytest.mark.parametrize(
    ("nodes", "bias"), [(MATMUL, 0), (BIASED, BIAS), (SPLIT, BIAS)], ids=["plain", "bias", "split"]
)
def test_error_of_a_product_is_that_of_its_output(nodes, bias, params, deltas, fp16, tmp_path):
    constants = {"w": WEIGHT} if nodes is MATMUL else {"w": WEIGHT, "b": BIAS}
    model = graph_of(nodes, constants, ("batch", "sequence", K))
    error, found = measured(model, {"x": ROWS}, params, tmp_path, fp16=fp16, deltas=deltas)
    wanted = expected_error(found, ROWS @ WEIGHT + bias)
    # The casts of FP16 stand before the FP32 layer as well.
    assert error.error == pytest.approx(wanted.mean(), rel=0.05 if fp16 else 1e-4)
    assert error.deviation == pytest.approx(wanted.std(ddof=1), rel=0.2 if fp16 else 1e-3)
    assert error.rows == len(ROWS)
    assert 0.002 < error.error < 0.05


def test_error_of_a_gemm_and_a_convolution(tmp_path):
    gemm = graph_of(GEMM, {"w": WEIGHT.T.copy(), "b": BIAS}, ("batch", K))
    flat = ROWS.reshape(-1, K)
    error, found = measured(gemm, {"x": flat}, PLAIN, tmp_path)
    assert error.error == pytest.approx(expected_error(found, flat @ WEIGHT + BIAS).mean(), 1e-4)

    conv = graph_of(CONV, {"w": FILTERS, "b": BIAS[:20]}, ("batch", 16, "height", "width"))
    with_fp32 = tmp_path / "fp32.onnx"
    write_graph(conv, with_fp32)
    with GraphTracer(with_fp32, ["y"]) as run:
        plain = run({"x": IMAGES})["y"]
    error, found = measured(conv, {"x": IMAGES}, PLAIN, tmp_path)
    assert error.error == pytest.approx(expected_error(found, plain, axis=1).mean(), 1e-4)
    assert error.rows == len(IMAGES)


def test_dropped_correction_and_wrong_scale_raise_the_error(tmp_path):
    model = graph_of(BIASED, {"w": WEIGHT, "b": BIAS}, ("batch", "sequence", K))
    sound, _ = measured(model, {"x": ROWS}, PLAIN, tmp_path)
    model = graph_of(BIASED, {"w": WEIGHT, "b": BIAS}, ("batch", "sequence", K))
    twice, _ = measured(model, {"x": ROWS}, ActivationQuantParams(2 * PLAIN.scale), tmp_path)
    assert twice.error > 1.5 * sound.error


def test_padded_positions_do_not_count():
    errors = np.float32([[1, 4, 1e9], [9, 9, 9]])
    feeds = {"input_ids": np.ones((2, 3)), "attention_mask": np.array([[1, 1, 0], [1, 1, 1]])}
    assert row_errors(errors, np.full((2, 3), 100.0), feeds) == pytest.approx([0.15, 0.3])
    flattened = row_errors(errors.reshape(-1), np.full(6, 100.0), feeds)
    assert flattened == pytest.approx([0.15, 0.3])


def test_position_with_a_huge_output_does_not_hide_the_others():
    lengths = np.float32([[1, 1, 1, 1e8]])
    feeds = {"x": np.zeros((1, 4))}
    errors = np.float32([[1e-2, 1e-2, 1e-2, 1]])
    assert row_errors(errors, lengths, feeds) == pytest.approx([0.075], 0.01)


def test_position_without_an_output_counts_like_a_tenth_of_the_others():
    squared = np.float32([[0, 1, 1]])
    feeds = {"x": np.zeros((1, 3))}
    assert row_errors(np.float32([[1e-4, 0, 0]]), squared, feeds) == pytest.approx([0.1 / 3])
    nothing = np.zeros((1, 3), np.float32)
    assert row_errors(nothing, nothing, feeds) == [0.0]
    assert row_errors(np.float32([[1, 0, 0]]), nothing, feeds) == [np.inf]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_number_that_is_not_finite_is_an_infinite_error(value):
    ones, feeds = np.ones((2, 3), np.float32), {"x": np.zeros((2, 3))}
    wrong = ones.copy()
    wrong[1, 2] = value
    assert row_errors(wrong, ones, feeds) == [1.0, np.inf]
    assert row_errors(ones, wrong, feeds) == [1.0, np.inf]


def test_positions_that_belong_to_no_row_are_one():
    ones, fours = np.float32([1, 1, 1]), np.float32([4, 4, 4])
    assert row_errors(ones, fours, {"x": np.zeros((2, 3))}) == [0.5]
    assert row_errors(ones, fours, {"sr": np.int64(16000)}) == [0.5]
    assert row_errors(ones, fours, {"sr": np.int64(16000), "x": np.zeros((3, 1))}) == [0.5] * 3


def test_mean_and_deviation_over_rows():
    assert LayerError.of([0.1, 0.3]) == LayerError(2, 0.2, pytest.approx(0.2 / 2**0.5))
    assert LayerError.of([0.1]) == LayerError(1, 0.1, None)
    assert LayerError.of([0.1, np.inf]).deviation is None


def test_nothing_is_measured_without_inputs(tmp_path):
    assert measure_layer_errors(tmp_path / "none.onnx", []) == {}
