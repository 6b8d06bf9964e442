"""What enginery asks of classic TensorRT's builder, with a stand-in for its bindings."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from enginery.core.errors import OptionError, ProviderError
from enginery.core.shapes import Profile
from enginery.runtime.providers.gpus import CudaGpu
from enginery.runtime.tensorrt import capabilities, library
from enginery.runtime.tensorrt.build import BuildRequest
from enginery.runtime.tensorrt.inspector import read_inspector
from enginery.runtime.tensorrt.library import has_tensorrt
from enginery.runtime.tensorrt.options import CLASSIC, BuildOptions
from enginery.runtime.tensorrt.process import build_plan, coverage, parse_onnx
from tests.passes.onnx_graphs import WIDTH, node, save_graph

trt = pytest.importorskip("tensorrt_rtx_bindings", reason="pip install 'enginery[tensorrt-rtx]'")

from tests.runtime import classic_tensorrt as double  # noqa: E402  it needs these bindings

BATCH = Profile.parse("batch=1:4:8")


@pytest.fixture
def calls(monkeypatch):
    """What classic TensorRT is told, in order, on a machine with one L4."""
    found = []
    monkeypatch.setitem(sys.modules, "tensorrt", double.ClassicTensorRT(found))
    gpu = CudaGpu("NVIDIA L4", "8.9", 24 << 30)
    monkeypatch.setattr(capabilities, "visible_gpus", lambda: (gpu,))
    return found


@pytest.fixture
def graph(tmp_path):
    return save_graph(tmp_path / "r.onnx", [node("Relu", "x", "y")])


def build(graph, **options):
    return build_plan(
        graph,
        BuildRequest(
            [BATCH], flavor=CLASSIC, capabilities="current", options=BuildOptions(**options)
        ),
        isolated=False,
    )


def test_network_is_strongly_typed_and_defaults_are_set(calls, graph):
    built = build(graph)
    assert calls[0] == (
        "create_network",
        1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED),
    )
    assert ("profiling_verbosity", trt.ProfilingVerbosity.DETAILED) in calls
    assert ("set_memory_pool_limit", trt.MemoryPoolType.WORKSPACE, 8 << 30) in calls
    assert ("builder_optimization_level", 3) in calls
    assert ("hardware_compatibility_level", trt.HardwareCompatibilityLevel.NONE) in calls
    assert ("build_serialized_network", frozenset({trt.BuilderFlag.TF32})) in calls
    assert (built.flavor, built.capabilities) == ("tensorrt", ("8.9",))
    assert built.tensorrt == double.VERSION
    assert built.plan == b"a plan of x"
    assert (built.activation_bytes, built.weights_bytes) == (11264, 16384)
    assert built.warnings == ("kernel tuning took long",)


def test_every_option_reaches_the_builder_before_it_builds(calls, graph):
    build(
        graph,
        workspace_bytes=1 << 20,
        optimization_level=5,
        hardware_compatibility="same-compute-capability",
        tf32=False,
    )
    names = [call[0] for call in calls]
    done = names.index("build_serialized_network")
    assert calls[done][1] == set()
    level = trt.HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY
    for call in (
        ("builder_optimization_level", 5),
        ("hardware_compatibility_level", level),
        ("set_memory_pool_limit", trt.MemoryPoolType.WORKSPACE, 1 << 20),
    ):
        assert calls.index(call) < done


def test_profiles_name_every_input(calls, graph):
    build(graph)
    assert ("add_optimization_profile", {"x": ((1, WIDTH), (4, WIDTH), (8, WIDTH))}) in calls


def test_ampere_engines_are_not_built_on_turing(calls, graph, monkeypatch):
    turing = CudaGpu("Tesla T4", "7.5", 16 << 30)
    monkeypatch.setattr(capabilities, "visible_gpus", lambda: (turing,))
    with pytest.raises(OptionError, match=r"ampere-plus, but this GPU has compute capability 7\.5"):
        build(graph, hardware_compatibility="ampere-plus")


def test_child_process_builds_with_it_too(calls, graph, tmp_path, monkeypatch):
    package = tmp_path / "site" / "tensorrt"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import sys\n"
        "from tests.runtime.classic_tensorrt import ClassicTensorRT\n"
        "sys.modules[__name__] = ClassicTensorRT([])\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}:{':'.join(p for p in sys.path if p)}")
    plan = tmp_path / "model.plan"
    built = build_plan(
        graph,
        BuildRequest([BATCH], flavor=CLASSIC, capabilities=["8.9"]),
        plan_path=plan,
    )
    assert plan.read_bytes() == built.plan == b"a plan of x"
    assert [layer.precision for layer in built.layers] == ["int8", "fp16"]


def test_coverage_of_rejected_nodes_equals_the_other_flavor(calls, tmp_path):
    path = save_graph(
        tmp_path / "g.onnx",
        [
            node("Relu", "x", "a"),
            node("BiasGelu", "a b", "c", domain="com.microsoft", name="fused"),
            node("Relu", "c", "y"),
        ],
        {"b": np.ones(WIDTH, np.float32)},
    )
    found = coverage(path, flavor=CLASSIC, isolated=False)
    assert (found.total, found.taken, found.partitions) == (3, 2, 2)
    assert [refusal.node for refusal in found.refused] == ["fused"]
    assert not parse_onnx(path, flavor=CLASSIC, isolated=False).accepted


def test_layers_come_from_the_inspector(calls, graph):
    """After the developer guide's own sample; never seen from a real GPU."""
    convolution, product = build(graph).layers
    assert (convolution.kind, convolution.precision) == ("convolution", "int8")
    assert convolution.type == "CaskConvolution"
    assert convolution.constants == ("int8", "fp32")
    assert convolution.tactic.startswith("sm80_xmma_fprop_implicit_gemm")
    assert (product.kind, product.precision) == ("gemm", "fp16")
    assert product.nodes == ("/dense/MatMul", "/dense/Add")


