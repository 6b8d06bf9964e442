"""Placement: nodes, multiply-adds and copies by provider, on the CPU and on OpenVINO above it."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginery.core.errors import InputError, ProviderError
from enginery.runtime.onnxruntime.cuda_graphs import with_cuda_graph
from enginery.runtime.onnxruntime.multiply_adds import (
    NodeWork,
    multiply_adds,
    profile_multiply_adds,
)
from enginery.runtime.onnxruntime.placement import (
    RECORD,
    PlacedNode,
    Placement,
    add_multiply_adds,
    find_copies,
    placement_from_session,
    read_placement,
)
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions
from enginery.runtime.providers.known import CPU, CUDA, OPENVINO
from enginery.runtime.providers.selection import Provider

ON_CPU = [Provider(CPU, "requested")]
CUDA_GRAPH = "enginery.runtime.onnxruntime.cuda_graphs"
GRAPHS = [(Path("model.onnx"), {})]
FEEDS = {"x": np.ones((2, 4), np.float32)}


def write_model(path, nodes, *, output="y", opset=17):
    """A graph of `x`: float32 (n, 4) and a stored `w`: float32 (4, 3)."""
    weight = numpy_helper.from_array(np.ones((4, 3), np.float32), "w")
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        [weight],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


@pytest.fixture
def two_products(tmp_path):
    """MatMul, LpNormalization and com.microsoft::TransposeMatMul, which OpenVINO does not take."""
    return write_model(
        tmp_path / "products.onnx",
        [
            helper.make_node("MatMul", ["x", "w"], ["a"], name="first"),
            helper.make_node("LpNormalization", ["a"], ["b"], name="norm"),
            helper.make_node(
                "TransposeMatMul",
                ["b", "b"],
                ["y"],
                name="second",
                domain="com.microsoft",
                transB=1,
            ),
        ],
    )


@pytest.fixture
def with_shapes(tmp_path):
    """A product, and the arithmetic of a reshape: Shape, Gather, Mul, Unsqueeze, Reshape."""
    index = helper.make_tensor("i", TensorProto.INT64, [], [0])
    three = helper.make_tensor("t", TensorProto.INT64, [], [3])
    axis = helper.make_tensor("ax", TensorProto.INT64, [1], [0])
    return write_model(
        tmp_path / "shapes.onnx",
        [
            helper.make_node("MatMul", ["x", "w"], ["a"], name="product"),
            helper.make_node("Shape", ["a"], ["s"], name="shape"),
            helper.make_node("Constant", [], ["zero"], value=index, name="zero"),
            helper.make_node("Constant", [], ["three"], value=three, name="three"),
            helper.make_node("Constant", [], ["axis"], value=axis, name="axis"),
            helper.make_node("Gather", ["s", "zero"], ["rows"], name="gather"),
            helper.make_node("Mul", ["rows", "three"], ["count"], name="times"),
            helper.make_node("Unsqueeze", ["count", "axis"], ["flat"], name="unsqueeze"),
            helper.make_node("Reshape", ["a", "flat"], ["b"], name="reshape"),
            helper.make_node("Mul", ["b", "b"], ["y"], name="square"),
        ],
    )


def test_every_node_and_its_multiply_adds_are_on_the_cpu(two_products):
    placement = read_placement(two_products, ON_CPU, FEEDS)
    assert [(n.name, n.op_type, n.domain, n.multiply_adds) for n in placement.nodes] == [
        ("first", "MatMul", "", 2 * 3 * 4),
        ("norm", "LpNormalization", "", 0),
        ("second", "TransposeMatMul", "com.microsoft", 2 * 2 * 3),
    ]
    assert placement.share("cpu") == 1.0
    assert placement.share("cuda") == 0.0
    assert (placement.fallen, placement.copies, placement.notes) == ((), (), ())


def test_the_work_of_nodes_without_names_is_told_as_that_of_no_one_in_particular(tmp_path):
    path = write_model(tmp_path / "m.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])])
    placement = read_placement(path, ON_CPU, FEEDS)
    assert placement.notes == ("100.0% of the multiply-adds are in nodes that were renamed",)


def test_without_feeds_nothing_is_run_and_nothing_counted(two_products):
    placement = read_placement(two_products, ON_CPU)
    assert not placement.counted
    assert [node.multiply_adds for node in placement.nodes] == [0, 0, 0]
    assert not placement.as_json()["multiply_adds_counted"]


def test_arithmetic_on_shapes_is_told_from_the_same_ops_on_activations(with_shapes):
    work = profile_multiply_adds(with_shapes, FEEDS)
    assert [name for name, node in work.items() if node.for_shapes] == [
        "shape",
        "gather",
        "times",
        "unsqueeze",
    ]
    assert not work["square"].for_shapes
    assert not work["reshape"].for_shapes


def test_a_tensor_as_large_as_the_input_is_no_shape(tmp_path):
    path = write_model(
        tmp_path / "cast.onnx",
        [
            helper.make_node("Cast", ["x"], ["whole"], to=TensorProto.INT64, name="large"),
            helper.make_node("Cast", ["whole"], ["y"], to=TensorProto.FLOAT, name="back"),
        ],
    )
    assert profile_multiply_adds(path, FEEDS)["large"].for_shapes
    many = {"x": np.ones((26, 4), np.float32)}
    assert not profile_multiply_adds(path, many)["large"].for_shapes


@pytest.mark.parametrize(
    ("op_type", "inputs", "output", "expected"),
    [
        ("MatMul", [(5, 7, 4), (4, 3)], (5, 7, 3), 5 * 7 * 3 * 4),
        ("MatMul", [(2, 8, 5, 4), (2, 8, 4, 5)], (2, 8, 5, 5), 2 * 8 * 5 * 5 * 4),
        ("MatMul", [(4,), (4, 3)], (3,), 12),
        ("MatMul", [(3, 4), (4,)], (3,), 12),
        ("Gemm", [(4, 2), (4, 3)], (2, 3), 2 * 3 * 4),  # the first is transposed
        ("FusedMatMul", [(2, 3), (2, 3)], (2, 2), 12),
        ("Conv", [(1, 6, 8, 8), (4, 3, 5, 5)], (1, 4, 4, 4), 64 * 3 * 25),  # two groups
        ("QLinearMatMul", [(5, 4), (), (), (4, 3), (3,), (3,)], (5, 3), 60),
        ("QLinearMatMul", [(5, 4), (1,), (1,), (4, 3), (3,), (3,)], (5, 3), 60),
        ("QGemm", [(4, 2), (1,), (1,), (4, 3), (3,), (3,)], (2, 3), 24),
        ("QLinearMatMul", [(3, 4), (1,), (1,), (4,), (1,), (1,)], (3,), 12),
        ("QLinearConv", [(1, 3, 8, 8), (), (), (4, 3, 5, 5)], (1, 4, 4, 4), 64 * 75),
        ("ConvTranspose", [(1, 3, 8, 8), (3, 2, 2, 2)], (1, 2, 16, 16), 192 * 8),
        ("Attention", [(2, 5, 8), (8, 24)], (2, 5, 8), 2 * 5 * 8 * 24 + 2 * 2 * 5 * 5 * 8),
        ("Attention", [(2, 5, 8), (2, 6, 8), (2, 6, 8)], (2, 5, 8), 2 * 2 * 5 * 8 * 6),
        ("MultiHeadAttention", [(2, 5, 2, 3, 4)], (2, 5, 8), 2 * 2 * 5 * 5 * 8),
        ("Add", [(2, 2), (2, 2)], (2, 2), 0),
        ("Conv", [(1, 3, 8, 8)], (1, 4, 4, 4), 0),
    ],
)
def test_multiply_adds_of_an_op(op_type, inputs, output, expected):
    assert multiply_adds(op_type, inputs, [output]) == expected


def test_multiply_adds_of_a_transformer_match_its_dims(tiny):
    # Of each token and layer: four products of 32 by 32 and two of 32 by 64; of each pair of
    # tokens in each layer the scores and the weighted values, 32 each.
    artifact = tiny.artifact("bert", "feature-extraction")
    with OrtRunner(artifact) as runner:
        placement = runner.placement()
    tokens, hidden, layers = 16, 32, 2
    expected = layers * (tokens * (4 * hidden**2 + 2 * hidden * 64) + 2 * tokens**2 * hidden)
    counted = sum(node.multiply_adds for node in placement.nodes)
    assert counted - expected in (0, hidden**2)  # the pooler, where the export has it
    assert placement.notes == ()


def test_the_runner_places_the_shapes_that_it_is_given(tiny):
    artifact = tiny.artifact("bert", "feature-extraction")
    one = np.ones((1, 4), np.int64)
    with OrtRunner(artifact) as runner:
        names = [spec.name for spec in runner.record.inputs]
        few = runner.placement(dict.fromkeys(names, one))
        more = runner.placement(dict.fromkeys(names, np.repeat(one, 2, axis=0)))
    work = [sum(node.multiply_adds for node in found.nodes) for found in (few, more)]
    assert work[1] == 2 * work[0] > 0


def test_a_graph_that_the_cpu_cannot_run_has_no_count(two_products):
    with pytest.raises(InputError, match="the CPU does not run the graph"):
        profile_multiply_adds(two_products, {"x": np.ones((2, 5), np.float32)})
    with pytest.raises(InputError, match="the graph fails on the feeds"):
        read_placement(two_products, ON_CPU, {"x": np.ones((2, 5), np.float32)})


def test_a_session_that_has_not_kept_its_placement_is_an_error(two_products):
    bare = ort.InferenceSession(str(two_products), providers=["CPUExecutionProvider"])
    with pytest.raises(ProviderError, match="has not recorded its placement"):
        placement_from_session(bare, CPU)
    options = ort.SessionOptions()
    options.add_session_config_entry(RECORD, "1")
    kept = ort.InferenceSession(str(two_products), options, providers=["CPUExecutionProvider"])
    assert len(placement_from_session(kept, CPU).nodes) == 3


def test_a_provider_that_does_not_register_is_an_error_and_not_the_cpu(two_products):
    with pytest.raises(ProviderError, match="CUDAExecutionProvider was requested but did not"):
        read_placement(two_products, [Provider(CUDA, "requested")], FEEDS)


def test_a_provider_that_does_not_register_with_options_leads_to_its_options(two_products):
    asked = Provider(CUDA, "requested", {"device_id": "7", "use_tf32": "0"})
    with pytest.raises(ProviderError) as caught:
        read_placement(two_products, [asked], FEEDS)
    assert caught.value.do.endswith("Check its options: cuda.device_id=7, cuda.use_tf32=0")
    assert caught.value.do.startswith("ONNX Runtime's log on standard error says why.")


# Names and numbers are made up after the log in Optimum's guide to NVIDIA GPUs ("All the costly
# MatMul operations are placed on the CUDA execution provider") and ONNX Runtime's profile format:
# no GPU has been asked.
UNDER_CUDA = Placement(
    CUDA,
    (
        PlacedNode("MatMul_101", "MatMul", "", CUDA, 90, False),
        PlacedNode("Gather_76", "Gather", "", CPU, 0, True),
        PlacedNode("MatMulInteger_7", "MatMulInteger", "", CPU, 10, False),
    ),
    counted=True,
)


def test_compute_on_the_cpu_under_a_gpu_is_named_and_shape_operations_are_not():
    assert [node.name for node in UNDER_CUDA.fallen] == ["MatMulInteger_7"]
    assert UNDER_CUDA.notes == (
        "1 compute node is on the CPU under cuda, 10.0% of the multiply-adds: "
        "MatMulInteger_7 (MatMulInteger)",
    )
    assert json.loads(json.dumps(UNDER_CUDA.as_json()))["fallen"][0]["name"] == "MatMulInteger_7"


def test_copies_are_counted_once_each_from_a_profile():
    events = [
        ("Memcpy_token_1", {"op_name": "MemcpyFromHost", "provider": CUDA}),
        ("MatMul_101", {"op_name": "MatMul", "provider": CUDA}),
        ("Memcpy_token_1", {"op_name": "MemcpyFromHost", "provider": CUDA}),
        ("Memcpy_token_2", {"op_name": "MemcpyToHost", "provider": CUDA}),
    ]
    copies = find_copies(events)
    assert copies == ("Memcpy_token_1", "Memcpy_token_2")
    assert Placement(CUDA, (), copies=copies).notes == ("2 copies between the devices in each run",)


def test_a_fused_node_has_the_work_of_the_one_it_is_named_after():
    placed = Placement(CPU, (PlacedNode("dense/MatMulAddFusion", "Gemm", "", CPU, 0, False),))
    work = {"dense": NodeWork("MatMul", 64, False), "lost": NodeWork("MatMul", 36, False)}
    found = add_multiply_adds(placed, work)
    assert found.nodes[0].multiply_adds == 64
    assert found.notes == ("36.0% of the multiply-adds are in nodes that were renamed",)


def test_nodes_that_prevent_a_cuda_graph_are_named():
    looped = PlacedNode("loop", "Loop", "", CUDA, 0, False)
    placed = Placement(CUDA, (*UNDER_CUDA.nodes, looped))
    assert [node.name for node in placed.uncapturable()] == ["MatMulInteger_7", "loop"]


def test_node_that_waits_for_the_number_of_tokens_prevents_a_capture():
    nodes = tuple(
        PlacedNode(name, name, "com.microsoft", CUDA, 0, for_shapes=False)
        for name in ("RemovePadding", "PackedAttention", "RestorePadding")
    )
    assert [node.name for node in Placement(CUDA, nodes).uncapturable()] == ["RemovePadding"]


def test_cuda_graph_error_names_nodes_and_copies(monkeypatch):
    copied = Placement(CUDA, UNDER_CUDA.nodes, copies=("Memcpy_token_1",))
    monkeypatch.setattr(f"{CUDA_GRAPH}.read_placement", lambda *_: copied)
    with pytest.raises(ProviderError) as caught:
        with_cuda_graph(GRAPHS, [Provider(CUDA, "requested")])
    assert "MatMulInteger_7 (MatMulInteger on cpu)" in caught.value.message
    assert "; copy Memcpy_token_1." in caught.value.message
    with pytest.raises(ProviderError, match="cpu has no CUDA graphs"):
        with_cuda_graph(GRAPHS, ON_CPU)
    fine = Placement(CUDA, UNDER_CUDA.nodes[:2])
    monkeypatch.setattr(f"{CUDA_GRAPH}.read_placement", lambda *_: fine)
    (head,) = with_cuda_graph(GRAPHS, [Provider(CUDA, "", {"device_id": "1"})])
    assert head.options == {"device_id": "1", "enable_cuda_graph": "1"}


def test_adding_tensors_on_the_cpu_keeps_a_cuda_graph_from_being_captured(tmp_path, monkeypatch):
    """Add is an op that computes shapes: only a run tells that this one does not."""
    path = write_model(
        tmp_path / "add.onnx", [helper.make_node("Add", ["x", "x"], ["y"], name="sum")]
    )
    real = read_placement

    def under_cuda(path, providers, feeds=None):
        return replace(real(path, ON_CPU, feeds), head=CUDA)

    monkeypatch.setattr(f"{CUDA_GRAPH}.read_placement", under_cuda)
    with pytest.raises(ProviderError, match=r"sum \(Add on cpu\)"):
        with_cuda_graph([(path, FEEDS)], [Provider(CUDA, "requested")])
    # Inputs that the graph does not run on leave it to the ops, and to ONNX Runtime's own refusal.
    wrong = {"x": np.ones((2, 5), np.float32)}
    assert with_cuda_graph([(path, wrong)], [Provider(CUDA, "requested")])


def test_a_runner_looks_at_its_graph_on_made_up_inputs(tiny, monkeypatch):
    artifact = tiny.artifact("bert", "feature-extraction")
    seen = []
    monkeypatch.setattr(
        "enginery.runtime.onnxruntime.runner.check_run_options", lambda *_, **__: None
    )
    monkeypatch.setattr(
        "enginery.runtime.onnxruntime.runner.with_cuda_graph",
        lambda graphs, given: seen.extend(graphs) or given,
    )
    with OrtRunner(artifact, RunnerOptions(cuda_graph=True)):
        pass
    ((path, feeds),) = seen
    assert path == artifact.model
    assert feeds["input_ids"].shape == (1, 16)


_PLACE = """
import json
from pathlib import Path
import numpy as np
from enginery.runtime.onnxruntime.placement import read_placement
from enginery.runtime.providers.selection import choose_providers
providers = choose_providers(["openvino", "cpu"])
feeds = {"x": np.ones((2, 4), np.float32)}
placement = read_placement(Path(sys.argv[1]), providers, feeds)
print(json.dumps(placement.as_json() | {"reason": providers[0].reason}))
"""


@pytest.mark.slow
def test_openvino_placement_names_nodes_on_the_cpu(with_openvino, two_products):
    found = with_openvino(_PLACE, two_products)
    assert [(p["name"], p["nodes"], p["multiply_adds"]) for p in found["providers"]] == [
        (OPENVINO, 2, 24),
        (CPU, 1, 12),
    ]
    assert found["notes"] == [
        "1 compute node is on the CPU under openvino, 33.3% of the multiply-adds: "
        "second (TransposeMatMul)"
    ]
    assert found["reason"] == "requested"


_RUN = """
import json
import numpy as np
from enginery.core.artifact.artifact import Artifact
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.providers.specification import parse_providers
ids = np.full((2, 9), 7, np.int64)
feeds = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}
specs = parse_providers("openvino,cpu", ["openvino.num_of_threads=1"])
with OrtRunner(Artifact.open(sys.argv[1]), providers=specs) as runner:
    answer = runner(feeds)["last_hidden_state"]
    share = runner.placement().share("openvino")
    options = runner._sessions[0].get_provider_options()
print(json.dumps({"answer": answer.tolist(), "share": share,
                  "options": runner.providers[0].options}))
"""


@pytest.mark.slow
def test_an_artifact_runs_on_openvino_with_its_options_and_answers_as_the_cpu(with_openvino, tiny):
    artifact = tiny.artifact("bert", "feature-extraction")
    found = with_openvino(_RUN, artifact.path)
    ids = np.full((2, 9), 7, np.int64)
    feeds = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}
    with OrtRunner(artifact) as runner:
        expected = runner(feeds)["last_hidden_state"]
    assert math.isclose(np.abs(np.array(found["answer"]) - expected).max(), 0, abs_tol=1e-3)
    assert found["share"] > 0.9
    assert found["options"] == {"num_of_threads": "1"}


@pytest.mark.slow
def test_the_doctor_finds_that_openvino_runs(with_openvino):
    code = (
        "import json\nfrom enginery.doctor.probe import examine_provider\n"
        f"print(json.dumps(examine_provider({OPENVINO!r})))"
    )
    found = with_openvino(code)
    assert (found["state"], found["reason"]) == ("runs", "")
