"""OpenAI's own client sends speech to the server."""

import httpx
import openai
import pytest

from enginery import export_model, load_model
from enginery.core.errors import InputError
from enginery.runtime.tasks import require_task
from enginery.runtime.tasks.task import InputLimits
from enginery.serve.batching.queue import OverloadedError, QueueEntry
from enginery.serve.config import ServeConfig
from tests import sounds
from tests.serve.conftest import Running
from tests.speech import save_whisper

TASK = "automatic-speech-recognition-with-past"
LANGUAGE = {"language": "en"}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    source = save_whisper(tmp_path_factory.mktemp("whisper") / "listener", time_stamps=True)
    return export_model(str(source), task=TASK)


@pytest.fixture(scope="module")
def server(artifact, tiny_paths):
    config = ServeConfig(access_log="off", max_speech_seconds=80)
    with Running({"listener": artifact.path, **tiny_paths("vectors")}, config) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        yield client


@pytest.fixture(scope="module")
def model(artifact):
    with load_model(artifact) as model:
        yield model


@pytest.fixture(scope="module")
def content():
    return sounds.wav(sounds.recording(45, seed=45))


@pytest.fixture(scope="module")
def expected(model, content):
    (result,) = model.generate([content], return_timestamps=True, **LANGUAGE)
    assert len(result.chunks) > 1
    return result


def test_a_recording_is_transcribed(client, model, content, expected):
    file = ("call.wav", content)
    create = client.audio.transcriptions.create
    assert create(model="listener", file=file, **LANGUAGE).text == expected.text
    assert create(model="listener", file=file, response_format="text", **LANGUAGE) == (
        f"{expected.text}\n"
    )
    (chunked,) = model.generate([content], chunk_length_s=15, stride_length_s=2, **LANGUAGE)
    extra = {"chunk_length_s": 15, "stride_length_s": 2}
    found = create(model="listener", file=file, extra_body=extra, temperature=0, **LANGUAGE)
    assert found.text == chunked.text != expected.text
    (prompted,) = model.generate([content], prompt="the boat", **LANGUAGE)
    found = create(model="listener", file=file, prompt="the boat", **LANGUAGE)
    assert found.text == prompted.text != expected.text


def test_a_transcript_has_the_times_of_its_segments(client, content, expected):
    found = client.audio.transcriptions.create(
        model="listener",
        file=("call.wav", content),
        response_format="verbose_json",
        timestamp_granularities=["segment"],
        **LANGUAGE,
    )
    assert (found.task, found.language, found.text) == ("transcribe", "english", expected.text)
    assert float(found.duration) == pytest.approx(45)
    spoken = [chunk for chunk in expected.chunks if chunk.text.strip()]
    assert [segment.text for segment in found.segments] == [chunk.text for chunk in spoken]
    assert [segment.start for segment in found.segments] == [c.timestamp[0] for c in spoken]
    assert [segment.id for segment in found.segments] == list(range(len(spoken)))


@pytest.mark.more
def test_a_transcript_is_streamed(client, model):
    content = sounds.wav(sounds.recording(65, seed=67))
    (expected,) = model.generate([content], **LANGUAGE)
    *deltas, done = client.audio.transcriptions.create(
        model="listener", file=("call.wav", content), stream=True, **LANGUAGE
    )
    assert (done.type, done.text) == ("transcript.text.done", expected.text)
    assert len(deltas) > 1
    assert "".join(event.delta for event in deltas) == expected.text


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # of the client's method
def test_speech_is_translated(client, model, content):
    (result,) = model.generate([content], task="translate", return_timestamps=True)
    create = client.audio.translations.create
    file = ("call.wav", content)
    assert create(model="listener", file=file).text == result.text
    found = create(model="listener", file=file, response_format="verbose_json")
    assert (found.text, len(found.segments) > 0) == (result.text, True)
    subtitles = create(model="listener", file=file, response_format="srt")
    assert subtitles.startswith("1\n00:00:0")
    assert create(model="listener", file=file, response_format="vtt").startswith("WEBVTT\n\n00:")


