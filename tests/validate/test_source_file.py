"""Artifacts that were imported from an .onnx file are compared with that file."""

import shutil

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from enginery import Artifact, export_model, optimize_model, quantize_model, validate_model
from enginery.core.errors import InputError, SourceError
from enginery.core.model.source import resolve_source
from enginery.validate.source_file import SourceFile
from tests.passes.onnx_graphs import node, save_graph
from tests.tiny import TEXT as SENTENCES
from tests.validate.faults import edits as faults
from tests.validate.faults.graph_editor import GraphEditor
from tests.validate.faults.text import on_mask

WORDS = "bert.embeddings.word_embeddings.weight"
DENSE = "bert.encoder.layer.1.intermediate.dense"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Write a text classifier as an .onnx file with its tokenizer and config beside it."""
    from tests.tiny import tiny_artifact

    root = tmp_path_factory.mktemp("source")
    artifact = tiny_artifact("bert", "text-classification", root / "artifact")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(artifact.path / name, root / name)
    shutil.copy(artifact.model, root / "classifier.onnx")
    return root / "classifier.onnx"


@pytest.fixture
def imported(source):
    return export_model(str(source), task="text-classification")


@pytest.fixture(
    params=[
        "fp32",
        pytest.param("fp16", marks=pytest.mark.more),
        pytest.param("int8", marks=pytest.mark.more),
    ]
)
def made(request, imported, tmp_path):
    """A copy of the imported artifact, or what `optimize` or `quantize` makes of it."""
    out = tmp_path / request.param
    if request.param == "fp32":
        return imported.copy_to(out)
    if request.param == "fp16":
        return optimize_model(imported, target="tensorrt", precision="fp16", out=out)
    return quantize_model(imported, SENTENCES, capability=(), curve=False, out=out)


def edited(edit):
    """Turn an edit of a `GraphEditor` into one of a model."""

    def apply(model):
        editor = GraphEditor(model)
        edit(editor)
        editor.finish()

    return apply


def convolution(path, *, dtype=np.float32, seed=0):
    """Write a graph of a convolution, a batch normalization and a projection, without a config."""
    generator = np.random.default_rng(seed)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    shapes = {"kernel": (8, 3, 3, 3), "scale": (8,), "shift": (8,), "mean": (8,), "out": (8, 4)}
    arrays = {name: generator.normal(0, 1, shape) for name, shape in shapes.items()}
    arrays["var"] = generator.uniform(0.5, 2, 8)
    norm, statistics = "BatchNormalization", "scale shift mean var"
    return save_graph(
        path,
        [
            node("Conv", "pixels kernel", "a", name="/stem/conv/Conv"),
            node(norm, f"a {statistics}", "b", name=f"/stem/norm/{norm}"),
            node("Relu", "b", "c"),
            node("GlobalMaxPool", "c", "d"),
            node("Flatten", "d", "e"),
            node("MatMul", "e out", "scores", name="/head/MatMul"),
        ],
        {name: array.astype(dtype) for name, array in arrays.items()},
        inputs={"pixels": (kind, ("batch", 3, "height", "width"))},
        outputs={"scores": (kind, ("batch", 4))},
    )


@pytest.fixture(scope="module")
def convolutional(tmp_path_factory):
    """The artifact of such a graph."""
    folder = tmp_path_factory.mktemp("convolutional")
    return export_model(str(convolution(folder / "conv.onnx")), out=folder / "artifact")


# Verdicts


@pytest.mark.more
def test_imported_artifact_and_what_is_made_of_it_pass_without_pytorch(made, monkeypatch):
    monkeypatch.setattr("enginery.validate.reference.TorchReference", None)
    report = validate_model(made)
    assert report.passed, report.summary
    assert report.reference["as"] == "ONNX Runtime FP32, source file"
    assert "agree with the source file" in report.summary
    assert any(case.kind == "real" for case in report.cases), "the tokenizer came along"
    assert {case.name for case in report.cases if case.kind == "sweep"} >= {"ragged", "longest"}
    assert report.weights.compared / report.weights.elements > 0.95


def mask_ignored_if_long(g, mask):
    long = g.op("Greater", g.size("input_ids", 1), np.int64(64))
    return g.op("Where", long, g.op("Max", mask, np.int64(1)), mask)


def zero_row(model):
    def change(array):
        array[599] = 0
        return array

    faults.change_initializer(model, WORDS, change)


@pytest.mark.more
def test_faults_of_the_graph_are_found(made):
    precision = made.path.name
    edits = [zero_row, edited(on_mask(mask_ignored_if_long))]
    if precision == "int8":
        edits.append(faults.change_quantized_weight(lambda scale: scale * 1.5, operand=1))
        edits.append(faults.swap_quantized_weights)
    if precision == "fp16":
        edits += [faults.flip_sign, faults.added("logits", np.float16(6e4))]
    sound = made.model.read_bytes()
    for edit in edits:
        broken = faults.break_graph(Artifact(made.path, made.manifest), edit)
        report = validate_model(broken, effort="quick")
        assert not report.passed, edit
        assert "the source file" in report.summary or "cosine" in report.summary
        if edit is zero_row and precision == "fp32":
            said = f"a weight differs from the source file's: {WORDS} in model.onnx: row 599"
            assert said in report.summary
        made.model.write_bytes(sound)


def test_weight_that_a_node_reads_in_anothers_place_is_found(imported, copied):
    """Both have their own names and values, but the nodes read each other's."""

    def swap(model):
        readers = [node for node in model.graph.node if node.op_type == "MatMul"]
        query, key = (
            next(node for node in readers if f"layer.0/attention/self/{name}/" in node.name)
            for name in ("query", "key")
        )
        query.input[1], key.input[1] = key.input[1], query.input[1]

    artifact = copied(imported)
    faults.break_graph(artifact, swap)
    differences = validate_model(artifact.path, effort="quick").weights.differences
    assert {found.graph for found in differences} == {"model.onnx"}
    assert len(differences) >= 2


