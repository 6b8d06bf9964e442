"""Whisper generates the tokens of transformers' `generate`."""

import warnings

import numpy as np
import pytest

from enginery import export_model, load_model
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError, InputError
from enginery.core.json_file import json_bytes, read_json
from enginery.core.shapes import TensorSpec
from enginery.runtime.generation.inputs import require_prepared
from enginery.runtime.generation.whisper import LANGUAGES, WhisperPrompts
from tests import sounds
from tests.speech import save_whisper

TASK = "automatic-speech-recognition-with-past"
SOUNDS = [sounds.speech(2, seed=1), sounds.chirp(1), sounds.sine(3), sounds.noise(2)]
PAIRS = [(sound, sounds.RATE) for sound in SOUNDS]
CASES = {
    "detected": {},
    "detected, translate": {"task": "translate"},
    "code": {"language": "fr"},
    "token": {"language": "<|haw|>", "task": "transcribe"},
    "name": {"language": "French", "task": "translate"},
    "beams": {"language": "chinese", "num_beams": 4},
    "detected, beams": {"num_beams": 4},
    "processors": {"no_repeat_ngram_size": 2, "num_beams": 2},
    "to the end": {"max_new_tokens": None},
}
ENGLISH = {"greedy": {}, "beams": {"num_beams": 4}, "to the end": {"max_new_tokens": None}}
OLDER = {
    "detected": [[1, None], [2, "transcribe"]],
    "language": [[1, "<|zh|>"], [2, "translate"], [3, "<|notimestamps|>"]],
}


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    """`whisper(multilingual=False)`: the directory of a tiny model."""
    made = {}

    def make(multilingual=True):
        if multilingual not in made:
            directory = tmp_path_factory.mktemp("whisper") / str(multilingual)
            made[multilingual] = save_whisper(directory, multilingual=multilingual)
        return made[multilingual]

    return make


def reference(source, **options):
    """The tokens and texts of transformers for all sounds."""
    import torch
    from transformers import WhisperForConditionalGeneration, WhisperProcessor
    from transformers.utils import logging

    processor = WhisperProcessor.from_pretrained(source)
    model = WhisperForConditionalGeneration.from_pretrained(source).eval()
    features = processor(SOUNDS, sampling_rate=sounds.RATE, return_tensors="pt").input_features
    options = {name: value for name, value in options.items() if value is not None}
    logging.set_verbosity_error()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = model.generate(features, **options).tolist()
    end = model.config.eos_token_id
    tokens = [row[: row.index(end)] if end in row else row for row in found]
    return tokens, [processor.tokenizer.decode(row, skip_special_tokens=True) for row in tokens]


def assert_equal(source, artifact, cases):
    with load_model(artifact) as model:
        end = model.definition.defaults.eos_token_id[0]
        for name, case in cases.items():
            options = {"max_new_tokens": 12, **case}
            tokens, texts = reference(source, **options)
            assert len({tuple(row) for row in tokens}) == len(SOUNDS), name
            for batch_size in (8, 1):
                found = model.generate(PAIRS, batch_size=batch_size, **options)
                # transformers leaves the end token out.
                cut = [[token for token in each.tokens if token != end] for each in found]
                assert cut == tokens, name
                assert [each.text for each in found] == texts, name


@pytest.mark.more
def test_tokens_are_those_of_transformers(whisper, home):
    source = whisper()
    artifact = export_model(str(source), task=TASK)
    assert_equal(source, artifact, CASES)
    with load_model(artifact) as model:
        several = [
            [each.tokens for each in model.generate(PAIRS, language=code)]
            for code in ("en", "fr", None)
        ]
        assert several[0] != several[1] != several[2]
        text = model.generate(PAIRS[:1])[0].text
        assert "".join(model.stream(PAIRS[0])) == text
        assert text


@pytest.mark.more
def test_an_english_model_takes_no_language(whisper, home):
    source = whisper(multilingual=False)
    artifact = export_model(str(source), task=TASK)
    assert_equal(source, artifact, ENGLISH)
    with load_model(artifact) as model:
        for name, value in (("language", "en"), ("task", "transcribe")):
            with pytest.raises(InputError, match=f"{name} is given, but the model knows English"):
                model.generate(PAIRS, **{name: value})


@pytest.mark.more
@pytest.mark.parametrize(
    "file", ["generation_config.json", pytest.param("config.json", marks=pytest.mark.more)]
)
@pytest.mark.parametrize("kind", ["detected", pytest.param("language", marks=pytest.mark.more)])
def test_tokens_that_older_files_force(whisper, home, tmp_path, file, kind):
    source = save_whisper(tmp_path / "older")
    ids = read_json(source / "tokenizer.json")["added_tokens"]
    ids = {each["content"].strip("<|>"): each["id"] for each in ids}
    forced = [[place, token and ids[token.strip("<|>")]] for place, token in OLDER[kind]]
    path = source / file
    path.write_bytes(json_bytes({**read_json(path), "forced_decoder_ids": forced}))
    artifact = export_model(str(source), task=TASK)
    cases = {"older": {}, "other task": {"task": "translate"}, "other": {"language": "fr"}}
    assert_equal(source, artifact, cases)


