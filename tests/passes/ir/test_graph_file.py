import numpy as np
import onnx
import onnxruntime as ort
import pytest

from enginery.core.artifact.external_data import external_data_files
from enginery.core.errors import ExportError
from enginery.passes.ir.graph_file import check_graph, read_graph, write_graph
from tests.passes.onnx_graphs import WIDTH, make_graph, node, save_graph


def save_with_everything_outside(path):
    """Save a model as Optimum saves those over 2 GB: tensors of Constant nodes are external too."""
    nodes = [
        node("MatMul", "x w", "y"),
        node("Constant", "", "b", value=onnx.numpy_helper.from_array(np.float32(range(8)), "b")),
        node("Add", "y b", "z"),
    ]
    weights = {"w": np.arange(512, dtype=np.float32).reshape(64, 8)}
    model = make_graph(nodes, weights, outputs={"z": (onnx.TensorProto.FLOAT, ["batch", 8])})
    onnx.save(
        model,
        path,
        save_as_external_data=True,
        location="all.data",
        size_threshold=0,
        convert_attribute=True,
    )


def test_written_graph_does_not_need_the_files_it_was_read_from(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    save_with_everything_outside(source / "model.onnx")
    assert write_graph(read_graph(source / "model.onnx"), target / "model.onnx", max_inline_bytes=0)
    assert external_data_files(target / "model.onnx") == ["model.onnx.data"]
    feeds = {"x": np.ones((2, 64), dtype=np.float32)}
    before, after = (
        ort.InferenceSession(str(place / "model.onnx")).run(None, feeds)[0]
        for place in (source, target)
    )
    np.testing.assert_array_equal(before, after)


def test_rms_normalization_is_valid_as_onnxruntime_writes_it(tmp_path):
    """ONNX Runtime has it in ONNX's own domain, where onnx's checker does not know it."""
    for name, op_type in (("norm", "SimplifiedLayerNormalization"), ("other", "NoSuchOperator")):
        nodes = [node(op_type, "x w", "y", name=name, epsilon=1e-6)]
        save_graph(tmp_path / f"{name}.onnx", nodes, {"w": np.ones(WIDTH, np.float32)})
    check_graph(tmp_path / "norm.onnx")
    with pytest.raises(ExportError, match="NoSuchOperator"):
        check_graph(tmp_path / "other.onnx")
