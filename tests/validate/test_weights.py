"""Weights against PyTorch's parameters: each damage is found and placed, each sound form silent."""

import json
import shutil

import numpy as np
import onnx
import pytest
import safetensors.numpy
from onnx import numpy_helper

from enginery import Artifact, export_model, optimize_model, quantize_model, validate_model
from enginery.core.model.source import resolve_record
from enginery.validate.config import ValidateConfig
from enginery.validate.reference import Reference
from enginery.validate.weights.compare import compare_weights
from enginery.validate.weights.elements import mismatches
from enginery.validate.weights.stored import StoredWeight
from tests.tiny import TEXT, save_tiny, tiny_artifact
from tests.validate.faults import edits as faults
from tests.validate.faults.sound import SOUND_GRAPHS

WORDS = "bert.embeddings.word_embeddings.weight"
QUERY = "/bert/encoder/layer.0/attention/self/query/MatMul"
KEY = "/bert/encoder/layer.0/attention/self/key/MatMul"
DENSE = "/bert/encoder/layer.1/intermediate/dense/MatMul"


def compare(artifact):
    return compare_weights(artifact, Reference.of(artifact, ValidateConfig()).open_weights)


@pytest.mark.parametrize("tolerance", [None, np.float32([0.5, 0.5])])
def test_a_weight_that_is_nan_equals_no_number(tolerance):
    values = np.float32([1, np.nan])
    stored = StoredWeight("w", "fp32", values, values, tolerance)
    error = None if tolerance is not None else np.float32([0.5, 0.5])
    assert mismatches(stored, np.float32([1.2, 2]), error).tolist() == [False, True]


@pytest.fixture(scope="session")
def varied(tmp_path_factory):
    """Export a tiny model in which no two parameters are equal: `varied("bert", task)`."""
    import torch
    from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

    root, made = tmp_path_factory.mktemp("varied"), {}

    def make(kind, task):
        if kind not in made:
            source = save_tiny(kind, task, root / f"{kind}-source")
            loader = {
                "text-classification": AutoModelForSequenceClassification,
                "image-classification": AutoModelForImageClassification,
            }[task]
            model = loader.from_pretrained(source)
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
                for name, buffer in model.named_buffers():
                    if "running" in name:
                        buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
            model.save_pretrained(source)
            made[kind] = tiny_artifact(kind, task, root / kind, source=source)
        return made[kind]

    return make


@pytest.fixture(scope="session")
def bert(varied):
    return varied("bert", "text-classification")


@pytest.fixture(scope="session")
def int8(bert, tmp_path_factory):
    out = tmp_path_factory.mktemp("int8") / "bert"
    return quantize_model(bert, TEXT, capability=(), curve=False, min_cosine=-1, out=out)


@pytest.fixture
def damaged(tmp_path):
    """Compare a copy of an artifact after an edit of its graph; return the only difference."""

    def make(artifact, edit):
        for file in artifact.path.rglob("*"):
            if file.is_file():
                copy = tmp_path / "damaged" / file.relative_to(artifact.path)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(file.read_bytes())
        found = compare(faults.break_graph(Artifact.open(tmp_path / "damaged"), edit))
        assert found.differences, "not found"
        return found.differences

    return make


def weight_of(model, path, operand=1):
    return next(node for node in model.graph.node if node.name == path).input[operand]


def array_of(model, name):
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    return numpy_helper.to_array(tensor)


def change(name, edit):
    """Change the array of an initializer, or that of the node at a path, in place."""

    def apply(model):
        stored = {tensor.name for tensor in model.graph.initializer}
        target = name if name in stored else weight_of(model, name)
        replaced = array_of(model, target).copy()
        changed = edit(replaced)
        replaced = replaced if changed is None else np.asarray(changed, replaced.dtype)
        tensor = next(tensor for tensor in model.graph.initializer if tensor.name == target)
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(replaced), target))

    return apply


def set_row(row, value):
    def edit(array):
        array[row] = value(array)

    return edit


