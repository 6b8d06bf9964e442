"""Pooling and activations inside a graph equal those outside of it."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from enginery.core.errors import ArtifactError
from enginery.passes.ir.answers import append_pooling, append_scores
from enginery.runtime.text.pooling import Layer, Pooling

MASKS = {
    "padding on the right": [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]],
    "padding on the left": [[1, 1, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 0, 1]],
    "a row of padding only": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]],
}


def identity(dtype="float", opset=20, mask="attention_mask"):
    """Return a graph that passes token vectors (b, s, 4) on."""
    return ir.from_onnx_text(
        f'<ir_version: 9, opset_import: ["" : {opset}]> '
        f"g (int64[b, s] {mask}, {dtype}[b, s, 4] x) => ({dtype}[b, s, 4] last_hidden_state) "
        "{ last_hidden_state = Identity (x) }"
    )


def pooling(*modes, normalize=False, include_prompt=True):
    return Pooling(modes, normalize, include_prompt, note="")


DENSE = np.float32([[1, -2, 3, 0.5], [0.1, 2, -1, 1]])
LAYERS = {
    "Normalize": Layer("Normalize"),
    "LayerNorm": Layer("LayerNorm", np.float32([1, 2, 0.5, -1]), np.float32([0, 1, 2, 3])),
    **{
        name: Layer("Dense", DENSE, np.float32([1, -1]), name)
        for name in ("Tanh", "ReLU", "Sigmoid", "SiLU", "GELU", "Identity")
    },
    "Dense without a bias": Layer("Dense", DENSE),
}


def run(model, tokens, mask):
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"x": tokens, "attention_mask": mask})


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("opset", [13, 20])
@pytest.mark.parametrize("padding", MASKS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    "mode", ["mean", "cls", "lasttoken", "mean_sqrt_len_tokens", "weightedmean"]
)
def test_vectors_are_those_of_the_pooling(mode, normalize, padding, opset, dtype):
    tokens = (
        np.random.default_rng(0)
        .standard_normal((3, 5, 4))
        .astype(np.float16 if dtype == "float16" else np.float32)
    )
    mask = np.array(MASKS[padding], np.int64)
    model = identity(dtype, opset)
    append_pooling(model, pooling(mode, normalize=normalize), tokens="last_hidden_state")
    same, found = run(model, tokens, mask)
    np.testing.assert_array_equal(same, tokens)
    assert found.dtype == np.float32
    expected = pooling(mode, normalize=normalize)(tokens, mask)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
def test_padding_that_is_not_a_number_counts_nothing(mode):
    mask = np.array([[1, 1, 0], [0, 1, 1]], np.int64)
    tokens = np.where(mask[..., None] > 0, np.float32(2), np.float32(np.nan)).repeat(4, axis=2)
    model = identity()
    append_pooling(model, pooling(mode), tokens="last_hidden_state")
    _, vectors = run(model, tokens, mask)
    np.testing.assert_array_equal(vectors, 2)


def test_other_inputs_outputs_and_opset_stay():
    model = identity()
    append_pooling(model, pooling("mean"), tokens="last_hidden_state")
    assert [value.name for value in model.graph.inputs] == ["attention_mask", "x"]
    names = [value.name for value in model.graph.outputs]
    assert names == ["last_hidden_state", "sentence_embedding"]
    assert dict(model.opset_imports) == {"": 20}


@pytest.mark.parametrize(
    ("model", "of", "said"),
    [
        (identity(), pooling("max"), "it pools by max, supported: one of mean, cls, lasttoken"),
        (identity(), pooling("cls", "mean"), "it pools by cls and mean"),
        (identity(), pooling("mean", include_prompt=False), "leaves a prompt's tokens out"),
        (identity(mask="mask"), pooling("mean"), "the graph has no input attention_mask"),
        (identity(opset=12), pooling("mean"), "opset 12, expected 13 or later"),
    ],
)
def test_pooling_that_a_graph_cannot_have_is_an_error(model, of, said):
    with pytest.raises(ArtifactError, match=said) as refused:
        append_pooling(model, of, tokens="last_hidden_state")
    assert "by the model's own settings" in str(refused.value)
    assert len(model.graph.outputs) == 1


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_scores_are_those_of_the_activation(activation, dtype):
    model = ir.from_onnx_text(
        f'<ir_version: 9, opset_import: ["" : 20]> g ({dtype}[b, 3] x) => ({dtype}[b, 3] logits) '
        "{ logits = Identity (x) }"
    )
    append_scores(model, activation, logits="logits")
    logits = np.array(
        [[1, -2, 0.5], [60, 0, -60]], np.float16 if dtype == "float16" else np.float32
    )
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    same, scores = session.run(["logits", "scores"], {"x": logits})
    np.testing.assert_array_equal(same, logits)
    wide = logits.astype(np.float64)
    shares = np.exp(wide - wide.max(axis=-1, keepdims=True))
    expected = {
        "softmax": shares / shares.sum(axis=-1, keepdims=True),
        "sigmoid": 1 / (1 + np.exp(-wide)),
    }[activation]
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_behind_the_pooling_are_in_the_graph(layer, normalize):
    tokens = np.random.default_rng(0).standard_normal((3, 5, 4)).astype(np.float32)
    mask = np.array(MASKS["padding on the right"], np.int64)
    layers = (LAYERS["Normalize"], LAYERS[layer])
    whole = Pooling(("mean",), normalize, include_prompt=True, note="", layers=layers)
    model = identity()
    append_pooling(model, whole, tokens="last_hidden_state")
    expected = whole(tokens, mask)
    assert str(model.graph.outputs[-1].shape) == f"[b,{expected.shape[1]}]"
    np.testing.assert_allclose(run(model, tokens, mask)[1], expected, rtol=1e-5, atol=1e-6)


def test_layers_that_the_opset_lacks_are_refused():
    for layer, opset in (("LayerNorm", 16), ("GELU", 19)):
        whole = Pooling(("mean",), False, include_prompt=True, note="", layers=(LAYERS[layer],))
        with pytest.raises(ArtifactError, match=f"the graph has opset {opset}, and .* need"):
            append_pooling(identity(opset=opset), whole, tokens="last_hidden_state")
