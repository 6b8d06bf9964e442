"""Tensors that transformers leaves out change answers, and so they are refused."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from enginery import export_model, validate_model
from enginery.core.artifact.artifact import Artifact, commit_artifact
from enginery.core.errors import ExportError
from enginery.core.model.source import resolve_source
from enginery.runtime.pytorch.runner import load_pytorch
from tests import tiny
from tests.validate.faults.checkpoints import EXTRA, HARMLESS, QUANTIZED, QUERY

HARM = 0.01
"""Difference of a probability that no rounding explains."""
LORA = {
    f"{QUERY}.lora_A": torch.linspace(-1, 1, 128).reshape(4, 32),
    f"{QUERY}.lora_B": torch.linspace(1, -1, 128).reshape(32, 4),
}


@pytest.fixture
def planted(tiny_model, tmp_path):
    """Return a function: a tiny classifier with other tensors in its checkpoint."""
    source = tiny_model("bert", "text-classification")

    def make(edit, name="planted"):
        path = tmp_path / name
        path.mkdir()
        for file in source.iterdir():
            (path / file.name).write_bytes(file.read_bytes())
        tensors = edit(load_file(source / "model.safetensors"))
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return make


def probabilities(path):
    """Return what transformers answers with a checkpoint, without a look at what it leaves out."""
    loader = transformers.AutoModelForSequenceClassification
    model = loader.from_pretrained(path, torch_dtype=torch.float32).float().eval()
    ids = torch.randint(5, 300, (4, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(ids).logits.softmax(-1)


def effect(path, truth):
    """Return the largest difference of a probability; 1 if transformers cannot load the file."""
    try:
        found = probabilities(path)
    except RuntimeError:  # integers cannot be parameters
        return 1.0
    return float((found - probabilities(truth)).abs().max())


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_without_their_scales_are_other_weights(planted, name):
    path = planted(QUANTIZED[name])
    assert effect(path, planted(dict, "truth")) > HARM
    with pytest.raises(ExportError, match="holds quantized weights"):
        load_pytorch(path, "text-classification")


@pytest.mark.slow
def test_adapter_that_is_left_out_changes_answers(planted, home):
    def merged(tensors):
        name = f"{QUERY}.weight"
        product = LORA[f"{QUERY}.lora_B"] @ LORA[f"{QUERY}.lora_A"]
        return tensors | {name: tensors[name] + product}

    path, truth = planted(lambda tensors: tensors | LORA), planted(merged, "truth")
    assert effect(path, truth) > HARM
    with pytest.raises(ExportError, match=r"lora_A, .*lora_B"):
        export_model(str(path))
    assert validate_model(export_model(str(truth))).passed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora of peft", pytest.param("layer", marks=pytest.mark.slow)])
def test_artifact_of_a_checkpoint_with_more_tensors_fails(planted, home, name):
    """As an artifact does that was exported before such tensors were looked at."""
    artifact = export_model(str(planted(EXTRA[name][0])), allow_unused=True)
    assert validate_model(artifact).passed
    manifest = artifact.manifest
    stage = manifest.stages[0]
    stage = stage.model_copy(update={"options": {**stage.options, "allow_unused": False}})
    commit_artifact(artifact.path, manifest.model_copy(update={"stages": (stage,)}))
    report = validate_model(Artifact.open(artifact.path))
    assert not report.passed
    assert report.summary.startswith("the checkpoint has tensors that no model was compared with")


@pytest.mark.parametrize("name", tiny.with_more([name for name in HARMLESS if name != "old names"]))
def test_checkpoint_with_harmless_tensors_passes(planted, home, name):
    path = planted(HARMLESS[name])
    assert effect(path, planted(dict, "truth")) == 0
    artifact = export_model(str(path))
    report = validate_model(artifact)
    assert report.passed
    assert report.weights.lost == []


def test_both_sides_are_counted(tiny_model, home):
    """The pooler and a head of another task are in no graph of the encoder."""
    source = tiny_model("bert", "text-classification")
    artifact = export_model(str(source), task="feature-extraction")
    weights = validate_model(artifact).weights
    stored = load_file(resolve_source(str(source)).path / "model.safetensors")
    # The pooler's bias is zero, as others are that the graph has.
    absent = {
        name: stored[name].numel()
        for name in ("classifier.bias", "classifier.weight", "bert.pooler.dense.weight")
    }
    assert {name.removeprefix("bert.") for name in absent} == set(weights.absent)
    assert weights.absent_elements == sum(absent.values())
    assert "in no graph (classifier.bias, classifier.weight, pooler.dense.weight)" in (
        weights.describe()
    )
    assert json.loads((artifact.path / "reports/validation.json").read_bytes())["weights"]["absent"]