def test_precision_of_dynamic_shapes_is_that_of_the_weights():
    unknown = [{"Name": "x", "Format/Datatype": "N/A due to dynamic shapes"}]
    layer = {
        "Name": "conv",
        "LayerType": "CaskConvolution",
        "ParameterType": "Convolution",
        "Inputs": unknown,
        "Outputs": unknown,
        "Weights": {"Type": "Half"},
    }
    (found,) = read_inspector(json.dumps({"Layers": [layer]}))
    assert (found.kind, found.precision, found.inputs) == ("convolution", "fp16", ())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"Layers": ["/Relu", "/Add"]}', "gave only the names of layers"),
        ("", "gave no list of layers"),
        ("[1]", "gave no list of layers"),
    ],
)
def test_incomplete_inspector_output_is_an_error(text, words):
    with pytest.raises(ProviderError, match=words):
        read_inspector(text)


def test_missing_package_is_named_with_the_command(graph, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert not has_tensorrt(CLASSIC)
    with pytest.raises(ProviderError, match=r"'tensorrt-cu13', which is not installed") as found:
        build(graph)
    assert found.value.do == "Install it with: pip install 'tensorrt-cu13>=10,<11'"


def test_version_11_is_rejected_with_the_reason(graph, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", double.ClassicTensorRT([], "11.4.0.106"))
    with pytest.raises(ProviderError) as found:
        build(graph)
    assert found.value.message == (
        "TensorRT 11.4.0.106 is installed, but 10 is required: an engine runs only with the "
        "version that built it, and TensorrtExecutionProvider of ONNX Runtime 1.31 links "
        "libnvinfer.so.10."
    )
    assert found.value.do.endswith("&& pip install 'tensorrt-cu13>=10,<11'")


def test_library_that_cannot_be_loaded_is_named(graph, tmp_path, monkeypatch):
    package = tmp_path / "tensorrt"
    package.mkdir()
    (package / "__init__.py").write_text(
        '__version__ = "10.16.1.11"\nraise OSError("libnvinfer.so.10: cannot open")\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    assert library.tensorrt_version(CLASSIC) == "10.16.1.11"
    with pytest.raises(ProviderError, match=r"cannot be loaded: libnvinfer\.so\.10: cannot open"):
        parse_onnx(graph, flavor=CLASSIC, isolated=False)


def test_builder_without_a_gpu_is_an_error(calls, graph, monkeypatch):
    def refuse(logger):
        logger.log(trt.ILogger.Severity.ERROR, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr(sys.modules["tensorrt"], "Builder", refuse)
    with pytest.raises(ProviderError, match=r"does not start: CUDA init.*--flavor tensorrt-rtx"):
        parse_onnx(graph, flavor=CLASSIC, isolated=False)
