"""Packed tokens: the graph, and its answers by a reference of CUDA's ops."""

import itertools
import math

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from enginery import optimize_model
from enginery.core.errors import OptionError
from enginery.optimize.config import OptimizeConfig, check_options
from enginery.passes.ir.packing import pack_tokens

DOMAIN = "com.microsoft"


class RemovePadding(OpRun):
    op_domain = DOMAIN

    def _run(self, hidden, counts):
        batch, length, _ = hidden.shape
        mask = np.arange(length) < counts[:, None]
        places = np.arange(batch * length, dtype=np.int32)
        offsets = np.concatenate([places[mask.ravel()], places[~mask.ravel()]])
        lengths = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return hidden[mask], offsets.reshape(batch, length), lengths, counts.max(keepdims=True)


class RestorePadding(OpRun):
    op_domain = DOMAIN

    def _run(self, packed, offsets):
        batch, length = offsets.shape
        found = np.zeros((batch * length, packed.shape[-1]), packed.dtype)
        found[offsets.ravel()[: len(packed)]] = packed
        return (found.reshape(batch, length, -1),)


class PackedAttention(OpRun):
    op_domain = DOMAIN

    def _run(self, packed, weights, bias, offsets, lengths, num_heads=None, scale=None, **_):
        rows = []
        for start, end in itertools.pairwise(lengths):
            merged = packed[start:end] @ weights + bias
            heads = [
                part.reshape(len(merged), num_heads, -1).transpose(1, 0, 2)
                for part in np.split(merged, 3, axis=1)
            ]
            query, key, value = heads
            scores = query @ key.transpose(0, 2, 1) * (scale or query.shape[-1] ** -0.5)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            found = scores / scores.sum(-1, keepdims=True) @ value
            rows.append(found.transpose(1, 0, 2).reshape(len(merged), -1))
        return (np.concatenate(rows),)


class SkipLayerNormalization(OpRun):
    op_domain = DOMAIN

    def _run(self, x, skip, gamma, beta, bias, epsilon=None):
        total = x + skip + bias
        mean, variance = total.mean(-1, keepdims=True), total.var(-1, keepdims=True)
        found = (total - mean) / np.sqrt(variance + epsilon) * gamma + beta
        return (found.astype(x.dtype),)


class BiasGelu(OpRun):
    op_domain = DOMAIN

    def _run(self, x, bias):
        total = (x + bias).astype(np.float64)
        return ((total * 0.5 * (1 + np.vectorize(math.erf)(total / 2**0.5))).astype(x.dtype),)


OPS = [RemovePadding, RestorePadding, PackedAttention, SkipLayerNormalization, BiasGelu]


@pytest.fixture
def fused(exported):
    """Return an optimized artifact of a tiny BERT."""
    return lambda task, **options: optimize_model(
        exported("bert", task), target="cuda", precision="fp32", **options
    )


def feeds_of(artifact, lengths=(7, 3, 5)):
    ids = np.random.default_rng(0).integers(5, 50, (len(lengths), max(lengths)))
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    made = {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": ids * 0}
    return {spec.name: made[spec.name] for spec in artifact.manifest.graphs[0].inputs}


@pytest.mark.slow
@pytest.mark.parametrize("task", ["feature-extraction", "text-classification"])
def test_packed_answers_equal_those_with_padding(fused, task):
    padded, packed = fused(task), fused(task, packed=True)
    feeds = feeds_of(padded)
    session = ort.InferenceSession(str(padded.model), providers=["CPUExecutionProvider"])
    expected = session.run(None, feeds)
    model = onnx.load(str(packed.model))
    ops = [node.op_type for node in model.graph.node]
    assert (ops.count("Attention"), ops.count("RemovePadding")) == (0, 1)
    assert ops.count("PackedAttention") == 2
    found = ReferenceEvaluator(model, new_ops=OPS).run(None, feeds)
    if task == "feature-extraction":
        kept = feeds["attention_mask"].astype(bool)
        assert (found[0][~kept] == 0).all()
        found[0], expected[0] = found[0][kept], expected[0][kept]
    assert len(found) == 2  # the second is the answer
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert packed.manifest.graphs[0].outputs == padded.manifest.graphs[0].outputs
    assert "2 attentions are packed" in "; ".join(packed.manifest.stages[-1].notes)


@pytest.mark.slow
def test_layers_see_no_padding(fused):
    """Products, norms and activations are between the two, with tokens in two dims."""
    model = ir.load(str(fused("feature-extraction", packed=True).model))
    order = [node.op_type for node in model.graph]
    inside = order[order.index("RemovePadding") : order.index("RestorePadding")]
    assert {"MatMul", "SkipLayerNormalization", "BiasGelu"} <= set(inside)
    after = order[order.index("RestorePadding") + 1 :]
    assert not {"PackedAttention", "SkipLayerNormalization", "BiasGelu"} & {*after}  # the pooling


ATTENTION = """<ir_version: 9, opset_import: ["" : 20, "com.microsoft" : 1]>
g (float[b, s, 4] x, int32[{counts}] n, float[b, 1, s, s] bias) => (float[b, s, 4] y)
<float[4, 12] w = {{{weights}}}, float[12] z = {{{zeros}}}>
{{ y = com.microsoft.Attention <num_heads: int = 1{attributes}> (x, w, z, n{inputs}) }}"""


def attention(counts="b", attributes="", inputs="", weights=(1.0,) * 48):
    text = ATTENTION.format(
        counts=counts,
        attributes=attributes,
        inputs=inputs,
        weights=", ".join(map(str, weights)),
        zeros=", ".join(["0.5"] * 12),
    )
    return ir.from_onnx_text(text)


def test_packed_attention_equals_that_of_the_cpu_with_padding():
    random = np.random.default_rng(0)
    model = attention(weights=random.normal(size=48).round(3))
    feeds = {
        "x": random.normal(size=(3, 6, 4)).astype(np.float32),
        "n": np.array([6, 2, 4], np.int32),
        "bias": np.zeros((3, 1, 6, 6), np.float32),
    }
    padded = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(padded, providers=["CPUExecutionProvider"])
    taken = {value.name: feeds[value.name] for value in session.get_inputs()}
    (expected,) = session.run(None, taken)
    assert pack_tokens(model) == 1
    (found,) = ReferenceEvaluator(ir.to_proto(model), new_ops=OPS).run(None, feeds)
    kept = np.arange(6) < feeds["n"][:, None]
    np.testing.assert_allclose(found[kept], expected[kept], rtol=1e-5, atol=1e-6)
    assert (found[~kept] == 0).all()
    assert (expected[~kept] != 0).any()


@pytest.mark.parametrize(
    ("counts", "attributes", "inputs", "packed"),
    [
        ("b", "", "", 1),
        ("b, s", "", "", 0),
        ("b", ", unidirectional: int = 1", "", 0),
        ("b", "", ", , bias", 0),
    ],
    ids=["counts", "mask", "causal", "bias"],
)
def test_only_attention_over_whole_rows_is_packed(counts, attributes, inputs, packed):
    model = attention(counts, attributes, inputs)
    assert pack_tokens(model) == packed
    assert [node.op_type for node in model.graph] == (
        ["RemovePadding", "PackedAttention", "RestorePadding"] if packed else ["Attention"]
    )
    assert model.graph.outputs[0].name == "y"


@pytest.mark.parametrize(
    "options", [{"target": "tensorrt"}, {"target": "cuda", "precision": "bf16"}]
)
def test_packing_is_for_cuda_in_fp32_and_fp16(options):
    with pytest.raises(OptionError, match="option 'packed' is set"):
        check_options(OptimizeConfig(packed=True, **options))