def test_graph_that_onnxruntime_has_fused_passes(imported, copied):
    """Fused nodes have other names, and query, key and value are in one weight."""
    import onnxruntime as ort
    from onnxruntime.transformers.optimizer import optimize_model as fuse

    artifact = copied(imported)
    fused = fuse(str(artifact.model), "bert", num_heads=4, hidden_size=32)
    assert any(node.op_type == "Attention" for node in fused.model.graph.node), ort.__version__

    def replace(model):
        model.CopyFrom(fused.model)

    faults.break_graph(artifact, replace)
    report = validate_model(artifact.path, effort="quick")
    assert report.passed, report.summary
    assert report.weights.compared / report.weights.elements > 0.95


@pytest.mark.more
def test_file_that_is_quantized_itself_is_compared_number_by_number(imported, tmp_path):
    int8 = quantize_model(imported, SENTENCES, capability=(), curve=False)
    (tmp_path / "source").mkdir()
    path = shutil.copy(int8.model, tmp_path / "source" / "quantized.onnx")
    artifact = export_model(str(path), out=tmp_path / "artifact")
    assert not any(stage.stage == "quantize" for stage in artifact.manifest.stages)
    weights = validate_model(artifact, effort="quick").weights
    assert weights.compared == weights.elements
    assert not weights.differences
    faults.break_graph(artifact, faults.change_quantized_weight(np.abs))
    report = validate_model(artifact.path, effort="quick")
    assert not report.passed
    (difference,) = report.weights.differences
    assert difference.differing < difference.elements


# Noise floors


def relative_floors(report):
    """Return the noise floors divided by the largest magnitude of their outputs."""
    outputs = [output for case in report.cases for output in case.outputs]
    largest = max(o.max_abs / o.max_rel for o in outputs if o.max_rel)
    return {output.noise_floor / largest for output in outputs}


@pytest.mark.slow
def test_convolutions_have_a_noise_floor_and_pass_folded(tmp_path):
    path = convolution(tmp_path / "conv.onnx")
    report = validate_model(export_model(str(path)))
    assert report.passed, report.summary
    assert not [note for note in report.notes if "noise floor" in note]
    assert all(1e-7 < ratio < 1e-5 for ratio in relative_floors(report))
    half = optimize_model(export_model(str(path)), target="tensorrt", precision="fp16")
    report = validate_model(half)
    assert report.passed, report.summary
    assert all(1e-4 < ratio < 1e-2 for ratio in relative_floors(report))


