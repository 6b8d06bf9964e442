"""Built-in inputs of graphs that take more than texts or images."""

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from benchmarks.model_types import save_model
from enginery import export_model, quantize_model, validate_model
from enginery.runtime.builtin_inputs import builtin_batches, synthetic_series, word_boxes
from tests.sounds import speech, wav

KINDS = {
    "layoutlm": ("text-classification", "sentences with boxes 1–16"),
    "layoutlmv3": ("text-classification", "sentences with images 1–4"),
    "owlvit": ("zero-shot-object-detection", "images with sentences"),
    "patchtst": ("time-series-forecasting", "series 1–8"),
    "wavlm": ("audio-classification", "sounds of 16000, 1–2"),
    "audio-spectrogram-transformer": ("audio-classification", "sounds 1–4"),
}
SLOW = ("layoutlmv3", "owlvit", "wavlm")


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """Return a function that exports a tiny model of a type, once."""
    folder, made = tmp_path_factory.mktemp("builtin"), {}

    def artifact(kind):
        if kind not in made:
            task = KINDS[kind][0]
            made[kind] = export_model(str(save_model(kind, task, folder / kind)), task=task)
        return made[kind]

    return artifact


@pytest.mark.more
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow if k in SLOW else ()) for k in KINDS]
)
def test_real_inputs_are_compared(kind, artifacts):
    report = validate_model(artifacts(kind), effort="quick")
    assert report.passed, report.summary
    real = [case.name for case in report.cases if case.kind == "real"]
    assert real[0] == KINDS[kind][1]


def test_each_word_has_a_box_of_its_own():
    words = ["one", "two", "three"] * 20
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(["?", *set(words)])}, "?"))
    tokenizer.pre_tokenizer = Whitespace()
    boxes = word_boxes(tokenizer.encode(" ".join(words)))
    assert boxes.shape == (60, 4)
    assert len({tuple(box) for box in boxes.tolist()}) == 60
    assert boxes.min() >= 0
    assert boxes.max() <= 1000
    assert (boxes[:, 2] - boxes[:, 0]).tolist() == [14 * len(word) for word in words]
    on_a_line = boxes[1:, 1] == boxes[:-1, 1]
    assert (boxes[1:, 0] > boxes[:-1, 2])[on_a_line].all()
    assert (boxes[1:, 1] > boxes[:-1, 3])[~on_a_line].all()


@pytest.mark.more
def test_tokens_of_one_word_share_its_box(artifacts):
    (batch,) = builtin_batches(artifacts("layoutlm"), artifacts("layoutlm").manifest.graphs[0])
    feeds = batch.load()
    boxes, mask = feeds["bbox"], feeds["attention_mask"].astype(bool)
    assert (boxes[:, 0] == 0).all()  # [CLS]
    assert (boxes[~mask] == 0).all()
    assert (boxes[0, 1:4] == boxes[0, 1]).all()  # "The", a token each letter
    assert (boxes[0, 4] != boxes[0, 1]).any()


def test_series_have_a_rhythm_and_differ():
    series = synthetic_series(240, 2)
    assert series.shape == (8, 240, 2)
    assert len({row.tobytes() for row in series}) == 8
    rows = series[..., 0] - series[..., 0].mean(axis=1, keepdims=True)
    powers = np.abs(np.fft.rfft(rows, axis=1)).mean(axis=0)
    assert powers[2:].argmax() + 2 == 240 // 24


@pytest.mark.slow
def test_a_folder_of_sounds_calibrates_and_validates(artifacts, tmp_path):
    for index in range(8):
        (tmp_path / f"{index}.wav").write_bytes(wav(speech(0.5, seed=index)))
    artifact = artifacts("wavlm")
    assert validate_model(artifact, data=str(tmp_path), effort="quick").passed
    quantized = quantize_model(
        artifact, data=str(tmp_path), min_cosine=0.5, capability=(), allow_failed=True
    )
    assert quantized.manifest.is_quantized
    assert f"{tmp_path.name}: sounds" in " ".join(quantized.manifest.stages[-1].notes)
