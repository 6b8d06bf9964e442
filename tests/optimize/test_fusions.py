"""Graphs of all exporters are fused without Optimum, and every attention of them is found."""

import warnings
from importlib import metadata

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from enginery.core.artifact.external_data import load_graph
from enginery.optimize.fusions import fused_ops
from enginery.optimize.worker import DECOMPOSED, Fusion, fuse, fuse_operators
from enginery.passes.attention.fuse import count_fused, count_unfused
from tests import tiny

TRANSFORMERS_5 = metadata.version("transformers").split(".")[0] == "5"

# The graph of each type, and its attentions.
OPTIMUM = {
    "bert": ("feature-extraction", 2),
    "distilbert": ("feature-extraction", 2),
    "roberta": ("feature-extraction", 2),
    "albert": ("feature-extraction", 2),
    "mpnet": ("feature-extraction", 2),
    "modernbert": ("feature-extraction", 2),
    "vit": ("image-classification", 2),
    "swin": ("image-classification", 2),
    "gpt2": ("text-generation-with-past", 2),
    "llama": ("text-generation-with-past", 2),
    "qwen3": ("text-generation-with-past", 2),
    "gemma3_text": ("text-generation-with-past", 2),
    "bart": ("text2text-generation-with-past", 10),
    "t5": ("text2text-generation-with-past", 10),
    "whisper": ("automatic-speech-recognition-with-past", 9),
}
TARGETS = pytest.mark.parametrize("target", ["cpu", "cuda"])
# In the order in which the names of dims are looked through.
SIZES = ({"batch": 3, "past": 7, "sequence": 13}, {"batch": 1, "past": 3, "sequence": 5})