@pytest.mark.more
def test_fp16_file_is_computed_in_fp32(tmp_path):
    path = convolution(tmp_path / "half.onnx", dtype=np.float16)
    artifact = export_model(str(path))
    assert artifact.manifest.precision == "fp16"
    record = artifact.manifest.graphs[0]
    pixels = np.random.default_rng(0).normal(0, 1, (2, 3, 8, 8)).astype(np.float16)
    with SourceFile(path, record) as reference:
        wide = np.load(reference({"pixels": pixels}, tmp_path / "wide")["scores"])
    with SourceFile(path, record, noise="fp16") as reference:
        rounded = np.load(reference({"pixels": pixels}, tmp_path / "rounded")["scores"])
    assert wide.dtype == np.float32
    assert 0 < np.abs(wide - rounded).max() < 0.1
    assert not np.array_equal(wide, wide.astype(np.float16)), "nothing was rounded"
    report = validate_model(artifact, effort="quick")
    assert report.passed, report.summary


# The file


@pytest.mark.more
def test_file_that_has_changed_or_is_gone_is_an_error(tmp_path):
    path = convolution(tmp_path / "conv.onnx")
    artifact = export_model(str(path), out=tmp_path / "artifact")
    convolution(path, seed=1)
    with pytest.raises(SourceError, match=r"has changed since the export: conv\.onnx"):
        validate_model(artifact)
    path.unlink()
    with pytest.raises(SourceError, match=r"does not exist any more.*--reference MODEL"):
        validate_model(artifact)
    (tmp_path / "elsewhere").mkdir()
    moved = convolution(tmp_path / "elsewhere" / "conv.onnx")
    report = validate_model(artifact, reference=str(moved), effort="quick")
    assert report.passed, report.summary
    assert report.reference_name == "the source file", "it is the same file"


def test_file_inside_the_artifact_is_no_reference(imported, copied):
    """Its author could name the faulty graph itself as the source."""
    artifact = copied(imported)
    record = resolve_source(str(artifact.model)).record
    forged = Artifact(artifact.path, artifact.manifest.model_copy(update={"source": record}))
    with pytest.raises(SourceError, match="is a file of the artifact itself"):
        validate_model(forged)


@pytest.mark.more
def test_other_file_can_be_the_reference_if_it_takes_the_same_inputs(
    imported, convolutional, copied, tmp_path
):
    path = convolution(tmp_path / "conv.onnx", seed=1)
    with pytest.raises(SourceError, match=r"conv\.onnx takes pixels: .* takes input_ids: "):
        validate_model(imported, reference=str(path))
    report = validate_model(copied(convolutional), reference=str(path), effort="quick")
    assert not report.passed
    assert "outputs differ from the reference file" in report.summary


@pytest.mark.more
@pytest.mark.parametrize("opset", ["auto", pytest.param(21, marks=pytest.mark.slow)])
def test_the_reference_is_the_file_with_its_own_names_of_dims(tmp_path, opset):
    """The import has other dims than its file, and a converted graph other operators."""
    path = convolution(tmp_path / "conv.onnx")
    model = onnx.load(path)
    for dim, name in zip(
        model.graph.input[0].type.tensor_type.shape.dim, ("D.0", "", "D.1", "?"), strict=True
    ):
        if name:
            dim.dim_param = name
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "D.0"
    onnx.save(model, path)
    artifact = export_model(str(path), opset=opset)
    assert artifact.manifest.graphs[0].inputs[0].dims == ("batch", 3, "height", "width")
    report = validate_model(artifact)
    assert report.passed, report.summary
    assert report.reference_name == "the source file"
    path.unlink()
    with pytest.raises(SourceError, match=r"does not exist any more.*--reference MODEL"):
        validate_model(artifact, effort="quick")


# Arrays


