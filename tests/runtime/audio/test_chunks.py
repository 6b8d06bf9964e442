"""CTC models transcribe long audio in chunks, with times, as transformers' pipeline does."""

import re
import warnings

import numpy as np
import pytest

from enginery.core.errors import InputError
from enginery.runtime.audio.chunks import ChunkLengths, cut
from enginery.runtime.model import load_model
from enginery.runtime.tasks import require_task
from enginery.runtime.tasks.audio import TimedTranscription
from enginery.runtime.tasks.task import InputLimits
from tests import sounds
from tests.tiny import CTC_KINDS, with_more

SPEECH = "automatic-speech-recognition"
CHUNKS = (
    {"chunk_length_s": 0.6},
    {"chunk_length_s": 0.5, "stride_length_s": 0.15},
    {"chunk_length_s": 0.4, "stride_length_s": 0},
)


@pytest.mark.parametrize("kind", with_more(CTC_KINDS, "wav2vec2"))
def test_chunks_and_times_are_those_of_the_pipeline(tiny, kind):
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = transformers.pipeline(SPEECH, model=str(tiny.source(kind, SPEECH)))
    samples = sounds.recording(2.13, seed=1)  # the tiny models have a frame for 10 samples
    with load_model(tiny.artifact(kind, SPEECH)) as model:
        for chunks in ({}, *CHUNKS):
            expected = pipeline(samples.copy(), **chunks)
            (result,) = model.transcribe([(samples, sounds.RATE)], **chunks)
            assert result.text == expected["text"], chunks
            assert len(result.text) > 20
            for times in ("char", "word"):
                answer = pipeline(samples.copy(), return_timestamps=times, **chunks)
                (timed,) = model.transcribe(
                    [(samples, sounds.RATE)], return_timestamps=times, **chunks
                )
                assert isinstance(timed, TimedTranscription)
                assert (timed.text, timed.score) == (result.text, result.score)
                spans = [(chunk.text, chunk.timestamp) for chunk in timed.chunks]
                assert spans == [(c["text"], c["timestamp"]) for c in answer["chunks"]]


def test_each_input_has_its_own_chunks(tiny):
    pairs = [(sounds.recording(seconds, seed=2), sounds.RATE) for seconds in (1.4, 0.3, 0.9)]
    with load_model(tiny.artifact("wav2vec2", SPEECH)) as model:
        together = model.transcribe(pairs, chunk_length_s=0.5)
        assert [r.text for r in together] == [
            model.transcribe([pair], chunk_length_s=0.5)[0].text for pair in pairs
        ]
        task = model.definition
        work = task.preprocess(pairs, task.Options(chunk_length_s=0.5))
        assert [chunk.is_last for chunk in work.context].count(True) == 3
        assert len(work.rows) == len(work.context) > 5


def test_chunks_cover_all_samples_whatever_the_blocks():
    samples = sounds.noise(3)
    lengths = ChunkLengths.read(30, rate=sounds.RATE, chunk_length_s=1, stride_length_s=(0.2, 0.1))
    for size in (100, 7_000, 48_000):
        blocks = (samples[start : start + size] for start in range(0, len(samples), size))
        chunks = list(cut(blocks, lengths))
        inner = [part[chunk.left : len(part) - chunk.right] for part, chunk in chunks]
        np.testing.assert_array_equal(np.concatenate(inner), samples)
        assert [chunk.is_last for _, chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert {chunk.length for _, chunk in chunks[:-1]} == {16_000}


def test_chunks_of_a_server_are_limited(tiny):
    artifact = tiny.artifact("wav2vec2", SPEECH)
    limits = InputLimits(max_seconds=2, max_speech_seconds=20)
    task = require_task(artifact.manifest).open(artifact, artifact.manifest.graphs[0], limits)

    def read(seconds, **options):
        return task.preprocess([(sounds.silence(seconds), sounds.RATE)], task.Options(**options))

    assert len(read(18, chunk_length_s=2).rows) > 10
    pair = (sounds.silence(9), sounds.RATE)
    with pytest.raises(InputError, match=r"the inputs up to audio 2 are 2.* seconds long tog"):
        task.preprocess([pair] * 3, task.Options(chunk_length_s=2))
    for seconds, options, message in (
        (3, {}, "audio 0 is 3.0 seconds long, expected at most 2"),
        (21, {"chunk_length_s": 2}, "audio 0 is 21.0 seconds long, expected at most 20"),
        (9, {"chunk_length_s": 3}, "chunk_length_s: found 3.0, expected seconds from 0 to 2"),
        (9, {"chunk_length_s": 0.2}, "chunks, expected at most"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            read(seconds, **options)
