"""A graph has the inputs that transformers' tokenizer or processor gives to the model."""

from __future__ import annotations

import numpy as np
import pytest

from enginery import load_model
from enginery.core.errors import ExportError
from enginery.export import model_inputs
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.pytorch.side_files import load_pillow_processor
from enginery.runtime.sample_inputs import ImageFeeder
from tests.tiny_inputs import TOKENS_AND_MASK, export_here, save_with_generic_tokenizer
from tests.tiny_vision import save_vision_model

TYPES = "token_type_ids"
TEXTS = ["the engine starts", "a list of the key"]
PAIRS = [("the engine starts", "a list of the key"), ("a", "the pump runs")]


def scores(results):
    return [(result.label, pytest.approx(result.score, abs=1e-4)) for result in results]


@pytest.mark.parametrize(
    ("kind", "special", "names", "config", "has_types"),
    [
        ("gpt2", "nowhere", None, {}, True),
        ("gpt2", "nowhere", TOKENS_AND_MASK, {}, False),
        ("roberta", "around", None, {"type_vocab_size": 2}, True),
        ("bert", "around", TOKENS_AND_MASK, {}, False),
        pytest.param("gpt_neo", "nowhere", None, {}, True, marks=pytest.mark.more),
        pytest.param(
            "xlm-roberta", "around", None, {"type_vocab_size": 2}, True, marks=pytest.mark.more
        ),
        pytest.param(
            "data2vec-text", "around", None, {"type_vocab_size": 2}, True, marks=pytest.mark.more
        ),
        pytest.param("bert", "around", None, {}, True, marks=pytest.mark.more),
        pytest.param("deberta", "around", None, {}, False, marks=pytest.mark.more),
        pytest.param("xlm", "around", TOKENS_AND_MASK, {}, False, marks=pytest.mark.more),
        pytest.param("llama", "nowhere", None, {}, False, marks=pytest.mark.more),
    ],
)
def test_token_types_are_those_of_the_tokenizer(
    kind, special, names, config, has_types, tmp_path, monkeypatch
):
    from transformers import pipeline

    settings = {"model_input_names": names} if names else {}
    source = save_with_generic_tokenizer(
        kind, tmp_path / "model", special=special, tokenizer=settings, **config
    )
    artifact = export_here(source, tmp_path / "artifact", monkeypatch)
    inputs = [spec.name for spec in artifact.manifest.graphs[0].inputs]
    assert (TYPES in inputs) == has_types
    classify = pipeline("text-classification", model=str(source), device="cpu")
    expected = [classify([text])[0] for text in TEXTS]
    expected += [classify([{"text": a, "text_pair": b}])[0] for a, b in PAIRS]
    with load_model(artifact.path) as model:
        results = [*model.classify(TEXTS), *model.classify(PAIRS)]
    assert [(row["label"], row["score"]) for row in expected] == scores(results)


def test_types_of_a_model_with_one_are_left_out(tmp_path, monkeypatch):
    source = save_with_generic_tokenizer("roberta", tmp_path / "model", type_vocab_size=1)
    artifact = export_here(source, tmp_path / "artifact", monkeypatch)
    assert [spec.name for spec in artifact.manifest.graphs[0].inputs] == TOKENS_AND_MASK


@pytest.mark.more
def test_dynamo_takes_the_same_inputs(tmp_path, monkeypatch):
    settings = {"model_input_names": TOKENS_AND_MASK}
    source = save_with_generic_tokenizer("bert", tmp_path / "model", tokenizer=settings)
    artifact = export_here(source, tmp_path / "artifact", monkeypatch, exporter="dynamo")
    assert [spec.name for spec in artifact.manifest.graphs[0].inputs] == TOKENS_AND_MASK


def test_another_input_that_the_model_uses_is_refused(tmp_path, monkeypatch):
    import torch

    class Model(torch.nn.Module):
        device = "cpu"

        def forward(self, input_ids, attention_mask=None, langs=None, return_dict=True):
            return {"logits": input_ids.float() + (0 if langs is None else langs)}

    class Tokenizer:
        model_input_names = ("input_ids", "langs")

        def __call__(self, *texts, **_):
            return {"input_ids": torch.ones(1, 3), "langs": torch.ones(1, 3)}

    monkeypatch.setattr(model_inputs, "load_tokenizer", lambda *_, **__: Tokenizer())
    with pytest.raises(ExportError, match="Model uses the input langs of its tokenizer"):
        model_inputs.compare_inputs(
            Model(), tmp_path, "fill-mask", ["input_ids"], trust_remote_code=False
        )


@pytest.mark.parametrize(
    ("kind", "pad_size", "has_mask"),
    [
        ("detr", {"height": 96, "width": 112}, True),
        ("detr", None, False),
        pytest.param(
            "table-transformer", {"height": 96, "width": 96}, True, marks=pytest.mark.more
        ),
        # It has no mask: to its own processor's padding it is blind in transformers, too.
        pytest.param("yolos", {"height": 96, "width": 96}, False, marks=pytest.mark.more),
    ],
)
def test_detectors_see_which_pixels_are_padding(kind, pad_size, has_mask, tmp_path, monkeypatch):
    import torch
    from transformers import AutoModelForObjectDetection

    settings = {"size": {"max_height": 96, "max_width": 96}, "do_pad": True, "pad_size": pad_size}
    source = save_vision_model(kind, "object-detection", tmp_path / "model", settings)
    model = AutoModelForObjectDetection.from_pretrained(source).eval()
    reference = load_pillow_processor(source)
    artifact = export_here(tmp_path / "model", tmp_path / "artifact", monkeypatch)
    (record,) = artifact.manifest.graphs
    assert ("pixel_mask" in [spec.name for spec in record.inputs]) == has_mask
    feed = ImageFeeder.open(artifact, record)
    generator = np.random.default_rng(0)
    with OrtRunner(artifact) as run:
        for size in ((60, 180), (180, 60), (100, 100)):
            picture = generator.integers(0, 255, (*size, 3), dtype=np.uint8)
            encoded = dict(reference(picture, return_tensors="pt"))
            if kind == "yolos":
                encoded.pop("pixel_mask", None)
            with torch.no_grad():
                expected = model(**encoded)
            outputs = run(feed([picture]))
            for name in ("logits", "pred_boxes"):
                np.testing.assert_allclose(outputs[name], expected[name], atol=1e-4)
