"""Artifacts whose files are hashed and whole, and say what cannot be: an error names it."""

import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from enginery.core.artifact.artifact import Artifact, commit_artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError, EngineryError
from enginery.core.shapes import TensorSpec
from enginery.runtime.image.processor import ImageProcessor, load_image
from enginery.runtime.model import load_model
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.onnxruntime.session import check_interface
from enginery.runtime.tasks.classify import Classify, classify_logits, label_names
from enginery.runtime.tasks.embed import Embed

WRONG = ("x", [], ["x"], {"a": 1}, -7, 0, 1, 10**9, 10**400, 1e300, math.nan, None, [[1, [2]]])
SENTENCE = {
    "sentence_bert_config.json": {"max_seq_length": 64, "do_lower_case": False},
    "config_sentence_transformers.json": {"prompts": {"q": "query: "}, "default_prompt_name": "q"},
    "modules.json": [{"type": "m.Transformer", "path": ""}, {"type": "m.Pooling", "path": "1_P"}],
    "1_P/config.json": {"pooling_mode": "mean", "include_prompt": True, "pooling_mode_x": False},
}
TOKENIZER = {
    "tokenizer_config.json": (
        *("tokenizer_class", "model_max_length", "do_lower_case", "strip_accents"),
        *("add_prefix_space", "added_tokens_decoder", "truncation_side", "padding_side"),
        *("pad_token", "mask_token", "clean_up_tokenization_spaces", "tokenize_chinese_chars"),
    ),
    "special_tokens_map.json": ("pad_token", "unk_token", "cls_token", "mask_token"),
    "config.json": (
        *("max_position_embeddings", "id2label", "problem_type", "model_type", "pad_token_id"),
    ),
}


def changed(document, place, value):
    """The document with the value at one place: a key, or an index and a key."""
    copy = json.loads(json.dumps(document))
    inner = copy
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return json.dumps(copy)


def works_or_is_refused(call):
    """Whether it works; any exception that is not one of ours comes through."""
    try:
        call()
    except EngineryError:
        return False
    return True


def test_text_files_with_wrong_values_work_or_are_rejected(tiny, altered):
    source = tiny.artifact("bert", "feature-extraction")
    artifact = altered(source, {name: json.dumps(value) for name, value in SENTENCE.items()})
    record, labels = artifact.manifest.graphs[0], np.zeros((1, 3), np.float32)
    text = ["The engine is warm."]

    def read():
        task = Embed.open(artifact, record)
        task.collate(task.preprocess(text, task.Options()).rows, 1)
        classify_logits(labels, task.config, "auto", top_k=1)
        task.pooling.pool(np.ones((1, 2, 4)), np.ones((1, 2)))

    read()
    documents = {**TOKENIZER, **{n: list(v) for n, v in SENTENCE.items() if isinstance(v, dict)}}
    places = [(name, (key,)) for name, keys in documents.items() for key in keys]
    places += [("modules.json", (i, key)) for i in (0, 1) for key in ("type", "path")]
    places += [("modules.json", (0,)), ("config_sentence_transformers.json", ("prompts", "q"))]
    outcomes = []
    for name, place in places:
        file = artifact.path / name
        before = file.read_text(encoding="utf-8") if file.is_file() else "{}"
        for value in WRONG:
            file.write_text(changed(json.loads(before), place, value), encoding="utf-8")
            outcomes.append(works_or_is_refused(read))
        file.write_text(before, encoding="utf-8")
    assert outcomes.count(False) > len(places) * 4
    assert outcomes.count(True) > len(places)


def test_image_files_with_wrong_values_work_or_are_rejected(tiny, altered):
    artifact = altered(tiny.artifact("convnext", "image-classification"), {})
    file = artifact.path / "preprocessor_config.json"
    before = json.loads(file.read_text(encoding="utf-8"))
    image = load_image(np.full((40, 50, 3), 9, np.uint8))

    def prepare():
        ImageProcessor.open(artifact.path)(image)

    keys = (
        *("size", "crop_pct", "resample", "do_resize", "do_rescale", "rescale_factor"),
        *("do_normalize", "image_mean", "image_std", "image_processor_type"),
    )
    outcomes = []
    for kind in ("ConvNext", "ViT", "CLIP"):
        for key in keys:
            for value in (*WRONG, [0.5], [1, 2], [0.5] * 4, {"shortest_edge": 0}, {"height": "x"}):
                document = {**before, "image_processor_type": f"{kind}ImageProcessor", key: value}
                file.write_text(json.dumps(document), encoding="utf-8")
                outcomes.append(works_or_is_refused(prepare))
    assert outcomes.count(False) > 3 * 8 * len(keys)
    assert outcomes.count(True) > 3 * 2 * len(keys)


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("config.json", "type_vocab_size", "x", "type_vocab_size is 'x', expected a whole number"),
        ("tokenizer_config.json", "model_max_length", "x", "model_max_length is 'x', expected a"),
        (
            "tokenizer_config.json",
            "added_tokens_decoder",
            {"0": {"content": 5}},
            "added_tokens_decoder.0.content is 5, expected a string",
        ),
        ("special_tokens_map.json", "unk_token", [1], "unk_token is [1], expected a string, or an"),
    ],
)
def test_a_model_with_a_wrong_value_is_not_loaded(tiny, altered, name, place, value, message):
    source = tiny.artifact("bert", "text-classification")
    document = json.loads((source.path / name).read_text(encoding="utf-8"))
    artifact = altered(source, {name: changed(document, (place,), value)})
    with pytest.raises(ArtifactError) as error:
        load_model(artifact.path)
    assert f"{artifact.path / name}: {message}" in str(error.value)


