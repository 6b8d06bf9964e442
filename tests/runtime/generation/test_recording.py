"""Speech of any length gets the text and the times of transformers' pipeline."""

import warnings

import numpy as np
import pytest

from enginery import export_model, load_model
from enginery.core.errors import InputError
from enginery.runtime.generation.recording import SpeechOptions
from enginery.runtime.generation.time_stamps import TimeStamps
from tests import sounds
from tests.speech import save_whisper

TASK = "automatic-speech-recognition-with-past"
LENGTHS = (5, 29.99, 30, 30.01, 75)
OPTIONS = {
    "language": {"language": "en"},
    "detected": {},
    "translated": {"language": "french", "task": "translate"},
    "beams": {"num_beams": 3},
}
CHUNKS = {
    "of a window": {"chunk_length_s": 30},
    "with two strides": {"chunk_length_s": 12.5, "stride_length_s": (3, 1.5)},
    "without overlap": {"chunk_length_s": 20, "stride_length_s": 0},
    "short": {"chunk_length_s": 10},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_whisper(tmp_path_factory.mktemp("whisper") / "stamped", time_stamps=True)


@pytest.fixture(scope="module")
def model(source):
    with load_model(export_model(str(source), task=TASK)) as model:
        yield model


@pytest.fixture(scope="module")
def pipeline(source):
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.pipeline("automatic-speech-recognition", model=str(source))


def ask(pipeline, samples, *, chunks=None, **options):
    """The text and the times of transformers, with the greedy search that is our default."""
    times = {"return_timestamps": True} if options.pop("return_timestamps", False) else {}
    answer = pipeline(
        samples.copy(), **times, **(chunks or {}), generate_kwargs={"num_beams": 1, **options}
    )
    return answer["text"], [(c["text"], c["timestamp"]) for c in answer.get("chunks", ())]


def generate(model, samples, *, chunks=None, **options):
    (result,) = model.generate([(samples, sounds.RATE)], **(chunks or {}), **options)
    times = getattr(result, "chunks", ())
    return result.text, [(chunk.text, chunk.timestamp) for chunk in times]


@pytest.mark.more
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("seconds", LENGTHS)
def test_windows_follow_the_time_stamps(model, pipeline, seconds, options):
    samples = sounds.recording(seconds, seed=int(seconds))
    expected = ask(pipeline, samples, return_timestamps=True, **options)
    assert generate(model, samples, return_timestamps=True, **options) == expected
    assert len(expected[1]) > 1 or seconds <= 30
    if seconds > 30:
        assert generate(model, samples, **options) == (expected[0], [])


@pytest.mark.more
@pytest.mark.parametrize("return_timestamps", [False, True])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_chunks_are_joined(model, pipeline, chunks, return_timestamps):
    for seconds in (31, 75):
        samples = sounds.recording(seconds, seed=int(seconds))
        options = {"language": "en", "return_timestamps": return_timestamps}
        expected = ask(pipeline, samples, chunks=chunks, **options)
        assert generate(model, samples, chunks=chunks, **options) == expected


@pytest.mark.more
def test_what_was_said_before_is_part_of_the_prompt(model, pipeline):
    samples = sounds.recording(45, seed=3)
    for text in ("the engine", " warm the boat "):
        ids = pipeline.tokenizer.get_prompt_ids(text, return_tensors="pt")
        options = {"language": "en", "return_timestamps": True}
        expected = ask(pipeline, samples, prompt_ids=ids, **options)
        assert generate(model, samples, prompt=text, **options) == expected
    assert generate(model, samples, **options) != expected


def test_results_do_not_depend_on_the_batch(model):
    lengths = (40, 5, 65, 12, 31)
    pairs = [(sounds.recording(seconds, seed=seconds), sounds.RATE) for seconds in lengths]
    options = {"language": "en", "return_timestamps": True}
    together = model.generate(pairs, **options, batch_size=3)
    alone = [model.generate([pair], **options)[0] for pair in pairs]
    assert together == alone
    assert [result.seconds for result in together] == pytest.approx(lengths)
    assert {result.language for result in together} == {"en"}
    chunked = model.generate(pairs, **options, chunk_length_s=15, batch_size=4)
    assert chunked == [model.generate([p], **options, chunk_length_s=15)[0] for p in pairs]


def test_a_stream_has_the_text_of_all_windows(model):
    samples = sounds.recording(65, seed=65)
    (whole,) = model.generate([(samples, sounds.RATE)], language="en")
    pieces = list(model.stream((samples, sounds.RATE), language="en"))
    assert "".join(pieces) == whole.text
    assert len(pieces) > 1
    with pytest.raises(InputError, match="chunk_length_s is set, but a stream goes on"):
        model.stream((samples, sounds.RATE), language="en", chunk_length_s=20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"return_timestamps": "word"}, "times of words are not supported, because the graphs"),
        ({"return_timestamps": 1}, "return_timestamps: found 1, expected true or false"),
        ({"chunk_length_s": 31}, "chunk_length_s: found 31, expected seconds from 0 to 30"),
        ({"chunk_length_s": float("nan")}, "chunk_length_s: found nan, expected seconds"),
        ({"stride_length_s": 2}, "stride_length_s is given, but no chunk_length_s"),
        ({"chunk_length_s": 6, "stride_length_s": 3}, "is 3 and 3 seconds, together not less than"),
        (
            {"chunk_length_s": 6, "stride_length_s": [1]},
            r"found \[1\], expected seconds, or a pair",
        ),
    ],
)
def test_windows_that_cannot_be_made_are_errors(options, message):
    with pytest.raises(InputError, match=message):
        SpeechOptions.read(30.0, sounds.RATE, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_return_sequences": 2, "num_beams": 2}, "num_return_sequences is set, which is not"),
        ({"stop_strings": ["a"]}, "stop_strings is set, which is not supported for audio in sev"),
        ({"prompt": "a"}, "prompt is given without language, and the model detects that"),
        ({"prompt": 3, "language": "en"}, "prompt is a int, expected a text"),
        ({"prompt": "<|en|>", "language": "en"}, "prompt has the special token"),
    ],
)
def test_options_that_windows_do_not_have_are_errors(model, options, message):
    with pytest.raises(InputError, match=message):
        model.generate([(sounds.silence(31), sounds.RATE)], **options)


