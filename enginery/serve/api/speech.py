"""OpenAI-compatible routes for speech: transcriptions and translations into English.

    client = openai.OpenAI(base_url="http://localhost:8000/v1", api_key="none")
    client.audio.transcriptions.create(model="whisper", file=open("call.flac", "rb")).text

Source: platform.openai.com/docs/api-reference/audio. The form has the audio as `file`. Audio of any
length is transcribed window after window; `chunk_length_s` and `stride_length_s`, which OpenAI does
not have, cut it into chunks that overlap. A temperature of 0 means greedy search, and text is never
generated again with another one. CTC models transcribe, too, without what only Whisper can do. A
field that would change the text and is not supported is an error.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal, cast

from pydantic import ConfigDict, Field
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from enginery.runtime.generation.whisper import LANGUAGES
from enginery.runtime.tasks.audio import Transcribe
from enginery.runtime.tasks.generate import Generate, TimedGeneration
from enginery.runtime.tasks.task import Task
from enginery.serve.api.endpoints import (
    Routes,
    form_of,
    json_response,
    run_inference,
    select_model,
)
from enginery.serve.api.errors import empty_input, invalid_body, invalid_field
from enginery.serve.api.generate import StreamedRequest, event_stream, run_stream, sent_event
from enginery.serve.api.requests import RequestBody, Schema, parse
from enginery.serve.models.served_model import ServedModel

routes = Routes("openai")

_MAX_PARTS = 32
_VERBS = (Generate.verb, Transcribe.verb)
_GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this count as 0: logits divided by them would overflow."""
_SUBTITLES = ("srt", "vtt")
_UNSUPPORTED = ("chunking_strategy", "include", "known_speaker_names", "known_speaker_references")
"""Fields of models of OpenAI's that do more than transcribe."""

Format = Literal["json", "text", "srt", "vtt", "verbose_json"]


class SpeechRequest(RequestBody):
    """The fields of a form beside its file; those of a form are texts."""

    model_config = ConfigDict(strict=False)
    model: str | None = None
    prompt: str | None = None
    response_format: Format | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    chunk_length_s: Annotated[float, Field(ge=0)] | None = None
    stride_length_s: Annotated[float, Field(ge=0)] | None = None


class TranscriptionRequest(SpeechRequest):
    """The fields of /v1/audio/transcriptions."""

    language: str | None = None
    timestamp_granularities: list[Literal["segment", "word"]] | None = None
    stream: bool | None = None


class SpeechText(Schema):
    """What was said."""

    text: str


class SpeechSegment(Schema):
    """A segment, with its start and end in seconds."""

    id: int
    start: float
    end: float
    text: str


class VerboseSpeechText(Schema):
    """What was said, and when."""

    task: Literal["transcribe", "translate"]
    language: str
    """English name of the language; empty if the model has only one."""
    duration: float
    text: str
    segments: list[SpeechSegment]


def _form_of(fields: type[SpeechRequest]) -> dict[str, Any]:
    """Return the JSON schema of a form with these fields and a file."""
    schema = fields.model_json_schema()
    file = {"type": "string", "contentMediaType": "application/octet-stream"}
    properties = {"file": file, **schema["properties"]}
    if granularities := properties.pop("timestamp_granularities", None):
        properties["timestamp_granularities[]"] = granularities
    return {"type": "object", "required": ["file"], "properties": properties}


_RESPONSE_TYPES = ("application/json", "text/plain", "text/event-stream")


