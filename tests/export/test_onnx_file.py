"""Import of .onnx files, and the errors for invalid ones."""

import json

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from PIL import Image

from enginery import export_model, quantize_model, validate_model
from enginery.core.errors import (
    ArtifactError,
    ExportError,
    OptionError,
    SourceError,
    UntrustedModelError,
)
from enginery.core.model.feeds import FeedLimits
from enginery.core.model.source import resolve_source
from enginery.export import graphs
from enginery.export.config import ExportConfig
from enginery.export.onnx_file import import_onnx, name_input_dims
from enginery.export.side_files import copy_side_files
from enginery.export.stage import with_opset
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.sample_inputs import ImageFeeder
from tests.passes.onnx_graphs import node, save_graph

FLOAT = TensorProto.FLOAT


def linear(path, *, dims=("batch", 4), external="", output="logits"):
    """Write a graph of one node: x @ w."""
    save_graph(
        path,
        [node("MatMul", "x w", output, name="matmul")],
        {"w": np.arange(12, dtype=np.float32).reshape(4, 3)},
        inputs={"x": (FLOAT, dims)},
        outputs={output: (FLOAT, (dims[0], 3))},
    )
    if external:
        model = onnx.load(path)
        onnx.save(model, path, save_as_external_data=True, location=external, size_threshold=0)
    return path


@pytest.fixture
def out(tmp_path):
    """The directory in which a file is imported."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_onnx_file_becomes_an_artifact(tmp_path):
    artifact = export_model(str(linear(tmp_path / "mine.onnx")), task="text-classification")
    assert artifact.model.name == "model.onnx"
    assert artifact.manifest.source.kind == "onnx"
    assert artifact.manifest.graphs[0].inputs[0].dims == ("batch", 4)


@pytest.mark.parametrize("is_drawn", [True, False])
def test_random_numbers_in_a_branch_are_noted(tmp_path, is_drawn):
    """The noted ops are those of ONNX's own domain; a branch is a graph inside a node."""
    op = "RandomUniformLike" if is_drawn else "Identity"
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
    g (float[batch, 4] x, bool c) => (float[batch, 4] y) {{
        y = If (c) <
            then_branch = then () => (float[batch, 4] t) {{ t = {op} (x) }},
            else_branch = other () => (float[batch, 4] e) {{ e = Neg (x) }}
        >
    }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "mine.onnx")
    notes = " ".join(export_model(str(tmp_path / "mine.onnx")).manifest.stages[0].notes)
    assert ("mine.onnx draws random numbers (RandomUniformLike)" in notes) == is_drawn


@pytest.mark.more
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


def dims_of(artifact):
    return {spec.name: spec.dims for spec in artifact.manifest.graphs[0].inputs}


def graph_of(path, inputs, nodes, outputs, *, opset=20, weights=None):
    """Write a graph of float inputs: name -> dims."""
    inputs, outputs = (
        {name: (FLOAT, dims) for name, dims in values.items()} for values in (inputs, outputs)
    )
    return save_graph(path, nodes, weights or {}, inputs=inputs, outputs=outputs, opset=opset)


def convolution(path, dims, *, inner=(), outside=("?", 4, "?", "?"), opset=20):
    """Write a convolution with a kernel of 1, as PaddlePaddle's exporter would."""
    nodes = [node("Conv", "x w", "c"), node("Relu", "c", "y")]
    weights = {"w": np.ones((4, 3, 1, 1), np.float32)}
    graph_of(path, {"x": dims}, nodes, {"y": outside}, weights=weights, opset=opset)
    if inner:
        model = onnx.load(path)
        model.graph.value_info.append(helper.make_tensor_value_info("c", FLOAT, inner))
        onnx.save(model, path)
    return path


PADDLE = ("DynamicDimension.0", 3, "DynamicDimension.1", "DynamicDimension.10")


@pytest.mark.more
@pytest.mark.parametrize(
    "dims", [PADDLE, (None, 3, None, None), ("?", 3, "?", "?"), (-1, 3, "H", "W")]
)
def test_dims_of_an_image_are_named(tmp_path, dims):
    artifact = export_model(str(convolution(tmp_path / "mine.onnx", dims)))
    assert dims_of(artifact) == {"x": ("batch", 3, "height", "width")}
    (renamed,) = (n for n in artifact.manifest.stages[0].notes if "renamed" in n)
    assert renamed.endswith("→ (batch, 3, height, width)")