@pytest.mark.parametrize(
    ("tokens", "kept", "frames"),
    [
        ([], 0, 3000),
        ([50, 1, 2], 3, 3000),
        ([50, 1, 70], 3, 3000),
        ([50, 1, 70, 70, 2], 4, 40),
        ([50, 1, 70, 72, 2, 80], 6, 3000),
        ([50, 1, 70, 72, 2, 80, 80], 7, 60),
    ],
)
def test_a_window_ends_with_its_last_pair_of_time_stamps(tokens, kept, frames):
    rules = TimeStamps(first=50, end=40)
    assert rules.split(tokens, window=3000, stride=2) == (tokens[:kept], frames)


def test_rules_of_time_stamps_are_those_of_transformers():
    import torch
    from transformers import GenerationConfig
    from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

    random = np.random.default_rng(0)
    config = GenerationConfig(
        eos_token_id=40, no_timestamps_token_id=49, max_initial_timestamp_index=8
    )
    rules, begin = TimeStamps(first=50, end=40, max_initial=8), 3
    other = WhisperTimeStampLogitsProcessor(config, begin_index=begin)
    for _ in range(300):
        tokens = [1, 2, 3]
        # Sequences as the rules allow them, of texts that are as probable as time stamps.
        for _ in range(int(random.integers(12))):
            scores = rules(tokens, _scores(random), begin=begin)
            tokens.append(int(scores.argmax()))
        scores = _scores(random)
        expected = other(torch.tensor([tokens]), torch.tensor(scores)[None])[0].numpy()
        np.testing.assert_array_equal(rules(tokens, scores, begin=begin), expected)


def _scores(random):
    scores = random.normal(0, 2, 90).astype(np.float32)
    scores[50:] -= np.float32(random.uniform(0, 6))
    return scores
