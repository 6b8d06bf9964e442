"""INT8 products are exact on every processor, those of x86 without VNNI included."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginery.runtime.model import load_model
from enginery.runtime.onnxruntime.session import new_session
from enginery.runtime.onnxruntime.tracing import GraphTracer
from enginery.runtime.providers.selection import choose_providers

ROWS, COLUMNS = 64, 16
# With the largest weights there are, two products leave 16 bits.
WEIGHT = np.full((ROWS, COLUMNS), 127, np.int8)
X = np.linspace(0.5, 1, 3 * ROWS, dtype=np.float32).reshape(3, ROWS)
STEP = np.float32(2**-7)  # exact, so that the expected numbers are, too


def static():
    """x and w through Q/DQ, as `quantize` writes them."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "step", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "step", "zero"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "step", "zero"], ["e"]),
        helper.make_node("MatMul", ["d", "e"], ["y"]),
    ]
    return nodes, {"w": WEIGHT, "step": STEP, "zero": np.int8(0)}


def dynamic():
    """x quantized as it comes, as `quantize --scheme dynamic` writes it; w in steps of 1."""
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("MatMulInteger", ["q", "w", "zero"], ["p"]),
        helper.make_node("Cast", ["p"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["f", "scale"], ["y"]),
    ]
    return nodes, {"w": WEIGHT}


def saved(graph, path):
    nodes, weights = graph
    made = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", ROWS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", COLUMNS])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
    )
    opset = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(made, opset_imports=opset, ir_version=10), str(path))
    return path


@pytest.mark.parametrize(
    ("graph", "weight", "rtol"),
    # A static graph rounds x to half a step of 1/128, a dynamic one to half of 1/255.
    [(static(), WEIGHT * STEP, 2**-8 / 0.5), (dynamic(), WEIGHT.astype(np.float32), 1 / 255)],
    ids=["static", "dynamic"],
)
def test_int8_products_do_not_saturate(tmp_path, graph, weight, rtol):
    path = saved(graph, tmp_path / "model.onnx")
    session = new_session(path, choose_providers(["cpu"]), ort.SessionOptions())
    np.testing.assert_allclose(session.run(None, {"x": X})[0], X @ weight, rtol=rtol)
    with GraphTracer(path, ["y"], optimized=True) as trace:
        np.testing.assert_allclose(trace({"x": X})["y"], X @ weight, rtol=rtol)


@pytest.mark.parametrize(
    ("features", "entry"),
    [
        (("avx2",), "1"),
        (("avx2", "avx512f"), "1"),
        ((), "1"),  # unknown
        (("avx2", "avx_vnni"), ""),
        (("avx2", "avx512f", "avx512_vnni", "amx_int8"), ""),
    ],
)
def test_exact_kernels_are_for_processors_that_saturate(tmp_path, monkeypatch, features, entry):
    """Those with VNNI never saturate, and the exact kernels are slow on them."""
    monkeypatch.setattr(
        "enginery.runtime.onnxruntime.session.read_cpuinfo", lambda: ("Some processor", features)
    )
    path = saved(static(), tmp_path / "model.onnx")
    session = new_session(path, choose_providers(["cpu"]), ort.SessionOptions())
    found = session.get_session_options()
    if entry:
        assert found.get_session_config_entry("session.x64quantprecision") == entry
    else:
        with pytest.raises(RuntimeError, match="does not have configuration"):
            found.get_session_config_entry("session.x64quantprecision")


@pytest.mark.parametrize(("text", "arena"), [("cpu", True), ("no", False), ("yes", True)])
def test_the_option_of_the_cpus_arena_is_the_sessions(tmp_path, text, arena):
    specs = "cpu" if text == "cpu" else f"cpu; cpu.enable_cpu_mem_arena={text}"
    options = ort.SessionOptions()
    path = saved(static(), tmp_path / "model.onnx")
    session = new_session(path, choose_providers(specs), options)
    assert session.get_session_options().enable_cpu_mem_arena == arena
    run = ort.RunOptions()
    run.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    if arena:
        session.run(None, {"x": X}, run)
    else:
        with pytest.raises(Exception, match="Did not find an arena based allocator"):
            session.run(None, {"x": X}, run)


def test_the_arena_is_shrunk_on_the_cpu_too(tiny):
    artifact = tiny.artifact("bert", "text-classification")
    with load_model(artifact) as plain, load_model(artifact, shrink_arena=True) as shrinking:
        texts = ["The engine is warm."]
        assert plain.classify(texts) == shrinking.classify(texts)