def test_names_are_replaced_wherever_the_file_mentions_them(tmp_path):
    half = "floor(DynamicDimension.1/2 - 1/2) + DynamicDimension.10"
    inner = ("DynamicDimension.0", 4, half, "other.1")
    path = convolution(
        tmp_path / "mine.onnx", PADDLE, inner=inner, outside=("DynamicDimension.0", 4, "a", "b")
    )
    original = onnx.load(path)
    made = onnx.load(export_model(str(path)).model)
    dims = [dim.dim_param for dim in made.graph.value_info[0].type.tensor_type.shape.dim]
    assert dims == ["batch", "", "floor(height/2 - 1/2) + width", "other.1"]
    assert made.graph.output[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert made.graph.node == original.graph.node
    assert made.graph.initializer == original.graph.initializer
    assert made.opset_import == original.opset_import


def add(*inputs):
    return [node("Add", " ".join(inputs), "y")]


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        (
            {"a": ("D.0", "D.1"), "b": ("D.0", "D.1")},
            {"a": ("batch", "a_1"), "b": ("batch", "a_1")},
        ),
        ({"a": ("D.0", "D.1"), "b": ("D.5", 1)}, {"a": ("batch", "a_1"), "b": ("batch", 1)}),
        ({"a": (None, None), "b": (1, None)}, {"a": ("batch", "a_1"), "b": (1, "b_1")}),
        ({"a": ("D.0", "D.0"), "b": (1, 1)}, {"a": ("a_0", "a_0"), "b": (1, 1)}),
        ({"a": ("rows", "D.1"), "b": (1, 1)}, {"a": ("rows", "a_1"), "b": (1, 1)}),
        ({"a": ("D.0", "batch"), "b": (1, 1)}, {"a": ("a_0", "batch"), "b": (1, 1)}),
        ({"a": ("N", "Tokens"), "b": (1, 1)}, {"a": ("batch", "tokens"), "b": (1, 1)}),
        ({"My:0": (4, "²"), "b": (4, "my_0_1")}, {"My:0": (4, "my_0_1_2"), "b": (4, "my_0_1")}),
        (
            {"input_ids": (None, None), "attention_mask": (None, None)},
            {"input_ids": ("batch", "sequence"), "attention_mask": ("batch", "sequence")},
        ),
    ],
    ids=[
        "equal dims",
        "first axes",
        "no names",
        "not a batch",
        "good names stay",
        "a batch elsewhere",
        "upper case",
        "a name that is taken",
        "known inputs",
    ],
)
def test_dims_get_names(tmp_path, inputs, named):
    path = graph_of(tmp_path / "mine.onnx", inputs, add(*inputs), {"y": (None, None)})
    name_input_dims(path)
    found = graphs.record_graph(path, tmp_path).inputs
    assert {spec.name: spec.dims for spec in found} == named


def test_a_file_with_good_names_is_not_touched(tmp_path):
    path = linear(tmp_path / "mine.onnx")
    before = path.read_bytes()
    assert name_input_dims(path) == []
    assert path.read_bytes() == before


def test_dims_can_be_chosen_and_fixed(tmp_path):
    path = convolution(tmp_path / "mine.onnx", PADDLE, outside=(PADDLE[0], 4, *PADDLE[2:]))
    artifact = export_model(str(path), dims=("x=images,3,48,columns",))
    assert dims_of(artifact) == {"x": ("images", 3, 48, "columns")}
    assert artifact.manifest.graphs[0].outputs[0].dims == ("images", 4, 48, "columns")