def feeds_of(session, sizes, seed, *, left):
    """Return inputs with padding, and a row of which all is padding."""
    random = np.random.default_rng(seed)
    fixed = {"height": 32, "width": 32, "num_channels": 3, "channels": 3, "feature_size": 8}
    feeds = {}
    for value in session.get_inputs():
        shape = []
        for dim in value.shape:
            if isinstance(dim, int):
                shape.append(dim)
            elif "+" in dim or "total" in dim:
                shape.append(sizes["past"] + sizes["sequence"])
            else:
                names = (name for name in (*fixed, *sizes) if name in dim)
                shape.append((fixed | sizes)[next(names)])
        if value.name == "attention_mask" and any("past" in x.name for x in session.get_inputs()):
            shape[1] = sizes["past"] + sizes["sequence"]
        if "mask" in value.name:
            mask = np.ones(shape, np.int64)
            mask[1:2, slice(0, 2) if left else slice(-2, None)] = 0
            mask[2:] = 0
            feeds[value.name] = mask
        elif value.name == "position_ids":
            positions = np.arange(sizes["past"], sizes["past"] + sizes["sequence"])
            feeds[value.name] = np.tile(positions, (shape[0], 1))
        elif value.type == "tensor(int64)":
            limit = 2 if "type" in value.name else 90
            feeds[value.name] = random.integers(limit // 2, limit, shape)
        else:
            feeds[value.name] = random.standard_normal(shape).astype(np.float32)
    return feeds


def session_of(path, level):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = level
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def attentions(path):
    return count_fused(load_graph(path))


def fused(path, target, out, **options):
    """Fuse a graph, compare it with the original, and return its file."""
    fuse(Fusion(path.parent, out, "O2", target, **options), path.name)
    levels = ort.GraphOptimizationLevel
    before = session_of(path, levels.ORT_DISABLE_ALL)
    after = session_of(out / path.name, levels.ORT_ENABLE_ALL)
    for seed, sizes in enumerate(SIZES):
        # For CUDA, the attention of BERT's family reads the number of tokens of a row, which are on
        # the left.
        feeds = feeds_of(before, sizes, seed, left=target == "cpu")
        outputs = zip(before.run(None, feeds), after.run(None, feeds), strict=True)
        for expected, actual in outputs:
            # A row of which all is masked may be NaN, where an exporter does not replace it.
            finite = np.isfinite(expected)
            limit = 5e-5 * np.abs(expected[finite]).max()
            np.testing.assert_allclose(actual[finite], expected[finite], atol=limit)
    return out / path.name


@TARGETS
@pytest.mark.parametrize("kind", tiny.with_more(OPTIMUM, "bert", "gpt2"))
@pytest.mark.skipif(TRANSFORMERS_5, reason="Optimum requires transformers 4")
def test_every_attention_of_optimums_graphs(kind, target, tmp_path):
    task, count = OPTIMUM[kind]
    artifact = tiny.tiny_artifact(kind, task, tmp_path / "artifact")
    found = 0
    for record in artifact.manifest.graphs:
        # A branch is not fused: it is a graph of its own.
        if "merged" not in record.file:
            path = fused(artifact.path / record.file, target, tmp_path / "fused")
            found += attentions(path)
            assert count_unfused(load_graph(path)) == 0
    assert found == count


def small(kind):
    """Return a model without a task, and its example inputs with the names of their dims."""
    import torch
    import transformers

    settings = dict(tiny._CONFIGS[kind]) | ({} if kind == "swin" else {"vocab_size": 100})
    settings |= {"use_cache": False} if kind == "llama" else {}
    config = transformers.AutoConfig.for_model(kind, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = transformers.AutoModel.from_config(config).eval()
    if kind == "swin":
        return model, {"pixel_values": torch.randn(3, 3, 32, 32)}, {"pixel_values": ("batch",)}
    ids = torch.randint(5, 90, (3, 13))
    dims = dict.fromkeys(("input_ids", "attention_mask"), ("batch", "sequence"))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, dims


@pytest.mark.more
@TARGETS
@pytest.mark.parametrize("kind", [pytest.param("bert", marks=pytest.mark.slow), "llama"])
def test_every_attention_of_pytorchs_graphs(kind, target, tmp_path):
    import torch

    model, inputs, dims = small(kind)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's, about code that is not ours
        program = torch.onnx.export(
            model,
            (),
            kwargs=inputs,
            dynamo=True,
            dynamic_shapes={name: dict(enumerate(dims[name])) for name in inputs},
            opset_version=20,
            verbose=False,
        )
    program.save(tmp_path / "model.onnx")
    path = fused(tmp_path / "model.onnx", target, tmp_path / "fused")
    assert (attentions(path), count_unfused(load_graph(path))) == (2, 0)


@TARGETS
@pytest.mark.parametrize("kind", ["bert", "llama", "swin"])
@pytest.mark.skipif(not TRANSFORMERS_5, reason="transformers' exporter came with version 5")
def test_every_attention_of_transformers_graphs(kind, target, tmp_path):
    import torch
    from transformers.exporters import OnnxConfig, OnnxExporter

    model, inputs, dims = small(kind)
    shapes = {
        name: dict.fromkeys(range(len(dims[name])), torch.export.Dim.DYNAMIC) for name in inputs
    }
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's, about code that is not ours
        exported = OnnxExporter().export(
            model, inputs, OnnxConfig(dynamic_shapes=shapes, opset_version=20)
        )
    onnx.save(named(ir.to_proto(exported.program), dims), tmp_path / "model.onnx")
    path = fused(tmp_path / "model.onnx", target, tmp_path / "fused")
    assert (attentions(path), count_unfused(load_graph(path))) == (2, 0)


def named(proto, dims):
    """Name the dims of a graph's inputs."""
    for value in proto.graph.input:
        for dim, name in zip(value.type.tensor_type.shape.dim, dims[value.name], strict=False):
            dim.dim_param = name
    return proto


NORMS = """<ir_version: 9, opset_import: ["" : 20]>
g (float[batch, sequence, 4] x, float[batch, sequence, 4] y) => (float[batch, sequence, 4] z)
<float[4] scale = {1, 2, 3, 4}> {
  a = Add (x, y)  n = LayerNormalization <axis = -1> (a, scale)  b = Add (n, x)
  m = LayerNormalization <axis = -1> (b, scale)  z = Neg (m) }"""


def norms(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(NORMS), path)
    return path


def test_norms_without_a_bias_are_fused_for_cuda(tmp_path):
    """The fusions of ONNX Runtime read a bias, and raise IndexError if there is none."""
    path = fused(norms(tmp_path), "cuda", tmp_path / "fused")
    assert fused_ops(path) == {"SkipLayerNormalization": 2}


def test_sums_and_norms_stay_apart_on_the_cpu(tmp_path):
    """Its kernel of SkipLayerNormalization is slower; sessions make it where shapes are known."""
    path = fused(norms(tmp_path), "cpu", tmp_path / "fused")
    graph = onnx.load(path).graph
    assert [node.op_type for node in graph.node].count("LayerNormalization") == 2
    computed = {name for node in graph.node for name in node.output} - {"z"}
    shaped = {x.name for x in graph.value_info if x.type.tensor_type.HasField("shape")}
    assert not computed & shaped


def test_a_fusion_that_fails_is_named_and_left_out(tmp_path, monkeypatch):
    from onnxruntime.transformers import optimizer

    apply = optimizer.optimize_by_fusion

    def fail(model, kind, heads, hidden, options):
        if options.enable_skip_layer_norm:
            raise IndexError("list index out of range")
        return apply(model, kind, heads, hidden, options)

    monkeypatch.setattr(optimizer, "optimize_by_fusion", fail)
    path = norms(tmp_path)
    notes = fuse(Fusion(path.parent, tmp_path / "fused", "O2", "cuda"), path.name)
    assert "IndexError: list index out of range" in notes[0]
    assert not fused_ops(tmp_path / "fused" / path.name)


def test_a_graph_of_which_nothing_can_be_fused_is_that_of_level_1(tmp_path, monkeypatch):
    from onnxruntime.transformers import optimizer

    def fail(*_):
        raise KeyError("node")

    monkeypatch.setattr(optimizer, "optimize_by_fusion", fail)
    assert not fused_ops(fused(norms(tmp_path), "cuda", tmp_path / "fused"))


def test_a_graph_that_cannot_be_read_is_an_error_and_not_a_fusion_that_fails(tmp_path, monkeypatch):
    path = norms(tmp_path)
    load = onnx.load

    def fail(source, *arguments, **options):
        if source == path:
            raise OSError(5, "Input/output error", str(source))
        return load(source, *arguments, **options)

    monkeypatch.setattr(onnx, "load", fail)
    fusion = Fusion(path.parent, tmp_path / "fused", "O2", "cuda")
    with pytest.raises(OSError, match="Input/output error"):
        fuse_operators(path, tmp_path / "fused.onnx", fusion, attention=True)


def test_level_1_fuses_nothing(tmp_path):
    path = norms(tmp_path)
    assert not fuse(Fusion(path.parent, tmp_path / "fused", "O1", "cuda"), path.name)
    assert not fused_ops(tmp_path / "fused" / path.name)


@pytest.mark.skipif(TRANSFORMERS_5, reason="Optimum requires transformers 4")
def test_a_decoder_for_cuda_is_also_written_as_its_cache_is_found(tmp_path):
    artifact = tiny.tiny_artifact("gpt2", "text-generation-with-past", tmp_path / "artifact")
    (record,) = artifact.manifest.graphs
    options = {"decomposed": [record.file]}
    path = fused(artifact.path / record.file, "cuda", tmp_path / "fused", **options)
    decomposed = tmp_path / "fused" / DECOMPOSED / record.file
    assert (attentions(path), attentions(decomposed)) == (2, 0)
    assert count_unfused(load_graph(decomposed)) == 2