@pytest.mark.more
def test_other_requests_run_between_the_windows_of_a_recording(server, client, content, expected):
    from concurrent.futures import ThreadPoolExecutor

    short = sounds.wav(sounds.recording(4, seed=4))
    create = client.audio.transcriptions.create
    alone = create(model="listener", file=("a.wav", short), **LANGUAGE).text
    with ThreadPoolExecutor(6) as threads:
        runs = [
            threads.submit(create, model="listener", file=("a.wav", each), **LANGUAGE)
            for each in (content, short, content, short, short)
        ]
        texts = [run.result().text for run in runs]
    assert texts == [expected.text, alone, expected.text, alone, alone]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": "docx"}, "response_format: found the string 'docx', expected 'json'"),
        ({"temperature": "hot"}, "temperature: found the string 'hot', expected a number"),
        ({"temperature": "2"}, "temperature: found the string '2', expected at most 1.0"),
        ({"language": "klingon"}, "language 'klingon' is not one of the model's 4"),
        ({"prompt": "the boat"}, "prompt is given without language"),
        ({"timestamp_granularities[]": "word"}, "the times of words are not supported"),
        ({"include[]": "logprobs"}, "include is not supported"),
        ({"chunk_length_s": "40"}, "chunk_length_s: found 40.0, expected seconds from 0 to 30"),
        ({"stream": "true", "response_format": "srt"}, "a stream is of json or text"),
        ({"model": "vectors"}, "was exported for feature-extraction"),
        ({"model": "whisper-1"}, "there is no model 'whisper-1'"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_an_error(server, fields, message):
    found = ask(server, fields, sounds.wav(sounds.silence(1)))
    assert found.status_code == (404 if "there is no" in message else 400)
    assert message in found.json()["error"]["message"]


def test_a_file_that_cannot_be_read_is_an_error(server, content):
    for body, message in (
        (b"text", "audio 0 is not an audio file of a supported format"),
        (b"", "file is missing or empty"),
        (sounds.wav(sounds.silence(81)), "audio 0 is 81.0 seconds long, expected at most 80"),
    ):
        found = ask(server, {}, body)
        assert found.status_code == 400
        error = found.json()["error"]
        assert message in error["message"]
        assert error["type"] == "invalid_request_error"
    found = httpx.post(f"{server.url}/v1/audio/transcriptions", json={"file": "a"}, timeout=30)
    assert "expected multipart/form-data" in found.json()["error"]["message"]
    found = httpx.post(f"{server.url}/v1/audio/transcriptions", data={"model": "a"}, timeout=30)
    assert found.status_code == 400


def test_recordings_that_are_held_at_once_are_limited(artifact, server):
    task = require_task(artifact.manifest).open(
        artifact, artifact.manifest.graphs[0], InputLimits(max_speech_seconds=80)
    )
    options = task.Options(language="en")
    pair = (sounds.silence(35), sounds.RATE)
    assert len(task.preprocess([pair] * 2, options).rows) == 2
    with pytest.raises(InputError, match=r"up to audio 2 are 105.0 seconds long together, .* 80"):
        task.preprocess([pair] * 3, options)
    with pytest.raises(InputError, match=r"audio 0: its first .* seconds are \d+ chunks, expected"):
        task.preprocess([pair], task.Options(language="en", chunk_length_s=1))
    (row,) = task.preprocess([pair], options).rows
    row.content.part.recording.seconds = 400.0
    scheduler = server.models.get("listener").scheduler_of(task)
    entries = [QueueEntry(None, 0, 0, 1, row)]
    assert scheduler._admit_recordings(entries) == 400
    scheduler._held_seconds = 300.0
    try:
        with pytest.raises(OverloadedError, match="recordings of 300 seconds are being"):
            scheduler._admit_recordings(entries)
    finally:
        scheduler._held_seconds = 0.0


def ask(server, fields, content):
    return httpx.post(
        f"{server.url}/v1/audio/transcriptions",
        data={"model": "listener", **fields},
        files={"file": ("a.wav", content)},
        timeout=30,
    )