@pytest.mark.more
@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ("z=batch,3,8,8", "the file has no input 'z'.* Its inputs: x"),
        ("x=batch,3", "with 2 dims, but the input has 4"),
        ("x=batch,4,8,8", "with 4 where the file has the fixed size 3"),
        ("x=batch,Three,8,8", "expected an input's name and a name in lower case or a number"),
        ("batch,3,8,8", "expected an input's name"),
    ],
)
def test_dims_that_do_not_fit_are_errors(tmp_path, dims, message):
    path = convolution(tmp_path / "mine.onnx", PADDLE)
    with pytest.raises(OptionError, match=message):
        export_model(str(path), dims=(dims,), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_dim_is_not_renamed_inside_the_longer_name_of_another(tmp_path):
    path = graph_of(tmp_path / "m.onnx", {"x": ("N", "D.1")}, add("x", "x"), {"y": ("N", "D.10")})
    name_input_dims(path)
    graph = onnx.load(str(path)).graph
    assert graph.input[0].type.tensor_type.shape.dim[1].dim_param == "x_1"
    assert graph.output[0].type.tensor_type.shape.dim[1].dim_param == "D.10"


def test_one_dim_has_one_name(tmp_path):
    inputs = {"a": ("D.0", "D.1"), "b": ("D.0", "D.1")}
    path = graph_of(tmp_path / "mine.onnx", inputs, add(*inputs), {"y": (None, None)})
    with pytest.raises(OptionError, match=r"replaces the file's dim D\.1 by 4 and by width"):
        name_input_dims(path, ["a=batch,4", "b=batch,width"])


def test_dims_are_for_files_only(tiny_model):
    with pytest.raises(OptionError, match=r"only the dims of an \.onnx file can be chosen"):
        export_model(str(tiny_model("bert", "fill-mask")), dims=("input_ids=batch,8",))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("unknown", "is not valid ONNX"),
        ("text-classification", "no input has a dynamic dim 'batch'"),
    ],
)
def test_errors_name_the_file_that_was_given(tmp_path, task, message):
    path = linear(tmp_path / "mine.onnx", dims=("rows", 4))
    if task == "unknown":
        model = onnx.load(str(path))
        model.graph.node[0].input[1] = "nowhere"
        path.write_bytes(model.SerializeToString())
    with pytest.raises(ExportError, match=f"^mine.onnx:? {message}"):
        export_model(str(path), task=task)


def softmax(path, *, opset=11):
    """Write a Softmax over two axes, which is several operators from opset 13 on."""
    nodes = [node("Softmax", "x", "y", axis=1, name="softmax")]
    return graph_of(path, {"x": ("N", 4, 5)}, nodes, {"y": ("N", 4, 5)}, opset=opset)


def test_an_import_keeps_the_opset_of_the_file(tmp_path):
    artifact = export_model(str(softmax(tmp_path / "mine.onnx")))
    assert artifact.manifest.graphs[0].opset == 11
    (stage,) = artifact.manifest.stages
    assert stage.options["opset"] == 11
    assert stage.fields["opset"] == "11"
    assert "opset" not in stage.changed_options


@pytest.mark.more
@pytest.mark.parametrize("external", ["", "weights.bin"])
def test_a_later_opset_converts_the_file(tmp_path, external):
    path = softmax(tmp_path / "mine.onnx")
    if external:
        path = linear(path, external=external)
        model = onnx.load(str(path), load_external_data=False)
        model.opset_import[0].version = 12
        path.write_bytes(model.SerializeToString())
    artifact = export_model(str(path), opset=20)
    model = onnx.load(artifact.model)
    assert [o.version for o in model.opset_import] == [20]
    assert artifact.manifest.graphs[0].opset == 20
    (stage,) = artifact.manifest.stages
    assert stage.options["opset"] == 20
    assert any(note.startswith("converted from opset 1") for note in stage.notes)
    assert artifact.manifest.graphs[0].data_files == ()
    assert set(artifact.manifest.files) == {"model.onnx"}
    feeds = {"x": np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)}
    if not external:
        with OrtRunner(artifact) as runner:
            expected = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
            np.testing.assert_allclose(runner(feeds)["y"], expected.run(None, feeds)[0], rtol=1e-6)


def test_an_earlier_opset_is_an_error(tmp_path):
    with pytest.raises(
        OptionError, match=r"mine\.onnx has opset 11, and a file is only converted to"
    ):
        export_model(str(softmax(tmp_path / "mine.onnx")), opset=9)


def test_the_opset_that_the_file_has_may_be_named(tmp_path):
    source = resolve_source(str(softmax(tmp_path / "mine.onnx")))
    config = ExportConfig(opset=11)
    assert with_opset(source, config) == config


@pytest.mark.more
def test_a_conversion_that_cannot_be_checked_is_an_error(tmp_path):
    """The file takes rows of 4 only, but does not say so."""
    path = linear(tmp_path / "mine.onnx", dims=("batch", "columns"))
    with pytest.raises(
        ExportError, match=r"^mine\.onnx cannot be converted .*could not be .*--dims"
    ):
        export_model(str(path), opset=21)
    made = export_model(str(path), opset=21, dims=("x=batch,4",))
    assert made.manifest.graphs[0].opset == 21


@pytest.mark.parametrize("ir_version", [3, 8])
def test_weights_are_taken_out_of_the_inputs(tmp_path, out, ir_version):
    """Files before IR version 4 list them there, where no pass may change them."""
    path = linear(tmp_path / "mine.onnx")
    model = onnx.load(str(path))
    model.ir_version, model.opset_import[0].version = ir_version, 8
    model.graph.input.insert(0, helper.make_tensor_value_info("w", TensorProto.FLOAT, (4, 3)))
    onnx.save(model, str(path))
    exported = import_onnx(path, ExportConfig(), out)
    assert "no longer inputs, since the file has values for them: w" in exported.notes
    written = onnx.load(str(out / "model.onnx"))
    assert [value.name for value in written.graph.input] == ["x"]
    onnx.checker.check_model(written, full_check=True)