def flip_lowest_bit(array):
    array.view(np.uint32)[3, 5] ^= 1


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "edit", "parameter", "said"),
    [
        (WORDS, set_row(411, lambda a: 0), WORDS, "row 411 of 600 differs: cosine 0.0000"),
        (WORDS, set_row(411, lambda a: a[412]), WORDS, "row 411 of 600 differs"),
        (DENSE, flip_lowest_bit, "layer.1.intermediate.dense.weight", "element [5, 3] is"),
        (QUERY, np.transpose, "layer.0.attention.self.query.weight", "it is transposed"),
        (DENSE, lambda a: a.astype(np.float16), "layer.1.intermediate.dense.weight", "to FP16"),
        (DENSE, lambda a: 1.1 * a, "layer.1.intermediate.dense.weight", "1.1 times as large"),
        (DENSE, lambda a: a[::-1], "layer.1.intermediate.dense.weight", "of 64 rows differ"),
        (DENSE, set_row((0, 0), lambda a: np.nan), "layer.1.intermediate.dense.weight", "finite"),
        ("bert.pooler.dense.weight", np.transpose, "bert.pooler.dense.weight", "is transposed"),
        ("classifier.bias", lambda a: 0 * a, "classifier.bias", "they are zero"),
    ],
)
def test_damage_of_an_fp32_weight(bert, damaged, name, edit, parameter, said):
    (found,) = damaged(bert, change(name, edit))
    assert found.parameter.endswith(parameter)
    assert said in found.problem


def test_weights_of_two_layers_swapped(bert, damaged):
    def swap(model):
        one, other = (
            array_of(model, weight_of(model, QUERY)),
            array_of(model, weight_of(model, KEY)),
        )
        change(QUERY, lambda _: other)(model)
        change(KEY, lambda _: one)(model)

    first, second = damaged(bert, swap)
    assert first.parameter.endswith("query.weight")
    assert first.problem.endswith(
        "it has the values of bert.encoder.layer.0.attention.self.key.weight"
    )
    assert second.parameter.endswith("key.weight")


def test_node_that_reads_another_layers_weight(bert, damaged):
    def rewire(model):
        node = next(node for node in model.graph.node if node.name == KEY)
        node.input[1] = weight_of(model, QUERY)

    (found, *_) = damaged(bert, rewire)
    assert found.parameter.endswith("key.weight")


@pytest.mark.more
@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)])
def test_cast_weights_are_the_nearest_numbers(bert, damaged, tmp_path, precision):
    artifact = optimize_model(bert, target="tensorrt", precision=precision, out=tmp_path / "low")
    found = compare(artifact)
    assert (found.differences, found.untraced) == ([], [])
    position_ids = 128
    assert found.kinds[precision] == found.elements - position_ids

    def next_number(model):
        tensor = next(t for t in model.graph.initializer if t.name == WORDS)
        raw = bytearray(tensor.raw_data)
        raw[2 * (411 * 32 + 7)] ^= 1
        tensor.raw_data = bytes(raw)

    (difference,) = damaged(artifact, next_number)
    assert difference.parameter == WORDS
    assert "element [411, 7] is" in difference.problem


@pytest.mark.more
def test_fused_attention(bert, damaged, tmp_path):
    artifact = optimize_model(bert, target="cuda", precision="fp32", out=tmp_path / "fused")
    found = compare(artifact)
    assert (found.differences, found.untraced) == ([], [])
    assert found.kinds["joined"] == 2 * (3 * 32 * 32 + 3 * 32)
    (difference,) = damaged(artifact, change("Attention_0_qkv_weight", lambda a: np.roll(a, 32, 1)))
    assert difference.parameter == "bert.encoder.layer.0.attention.self.query.weight"


def test_fused_attention_of_another_layer(bert, damaged, tmp_path):
    artifact = optimize_model(bert, target="cuda", precision="fp32", out=tmp_path / "fused")

    def swap(model):
        other = array_of(model, "Attention_1_qkv_weight")
        change("Attention_0_qkv_weight", lambda _: other)(model)

    (difference,) = damaged(artifact, swap)
    assert difference.parameter == "bert.encoder.layer.0.attention.self.query.weight"
    assert difference.problem.endswith("of bert.encoder.layer.1.attention.self.query.weight")


@pytest.mark.more
def test_quantized_weights_biases_and_scales_are_sound(int8):
    found = compare(int8)
    assert (found.differences, found.untraced) == ([], [])
    assert found.kinds["quantized"] > found.elements / 3


def test_a_quantized_activation_may_be_rearranged(int8, tmp_path):
    # With its reports, which have the calibrated ranges.
    copy = Artifact.open(shutil.copytree(int8.path, tmp_path / "copy"))
    (graph,) = (graph for graph in SOUND_GRAPHS if graph.name == "reshaped there and back")
    assert compare(faults.break_graph(copy, graph.change)).differences == []


