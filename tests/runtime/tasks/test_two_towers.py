"""Texts and images of one graph: vectors of one space, beside transformers' own."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, CLIPImageProcessor

from enginery import export_model, load_model, predict_file
from enginery.core.errors import InputError
from tests.tiny_encoders import save_encoder
from tests.validate.test_answers import compared, with_other_mean

TEXTS = ["A cat.", "a", "", "A cat that sits on a very long bench beside the river."]


def pictures():
    pixels = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    return [Image.fromarray(pixels), Image.fromarray(pixels[:, :20]), Image.fromarray(pixels[:32])]


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """`whole("CLIPModel")`: an artifact and the vectors of the model in transformers."""
    made = {}

    def make(name):
        if name in made:
            return made[name]
        root = tmp_path_factory.mktemp(name)
        model = save_encoder(name, tiny_model("bert", "fill-mask"), root / "source")
        tokenizer = AutoTokenizer.from_pretrained(root / "source")
        # transformers' pipeline pads SigLIP's texts to the length that it was trained with.
        options = {"padding": True}
        if name == "SiglipModel":
            options = {"padding": "max_length", "max_length": 64, "return_attention_mask": False}
        texts = tokenizer(TEXTS, return_tensors="pt", truncation=True, **options)
        texts.pop("token_type_ids")
        processor = CLIPImageProcessor.from_pretrained(root / "source")
        images = processor(pictures(), return_tensors="pt")
        with torch.no_grad():
            expected = model(**texts, **images)
        artifact = export_model(str(root / "source"), out=root / "artifact")
        vectors = expected.text_embeds.numpy(), expected.image_embeds.numpy()
        return made.setdefault(name, (artifact, *vectors))

    return make


@pytest.mark.parametrize(
    "name",
    [
        "CLIPModel",
        pytest.param("SiglipModel", marks=pytest.mark.more),
        pytest.param("ChineseCLIPModel", marks=pytest.mark.more),
    ],
)
def test_texts_and_images_have_the_vectors_of_the_whole_model(name, whole):
    artifact, texts, images = whole(name)
    with load_model(artifact) as model:
        assert model.embed(TEXTS) == pytest.approx(texts, abs=1e-5)
        assert model.embed_images(pictures()) == pytest.approx(images, abs=1e-4)
        alone = np.concatenate([model.embed([text]) for text in TEXTS])
        assert alone == pytest.approx(texts, abs=1e-5)
        alone = np.concatenate([model.embed_images([image]) for image in pictures()])
        assert alone == pytest.approx(images, abs=1e-4)
        similar = model.embed(TEXTS) @ model.embed_images(pictures()).T
        assert similar == pytest.approx(texts @ images.T, abs=1e-4)
        assert model.embed(TEXTS, dimensions=3).shape == (4, 3)
        assert model.embed([]).shape == (0, texts.shape[1])


@pytest.mark.parametrize("name", ["CLIPModel", pytest.param("SiglipModel", marks=pytest.mark.more)])
def test_answers_of_both_are_compared(name, whole, tmp_path):
    artifact, *_ = whole(name)
    found = compared(artifact, tmp_path / "sound")
    assert (found.cases, found.notes) == ((), ())
    assert found.answers.compared == found.answers.inputs == 9
    found = compared(with_other_mean(artifact, tmp_path / "changed"), tmp_path / "faulty")
    assert {case.name.split()[0] for case in found.cases} == {"image"}


def test_notes_and_errors_say_what_the_model_takes(whole):
    artifact, *_ = whole("CLIPModel")
    with load_model(artifact) as model:
        assert (
            "the graph takes texts and images: one blank image runs with each batch" in model.notes
        )
        assert any(note.startswith("images are preprocessed as by CLIP") for note in model.notes)
        assert model.method == "embed"
        with pytest.raises(InputError, match="classify"):
            model.classify(TEXTS)
        with pytest.raises(InputError, match="text 0 is a"):
            model.embed(pictures())


def test_predict_embeds_the_texts_of_a_file_and_the_images_of_a_folder(whole, tmp_path):
    artifact, texts, images = whole("CLIPModel")
    rows = tmp_path / "texts.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS if text))
    predict_file(artifact, rows, tmp_path / "texts-out.jsonl")
    found = [json.loads(line) for line in (tmp_path / "texts-out.jsonl").read_text().splitlines()]
    expected = [vector for text, vector in zip(TEXTS, texts, strict=True) if text]
    assert [row["embedding"] for row in found] == pytest.approx(np.array(expected), abs=1e-5)
    folder = tmp_path / "pictures"
    folder.mkdir()
    for index, picture in enumerate(pictures()):
        picture.save(folder / f"{index}.png")
    predict_file(artifact, folder, tmp_path / "images-out.jsonl")
    found = [json.loads(line) for line in (tmp_path / "images-out.jsonl").read_text().splitlines()]
    assert [row["embedding"] for row in found] == pytest.approx(images, abs=1e-4)


def test_triton_gets_the_graph_of_both_alone(whole):
    from enginery.deploy.triton.stage import _why_graph_only

    artifact, *_ = whole("CLIPModel")
    (graph,) = artifact.manifest.graphs
    assert _why_graph_only(artifact, graph) == "the model takes texts and images in one graph"