def sequence(inner):
    return helper.make_sequence_type_proto(inner)


FLOATS = helper.make_tensor_type_proto(TensorProto.FLOAT, ["batch", 3])


@pytest.mark.parametrize(
    ("op", "kind", "described", "remedy"),
    [
        (
            "ZipMap",
            sequence(helper.make_map_type_proto(TensorProto.INT64, FLOATS)),
            "a sequence",
            "'zipmap': False",
        ),
        (
            "SequenceConstruct",
            sequence(FLOATS),
            "a sequence",
            "SequenceConstruct",
        ),
        (
            "Optional",
            helper.make_optional_type_proto(FLOATS),
            "an optional",
            "Optional",
        ),
    ],
)
def test_output_that_is_no_tensor_is_named(tmp_path, out, op, kind, described, remedy):
    path = linear(tmp_path / "mine.onnx")
    model = onnx.load(str(path))
    domain = "ai.onnx.ml" if op == "ZipMap" else ""
    model.graph.node.append(helper.make_node(op, ["logits"], ["probabilities"], domain=domain))
    model.graph.output.append(helper.make_value_info("probabilities", kind))
    onnx.save(model, str(path))
    with pytest.raises(
        ExportError, match=rf"mine\.onnx: the output 'probabilities' is {described}"
    ) as info:
        import_onnx(path, ExportConfig(), out)
    assert remedy in info.value.do


def test_output_that_the_task_does_not_have_is_rejected(tmp_path):
    path = linear(tmp_path / "mine.onnx", output="scores")
    with pytest.raises(ExportError, match="needs the output logits, but the graph has scores"):
        export_model(str(path), task="text-classification")


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
def test_links_out_of_the_directory_are_never_copied(beside, out, name, target, trust):
    path = beside({"model_type": "bert"})
    link = path.parent / name
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    with pytest.raises(UntrustedModelError, match=f"{name} is a link to .*Put the file itself"):
        import_onnx(path, ExportConfig(trust_remote_code=trust), out)
    assert not any("1234" in file.read_text() for file in out.rglob("*.json"))


def test_rejected_import_leaves_no_artifact(beside, tmp_path):
    path = beside({"model_type": "bert"})
    (path.parent / "notes.txt").symlink_to("/proc/self/environ")
    with pytest.raises(UntrustedModelError, match=r"notes\.txt is a link"):
        export_model(str(path), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_beside_an_import_are_screened(beside, out):
    path = beside({"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"}})
    with pytest.raises(UntrustedModelError, match=r"config\.json: auto_map names Python code"):
        import_onnx(path, ExportConfig(), out)


def test_own_code_for_a_type_of_transformers_is_accepted(beside, out):
    path = beside({"model_type": "bert", "auto_map": {"AutoConfig": "org/name--x.Config"}})
    assert import_onnx(path, ExportConfig(), out).model_type == "bert"


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


def test_side_file_with_an_invalid_name_is_rejected(beside, out):
    path = beside({"model_type": "bert"})
    (path.parent / "a\x1b[2J.txt").write_text("")
    with pytest.raises(UntrustedModelError, match="control characters"):
        import_onnx(path, ExportConfig(), out)


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
    graphs.name_dims(path)
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


# Images for an .onnx file


def detector(path, dims=("n", 3, "h", "w")):
    """Write a graph of one convolution, for images of these dims."""
    channels = dims[1] if dims[1] in (1, 3) else dims[3]
    weight = np.random.default_rng(0).normal(size=(16, channels, 3, 3)).astype(np.float32)
    nodes = [node("Conv", "images w", "y", name="conv", pads=[1, 1, 1, 1])]
    if dims[1] != channels:
        nodes[0].input[0] = "p"
        nodes.insert(0, node("Transpose", "images", "p", name="t", perm=[0, 3, 1, 2]))
    outputs = {"y": (dims[0], 16, None, None)}
    return str(graph_of(path, {"images": dims}, nodes, outputs, weights={"w": weight}))


@pytest.fixture
def photo(tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, (40, 60, 3)).astype(np.uint8)
    folder = tmp_path / "photos"
    folder.mkdir()
    Image.fromarray(pixels).save(folder / "a.png")
    return folder, pixels


