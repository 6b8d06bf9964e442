"""Labels for images from a model of texts and images, beside transformers' pipeline."""

import json

import pytest

from enginery import export_model, load_model, predict_file
from enginery.core.errors import InputError, OptionError
from enginery.runtime.pytorch.side_files import load_pillow_processor
from enginery.runtime.tasks import manifest_tasks
from enginery.runtime.tasks.task import ModelInputs
from enginery.runtime.tasks.zero_shot_images import ZeroShotImageOptions
from tests.tiny_encoders import save_encoder
from tests.tiny_vision import encoded_picture, opened_images
from tests.validate.test_answers import compared, with_other_mean

LABELS = ["cat", "two boats", "a tree beside the river"]
TASK = "zero-shot-image-classification"


def save_model(name, tokenizer_directory, directory):
    """Write a model whose tokenizer gives what that of a real one does."""
    save_encoder(name, tokenizer_directory, directory)
    file = directory / "tokenizer_config.json"
    masks = [] if name == "SiglipModel" else ["attention_mask"]
    names = {"model_input_names": ["input_ids", *masks]}
    file.write_text(json.dumps({**json.loads(file.read_text()), **names}))
    return directory


@pytest.fixture(
    scope="module", params=["CLIPModel", pytest.param("SiglipModel", marks=pytest.mark.more)]
)
def model(request, tiny_model, tmp_path_factory):
    """A model's directory and its artifact."""
    root = tmp_path_factory.mktemp(request.param)
    source = save_model(request.param, tiny_model("bert", "fill-mask"), root / "source")
    return source, export_model(str(source), task=TASK, out=root / "artifact")


def scores(labels):
    return [(label.label, pytest.approx(label.score, abs=1e-5)) for label in labels]


def test_answers_are_those_of_the_pipeline(model, tmp_path):
    import transformers

    source, artifact = model
    pipeline = transformers.pipeline(
        TASK, model=str(source), image_processor=load_pillow_processor(source), device="cpu"
    )
    pictures = opened_images(tmp_path)
    with load_model(artifact) as loaded:
        assert loaded.method == "zero_shot_images"
        for labels, options in (
            (LABELS, {}),
            (LABELS[1:], {"hypothesis_template": "{} on a photo"}),
            (LABELS[:1], {}),
        ):
            answers = loaded.zero_shot_images(pictures, labels, **options)
            for answer, picture in zip(answers, pictures, strict=True):
                expected = pipeline(picture, candidate_labels=labels, **options)
                assert [(item["label"], item["score"]) for item in expected] == scores(
                    answer.labels
                )
        # The same graph embeds texts and images.
        assert len(loaded.embed(LABELS)) == len(LABELS)
        assert len(loaded.embed_images(pictures[:2])) == 2


def test_calls_with_other_labels_share_no_batch(model):
    with load_model(model[1]) as loaded:
        task = loaded.definition
        pictures, work = [encoded_picture((40, 40))], ModelInputs([])
        rows = [
            next(task.read_rows(pictures, ZeroShotImageOptions(**options), work))
            for options in (
                {"candidate_labels": ["cat", "boat"]},
                {"candidate_labels": ["cat", "boat"]},
                {"candidate_labels": ["boat", "cat"]},
                {"candidate_labels": ["cat", "boat"], "hypothesis_template": "{}"},
            )
        ]
        first, *others = [loaded._rows.batch_key(row) for row in rows]
        assert [key == first for key in others] == [True, False, False]


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([], {}, "candidate_labels is missing"),
        (["cat", " "], {}, "candidate_labels: a label is empty"),
        (["cat"] * 101, {}, "expected a list of 1 to 100 strings"),
        (["cat"], {"hypothesis_template": "a photo"}, "expected a text with one '{}'"),
        (["cat"], {"hypothesis_template": "x" * 100_000 + "{}"}, "100,005 characters"),
    ],
)
def test_labels_that_are_refused(model, labels, options, message):
    with load_model(model[1]) as loaded, pytest.raises(InputError) as caught:
        loaded.zero_shot_images([encoded_picture((40, 40))], labels, **options)
    assert message in str(caught.value)


def test_a_label_that_is_too_long_is_no_label(model):
    with load_model(model[1]) as loaded:
        if "siglip" in loaded.definition.config.model_type:  # its texts are cut by the pipeline
            long = loaded.zero_shot_images([encoded_picture((40, 40))], ["cat " * 100])
            assert len(long[0].labels) == 1
            return
        with pytest.raises(InputError, match="the hypothesis has more than the 64 tokens"):
            loaded.zero_shot_images([encoded_picture((40, 40))], ["boat", "cat " * 100])


def test_the_task_of_the_export_comes_first(model):
    manifest = model[1].manifest
    verbs = [task.verb for task in manifest_tasks(manifest)]
    assert verbs == ["zero_shot_images", "embed", "embed_images"]
    embeds = manifest.model_copy(update={"task": "feature-extraction"})
    assert [task.verb for task in manifest_tasks(embeds)] == [
        "embed",
        "embed_images",
        "zero_shot_images",
    ]


def test_a_folder_gets_labels(model, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(encoded_picture((90, 70)))
    out = tmp_path / "out.jsonl"
    options = {"candidate_labels": tuple(LABELS)}
    predict_file(model[1], str(tmp_path / "images"), out, top_k=2, **options)
    row = json.loads(out.read_text())
    with load_model(model[1]) as loaded:
        (expected,) = loaded.zero_shot_images([encoded_picture((90, 70))], LABELS, top_k=2)
    assert [(item["label"], item["score"]) for item in row["scores"]] == scores(expected.labels)
    with pytest.raises(OptionError, match="candidate_labels is missing"):
        predict_file(model[1], str(tmp_path / "images"), out, force=True)


def test_answers_are_compared_with_the_pipeline(model, tmp_path):
    artifact = model[1]
    result = compared(artifact, tmp_path / "sound")
    assert (result.cases, result.notes) == ((), ())
    assert result.answers.compared == result.answers.inputs == 3
    assert compared(with_other_mean(artifact, tmp_path / "changed"), tmp_path / "faulty").cases