def test_a_tokenizer_that_cannot_be_read_is_an_artifact_error(tiny, altered):
    source = tiny.artifact("bert", "text-classification")
    for content in ("{}", "[]", '{"model": {"type": "BPE", "vocab": 3}}', "\0"):
        artifact = altered(source, {"tokenizer.json": content})
        with pytest.raises(ArtifactError, match=r"tokenizer\.json cannot be read by tokenizers"):
            load_model(artifact.path)


def test_labels_are_named_by_their_index(tiny):
    artifact = tiny.artifact("bert", "text-classification")
    config = Classify.open(artifact, artifact.manifest.graphs[0]).config
    assert label_names(config, 4) == ["calm", "angry", "glad", "LABEL_3"]


def with_record(artifact, directory, **changes):
    """A copy of the artifact whose manifest says something else of its graph."""
    artifact.copy_to(directory)
    record = artifact.manifest.graphs[0].model_copy(update=changes)
    commit_artifact(directory, artifact.manifest.model_copy(update={"graphs": (record,)}))
    return Artifact.open(directory)


IDS, MASK, TYPES = (
    TensorSpec(name, "int64", ("batch", "sequence"))
    for name in ("input_ids", "attention_mask", "token_type_ids")
)
LOGITS = TensorSpec("logits", "float32", ("batch", 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": (IDS, MASK)}, "has the inputs input_ids, attention_mask, token_type_ids;"),
        (
            {"inputs": (IDS, MASK, TYPES, TensorSpec("more", "int64", ()))},
            "says input_ids, attention_mask, token_type_ids, more",
        ),
        (
            {"inputs": (TensorSpec("input_ids", "int32", IDS.dims), MASK, TYPES)},
            "the input input_ids: int64 (batch, sequence) differs from manifest.json, which says "
            "input_ids: int32 (batch, sequence)",
        ),
        (
            {"inputs": (TensorSpec("input_ids", "int64", ("batch",)), MASK, TYPES)},
            "which says input_ids: int64 (batch)",
        ),
        (
            {"outputs": (TensorSpec("logits", "float32", ("batch", 5)),)},
            "the output logits: float32 (batch, 3) differs from manifest.json, which says logits: "
            "float32 (batch, 5)",
        ),
        ({"outputs": (TensorSpec("logits", "float16", ("batch", 3)),)}, "says logits: float16"),
        ({"outputs": (LOGITS, TensorSpec("more", "float32", ()))}, "has the outputs logits;"),
    ],
)
def test_a_graph_that_is_not_the_manifests_is_rejected(tiny, tmp_path, changes, message):
    source = tiny.artifact("bert", "text-classification")
    artifact = with_record(source, tmp_path / "altered", **changes)
    with pytest.raises(ArtifactError) as error:
        OrtRunner(artifact)
    assert str(artifact.model) in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("shape", "dims", "fits"),
    [
        (["batch", 8], ("batch", 8), True),
        (["batch", "seq"], (4, 8), True),
        (["batch", 8], ("batch", "sequence"), False),
        (["batch", 8], ("batch", 9), False),
        (["batch", None], ("batch", "sequence"), True),
        ([], ("batch",), False),
    ],
)
def test_an_input_that_is_fixed_in_the_graph_is_fixed_in_the_manifest(shape, dims, fits):
    value = SimpleNamespace(name="x", type="tensor(float)", shape=shape)
    session = SimpleNamespace(get_inputs=lambda: [value], get_outputs=list)
    record = GraphRecord(
        file="m", opset=17, inputs=(TensorSpec("x", "float32", dims),), outputs=(), data_files=()
    )
    with nullcontext() if fits else pytest.raises(ArtifactError, match="the input x: float32"):
        check_interface(session, record, Path("m"))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("question-answering", "question-answering needs start_logits"),
        ("token-classification", "token-classification expects 3 dims"),
    ],
)
def test_a_graph_without_the_outputs_of_its_task_is_rejected(tiny, tmp_path, task, message):
    source = tiny.artifact("bert", "text-classification")
    source.copy_to(tmp_path / "altered")
    commit_artifact(tmp_path / "altered", source.manifest.model_copy(update={"task": task}))
    with pytest.raises(ArtifactError, match=message):
        load_model(tmp_path / "altered")


def test_fewer_rows_than_inputs_are_an_error(tiny, tmp_path):
    """A graph may claim a free batch and give one row."""
    source = tiny.artifact("bert", "text-classification")
    source.copy_to(tmp_path / "altered")
    path = tmp_path / "altered" / source.manifest.graphs[0].file
    model = onnx.load(path)
    for node in model.graph.node:
        for place, name in enumerate(node.output):
            if name == "logits":
                node.output[place] = "all_logits"
    axes = onnx.numpy_helper.from_array(np.array([0], np.int64), "first_axis")
    model.graph.initializer.append(axes)
    model.graph.node.append(
        onnx.helper.make_node("ReduceMean", ["all_logits"], ["logits"], axes=[0], keepdims=1)
        if model.opset_import[0].version < 18
        else onnx.helper.make_node("ReduceMean", ["all_logits", "first_axis"], ["logits"])
    )
    path.unlink()
    onnx.save(model, path)
    commit_artifact(tmp_path / "altered", source.manifest)
    with (
        load_model(tmp_path / "altered") as found,
        pytest.raises(ArtifactError, match=r"returned logits with the shape \(1, 3\) for 2 inputs"),
    ):
        found.classify(["The engine is warm.", "A cat."])