def pixels_of(artifact, pixels):
    feeder = ImageFeeder.open(artifact, artifact.manifest.graphs[0])
    (name, found), *_ = feeder([Image.fromarray(pixels)]).items()
    assert name == "images"
    return found[0]


def test_images_are_prepared_as_the_options_of_an_import_say(tmp_path, photo):
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    options = {"mean": "0.485,0.456,0.406", "std": "0.229,0.224,0.225", "channel_order": "bgr"}
    artifact = export_model(detector(tmp_path / "m.onnx"), **options)
    expected = (photo[1][..., ::-1] / 255 - mean) / std
    np.testing.assert_allclose(
        pixels_of(artifact, photo[1]), expected.transpose(2, 0, 1), atol=1e-5
    )


@pytest.mark.more
@pytest.mark.parametrize(
    ("dims", "options", "shape"),
    [
        (("n", 3, "h", "w"), {"resize": "32x64"}, (3, 32, 64)),
        (("n", 3, "h", "w"), {"resize": "32"}, (3, 32, 32)),
        (("n", 3, 24, 48), {"mean": "0"}, (3, 24, 48)),
        (("n", 3, 24, "w"), {"resize": "24x99"}, (3, 24, 99)),
        (("n", "h", "w", 3), {"resize": "32x64"}, (32, 64, 3)),
        (("n", 1, 24, "w"), {"resize": "24x48"}, (1, 24, 48)),
    ],
)
def test_images_get_the_size_and_layout_of_an_imported_graph(tmp_path, photo, dims, options, shape):
    artifact = export_model(detector(tmp_path / "m.onnx", dims), rescale="1", **options)
    found = pixels_of(artifact, photo[1])
    assert found.shape == shape
    assert found.max() > 1


def test_a_resized_imports_sizes_are_those_of_its_images(tmp_path):
    dims = ("n", 3, "height", "width")
    artifact = export_model(detector(tmp_path / "m.onnx", dims), resize="32x64")
    assert artifact.manifest.graphs[0].sample_sizes == {"height": 32, "width": 64}
    limits = FeedLimits.from_artifact(artifact)
    assert (limits.sizes["height"], limits.sizes["width"]) == (32, 64)


@pytest.mark.more
def test_imported_graphs_are_validated_and_quantized_on_images(tmp_path, photo):
    artifact = export_model(detector(tmp_path / "m.onnx"), resize="32")
    report = validate_model(artifact, data=str(photo[0]), effort="quick")
    assert report.passed, report.summary
    assert any(case.kind == "real" for case in report.cases)
    for index in range(8):
        Image.fromarray(np.roll(photo[1], index)).save(photo[0] / f"{index}.png")
    quantized = quantize_model(artifact, data=str(photo[0]), capability=())
    assert quantized.manifest.is_quantized


@pytest.mark.parametrize(
    ("dims", "options", "said"),
    [
        (("n", 3, 24, 48), {"resize": "32"}, "the graph takes images of the height 24"),
        (("n", 3, "h", "w"), {"channel_order": "gray"}, "takes images of 3 channels"),
        (("n", 3, "h", "w"), {"resize": "3x3x3"}, "expected 320, or 480x640"),
        (("n", 3, "h", "w"), {"resize": "0"}, "expected 320, or 480x640"),
        (("n", 3, "h", "w"), {"resize": "99999"}, "up to 16384 pixels"),
        (("n", 3, "h", "w"), {"rescale": "1/0"}, "expected 1/255, or a number"),
        (("n", 3, "h", "w"), {"mean": "a"}, "expected a number, or three"),
        (("n", 3, "h", "w"), {"mean": "nan"}, "expected a number, or three"),
        (("n", 3, "h", "w"), {"mean": "1,2"}, "expected a number, or three"),
        (("n", 3, "h", "w"), {"std": "0"}, "expected a number above 0"),
    ],
)
def test_options_for_images_that_make_no_sense_are_rejected(tmp_path, dims, options, said):
    with pytest.raises(OptionError, match=said):
        export_model(detector(tmp_path / "m.onnx", dims), **options)


def test_options_for_images_need_a_graph_of_images(tmp_path):
    with pytest.raises(OptionError, match="the graph takes no images"):
        export_model(str(linear(tmp_path / "mine.onnx")), resize="32")


def test_images_for_an_import_without_their_options_are_an_error_with_advice(tmp_path, photo):
    artifact = export_model(detector(tmp_path / "m.onnx"))
    with pytest.raises(ArtifactError, match="--resize, --mean and --std"):
        quantize_model(artifact, data=str(photo[0]), capability=())
