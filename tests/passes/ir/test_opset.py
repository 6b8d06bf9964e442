"""Conversion of graphs to a later opset, which must not change what they compute."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, version_converter

from enginery.core.errors import ExportError
from enginery.passes.ir import opset
from enginery.passes.ir.opset import convert_opset
from tests.passes.onnx_graphs import node, save_graph

FEEDS = {"x": np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)}
WEIGHT = {"w": np.random.default_rng(1).normal(size=(64, 64)).astype(np.float32)}


@pytest.fixture
def graph(tmp_path):
    nodes = [
        node("MatMul", "x w", "product", name="product"),
        node("Softmax", "product", "y", name="softmax"),
    ]
    return save_graph(tmp_path / "mine.onnx", nodes, WEIGHT, opset=11)


def test_names_weights_and_metadata_stay(graph, tmp_path):
    model = onnx.load(graph)
    model.metadata_props.add(key="character", value="a")
    onnx.save(model, graph)
    assert convert_opset(graph, tmp_path / "new" / "model.onnx", 20, [FEEDS]) == ()
    made = onnx.load(tmp_path / "new" / "model.onnx")
    assert [o.version for o in made.opset_import] == [20]
    assert {"product", "softmax"} <= {n.name for n in made.graph.node}
    assert made.graph.initializer[0].name == "w"
    assert made.metadata_props[0].value == "a"


@pytest.mark.parametrize(("factor", "change"), [(1.001, "up to"), (np.nan, "up to nan")])
def test_changed_outputs_are_an_error(graph, tmp_path, monkeypatch, factor, change):
    convert = version_converter.convert_version

    def damage(model, version):
        made = convert(model, version)
        weight = numpy_helper.to_array(made.graph.initializer[0]) * np.float32(factor)
        made.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "w"))
        return made

    monkeypatch.setattr(version_converter, "convert_version", damage)
    with pytest.raises(ExportError, match=f"to opset 20: its output y changes, by {change}"):
        convert_opset(graph, tmp_path / "new.onnx", 20, [FEEDS])


def test_what_the_converter_does_not_know_is_an_error(tmp_path):
    path = save_graph(tmp_path / "mine.onnx", [node("Relu", "x", "y")], opset=11)
    with pytest.raises(
        ExportError, match=r"mine\.onnx cannot be converted to opset 200: onnx\.ver"
    ):
        convert_opset(path, tmp_path / "new" / "model.onnx", 200, [FEEDS])


def test_inputs_that_the_graph_rejects_are_an_error(graph, tmp_path):
    wrong = {"x": np.zeros((3, 63), np.float32)}
    with pytest.raises(ExportError, match=r"^mine cannot .* could not be compared with it"):
        convert_opset(graph, tmp_path / "new.onnx", 20, [wrong], name="mine")
    assert not (tmp_path / "new.onnx").exists()


def test_files_of_over_two_gigabytes_are_an_error(graph, tmp_path, monkeypatch):
    monkeypatch.setattr(opset, "_MAX_BYTES", 1000)
    with pytest.raises(ExportError, match=r"it has [\d,]+ bytes, and onnx.version_converter takes"):
        convert_opset(graph, tmp_path / "new.onnx", 20, [FEEDS])
