"""Exports of checkpoints that have more tensors than the model, or others."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from enginery import export_model, validate_model
from enginery.core.errors import ExportError

QUERY = "bert.encoder.layer.0.attention.self.query"
ADAPTER = {f"{QUERY}.lora_A": torch.ones(4, 32), f"{QUERY}.lora_B": torch.ones(32, 4)}


@pytest.fixture
def changed(tiny_model, tmp_path):
    """Return a function: a copy of a tiny classifier with other tensors."""

    def make(edit):
        path = tmp_path / "model"
        shutil.copytree(tiny_model("bert", "text-classification"), path)
        tensors = load_file(path / "model.safetensors")
        save_file(edit(tensors), path / "model.safetensors", metadata={"format": "pt"})
        return path

    return make


@pytest.mark.more
@pytest.mark.parametrize("exporter", ["optimum", "dynamo"])
def test_adapter_is_refused_unless_it_may_be_left_out(changed, home, exporter):
    path = changed(lambda tensors: tensors | ADAPTER)
    message = r"BertForSequenceClassification does not use.*query\.lora_A.*--allow-unused"
    with pytest.raises(ExportError, match=message):
        export_model(str(path), exporter=exporter)
    artifact = export_model(str(path), exporter=exporter, allow_unused=True)
    assert any(
        "left out" in note and "lora_A" in note for note in artifact.manifest.stages[0].notes
    )


@pytest.mark.more
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model."])
def test_names_with_a_prefix_are_shown(changed, home, prefix):
    path = changed(lambda tensors: {prefix + name: value for name, value in tensors.items()})
    with pytest.raises(ExportError, match=rf"have other names than the model's: {prefix}bert\."):
        export_model(str(path))


def test_missing_weights_name_what_is_there_in_their_place(changed, home):
    path = changed(lambda t: {n.replace("classifier", "answer"): v for n, v in t.items()})
    with pytest.raises(ExportError, match=r"no weights for .*classifier.*took answer\.bias"):
        export_model(str(path), allow_unused=True)


@pytest.mark.more
def test_missing_weights_are_refused_by_dynamo_too(changed, home):
    path = changed(lambda t: {n: v for n, v in t.items() if not n.startswith("classifier")})
    with pytest.raises(ExportError, match=r"no weights for text-classification: classifier"):
        export_model(str(path), exporter="dynamo")


@pytest.mark.more
def test_head_of_another_task_is_a_note(tiny_model, home):
    source = tiny_model("bert", "text-classification")
    artifact = export_model(str(source), task="feature-extraction")
    expected = "BertModel does not use classifier.bias, classifier.weight, which"
    assert any(note.startswith(expected) for note in artifact.manifest.stages[0].notes)
    assert validate_model(artifact).passed