@routes.post(
    "/v1/audio/transcriptions",
    summary="Transcribe speech",
    response=SpeechText | VerboseSpeechText,
    response_types=_RESPONSE_TYPES,
    runs_model=True,
    other_bodies={"multipart/form-data": _form_of(TranscriptionRequest)},
)
async def transcriptions(request: Request) -> Response:
    """Answer POST /v1/audio/transcriptions: what was said, in its own language."""
    content, body = await _read_form(request, TranscriptionRequest)
    fields = cast("TranscriptionRequest", body)
    model, task = _select(request, fields.model, _VERBS)
    if "word" in (fields.timestamp_granularities or ()):
        raise invalid_field(
            "timestamp_granularities: the times of words are not supported.",
            field="timestamp_granularities[]",
            do="Leave it out, or send segment.",
        )
    options: dict[str, Any] = {"language": fields.language}
    if isinstance(task, Generate):
        options["task"] = None if fields.language is None else "transcribe"
    if fields.stream:
        return await _stream(request, (model, task), content, _options(task, fields, options))
    return await _answer(request, (model, task), content, _options(task, fields, options), fields)


@routes.post(
    "/v1/audio/translations",
    summary="Translate speech into English",
    response=SpeechText | VerboseSpeechText,
    response_types=_RESPONSE_TYPES[:2],
    runs_model=True,
    other_bodies={"multipart/form-data": _form_of(SpeechRequest)},
)
async def translations(request: Request) -> Response:
    """Answer POST /v1/audio/translations: what was said, in English."""
    content, fields = await _read_form(request, SpeechRequest)
    model, task = _select(request, fields.model, (Generate.verb,))
    options = _options(task, fields, {"task": "translate"})
    return await _answer(request, (model, task), content, options, fields)


def _select(request: Request, name: str | None, verbs: Sequence[str]) -> tuple[ServedModel, Task]:
    """Return the model of speech that the form names, or the only one, and its task."""

    def hears(model: ServedModel) -> bool:
        task = model.task
        return task is not None and task.verb in verbs and task.modality == "audio"

    model, task = select_model(request, name, *verbs, fits=hears)
    if task.modality != "audio":
        raise invalid_field(
            f"model '{model.name}' {task.purpose} from {task.modality}, expected a model of "
            "speech.",
            field="model",
        )
    return model, task


async def _read_form(request: Request, kind: type[SpeechRequest]) -> tuple[bytes, SpeechRequest]:
    """Return the file and the fields of a form.

    Raises:
        HTTPError: the form is malformed, has no file, or a field is invalid.
    """
    form_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if form_type != "multipart/form-data":
        raise invalid_body(
            f"found a body of {form_type[:60] or 'no type'!r}, expected multipart/form-data.",
            do="Send a form with the audio as file: curl -F file=@call.flac",
        )
    parts = await form_of(request, max_files=1, max_fields=_MAX_PARTS)
    content, values = b"", dict[str, Any]()
    try:
        for name, part in parts.multi_items():
            field = name.removesuffix("[]")
            if isinstance(part, UploadFile):
                if name != "file":
                    raise invalid_field(
                        f"found a file in {name[:60]!r}, expected file.", field="file"
                    )
                content = await part.read()
            elif field == "timestamp_granularities":
                values.setdefault(field, []).append(part)
            elif field in _UNSUPPORTED:
                raise invalid_field(f"{field} is not supported.", field=field, do="Leave it out.")
            elif part:  # an empty field is one that is left out
                values[field] = part
    finally:
        await parts.close()
    if not content:
        raise empty_input("file", "file is missing or empty, expected an audio file.")
    return content, parse(kind, values)


