"""Multiply-adds by layer: the same that the placement counts by node."""

import numpy as np
import onnx_ir as ir
import pytest

from enginery.core.feeds import FeedLimits, make_feeds
from enginery.core.model_files import ModelConfig
from enginery.core.shapes import canonical_dim, dynamic_dims
from enginery.passes.layers import find_layers
from enginery.quantize.multiply_adds import Arithmetic, count_multiply_adds
from enginery.runtime.multiply_adds import count_node_work


def fed(artifact):
    record = artifact.manifest.graphs[0]
    limits = FeedLimits.from_config(ModelConfig.read(artifact.path))
    sizes = {name: 1 if canonical_dim(name) == "batch" else limits.sizes.get(name, 17)
             for name in dynamic_dims(record.inputs)}  # fmt: skip
    return make_feeds(record.inputs, sizes, limits, seed=0)


@pytest.mark.parametrize(
    ("kind", "task"),
    [("bert", "text-classification"), ("resnet", "image-classification"),
     ("vit", "image-classification")],
)  # fmt: skip
def test_layers_and_attention_count_as_nodes_do(tiny, kind, task):
    artifact = tiny(kind, task)
    model = ir.load(artifact.model)
    layers, feeds = find_layers(model), fed(artifact)
    found = count_multiply_adds(artifact.model, model, layers, feeds)
    work = count_node_work(artifact.model, feeds)
    assert found.by_layer == {layer.name: work[layer.name].multiply_adds for layer in layers}
    others = [node for name, node in work.items() if name not in found.by_layer]
    assert found.attention == sum(n.multiply_adds for n in others if n.op_type == "MatMul")


def test_nodes_without_names_count_as_well(tiny, tmp_path):
    """As a file has them that another exporter wrote; names are given in memory alone."""
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


def test_share_is_of_the_layers_or_of_all_products():
    work = Arithmetic({"a": 30, "b": 10}, attention=20, rows_by_layer={}, positions=1)
    assert work.share({"a"}) == 0.75
    assert work.share({"a"}, with_attention=True) == 0.5
    assert Arithmetic({}, 0, {}, 1).share({"a"}) == 0.0
