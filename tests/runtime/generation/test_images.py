"""Models that read images generate the tokens of transformers, alone and in batches."""

import io
import warnings

import numpy as np
import pytest
from PIL import Image

from enginery import export_model, load_model, validate_model
from enginery.core.errors import InputError
from tests.image_to_text import TASK_TOKEN, save_image_to_text

TASK = "image-to-text-with-past"
CASES = {
    "greedy": {},
    "beams": {"num_beams": 4},
    "all beams": {"num_beams": 3, "num_return_sequences": 2, "no_repeat_ngram_size": 2},
    "prompt": {"prompt": TASK_TOKEN},
    "long prompt": {"prompt": f"{TASK_TOKEN} The engine", "num_beams": 2},
    "prompt with start": {"prompt": "</s>The", "max_length": 12, "max_new_tokens": None},
}


def picture(seed, size=(50, 40)):
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 255, (5, 6, 3)).astype(np.uint8)
    return Image.fromarray(coarse).resize(size, resample=0)


IMAGES = [picture(1), picture(2, (30, 60)), picture(3, (90, 90)), picture(4, (64, 32))]


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """`reader("donut")`: the source of a tiny model and its artifact."""
    made = {}

    def make(kind):
        if kind not in made:
            source = save_image_to_text(kind, tmp_path_factory.mktemp("readers") / kind)
            made[kind] = (source, export_model(str(source), task=TASK))
        return made[kind]

    return make


def reference(source, prompt=None, **options):
    """The new tokens of transformers for each image."""
    import torch
    from transformers import AutoImageProcessor, AutoTokenizer, VisionEncoderDecoderModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(source)
    processor = AutoImageProcessor.from_pretrained(source, use_fast=False)
    model = VisionEncoderDecoderModel.from_pretrained(source).eval()
    if prompt is not None:
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        options["decoder_input_ids"] = ids
    found = []
    for image in IMAGES:
        pixels = processor(image, return_tensors="pt").pixel_values
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = model.generate(pixels, do_sample=False, **options)
        length = 1
        if prompt is not None:
            starts = "donut" in str(source) or ids[0, 0] == 2
            length = ids.shape[1] + (0 if starts else 1)
        found += [row[length:].tolist() for row in rows]
    return found


_slow = pytest.mark.slow
SOME = [
    "trocr",
    pytest.param("donut", marks=_slow),
    *(pytest.param(k, marks=_slow) for k in ("deit-trocr", "vit-gpt2")),
]


@pytest.mark.more
@pytest.mark.parametrize("kind", SOME)
def test_tokens_are_those_of_transformers(reader, home, kind):
    source, artifact = reader(kind)
    with load_model(artifact) as model:
        for name, case in CASES.items():
            options = {"max_new_tokens": 10, **case}
            expected = reference(source, **{k: v for k, v in options.items() if v is not None})
            assert len({tuple(row) for row in expected}) >= len(IMAGES), name
            for batch_size in (8, 1):
                found = model.generate(IMAGES, batch_size=batch_size, **options)
                filled = [
                    [*each.tokens, *[1] * (len(row) - len(each.tokens))]
                    for each, row in zip(found, expected, strict=True)
                ]
                assert filled == expected, name
        assert "".join(model.stream(IMAGES[0])) == model.generate(IMAGES[:1])[0].text


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOME)
def test_validation_runs_all_graphs(reader, home, kind):
    _, artifact = reader(kind)
    report = validate_model(artifact, effort="quick", force=True)
    assert report.passed, report.summary
    assert not any("noise floor" in note for note in report.notes)
    assert {case.graph for case in report.cases} == {g.file for g in artifact.manifest.graphs}
    assert any("24 tokens, token 5" in case.name for case in report.cases)


@pytest.mark.more
def test_images_are_read_from_files_and_bytes(reader, home, tmp_path):
    _, artifact = reader("donut")
    content = io.BytesIO()
    IMAGES[0].save(content, "PNG")
    path = tmp_path / "a.png"
    path.write_bytes(content.getvalue())
    with load_model(artifact) as model:
        inputs = [IMAGES[0], content.getvalue(), path, np.asarray(IMAGES[0])]
        assert len({each.tokens for each in model.generate(inputs)}) == 1


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (b"png", {}, "found one bytes, expected a list of images"),
        ([IMAGES[0], b"png"], {}, "image 1"),
        (IMAGES, {"prompt": ""}, "prompt has no tokens"),
        (IMAGES, {"prompt": 3}, "prompt is a int, expected a text"),
        (IMAGES, {"prompt": "The engine is warm. " * 20}, r"the prompt has \d+ tokens, and"),
    ],
)
def test_bad_input_is_an_error(reader, home, inputs, options, message):
    _, artifact = reader("trocr")
    with load_model(artifact) as model, pytest.raises(InputError, match=message):
        model.generate(inputs, **options)