def test_files_and_bytes_are_read(whisper, home, tmp_path):
    artifact = export_model(str(whisper()), task=TASK)
    content = sounds.wav(SOUNDS[0])
    path = tmp_path / "a.wav"
    path.write_bytes(content)
    samples = (SOUNDS[0] * 32767).astype("<i2")
    with load_model(artifact) as model:
        found = model.generate([content, path, str(path), (samples, sounds.RATE)])
        assert len({each.tokens for each in found}) == 1
        (silent,) = model.generate([(sounds.silence(1), sounds.RATE)])
        assert silent.tokens


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (PAIRS[0][0].tobytes(), {}, "found one bytes, expected a list of sounds"),
        ([PAIRS[0], 3], {}, "audio 1 is a int, expected a path"),
        ([SOUNDS[0]], {}, "audio 0 is an array without its sampling rate"),
        ([PAIRS[0], b""], {}, "audio 1 is not an audio file"),
        ([PAIRS[0], "none.wav"], {}, "audio 1: file none.wav does not exist"),
        ([(np.zeros(0, np.float32), 16000)], {}, "audio 0 has no samples"),
        ([PAIRS[0], (sounds.silence(31), 16000)], {}, "audio 1 is longer than 30 seconds, and the"),
        (PAIRS, {"language": "frensh"}, "'frensh' is not one of the model's 4; the nearest are fr"),
        (
            PAIRS,
            {"language": "fx"},
            "language 'fx' is not one of the model's 4; the nearest are fr",
        ),
        (PAIRS, {"language": "german"}, "language 'german' is not one of the model's 4"),
        (PAIRS, {"language": ["fr"]}, "language is a list, expected a code"),
        (PAIRS, {"task": "translat"}, "'translat' is unknown; did you mean 'translate'"),
        (PAIRS, {"return_timestamps": True}, "return_timestamps is true, but the model has no"),
        (PAIRS, {"langage": "fr"}, "unknown option 'langage'"),
    ],
)
def test_bad_input_is_an_error(whisper, home, inputs, options, message):
    artifact = export_model(str(whisper()), task=TASK)
    with load_model(artifact) as model, pytest.raises(InputError, match=message):
        model.generate(inputs, **options)


def test_languages_are_those_of_transformers():
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    found = {name: code for code, names in LANGUAGES.items() for name in names}
    assert found == TO_LANGUAGE_CODE


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"return_timestamps": True}, "return_timestamps is True, which is not supported"),
        ({"no_speech_threshold": 0.6}, "no_speech_threshold is 0.6, which is not supported"),
        ({"condition_on_prev_tokens": True}, "condition_on_prev_tokens is True, which is not supp"),
        ({"lang_to_id": {"<|fr|>": "x"}}, r"lang_to_id.<\|fr\|>: found 'x'"),
        ({"forced_decoder_ids": [[1, 5], [3, 6]]}, r"tokens for the places \[1, 3\]"),
    ],
)
def test_files_that_ask_for_something_else_are_errors(tmp_path, fields, message):
    (tmp_path / "generation_config.json").write_bytes(json_bytes(fields))
    (tmp_path / "config.json").write_bytes(b"{}")
    with pytest.raises(ArtifactError, match=message):
        WhisperPrompts.read(tmp_path)


def test_time_stamps_are_no_part_of_the_text():
    prompts = WhisperPrompts(no_timestamps_token_id=50)
    assert 51 in prompts.time_stamps
    assert 50 not in prompts.time_stamps
    assert not WhisperPrompts().time_stamps


def test_a_feature_extractor_of_another_size_is_an_error(whisper, home, copied):
    artifact = copied(export_model(str(whisper()), task=TASK))
    path = artifact.path / "preprocessor_config.json"
    path.write_bytes(json_bytes({**read_json(path), "feature_size": 80}))
    with pytest.raises(ArtifactError, match=r"makes input_features of \(80, 3000\)"):
        load_model(artifact)


@pytest.mark.parametrize("kind", ["speech_to_text", "moonshine"])
def test_encoders_that_padding_changes_are_an_error(kind):
    taken = {"speech_to_text": "input_features", "moonshine": "input_values"}[kind]
    record = GraphRecord(
        file="encoder_model.onnx",
        opset=20,
        data_files=(),
        inputs=(
            TensorSpec(taken, "float32", ("batch", "encoder_sequence")),
            TensorSpec("attention_mask", "int64", ("batch", "encoder_sequence")),
        ),
        outputs=(TensorSpec("last_hidden_state", "float32", ("batch", "sequence", 16)),),
    )
    with pytest.raises(ArtifactError, match=f"takes attention_mask, {taken}, and how far audio is"):
        require_prepared(record)
