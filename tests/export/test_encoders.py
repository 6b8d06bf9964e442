"""Encoders are exported as the class that config.json names: no weight of it is left out."""

import inspect
import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, CLIPImageProcessor

from enginery import export_model, load_model, validate_model
from enginery.core.errors import ExportError
from tests.tiny_encoders import save_encoder

TEXTS = ["The engine is warm.", "a", "", "A cat that sits on a very long bench beside the river."]


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("CLIPTextModelWithProjection", "text_embeds"),
        pytest.param("CLIPTextModel", "pooler_output", marks=pytest.mark.more),
        pytest.param("DPRQuestionEncoder", "pooler_output", marks=pytest.mark.more),
        pytest.param("DPRContextEncoder", "pooler_output", marks=pytest.mark.more),
        ("T5EncoderModel", "last_hidden_state"),
        pytest.param("MT5EncoderModel", "last_hidden_state", marks=pytest.mark.more),
    ],
)
def test_texts_get_the_vectors_of_the_class_that_config_json_names(
    name, output, tiny_model, tmp_path
):
    source = tmp_path / "source"
    reference = save_encoder(name, tiny_model("bert", "fill-mask"), source)
    artifact = export_model(str(source), out=tmp_path / "artifact")
    assert artifact.manifest.task == "feature-extraction"
    tokens = AutoTokenizer.from_pretrained(source)(
        TEXTS, return_tensors="pt", padding=True, truncation=True, max_length=64
    )
    accepted = inspect.signature(reference.forward).parameters
    with torch.no_grad():
        outputs = reference(**{n: t for n, t in tokens.items() if n in accepted})
    expected = outputs[output].numpy()
    if expected.ndim == 3:  # the mean, as sentence-transformers takes it of a plain transformer
        mask = tokens["attention_mask"].numpy()[..., None]
        expected = (expected * mask).sum(1) / mask.sum(1)
    with load_model(artifact) as model:
        assert model.embed(TEXTS) == pytest.approx(expected, abs=1e-5)
        alone = np.concatenate([model.embed([text]) for text in TEXTS])
        assert alone == pytest.approx(expected, abs=1e-5)


@pytest.mark.more
@pytest.mark.parametrize("name", ["CLIPTextModelWithProjection", "DPRContextEncoder"])
def test_encoders_are_validated_with_their_class(name, tiny_model, tmp_path):
    save_encoder(name, tiny_model("bert", "fill-mask"), tmp_path / "source")
    artifact = export_model(str(tmp_path / "source"), out=tmp_path / "artifact")
    assert validate_model(artifact.path, effort="quick").passed


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("CLIPVisionModelWithProjection", "image_embeds"),
        pytest.param("CLIPVisionModel", "pooler_output", marks=pytest.mark.more),
    ],
)
def test_images_get_the_vectors_of_the_class_that_config_json_names(
    name, output, tiny_model, tmp_path
):
    source = tmp_path / "source"
    reference = save_encoder(name, tiny_model("bert", "fill-mask"), source)
    artifact = export_model(str(source), out=tmp_path / "artifact")
    pixels = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    images = [Image.fromarray(pixels), Image.fromarray(pixels[:, :20])]
    inputs = CLIPImageProcessor.from_pretrained(source)(images, return_tensors="pt")
    with torch.no_grad():
        expected = reference(**inputs)[output].numpy()
    with load_model(artifact) as model:
        assert model.embed_images(images) == pytest.approx(expected, abs=1e-4)


def test_pooler_that_no_output_reads_is_left_out_with_a_note(tiny_model, tmp_path):
    artifact = export_model(str(tiny_model("bert", "feature-extraction")))
    (note,) = [note for note in artifact.manifest.stages[0].notes if "left out" in note]
    assert note.endswith("pooler.dense.bias, pooler.dense.weight")


def test_class_without_a_task_lists_what_optimum_exports(tiny_model, tmp_path):
    source = tmp_path / "source"
    save_encoder("DPRReader", tiny_model("bert", "fill-mask"), source)
    with pytest.raises(ExportError, match="transformers lists no task for the class DPRReader"):
        export_model(str(source))
    file = source / "config.json"
    changes = {"model_type": "bert", "architectures": ["BertForPreTraining"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ExportError, match="no task for the class BertForPreTraining") as raised:
        export_model(str(source))
    assert raised.value.do.startswith("Set --task to one of: feature-extraction, fill-mask")
    assert "zero-shot" not in raised.value.do
