"""Existing .onnx files as artifacts, and what is wrong with some of them."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginery import export_model, validate_model
from enginery.core.errors import ExportError, SourceError


def linear(path, *, dims=("batch", 4), external="", output="logits"):
    """x @ w: a graph of one node."""
    weight = numpy_helper.from_array(np.arange(12, dtype=np.float32).reshape(4, 3), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], [output], name="matmul")],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, (dims[0], 3))],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    if external:
        onnx.save(model, path, save_as_external_data=True, location=external, size_threshold=0)
    else:
        onnx.save(model, path)
    return path


def test_onnx_file_becomes_an_artifact(tmp_path):
    artifact = export_model(str(linear(tmp_path / "mine.onnx")), task="text-classification")
    assert artifact.model.name == "model.onnx"
    assert artifact.manifest.source.kind == "onnx"
    assert artifact.manifest.graphs[0].inputs[0].dims == ("batch", 4)


def test_external_data_comes_along_and_is_part_of_the_source(tmp_path):
    path = linear(tmp_path / "mine.onnx", external="weights.bin")
    artifact = export_model(str(path))
    assert artifact.manifest.graphs[0].data_files == ("weights.bin",)
    assert (artifact.path / "weights.bin").read_bytes() == (tmp_path / "weights.bin").read_bytes()
    before = artifact.manifest.source.sha256
    data = bytearray((tmp_path / "weights.bin").read_bytes())
    data[0] ^= 1
    (tmp_path / "weights.bin").write_bytes(data)
    assert export_model(str(path)).manifest.source.sha256 != before


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/hostname"])
def test_external_data_outside_the_directory_is_refused(tmp_path, location):
    folder = tmp_path / "model"
    folder.mkdir()
    path = linear(folder / "mine.onnx", external="weights.bin")
    (tmp_path / "secret.bin").write_bytes(b"0" * 48)
    model = onnx.load(str(path), load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location
    path.write_bytes(model.SerializeToString())
    with pytest.raises(SourceError, match="lies outside the directory"):
        export_model(str(path))


def test_external_data_behind_a_link_is_refused(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    path = linear(folder / "mine.onnx", external="weights.bin")
    (folder / "weights.bin").rename(tmp_path / "secret.bin")
    (folder / "weights.bin").symlink_to(tmp_path / "secret.bin")
    with pytest.raises(SourceError, match="lies outside the directory"):
        export_model(str(path))


def test_missing_external_data_is_named(tmp_path):
    path = linear(tmp_path / "mine.onnx", external="weights.bin")
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(SourceError, match=r"'weights\.bin' is missing"):
        export_model(str(path))


@pytest.mark.parametrize("dim", [None, "Addlogits_dim_1"])
def test_input_dim_without_a_readable_name_is_refused(tmp_path, dim):
    path = linear(tmp_path / "mine.onnx", dims=(dim, 4))
    with pytest.raises(ExportError, match="dim 0 of input 'x' is dynamic and"):
        export_model(str(path))


def test_output_that_the_task_does_not_have_is_refused(tmp_path):
    path = linear(tmp_path / "mine.onnx", output="scores")
    with pytest.raises(ExportError, match="read from the output logits, but the graph has scores"):
        export_model(str(path), task="text-classification")


def test_graph_that_is_not_valid_onnx_is_refused(tmp_path):
    path = linear(tmp_path / "mine.onnx")
    model = onnx.load(str(path))
    model.graph.node[0].input[1] = "nowhere"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ExportError, match="not valid ONNX"):
        export_model(str(path))


@pytest.mark.parametrize("content", [b"", b"\x00 this is no model", b"PK\x03\x04"])
def test_file_that_is_no_onnx_is_refused(tmp_path, content):
    path = tmp_path / "mine.onnx"
    path.write_bytes(content)
    with pytest.raises(SourceError, match="is not an ONNX model"):
        export_model(str(path))


def test_validating_an_imported_graph_asks_for_its_pytorch_model(exported, tiny_model):
    source = tiny_model("bert", "text-classification")
    original = exported("bert", "text-classification")
    artifact = export_model(str(original.model), task="text-classification")
    with pytest.raises(SourceError, match=r"no PyTorch model.*--reference"):
        validate_model(artifact)
    assert validate_model(artifact, reference=str(source)).passed