def test_a_folder_of_arrays_is_compared_size_by_size(convolutional, copied, tmp_path):
    artifact = copied(convolutional)
    generator = np.random.default_rng(0)
    (tmp_path / "rows").mkdir()
    for count, size in ((3, 8), (2, 11)):
        pixels = generator.normal(0, 1, (count, 3, size, size)).astype(np.float32)
        np.savez(tmp_path / "rows" / f"{size}.npz", pixels=pixels)
    report = validate_model(artifact, data=str(tmp_path / "rows"), effort="quick")
    assert report.passed, report.summary
    assert [case.name for case in report.cases if case.kind == "real"] == [
        "rows of 3 × 11 × 11, 1–2",
        "rows of 3 × 8 × 8, 1–3",
    ]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pixel": np.zeros((2, 3, 8, 8))}, r"has the arrays pixel; expected .* inputs pixels"),
        ({"pixels": np.zeros((2, 8, 8))}, r"pixels has the shape \(2, 8, 8\), the graph takes"),
        (
            {"pixels": np.zeros((2, 4, 8, 8))},
            r"pixels: found shape \(2, 4, 8, 8\), expected pixels",
        ),
        ({"pixels": np.full((2, 3, 8, 8), "a")}, r"values of <U1 that float32 cannot hold"),
    ],
)
def test_arrays_that_do_not_fit_are_errors(convolutional, tmp_path, arrays, message):
    np.savez(tmp_path / "inputs.npz", **arrays)
    with pytest.raises(InputError, match=message):
        validate_model(convolutional, data=str(tmp_path / "inputs.npz"))


@pytest.mark.more
def test_integers_keep_their_values(imported, copied, tmp_path):
    artifact = copied(imported)
    ids = np.full((2, 5), 7.5)
    mask = np.ones((2, 5), np.int32)
    types = np.zeros((2, 5), np.int8)
    file = str(tmp_path / "inputs.npz")
    np.savez(file, input_ids=ids, attention_mask=mask, token_type_ids=types)
    with pytest.raises(InputError, match="input_ids has values of float64 that int64 cannot hold"):
        validate_model(artifact, data=file)
    np.savez(file, input_ids=ids.astype(int), attention_mask=mask[:, :4], token_type_ids=types)
    with pytest.raises(InputError, match=r"sequence is 4, but 5 in the inputs before it"):
        validate_model(artifact, data=file)
    np.savez(file, input_ids=ids.astype(int), attention_mask=mask, token_type_ids=types)
    report = validate_model(artifact, data=file, effort="quick")
    assert report.passed, report.summary
    assert [case.name for case in report.cases if case.kind == "real"] == ["rows 1–2"]


def recurrent(path):
    """Write a graph with a state (1, batch, 4) and a scalar, which takes 3 samples or more."""
    return save_graph(
        path,
        [
            node("Gather", "samples third", "a", axis=1),
            node("Mul", "a rate", "b"),
            node("Mul", "b weight", "c"),
            node("Add", "c state", "next"),
        ],
        {"third": np.int64([600]), "weight": np.float32([[1, 2, 3, 4]])},
        inputs={
            "samples": (TensorProto.FLOAT, ("batch", "samples")),
            "state": (TensorProto.FLOAT, (1, "batch", 4)),
            "rate": (TensorProto.FLOAT, ()),
        },
        outputs={"next": (TensorProto.FLOAT, (1, "batch", 4))},
    )


@pytest.mark.more
def test_arrays_prove_what_generated_inputs_cannot(tmp_path):
    """The file rejects short inputs; the state's first dim is not the batch."""
    artifact = export_model(str(recurrent(tmp_path / "recurrent.onnx")))
    report = validate_model(artifact, effort="quick")
    assert not report.passed
    assert "could not be compared on any input: the source file fails on" in report.summary
    generator = np.random.default_rng(0)
    np.savez(
        tmp_path / "inputs.npz",
        samples=generator.normal(0, 1, (3, 700)).astype(np.float32),
        state=generator.normal(0, 1, (1, 3, 4)).astype(np.float32),
        rate=np.float32(2),
    )
    report = validate_model(artifact, data=str(tmp_path / "inputs.npz"), effort="quick")
    assert report.passed, report.summary
    assert "inputs skipped that the source file rejects" in report.summary