def requantized(model):
    """Store a weight in half the range, with twice the scale."""
    change(f"{DENSE}/weight", lambda a: np.rint(a / 2))(model)
    change(f"{DENSE}/weight_scale", lambda a: 2 * a)(model)


@pytest.mark.parametrize(
    "edit",
    [
        change(f"{DENSE}/weight_scale", lambda a: 1.1 * a),
        change(f"{DENSE}/weight_scale", lambda a: 100 * a),
        change(f"{DENSE}/weight_scale", set_row(5, lambda a: 1.1 * a[5])),
        change(f"{DENSE}/weight_scale", lambda a: a[::-1]),
        change(f"{DENSE}/weight_scale", lambda a: np.roll(a, 1)),
        change(f"{DENSE}/weight_scale", lambda a: 0 * a + a.mean()),
        change(f"{DENSE}/weight", lambda a: a[[1, 0, *range(2, len(a))]]),
        change(f"{DENSE}/weight_zero_point", lambda a: a + 1),
        requantized,
    ],
)
def test_damage_of_a_quantized_weight(int8, damaged, edit):
    found = damaged(int8, edit)
    assert all(f.parameter.endswith("layer.1.intermediate.dense.weight") for f in found)


def test_dropped_and_altered_bias_correction(int8, damaged):
    recorded = json.loads((int8.path / "reports/ranges.json").read_text())["bias_deltas"]
    delta = np.float32(recorded[DENSE])

    def dropped(array):
        return array.astype(np.float32) - delta

    (found,) = damaged(int8, change(f"{DENSE}/bias", dropped))
    assert found.parameter.endswith("layer.1.intermediate.dense.bias")


def test_scale_of_an_activation(int8, damaged):
    found = damaged(int8, faults.clip_activations(0.5))
    assert all("calibrated" in difference.problem for difference in found)


def test_without_a_record_corrected_biases_are_not_traced(int8, tmp_path, copied):
    artifact = copied(int8)  # without reports
    found = compare(artifact)
    assert found.differences == []
    assert {weight.weight.rpartition("/")[2] for weight in found.untraced} == {"bias"}


def test_dynamic_int8(bert, damaged, tmp_path):
    artifact = quantize_model(bert, scheme="dynamic", target="cpu", out=tmp_path / "dynamic")
    found = compare(artifact)
    assert (found.differences, found.untraced) == ([], [])
    (difference,) = damaged(artifact, change(f"{WORDS}_quantized", set_row(411, lambda a: a[412])))
    assert difference.parameter == WORDS


def test_folded_batch_normalization(varied, damaged):
    artifact = varied("resnet", "image-classification")
    found = compare(artifact)
    assert (found.differences, found.untraced, found.unused) == ([], [], [])
    path = "/resnet/encoder/stages.1/layers.0/layer/layer.1/convolution/Conv"

    def scale_channel(model):
        change(path, set_row(2, lambda a: 1.001 * a[2]))(model)

    (difference,) = damaged(artifact, scale_channel)
    assert "row 2 of 4 differs" in difference.problem


def test_a_dropped_batch_normalization_is_not_compared(varied, tmp_path):
    artifact = varied("resnet", "image-classification")
    source = resolve_record(artifact.manifest.source).path
    module = "resnet.encoder.stages.1.layers.0.layer.1"
    weights = safetensors.numpy.load_file(source / "model.safetensors")
    path = "/resnet/encoder/stages.1/layers.0/layer/layer.1/convolution/Conv"

    def drop(model):
        change(path, lambda _: weights[f"{module}.convolution.weight"])(model)
        del next(node for node in model.graph.node if node.name == path).input[2]

    found = compare(faults.break_graph(artifact.copy_to(tmp_path / "copy"), drop))
    roles = ("bias", "running_mean", "running_var", "weight")
    assert sorted(found.unused) == [f"{module}.normalization.{role}" for role in roles]


@pytest.mark.slow
def test_batch_normalization_that_torchs_exporter_has_folded(varied, home):
    source = resolve_record(varied("resnet", "image-classification").manifest.source).path
    found = compare(export_model(str(source), task="image-classification", exporter="dynamo"))
    assert (found.differences, found.untraced, found.unused) == ([], [], [])
    assert found.kinds["folded"] > 0.9 * found.elements


def test_every_graph_of_a_model_is_compared(exported):
    artifact = exported("t5", "text2text-generation-with-past")
    found = compare(artifact)
    assert (found.differences, found.untraced, found.unused) == ([], [], [])


