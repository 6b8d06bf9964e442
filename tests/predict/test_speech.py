"""Recordings of any length in a folder, with the times of what was said."""

import re

import pytest

from enginery import export_model, load_model
from enginery.core.errors import OptionError
from tests import sounds
from tests.speech import save_whisper

CTC, WHISPER = "automatic-speech-recognition", "automatic-speech-recognition-with-past"


def write(folder, *lengths):
    folder.mkdir()
    paths = [folder / f"{index}.wav" for index in range(len(lengths))]
    for path, seconds in zip(paths, lengths, strict=True):
        path.write_bytes(sounds.wav(sounds.recording(seconds, seed=int(seconds))))
    return paths


def assert_chunks(found, results):
    for row, result in zip(found, results, strict=True):
        assert len(row["chunks"]) == len(result.chunks) > 0
        for chunk, expected in zip(row["chunks"], result.chunks, strict=True):
            assert chunk["text"] == expected.text
            times = [time for time in expected.timestamp if time is not None]
            assert [t for t in chunk["timestamp"] if t is not None] == pytest.approx(times)


@pytest.mark.more
def test_recordings_are_transcribed_with_times(predict, rows, home, tmp_path):
    artifact = export_model(str(save_whisper(tmp_path / "whisper", time_stamps=True)), task=WHISPER)
    paths = write(tmp_path / "calls", 41, 3)
    with load_model(artifact) as model:
        results = model.generate(paths, language="en", return_timestamps=True)
    (tmp_path / "calls" / "2.wav").write_bytes(b"RIFF")
    predict(artifact, tmp_path / "calls", generation=("language=en", "return_timestamps=true"))
    *found, bad = rows()
    assert "not an audio file" in bad["error"]
    assert [row["generated"] for row in found] == [result.text for result in results]
    assert_chunks(found, results)
    message = re.escape("option 'chunk_length_s' is '2.0', but the model generates text")
    with pytest.raises(OptionError, match=message):
        predict(artifact, tmp_path / "calls", "other.parquet", chunk_length_s=2.0)


def test_a_ctc_model_writes_the_times_of_words(predict, rows, tmp_path, tiny):
    artifact, options = tiny("wav2vec2", CTC), {"return_timestamps": "word", "chunk_length_s": 0.5}
    paths = write(tmp_path / "calls", 0.3, 1.1)
    with load_model(artifact) as model:
        results = model.transcribe(paths, **options)
    predict(artifact, tmp_path / "calls", **options)
    found = rows()
    assert [row["text"] for row in found] == [result.text for result in results]
    assert_chunks(found, results)