def _options(task: Task, fields: SpeechRequest, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the task for the fields of a form.

    Raises:
        HTTPError: a field is for Whisper alone.
    """
    timed = fields.response_format in (*_SUBTITLES, "verbose_json")
    temperature = fields.temperature or 0.0
    samples = temperature >= _GREEDY_TEMPERATURE
    options: dict[str, Any] = {
        **own,
        "prompt": fields.prompt,
        "chunk_length_s": fields.chunk_length_s,
        "stride_length_s": fields.stride_length_s,
        "return_timestamps": timed or None,
    }
    if not isinstance(task, Generate):
        for name in ("language", "prompt", "return_timestamps", "temperature"):
            if options.get(name) or (name == "temperature" and samples):
                field = "response_format" if name == "return_timestamps" else name
                raise invalid_field(
                    f"{field} is for Whisper; the model is a CTC model, which has none.",
                    field=field,
                    do="Leave it out.",
                )
        return {name: options[name] for name in ("chunk_length_s", "stride_length_s")}
    if samples:
        options |= {"do_sample": True, "temperature": temperature}
    if not task.has_own_length:
        options["max_new_tokens"] = task.limits.max_new_tokens
    return {**options, "num_return_sequences": 1}


async def _answer(
    request: Request,
    selected: tuple[ServedModel, Task],
    content: bytes,
    options: dict[str, Any],
    fields: SpeechRequest,
) -> Response:
    """Return the response in the format that the form asks for."""
    model, task = selected
    (result,) = await run_inference(request, model, task, [content], options)
    if isinstance(task, Generate):
        (result,) = result
    kind = fields.response_format or "json"
    if kind == "text":
        return Response(f"{result.text}\n", media_type="text/plain")
    if kind == "json":
        return json_response({"text": result.text})
    segments = spoken_segments(result)
    if kind in _SUBTITLES:
        return Response(subtitles(segments, kind), media_type="text/plain")
    language = LANGUAGES.get(result.language, (result.language,))[0]
    return json_response(
        {
            "task": "translate" if options.get("task") == "translate" else "transcribe",
            "language": language,
            "duration": round(result.seconds, 3),
            "text": result.text,
            "segments": [segment.model_dump() for segment in segments],
        }
    )


async def _stream(
    request: Request, selected: tuple[ServedModel, Task], content: bytes, options: dict[str, Any]
) -> Response:
    """Return the text as server-sent events, each window as it is done."""
    model, task = selected
    if not isinstance(task, Generate):
        raise invalid_field("stream is for Whisper.", field="stream", do="Leave it out.")
    if options["return_timestamps"]:
        raise invalid_field(
            "response_format: a stream is of json or text.",
            field="response_format",
            do="Leave it out.",
        )
    read = task.Options.read(options)
    prepare = partial(task.preprocess, [content], read, streams=True)
    steps = run_stream(request, StreamedRequest(model, task, prepare, [content]))

    async def events() -> AsyncGenerator[bytes]:
        async with aclosing(steps):
            async for step in steps:
                piece = "".join(text for _, text in step.pieces)
                if piece:
                    yield sent_event({"type": "transcript.text.delta", "delta": piece})
                if step.done:
                    text = step.results[0].text
                    yield sent_event({"type": "transcript.text.done", "text": text})

    return await event_stream(events())


def spoken_segments(result: TimedGeneration) -> list[SpeechSegment]:
    """Return the parts of a transcript with text; where the model says no time, its neighbour's."""
    segments: list[SpeechSegment] = []
    for chunk in result.chunks:
        start, end = chunk.timestamp
        if not chunk.text.strip():
            continue
        start = start if start is not None else segments[-1].end if segments else 0.0
        end = end if end is not None else max(result.seconds, start)
        segments.append(
            SpeechSegment(id=len(segments), start=start, end=round(end, 2), text=chunk.text)
        )
    return segments


def subtitles(segments: Sequence[SpeechSegment], kind: str) -> str:
    """Return segments as SubRip (`srt`), or as WebVTT (`vtt`, www.w3.org/TR/webvtt1)."""
    point = "," if kind == "srt" else "."
    lines = ["WEBVTT", ""] if kind == "vtt" else []
    for segment in segments:
        if kind == "srt":
            lines.append(str(segment.id + 1))
        # An arrow or an empty line in the text would end it.
        text = " ".join(segment.text.replace("-->", "->").split())
        lines += [f"{_clock(segment.start, point)} --> {_clock(segment.end, point)}", text, ""]
    return "\n".join(lines) + "\n"


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"
