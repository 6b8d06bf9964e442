"""Audio gets the same labels and texts as with transformers' pipelines."""

from __future__ import annotations

import json
import re
import warnings

import numpy as np
import pytest

from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import ArtifactError, InputError
from enginery.runtime.model import load_model
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.tasks import require_task
from enginery.runtime.tasks.audio import AudioTask, Transcription
from enginery.runtime.tasks.examples import example_input
from enginery.runtime.tasks.results import is_finite
from tests.sounds import RATE, chirp, noise, silence, sine, speech, wav
from tests.tiny import AUDIO_KINDS, CTC_KINDS, with_more
from tests.tolerances import SCORES

CLASSES, SPEECH = "audio-classification", "automatic-speech-recognition"


def sounds():
    return [speech(1.0), speech(2.3, seed=1), chirp(0.7), noise(0.5), sine(3.1), silence(1.0)]


def pairs(waves):
    return [(each, RATE) for each in waves]


def pipeline(task, source):
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.pipeline(task, model=str(source))


@pytest.mark.more
@pytest.mark.parametrize("kind", with_more(AUDIO_KINDS, "wav2vec2"))
def test_labels_equal_the_pipeline(tiny, kind):
    classifier = pipeline(CLASSES, tiny.source(kind, CLASSES))
    with load_model(tiny.artifact(kind, CLASSES)) as model:
        found = model.classify_audio(pairs(sounds()))
        assert model.classify_audio([]) == []
        (best,) = model(pairs(sounds()[:1]), top_k=1)
        assert [label.label for label in best.labels] == [found[0].label]
        assert best.score == pytest.approx(found[0].score, abs=SCORES)
    for answer, samples in zip(found, sounds(), strict=True):
        expected = classifier(samples)
        assert [label.label for label in answer.labels] == [each["label"] for each in expected]
        np.testing.assert_allclose(
            [label.score for label in answer.labels],
            [each["score"] for each in expected],
            atol=SCORES,
        )
    assert len({round(answer.score, 4) for answer in found}) == len(found)


@pytest.mark.more
@pytest.mark.parametrize("kind", with_more(CTC_KINDS, "wav2vec2"))
def test_texts_equal_the_pipeline(tiny, kind):
    transcriber = pipeline(SPEECH, tiny.source(kind, SPEECH))
    with load_model(tiny.artifact(kind, SPEECH)) as model:
        found = model.transcribe(pairs(sounds()))
        assert model.transcribe([]) == []
    assert [each.text for each in found] == [transcriber(each)["text"] for each in sounds()]
    assert len({each.text for each in found}) == len(found)
    assert all(1 / 32 <= each.score <= 1 for each in found)
    assert found[0].to_dict() == {"text": found[0].text, "score": found[0].score}


def test_score_is_the_mean_probability_of_the_tokens(tiny):
    import torch
    from transformers import AutoFeatureExtractor, AutoModelForCTC

    source = tiny.source("wav2vec2", SPEECH)
    inputs = AutoFeatureExtractor.from_pretrained(source)(
        speech(1.0), sampling_rate=RATE, return_tensors="pt"
    )
    with torch.no_grad():
        logits = AutoModelForCTC.from_pretrained(source).eval()(**inputs).logits
    expected = logits.softmax(-1).max(-1).values.mean().item()
    with load_model(tiny.artifact("wav2vec2", SPEECH)) as model:
        (found,) = model.transcribe(pairs([speech(1.0)]))
    assert found.score == pytest.approx(expected, abs=SCORES)


def test_files_are_resampled(tiny, tmp_path):
    pytest.importorskip("soundfile", reason="pip install 'enginery[audio]'")
    soxr = pytest.importorskip("soxr", reason="pip install 'enginery[audio]'")
    samples = speech(1.0, rate=44_100)
    (path := tmp_path / "call.wav").write_bytes(wav(samples, 44_100))
    rounded = (samples * 32767).astype("<i2").astype(np.float32) / 32768
    expected = soxr.resample(rounded, 44_100, RATE)
    with load_model(tiny.artifact("wav2vec2", CLASSES)) as model:
        found = model([path, str(path), path.read_bytes(), (expected, RATE)])
    assert len({each.score for each in found}) == 1


def test_inputs_of_one_length_share_a_batch_and_of_others_none(tiny, monkeypatch):
    shapes = []
    call = OrtRunner.__call__

    def noting(runner, feeds, outputs=()):
        shapes.append(feeds["input_values"].shape)
        return call(runner, feeds, outputs)

    monkeypatch.setattr(OrtRunner, "__call__", noting)
    inputs = pairs([noise(0.5, seed=1), noise(0.7, seed=2), noise(0.5, seed=3)])
    with load_model(tiny.artifact("wav2vec2", CLASSES)) as model:
        together = model(inputs)
        assert shapes == [(2, 8000), (1, 11200)]
        for index in range(3):
            (alone,) = model(inputs[index : index + 1])
            assert alone.score == pytest.approx(together[index].score, abs=SCORES)


