"""The graph's own outputs as an .npz file."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from PIL import Image

from enginery import export_model, predict_file
from enginery.core.errors import EngineryError, InputError
from enginery.predict import tensors

FLOAT = onnx.TensorProto.FLOAT


def saved(path, dims, *, nodes=None, outside=None, kind=FLOAT):
    """Write a graph with the inputs' `dims` whose output is the input's half."""
    nodes = nodes or [helper.make_node("Mul", ["x", "half"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "halves",
        [helper.make_tensor_value_info("x", FLOAT, dims)],
        [helper.make_tensor_value_info("y", kind, dims if outside is None else outside)],
        [helper.make_tensor("half", FLOAT, [], [0.5])],
    )
    opset = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), path)
    return path


@pytest.fixture
def halves(tmp_path, home):
    """Return a function that imports such a graph."""

    def make(*dims, **options):
        image_options = {n: options.pop(n) for n in ("resize", "rescale") if n in options}
        path = saved(tmp_path / "halves.onnx", dims, **options)
        return export_model(str(path), out=tmp_path / "artifact", **image_options)

    return make


@pytest.fixture
def images(tmp_path):
    """Return a folder of two images of different sizes, and their pixels."""
    folder = tmp_path / "images"
    (folder / "more").mkdir(parents=True)
    random = np.random.default_rng(0)
    pixels = {
        "b.png": random.integers(0, 256, (8, 6, 3), np.uint8),
        "more/a.png": random.integers(0, 256, (4, 6, 3), np.uint8),
    }
    for name, array in pixels.items():
        Image.fromarray(array).save(folder / name)
    return folder, pixels


def test_rows_of_arrays_keep_their_order(halves, tmp_path):
    artifact = halves("batch", 4)
    x = np.random.default_rng(0).random((150, 4), np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    out = tmp_path / "y.npz"
    report = predict_file(artifact, tmp_path / "x.npz", out, batch_rows=8)
    with np.load(out) as found:
        assert found.files == ["y"]
        np.testing.assert_array_equal(found["y"], x / 2)
    assert (report.counts.rows, report.worked) == (150, True)
    assert json.loads((tmp_path / "y.npz.json").read_text())["sha256"] == report.sha256
    assert sorted(path.name for path in tmp_path.glob("y.npz*")) == ["y.npz", "y.npz.json"]
    assert not predict_file(artifact, tmp_path / "x.npz", out).worked


def test_images_of_different_sizes_have_an_array_each(halves, images, tmp_path):
    folder, pixels = images
    artifact = halves("batch", 3, "height", "width", rescale="1")
    predict_file(artifact, folder, tmp_path / "y.npz")
    with np.load(tmp_path / "y.npz") as found:
        assert list(found["row"]) == list(pixels)
        for name, array in pixels.items():
            np.testing.assert_array_equal(found[f"y/{name}"], array.transpose(2, 0, 1)[None] / 2)


def test_images_of_one_size_share_an_array(halves, images, tmp_path):
    folder, pixels = images
    artifact = halves("batch", 3, "height", "width", rescale="1", resize="5x7")
    predict_file(artifact, folder, tmp_path / "y.npz")
    with np.load(tmp_path / "y.npz") as found:
        assert found["y"].shape == (2, 3, 5, 7)
        assert list(found["row"]) == list(pixels)


def test_a_graph_without_a_batch_axis_runs_file_by_file(halves, tmp_path):
    nodes = [helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)]
    artifact = halves("batch", 4, nodes=nodes, outside=[])
    folder = tmp_path / "arrays"
    folder.mkdir()
    for name, rows in (("a", 2), ("b", 3)):
        np.savez(folder / f"{name}.npz", x=np.ones((rows, 4), np.float32))
    predict_file(artifact, folder, tmp_path / "y.npz")
    with np.load(tmp_path / "y.npz") as found:
        assert {name: float(found[name]) for name in found.files} == {"y/a": 8.0, "y/b": 12.0}


def test_a_model_with_a_task_has_raw_outputs_too(tiny, tmp_path):
    artifact = tiny("bert", "feature-extraction")
    feeds = {spec.name: np.ones((3, 5), np.int64) for spec in artifact.manifest.graphs[0].inputs}
    np.savez(tmp_path / "ids.npz", **feeds)
    predict_file(artifact, tmp_path / "ids.npz", tmp_path / "y.npz")
    session = onnxruntime.InferenceSession(artifact.path / "model.onnx")
    names = [each.name for each in session.get_outputs()]
    with np.load(tmp_path / "y.npz") as found:
        for name, expected in zip(names, session.run(None, feeds), strict=True):
            np.testing.assert_allclose(found[name], expected, atol=1e-5)


def test_tables_are_refused_for_a_graph_without_a_task_and_name_npz(halves, images, tmp_path):
    artifact = halves("batch", 3, "height", "width")
    with pytest.raises(EngineryError) as error:
        predict_file(artifact, images[0], tmp_path / "y.parquet")
    assert "--out results.npz" in error.value.do


def save(folder, **arrays):
    np.savez(folder / "x.npz", **arrays)
    return folder / "x.npz"


def text_file(folder):
    (folder / "lines.txt").write_text("hello\n")
    return folder / "lines.txt"


@pytest.mark.more
@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda folder: folder / "missing.npz", "no such file or folder"),
        (lambda folder: save(folder, z=np.ones((1, 4))), "expected the graph's inputs x"),
        (lambda folder: save(folder, x=np.ones((1, 5))), "expected"),
        (lambda folder: save(folder, x=np.full((1, 4), np.nan)), "NaN or infinity"),
        (text_file, "expected as .npz"),
    ],
)
def test_an_input_that_the_graph_does_not_take_is_an_error(write, problem, halves, tmp_path):
    artifact = halves("batch", 4)
    with pytest.raises(InputError, match=problem):
        predict_file(artifact, write(tmp_path), tmp_path / "y.npz")
    assert not list(tmp_path.glob("y.npz*"))


def test_a_damaged_image_ends_the_run_and_is_named(halves, images, tmp_path):
    folder, _ = images
    (folder / "c.png").write_bytes(b"no image")
    artifact = halves("batch", 3, "height", "width", rescale="1")
    with pytest.raises(InputError, match=r"c\.png"):
        predict_file(artifact, folder, tmp_path / "y.npz")
    assert not list(tmp_path.glob("y.npz*"))


def test_a_run_that_fails_while_writing_keeps_the_earlier_output(halves, tmp_path, monkeypatch):
    artifact = halves("batch", 4)
    np.savez(tmp_path / "x.npz", x=np.ones((2, 4), np.float32))
    out = tmp_path / "y.npz"
    predict_file(artifact, tmp_path / "x.npz", out)
    before = out.read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensors, "_copy", full)
    with pytest.raises(InputError, match=r"y\.npz' cannot be written: No space left"):
        predict_file(artifact, tmp_path / "x.npz", out, force=True)
    assert out.read_bytes() == before
    monkeypatch.undo()
    assert not predict_file(artifact, tmp_path / "x.npz", out).worked
    assert not list(tmp_path.glob(".tmp-*"))


def test_images_for_a_graph_that_was_imported_without_their_settings(halves, images, tmp_path):
    artifact = halves("batch", 3, "height", "width")
    with pytest.raises(InputError) as error:
        predict_file(artifact, images[0], tmp_path / "y.npz")
    assert "--resize" in error.value.do


def test_an_output_may_be_empty(halves, tmp_path):
    nodes = [helper.make_node("NonZero", ["x"], ["y"])]
    path = tmp_path / "empty.onnx"
    saved(path, ["batch", 4], nodes=nodes, outside=[2, "found"], kind=onnx.TensorProto.INT64)
    artifact = export_model(str(path), out=tmp_path / "empty")
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 4), np.float32))
    predict_file(artifact, tmp_path / "x.npz", tmp_path / "y.npz")
    with np.load(tmp_path / "y.npz") as found:
        assert found["y"].shape == (2, 0)
