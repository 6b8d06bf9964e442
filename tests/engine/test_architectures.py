"""Real engines of each architecture, built without a GPU and read back; none has been run."""

import numpy as np
import onnx
import pytest

from enginery import build_engine, export_model, optimize_model, quantize_model
from enginery.core.artifact.artifact import Artifact, commit_artifact, staging
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.engine_record import engine_directories
from enginery.core.shapes import dynamic_dims
from enginery.core.subprocess import peak_rss_bytes
from enginery.export.graphs import record_graph
from enginery.runtime.tensorrt.library import has_tensorrt
from tests.core.artifacts import manifest
from tests.passes.onnx_graphs import node
from tests.tiny import TEXT, tiny_artifact

pytestmark = pytest.mark.skipif(not has_tensorrt(), reason="pip install 'enginery[tensorrt-rtx]'")

PROFILES = ("batch=1:8:32,sequence=8:64:256", "batch=1,sequence=8:16:64")
TARGETS = ("8.0", "8.9", "12.0")


def engines_of(artifact):
    return [Engine.open(path, verify=True) for path in engine_directories(artifact.path)]


def multiplied(engine):
    """Layers that multiply, by kind and precision."""
    return {n: c for n, c in engine.record.layers.items() if not n.startswith("other")}


# MiniLM


@pytest.fixture
def embedder(minilm, home):
    """`embedder("fp16")`: the real MiniLM, exported, or made FP16 or INT8 of that."""
    exported = export_model(minilm, task="feature-extraction")

    def make(precision: str) -> Artifact:
        if precision == "fp16":
            return optimize_model(exported, target="tensorrt", precision="fp16")
        if precision == "int8":
            # How near INT8 comes is not asked here.
            return quantize_model(
                exported, TEXT * 4, min_cosine=-1, capability=(), curve=False, smoothing="none"
            )
        return exported

    return make


@pytest.mark.parametrize(
    ("precision", "product", "attentions"),
    [
        pytest.param("fp32", "gemm fp32", 0, marks=pytest.mark.slow),
        pytest.param("fp16", "gemm fp16", 6, marks=pytest.mark.slow),
        ("int8", "gemm int8", 6),
    ],
)
@pytest.mark.slow
def test_minilm_with_two_profiles_for_three_generations(embedder, precision, product, attentions):
    source = embedder(precision)
    made = build_engine(
        source, profile=PROFILES, capability=",".join(TARGETS), engine_per_profile=False
    )
    (engine,) = engines_of(made)
    record = engine.record
    assert record.capabilities == TARGETS
    assert record.profiles == PROFILES
    assert record.layers[product] >= 24
    assert record.fused_attentions % 6 == 0
    assert (record.fused_attentions > 0) == (attentions > 0)
    weights = sum(source.manifest.files[name].size_bytes for name in graph_files(source))
    assert record.plan_size_bytes > 0.9 * weights
    # Three generations and two profiles share the weights.
    assert record.plan_size_bytes < 2 * weights


def graph_files(artifact):
    return [name for graph in artifact.manifest.graphs for name in (graph.file, *graph.data_files)]


@pytest.mark.slow
@pytest.mark.parametrize("capability", TARGETS)
def test_minilm_for_each_generation_has_the_same_products(embedder, capability):
    made = build_engine(embedder("fp16"), profile=PROFILES[:1], capability=capability)
    (engine,) = engines_of(made)
    assert multiplied(engine) == {"gemm fp16": 24, "attention fp16": 6}
    assert engine.record.activation_bytes > 0


# Tiny models


@pytest.mark.parametrize(
    ("kind", "task", "profiles"),
    [
        ("bert", "text-classification", ["batch=1:2:4,sequence=1:16:64"]),
        ("vit", "image-classification", ["batch=1:2:4"]),
        pytest.param(
            "gpt2", "text-generation", ["batch=1,sequence=1:16:64"], marks=pytest.mark.slow
        ),
        (
            "gpt2",
            "text-generation-with-past",
            ["batch=1:2:4,past_sequence=0:16:64,sequence=1"],
        ),
        pytest.param("t5", "text2text-generation-with-past", None, marks=pytest.mark.slow),
    ],
    ids=["bert", "vit", "gpt2", "gpt2-with-past", "t5"],
)
def test_every_graph_gets_an_engine(tiny_model, home, kind, task, profiles):
    model = tiny_model(kind, task.removesuffix("-with-past"))
    source = export_model(str(model), task=task)
    if profiles is None:
        profiles = [
            ",".join(f"{name}=1:4:16" for name in dynamic_dims(graph.inputs))
            for graph in source.manifest.graphs
        ]
        profiles = list(dict.fromkeys(profiles))
    made = build_engine(source, profile=profiles, capability="8.9")
    graphs = {graph.file: graph for graph in source.manifest.graphs}
    engines = {engine.record.graph: engine for engine in engines_of(made)}
    assert engines.keys() == graphs.keys()
    for file, engine in engines.items():
        assert engine.record.layers["gemm fp32"] >= 2
        names = dynamic_dims(graphs[file].inputs)
        assert [profile.count("=") for profile in engine.record.profiles] == [len(names)]
        wrapper = onnx.load(engine.path / engine.record.wrapper)
        assert [v.name for v in wrapper.graph.input] == [s.name for s in graphs[file].inputs]
        assert [v.name for v in wrapper.graph.output] == [s.name for s in graphs[file].outputs]
    if kind == "t5":
        assert len(engines) == 2