def test_long_inputs_run_in_smaller_batches(tiny, monkeypatch):
    rows = []
    call = OrtRunner.__call__

    def noting(runner, feeds, outputs=()):
        rows.append(len(feeds["input_features"]))
        return call(runner, feeds, outputs)

    monkeypatch.setattr(OrtRunner, "__call__", noting)
    with load_model(tiny.artifact("whisper", CLASSES)) as model:
        model(pairs([noise(0.1, seed=seed) for seed in range(5)]))
    assert rows == [2, 2, 1]  # 30 seconds are 1500 tokens, and a batch has up to 4096


def test_truncated_audio_is_counted(tiny):
    with load_model(tiny.artifact("audio-spectrogram-transformer", CLASSES)) as model:
        long, short = model(pairs([noise(3.0), noise(3.0)[:10_480]]))
        assert model.truncated == 1
    assert long.score == pytest.approx(short.score, abs=SCORES)


def test_too_short_audio_is_an_error(tiny):
    with load_model(tiny.artifact("wav2vec2", CLASSES)) as model:
        message = "audio 1 has 19 samples at 16000 Hz, expected at least 20"
        with pytest.raises(InputError, match=message):
            model(pairs([noise(0.1), noise(0.1)[:19]]))
        model(pairs([noise(0.1)[:20]]))


@pytest.mark.parametrize("one", ["call.wav", b"RIFF", np.zeros(8, np.float32)])
def test_one_input_instead_of_a_list_is_rejected(tiny, one):
    with (
        load_model(tiny.artifact("wav2vec2", CLASSES)) as model,
        pytest.raises(InputError, match=r"expected a list of audio. Pass \[audio\]"),
    ):
        model(one)


def test_error_names_the_input(tiny):
    with load_model(tiny.artifact("wav2vec2", CLASSES)) as model:
        with pytest.raises(InputError, match="audio 1 is an array without its sampling rate"):
            model([(noise(0.1), RATE), noise(0.1)])
        with pytest.raises(InputError, match=r"Call classify_audio\(\)"):
            model.transcribe([])


def test_nan_of_a_graph_is_found(tiny):
    with load_model(tiny.artifact("wav2vec2", SPEECH)) as model:
        task = model.definition
        work = task.preprocess([(noise(0.1), RATE)], task.Options())
        for bad in (np.nan, np.inf):
            outputs = {"logits": np.full((1, 3, 32), bad, np.float32)}
            results = task.postprocess(work, task.split(work.rows, {}, outputs), task.Options())
            assert not is_finite(results[0])
        assert is_finite(Transcription("", 0.5))


def test_feature_extractor_of_another_model_is_an_error(tiny, altered):
    artifact = tiny.artifact("wav2vec2", CLASSES)
    config = {"feature_extractor_type": "WhisperFeatureExtractor"}
    other = altered(artifact, {"preprocessor_config.json": json.dumps(config)})
    with pytest.raises(ArtifactError, match=r"takes input_values.*makes input_features"):
        load_model(other)
    artifact = tiny.artifact("whisper", CLASSES)  # 8 mel bins
    other = altered(artifact, {"preprocessor_config.json": json.dumps(config)})
    with (
        load_model(other) as model,
        pytest.raises(InputError, match=r"audio 0: .* produces 80 × 3000, but the graph takes"),
    ):
        model(pairs([noise(0.1)]))


def test_graph_with_a_mask_gets_one(tiny):
    artifact = tiny.artifact("wav2vec2", CLASSES)
    task = require_task(artifact.manifest).open(artifact, artifact.manifest.graphs[0])
    spec = task.record.inputs[0]
    mask = type(spec)("attention_mask", "int64", spec.dims)
    task.record = task.record.model_copy(update={"inputs": (spec, mask)})
    feeds = task.collate([task.read_row((noise(0.1), RATE))] * 2, 0)
    np.testing.assert_array_equal(feeds["attention_mask"], np.ones((2, 1600), np.int64))


def test_encoder_with_a_decoder_is_no_ctc_model(tiny):
    artifact = tiny.artifact("wav2vec2", SPEECH)
    graph = artifact.manifest.graphs[0]
    several = artifact.manifest.model_copy(update={"graphs": (graph, graph)})
    with pytest.raises(
        ArtifactError, match=r"automatic-speech-recognition, with several graphs, .* not a supp"
    ):
        load_model(Artifact(artifact.path, several))


def test_example_is_a_small_file_that_the_task_takes(tiny):
    import base64

    pytest.importorskip("soundfile", reason="pip install 'enginery[audio]'")
    with load_model(tiny.artifact("wav2vec2", CLASSES)) as model:
        example = base64.b64decode(example_input(model.definition))
        assert len(example) < 4096
        assert len(model([example])) == 1


def test_longest_duration_is_the_tasks(tiny):
    artifact = tiny.artifact("wav2vec2", CLASSES)
    task = require_task(artifact.manifest).open(artifact, artifact.manifest.graphs[0])
    assert isinstance(task, AudioTask)
    task.max_seconds = 0.5
    with pytest.raises(InputError, match=re.escape("audio 0 is 0.6 seconds long")):
        task.read_row((noise(0.6), RATE))
