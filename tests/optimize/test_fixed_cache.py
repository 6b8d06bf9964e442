"""Generating artifacts for CUDA get a graph with a cache of fixed size."""

import json

import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from enginery import export_model, publish_model
from enginery.core.artifact.external_data import external_data_files
from enginery.core.errors import ArtifactError
from enginery.optimize import fixed_cache, stage
from enginery.optimize.config import OptimizeConfig
from enginery.passes.generation.fixed_cache import fix_cache
from enginery.runtime.decoder_graphs import DecoderGraphs

FILE = "model_fixed_cache.onnx"


@pytest.fixture
def optimized(tiny_model, home, tmp_path):
    """Return a function: `optimized("gpt2", precision="fp16")` is the artifact for CUDA."""

    def make(kind, *, target="cuda", **options):
        task = "text2text-generation" if kind == "t5" else "text-generation"
        artifact = export_model(str(tiny_model(kind, task)), task=f"{task}-with-past")
        config = OptimizeConfig(target=target, **options)
        return stage.run(artifact, config, tmp_path / "optimized")

    return make


def notes(artifact):
    return json.loads((artifact.path / stage.REPORT).read_text())["notes"]


@pytest.mark.more
def test_the_graph_stands_beside_the_decoder(optimized):
    from optimum.onnxruntime import ORTModelForCausalLM
    from transformers import AutoTokenizer

    artifact = optimized("gpt2", precision="fp16")
    decoder, record = artifact.manifest.graphs
    assert (decoder.file, record.file) == ("model.onnx", FILE)
    (graphs,) = DecoderGraphs.find_all(artifact.manifest.graphs)
    assert (graphs.later, graphs.fixed) == (decoder, record)
    dims = {spec.name: (spec.dtype, spec.dims) for spec in (*record.inputs, *record.outputs)}
    assert dims["past_key_values.1.key"] == ("float16", ("batch", 4, "buffer", 8))
    assert dims["present.1.key"] == dims["past_key_values.1.key"]
    assert dims["logits"] == ("float32", ("batch", 600))
    assert dims["next_ids"] == dims["next_position_ids"] == ("int64", ("batch", 1))
    assert dims["seqlens_k"] == dims["next_seqlens_k"] == ("int32", ("batch",))
    assert f"{FILE}: a cache of fixed size, attention 2 by GroupQueryAttention" in notes(artifact)
    assert list(artifact.manifest.stages[-1].notes) == notes(artifact)
    ort.InferenceSession(str(artifact.path / FILE), providers=["CPUExecutionProvider"])
    # Other readers find the decoder that they know.
    model = ORTModelForCausalLM.from_pretrained(artifact.path)
    inputs = AutoTokenizer.from_pretrained(artifact.path)(
        ["The engine"], return_tensors="pt", return_token_type_ids=False
    )
    assert model.generate(**inputs, max_new_tokens=2).shape[1] > inputs["input_ids"].shape[1]


@pytest.mark.slow
def test_models_with_rms_normalization_are_cast_and_fp32_is_scattered(optimized):
    artifact = optimized("llama", precision="fp16")
    for record in artifact.manifest.graphs:
        graph = onnx.load(artifact.path / record.file).graph
        norms = [node for node in graph.node if node.op_type == "SimplifiedLayerNormalization"]
        kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
        assert norms
        assert {kinds[node.input[1]] for node in norms} == {onnx.TensorProto.FLOAT16}


@pytest.mark.slow
def test_fp32_is_scattered_since_grouped_attention_is_in_low_precision(optimized):
    artifact = optimized("llama", precision="fp32")
    (graphs,) = DecoderGraphs.find_all(artifact.manifest.graphs)
    assert "attention 2 by MultiHeadAttention" in notes(artifact)[-1]
    dims = {spec.name: (spec.dtype, spec.dims) for spec in graphs.fixed.inputs}
    # Keys and values of two heads are written for all four.
    assert dims["past_key_values.0.key"] == ("float32", ("batch", 4, "buffer", 8))
    assert {"rows", "buffer_positions"} <= dims.keys()


@pytest.mark.slow
def test_encoder_decoders_get_one_for_their_decoder(optimized):
    artifact = optimized("t5", precision="fp16")
    files = [record.file for record in artifact.manifest.graphs]
    assert files[-1] == "decoder_with_past_model_fixed_cache.onnx"
    (graphs,) = DecoderGraphs.find_all(artifact.manifest.graphs)
    assert graphs.fixed.file == files[-1]
    names = {spec.name for spec in graphs.fixed.inputs}
    assert {"encoder_attention_mask", "past_key_values.0.encoder.key"} <= names
    assert "present.0.encoder.key" not in {spec.name for spec in graphs.fixed.outputs}


@pytest.mark.more
def test_weights_are_stored_once(optimized, monkeypatch, tmp_path):
    monkeypatch.setattr(fixed_cache, "_SHARED_BYTES", 0)
    artifact = optimized("gpt2", precision="fp16")
    decoder, record = artifact.manifest.graphs
    assert decoder.data_files == record.data_files == ("model.onnx.data",)
    assert external_data_files(artifact.path / FILE) == ["model.onnx.data"]
    data, graph = (artifact.manifest.files[name].size_bytes for name in ("model.onnx.data", FILE))
    assert graph < data / 2
    ort.InferenceSession(str(artifact.path / FILE), providers=["CPUExecutionProvider"])
    # Files of another layout have other names.
    publish_model(artifact, str(tmp_path / "registry"), layout="hub", allow_failed=True)
    graphs = sorted((tmp_path / "registry").rglob("*.onnx"))
    assert len(graphs) == 2
    (names,) = {tuple(external_data_files(path)) for path in graphs}
    assert len(list((tmp_path / "registry").rglob("*.onnx_data"))) == len(names) == 1


@pytest.mark.more
def test_a_graph_with_other_logits_is_left_out(optimized, monkeypatch):
    def wrong(facts, **options):
        fixed = fix_cache(facts, **options)
        for node in fixed.model.graph:
            if node.op_type in fixed.attentions:
                node.attributes.pop("scale")
                node.attributes.add(ir.AttrFloat32("scale", 0.9))
        return fixed

    monkeypatch.setattr(fixed_cache, "fix_cache", wrong)
    artifact = optimized("gpt2", precision="fp32")
    assert [record.file for record in artifact.manifest.graphs] == ["model.onnx"]
    assert not (artifact.path / FILE).exists()
    assert (
        "model.onnx: no graph with a cache of fixed size, because of its logits"
        in notes(artifact)[-1]
    )


@pytest.mark.more
def test_a_disk_that_is_full_ends_the_stage(optimized, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fixed_cache, "fix_cache", fail)
    with pytest.raises(ArtifactError, match="No space left"):
        optimized("gpt2", precision="fp32")


def test_other_targets_have_none(optimized):
    artifact = optimized("gpt2", target="cpu", precision="fp32")
    assert len(artifact.manifest.graphs) == 1
