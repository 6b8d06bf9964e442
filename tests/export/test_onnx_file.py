"""Import of .onnx files, and the errors for invalid ones."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginery import export_model
from enginery.core.errors import ExportError, SourceError, UntrustedModelError
from enginery.core.model.source import resolve_source
from enginery.export import graphs
from enginery.export.config import ExportConfig
from enginery.export.onnx_file import import_onnx
from enginery.export.side_files import copy_side_files


def linear(path, *, dims=("batch", 4), external="", output="logits"):
    """Write a graph of one node: x @ w."""
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
    with pytest.raises(SourceError, match="is not a safe path in the directory"):
        export_model(str(path))


def test_external_data_behind_a_link_is_refused(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    path = linear(folder / "mine.onnx", external="weights.bin")
    (folder / "weights.bin").rename(tmp_path / "secret.bin")
    (folder / "weights.bin").symlink_to(tmp_path / "secret.bin")
    with pytest.raises(SourceError, match="is a symbolic link"):
        export_model(str(path))


def test_missing_external_data_is_named(tmp_path):
    path = linear(tmp_path / "mine.onnx", external="weights.bin")
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(SourceError, match=r"'weights\.bin' is missing"):
        export_model(str(path))


@pytest.mark.parametrize("dim", [None, "Addlogits_dim_1"])
def test_input_dim_without_a_readable_name_is_rejected(tmp_path, dim):
    path = linear(tmp_path / "mine.onnx", dims=(dim, 4))
    with pytest.raises(ExportError, match="dim 0 of input 'x' is dynamic and"):
        export_model(str(path))


def test_output_that_the_task_does_not_have_is_rejected(tmp_path):
    path = linear(tmp_path / "mine.onnx", output="scores")
    with pytest.raises(ExportError, match="needs the output logits, but the graph has scores"):
        export_model(str(path), task="text-classification")


def test_invalid_onnx_is_rejected(tmp_path):
    path = linear(tmp_path / "mine.onnx")
    model = onnx.load(str(path))
    model.graph.node[0].input[1] = "nowhere"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ExportError, match="not valid ONNX"):
        export_model(str(path))


@pytest.mark.parametrize("content", [b"", b"\x00 this is no model", b"PK\x03\x04"])
def test_file_that_is_not_onnx_is_rejected(tmp_path, content):
    path = tmp_path / "mine.onnx"
    path.write_bytes(content)
    with pytest.raises(SourceError, match="is not an ONNX model"):
        export_model(str(path))


@pytest.fixture
def beside(tmp_path):
    """Return a function that makes a folder with mine.onnx and config.json, beside a secret."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "config.json").write_text('{"password": "1234"}')

    def make(config):
        (tmp_path / "model").mkdir()
        path = linear(tmp_path / "model" / "mine.onnx")
        (path.parent / "config.json").write_text(json.dumps(config))
        return path

    return make


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("notes.txt", "/proc/self/environ"),
        ("license.txt", "../secret/config.json"),
        ("1_Pooling", "../secret"),
        ("1_Pooling/config.json", "../../secret/config.json"),
        ("config.json", "../secret/config.json"),
    ],
)
def test_links_out_of_the_directory_are_never_copied(beside, tmp_path, name, target, trust):
    path, out = beside({"model_type": "bert"}), tmp_path / "out"
    link = path.parent / name
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    out.mkdir()
    with pytest.raises(UntrustedModelError, match=f"{name} is a link to .*Put the file itself"):
        import_onnx(path, ExportConfig(trust_remote_code=trust), out)
    assert not any("1234" in file.read_text() for file in out.rglob("*.json"))


def test_rejected_import_leaves_no_artifact(beside, tmp_path):
    path = beside({"model_type": "bert"})
    (path.parent / "notes.txt").symlink_to("/proc/self/environ")
    with pytest.raises(UntrustedModelError, match=r"notes\.txt is a link"):
        export_model(str(path), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_beside_an_import_are_screened(beside, tmp_path):
    path = beside({"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"}})
    (tmp_path / "out").mkdir()
    with pytest.raises(UntrustedModelError, match=r"config\.json: auto_map names Python code"):
        import_onnx(path, ExportConfig(), tmp_path / "out")


def test_own_code_for_a_type_of_transformers_is_accepted(beside, tmp_path):
    path = beside({"model_type": "bert", "auto_map": {"AutoConfig": "org/name--x.Config"}})
    (tmp_path / "out").mkdir()
    assert import_onnx(path, ExportConfig(), tmp_path / "out").model_type == "bert"


def test_side_files_in_the_hub_cache_are_copied(tmp_path):
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot = blobs.parent / "snapshots" / "f00"
    for folder in (blobs, snapshot / "1_Pooling", tmp_path / "out"):
        folder.mkdir(parents=True)
    (blobs / "abc").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/abc")
    (snapshot / "1_Pooling" / "config.json").symlink_to("../../../blobs/abc")
    copy_side_files(snapshot, tmp_path / "out", code=False)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "out" / "1_Pooling" / "config.json").read_text() == "{}"


def test_side_file_with_an_invalid_name_is_rejected(beside, tmp_path):
    path = beside({"model_type": "bert"})
    (path.parent / "a\x1b[2J.txt").write_text("")
    (tmp_path / "out").mkdir()
    with pytest.raises(UntrustedModelError, match="control characters"):
        import_onnx(path, ExportConfig(), tmp_path / "out")


def test_the_structure_is_checked_before_onnx_reads_the_file(tmp_path, monkeypatch):
    path = tmp_path / "mine.onnx"
    path.write_bytes(b"\x00 this is no model")
    monkeypatch.setattr(onnx, "load", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(SourceError, match="is not an ONNX model, or a damaged one"):
        resolve_source(str(path))
    with pytest.raises(SourceError, match="is not an ONNX model, or a damaged one"):
        import_onnx(path, ExportConfig(), tmp_path)


def with_dims(path, dims):
    """Set the dims of the file's input."""
    model = onnx.load(str(path))
    for dim, new in zip(model.graph.input[0].type.tensor_type.shape.dim, dims, strict=True):
        if isinstance(new, int):
            dim.dim_value = new
        else:
            dim.dim_param = new
    onnx.save(model, path)
    graphs.name_dims(path, {})
    return path


def test_dim_beyond_32_bits_is_rejected(tmp_path):
    path = with_dims(linear(tmp_path / "mine.onnx"), ("batch", 2**40))
    with pytest.raises(ExportError, match=r"'x': dims\.1.*less than or equal to 2147483647"):
        graphs.record_graph(path, tmp_path)


def test_name_with_control_characters_is_rejected(tmp_path):
    path = linear(tmp_path / "mine.onnx", output="scores\x1b[2J")
    with pytest.raises(ExportError, match="no control character"):
        graphs.record_graph(path, tmp_path)


@pytest.mark.parametrize("name", ["²", "1" * 5000])
def test_dim_named_with_digits_is_rejected(tmp_path, name):
    path = with_dims(linear(tmp_path / "mine.onnx"), ("batch", name))
    with pytest.raises(ExportError, match="dim 1 of input 'x' is dynamic and named"):
        graphs.check_exported_graph(path)
