"""The precision that a manifest declares must be that of its graphs."""

import pytest

from enginery import Artifact, validate_model
from enginery.core.errors import ArtifactError
from tests.core.artifacts import edit_manifest
from tests.tiny import TEXT

BERT = ("bert", "text-classification")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_fp32_graph_declared_as_half_precision_is_rejected(exported, copied, precision):
    artifact = copied(exported(*BERT))
    edit_manifest(artifact.path, precision=precision)
    with pytest.raises(
        ArtifactError, match=rf"declares the precision {precision}, but only 0\.0% of the float"
    ):
        validate_model(artifact.path)


def test_fp32_graph_declared_as_quantized_is_rejected(exported, copied):
    artifact = copied(exported(*BERT))
    (export,) = artifact.manifest.stages
    quantize = export.model_copy(update={"stage": "quantize", "options": {"min_cosine": 0.9}})
    stages = [stage.model_dump(mode="json") for stage in (export, quantize)]
    edit_manifest(artifact.path, stages=stages, precision="int8", residual="fp32")
    with pytest.raises(ArtifactError, match="no graph has a quantized operator"):
        validate_model(artifact.path)


@pytest.mark.more
def test_rest_of_a_quantized_graph_that_is_declared_too_coarse(exported, copied):
    """The tolerance of the graph without quantization follows from it."""
    from enginery import quantize_model

    made = quantize_model(
        exported(*BERT), TEXT, capability=(), curve=False, residual="fp32", min_cosine=-1
    )
    artifact = copied(made)
    edit_manifest(artifact.path, residual="bf16")
    with pytest.raises(ArtifactError, match="declares the precision bf16, but only"):
        validate_model(artifact.path, min_cosine=0)


@pytest.mark.more
def test_correct_declarations_are_accepted(exported, copied):
    from enginery import optimize_model

    artifact = copied(exported(*BERT))
    half = optimize_model(artifact, target="tensorrt", precision="fp16")
    assert Artifact.open(half.path).manifest.precision == "fp16"
    assert validate_model(half).passed


def structure(text):
    """Return the first graph of a model as validate reads it."""
    import onnx

    from enginery.core.trust.onnx_structure import read_structure

    def read(path):
        onnx.save(onnx.parser.parse_model(text), str(path))
        return read_structure(path).graph

    return read


LOOP = """<ir_version: 10, opset_import: ["" : 20]>
g (float[n, 2] x, int64 times, bool go) => (float[n, 2] y)
<float[2, 2] w = {1, 2, 3, 4}, float[2] v = {1, 2}, float[2] b = {0, 0}> {
  h = Loop (times, go, x) <body = b (int64 i, bool c, float[n, 2] s) => (bool d, float[n, 2] t) {
    d = Identity (c)  t = MatMul (s, w) }>
  y = LayerNormalization (h, v, b)
}"""


def test_weights_of_loops_and_normalizations_may_stay_fp32(tmp_path):
    from enginery.validate.declared_precision import _computes_in, _count_weights, _weights_kept

    graph = structure(LOOP)(tmp_path / "loop.onnx")
    kept = _weights_kept(graph)
    assert kept >= {"w", "v", "b"}
    assert _count_weights([graph], kept) == {}
    assert not _computes_in(graph, "fp16")
    other = structure(LOOP.replace("y = Layer", "z = MatMul (h, w)  y = Layer"))
    assert "w" not in _weights_kept(other(tmp_path / "other.onnx"))