@pytest.mark.slow
def test_exporter_of_torch(exported):
    found = compare(exported("bert", "text-classification", exporter="dynamo"))
    assert found.differences == []
    assert found.compared > 0.99 * found.elements


@pytest.mark.more
def test_verdict_names_parameter_and_row(bert, copied):
    edit = change(WORDS, set_row(599, lambda a: a[598]))
    report = validate_model(faults.break_graph(copied(bert), edit))
    assert not report.passed
    assert f"a weight differs from PyTorch's: {WORDS} in model.onnx: row 599" in report.summary


def test_constant_that_is_no_parameter_is_listed(bert, copied):
    def add(model):
        model.graph.initializer.append(
            numpy_helper.from_array(np.float32(range(2048)) / 7, "a_table")
        )
        model.graph.node.insert(0, onnx.helper.make_node("Abs", ["a_table"], ["unused"]))

    found = compare(faults.break_graph(copied(bert), add))
    assert found.differences == []
    assert [(weight.weight, weight.shape) for weight in found.untraced] == [("a_table", (2048,))]
    assert "95" in found.describe()


@pytest.mark.slow
def test_minilm(minilm, copied, tmp_path):
    artifact = export_model(minilm, task="feature-extraction")
    found = compare(artifact)
    assert found.differences == []
    assert found.describe().startswith("100 % of 22.6 M elements compared in full; 0.148 M of ")
    assert found.absent == ["pooler.dense.bias", "pooler.dense.weight"]
    row = change("embeddings.word_embeddings.weight", set_row(4711, lambda a: a[4712]))
    (difference,) = compare(faults.break_graph(copied(artifact), row)).differences
    assert "row 4711 of 30522 differs" in difference.problem
    int8 = quantize_model(
        artifact, TEXT, capability=(), curve=False, min_cosine=-1, out=tmp_path / "int8"
    )
    assert compare(int8).differences == []
    scales = change(
        "/encoder/layer.2/intermediate/dense/MatMul/weight_scale", lambda a: np.roll(a, 1)
    )
    (difference,) = compare(faults.break_graph(int8, scales)).differences
    assert difference.parameter == "encoder.layer.2.intermediate.dense.weight"


def zeroed(name):
    def edit(model):
        faults.change_initializer(model, name, np.zeros_like)

    return edit


def without(artifact, copied, *edits):
    made = copied(artifact)
    for edit in edits:
        made = faults.break_graph(made, edit)
    return made


def test_key_bias_has_no_effect_and_others_have(bert, copied, tmp_path):
    attention = "bert.encoder.layer.0.attention.self"
    sound = without(bert, copied, zeroed(f"{attention}.key.bias"))
    found = compare(sound)
    assert (found.differences, found.kinds["of no effect"]) == ([], 32)
    broken = faults.break_graph(sound, zeroed(f"{attention}.query.bias"))
    assert [found.parameter for found in compare(broken).differences] == [f"{attention}.query.bias"]


def halved_query(model, *, undone):
    """Halve the query's weight and bias, and with `undone` double the scores again."""
    names = {node.name: node for node in model.graph.node}
    for name in (names[QUERY].input[1], "bert.encoder.layer.0.attention.self.query.bias"):
        faults.change_initializer(model, name, lambda array: array / 2)
    if undone:
        scores = next(node for node in model.graph.node if node.op_type == "Softmax").input[0]
        product = next(node for node in model.graph.node if scores in node.output)
        while product.op_type != "MatMul":
            product = next(n for n in model.graph.node if product.input[0] in n.output)
        output, product.output[0] = product.output[0], "halved"
        place = 1 + list(model.graph.node).index(product)
        doubled = onnx.helper.make_node("Mul", ["halved", "two"], [output])
        model.graph.node.insert(place, doubled)
        model.graph.node.insert(place, faults.constant("two", np.float32(2)))


@pytest.mark.more
@pytest.mark.parametrize("undone", [True, False])
def test_factor_that_the_graph_undoes(bert, copied, undone):
    artifact = without(bert, copied, lambda model: halved_query(model, undone=undone))
    differences = compare(artifact).differences
    assert [found.factor for found in differences] == pytest.approx([0.5, 0.5])
    report = validate_model(artifact, effort="quick")
    assert report.passed == undone, report.summary
    assert report.weights.kinds.get("scaled", 0) == (32 * 32 + 32 if undone else 0)
