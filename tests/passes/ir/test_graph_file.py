import numpy as np
import onnx
import onnxruntime as ort
import pytest

from enginery.core.artifact.external_data import external_data_files
from enginery.core.errors import ExportError
from enginery.passes.ir.graph_file import check_graph, read_graph, write_graph


def save_with_everything_outside(path):
    """Save a model as Optimum saves those over 2 GB: tensors of Constant nodes are external too."""
    weights = np.arange(512, dtype=np.float32).reshape(64, 8)
    bias = np.arange(8, dtype=np.float32)
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("MatMul", ["x", "w"], ["y"]),
            onnx.helper.make_node(
                "Constant", [], ["b"], value=onnx.numpy_helper.from_array(bias, "b")
            ),
            onnx.helper.make_node("Add", ["y", "b"], ["z"]),
        ],
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 64])],
        [onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, ["batch", 8])],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10
    )
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
        graph = onnx.helper.make_graph(
            [onnx.helper.make_node(op_type, ["x", "w"], ["y"], name=name, epsilon=1e-6)],
            "g",
            [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 4])],
            [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 4])],
            [onnx.numpy_helper.from_array(np.ones(4, np.float32), "w")],
        )
        opset = [onnx.helper.make_opsetid("", 20)]
        model = onnx.helper.make_model(graph, opset_imports=opset, ir_version=10)
        onnx.save(model, tmp_path / f"{name}.onnx")
    check_graph(tmp_path / "norm.onnx")
    with pytest.raises(ExportError, match="NoSuchOperator"):
        check_graph(tmp_path / "other.onnx")