def test_a_convolutional_model_takes_dynamic_heights_and_widths(tiny_model, home):
    source = export_model(str(tiny_model("resnet", "image-classification")))
    dims = dynamic_dims(source.manifest.graphs[0].inputs)
    assert {"batch", "height", "width"} <= set(dims)
    profile = "batch=1:2:4,height=32:64:128,width=32:64:96"
    (engine,) = engines_of(build_engine(source, profile=[profile], capability="8.9"))
    assert engine.record.layers["convolution fp32"] >= 5
    assert engine.record.profiles == (profile,)


@pytest.mark.more
def test_a_merged_decoder_is_refused_with_the_remedy(tiny_model, home, tmp_path):
    from enginery.core.errors import ProviderError

    model = tiny_model("t5", "text2text-generation")
    task = "text2text-generation-with-past"
    source = tiny_artifact("t5", task, tmp_path / "merged", source=model)
    profiles = [
        ",".join(f"{name}=1:4:16" for name in dynamic_dims(graph.inputs))
        for graph in source.manifest.graphs
    ]
    with pytest.raises(ProviderError, match="--no-post-process"):
        build_engine(source, profile=list(dict.fromkeys(profiles)), capability="8.9")


# Large


@pytest.mark.slow
def test_a_model_over_two_gigabytes_is_built_from_its_external_data(tmp_path, monkeypatch):
    """Four products of 12288 x 12288 in FP32: 2.4 GB. Protobuf's own limit is 2 GiB."""
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    source = large_artifact(tmp_path / "large", width=12288, products=4)
    weights = sum(file.size_bytes for file in source.manifest.files.values())
    assert weights > 2 << 30
    before = peak_rss_bytes()
    made = build_engine(source, profile=["batch=1:8:32"], capability="8.9")
    (engine,) = engines_of(made)
    record = engine.record
    assert record.plan_size_bytes > 2 << 30
    assert record.layers["gemm fp32"] == 4
    assert record.peak_rss_bytes <= 4 * record.plan_size_bytes + 500e6
    assert peak_rss_bytes() - before < 1e9, "nothing of it comes into this process"


def large_artifact(out, *, width, products):
    """x @ w0 @ w1 …, its weights written one after another: they are never all in memory."""
    from onnx import TensorProto, helper

    with staging(out) as directory:
        data = directory / "model.onnx.data"
        tensors, row = [], np.random.default_rng(0).standard_normal(width).astype(np.float32)
        with data.open("wb") as stream:
            for index in range(products):
                offset = stream.tell()
                for shift in range(width):
                    stream.write(np.roll(row, shift + index).tobytes())
                tensors.append(external(f"w{index}", (width, width), data.name, offset))
        nodes = [
            node(
                "MatMul",
                f"{'x' if i == 0 else f'h{i}'} w{i}",
                "y" if i == products - 1 else f"h{i + 1}",
                name=f"product{i}",
            )
            for i in range(products)
        ]
        values = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width])
            for name in ("x", "y")
        ]
        graph = helper.make_graph(nodes, "large", values[:1], values[1:], tensors)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
        (directory / "model.onnx").write_bytes(model.SerializeToString())
        (directory / "config.json").write_text("{}")
        record = record_graph(directory / "model.onnx", directory)
        commit_artifact(directory, manifest().model_copy(update={"graphs": (record,)}))
    return Artifact.open(out)


def external(name, shape, file, offset):
    tensor = onnx.TensorProto(name=name, data_type=onnx.TensorProto.FLOAT, dims=shape)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    length = 4 * shape[0] * shape[1]
    for key, value in (("location", file), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor
