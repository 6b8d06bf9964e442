"""Multiply-adds per layer match those that placement counts per node."""

import numpy as np
import onnx_ir as ir
import pytest

from enginery.core.model.feeds import FeedLimits, make_feeds
from enginery.core.shapes import canonical_dim, dynamic_dims
from enginery.passes.qdq.layers import find_layers
from enginery.quantize.multiply_adds import MultiplyAddCounts, count_multiply_adds
from enginery.runtime.onnxruntime.multiply_adds import profile_multiply_adds


def fed(artifact):
    record = artifact.manifest.graphs[0]
    limits = FeedLimits.from_artifact(artifact)
    sizes = {
        name: 1 if canonical_dim(name) == "batch" else limits.sizes.get(name, 17)
        for name in dynamic_dims(record.inputs)
    }
    return make_feeds(record.inputs, sizes, limits, seed=0)


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("bert", "text-classification"),
        ("resnet", "image-classification"),
        ("vit", "image-classification"),
    ],
)
def test_multiply_adds_per_layer_match_those_per_node(tiny, kind, task):
    artifact = tiny(kind, task)
    model = ir.load(artifact.model)
    layers, feeds = find_layers(model), fed(artifact)
    found = count_multiply_adds(artifact.model, model, layers, feeds)
    work = profile_multiply_adds(artifact.model, feeds)
    assert found.by_layer == {layer.name: work[layer.name].multiply_adds for layer in layers}
    others = [node for name, node in work.items() if name not in found.by_layer]
    assert found.attention == sum(n.multiply_adds for n in others if n.op_type == "MatMul")


def test_unnamed_nodes_are_counted(tiny, tmp_path):
    """Other exporters write nodes without names; they are named in memory only."""
    artifact = tiny("bert", "text-classification")
    model = ir.load(artifact.model)
    named, feeds = find_layers(model), fed(artifact)
    expected = count_multiply_adds(artifact.model, model, named, feeds)
    bare = ir.load(artifact.model)
    for node in bare.graph:
        node.name = ""
    ir.save(bare, tmp_path / "bare.onnx")
    assert count_multiply_adds(tmp_path / "bare.onnx", model, named, feeds) == expected
    assert np.isclose(expected.share([layer.name for layer in named]), 1.0)


def test_share_with_and_without_attention():
    work = MultiplyAddCounts({"a": 30, "b": 10}, attention=20, rows_by_layer={}, positions=1)
    assert work.share({"a"}) == 0.75
    assert work.share({"a"}, with_attention=True) == 0.5
    assert MultiplyAddCounts({}, 0, {}, 1).share({"a"}) == 0.0
