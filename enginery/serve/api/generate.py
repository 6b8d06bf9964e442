"""POST /generate and /generate_stream: generate text, with the options of `Model.generate`.

    $ curl localhost:8000/generate \
        -d '{"inputs": "The engine", "parameters": {"max_new_tokens": 32}}'
    {"generated_text":" is warm.","details":{"finish_reason":"stop","generated_tokens":4,…}}

One input gets one result, a list of inputs a list; with `num_return_sequences` above 1 each input
has a list of results. /generate_stream takes one input and sends server-sent events, as Hugging
Face's text-generation-inference does: `token.text` is the next piece, and the last event has the
whole text. /predict/{model} answers as /generate does.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from enginery.core.errors import EngineryError
from enginery.runtime.audio.transcript import SpeechChunk
from enginery.runtime.generation.search import TokenLogprob
from enginery.runtime.tasks.generate import Generate, Generation, TimedGeneration
from enginery.runtime.tasks.results import to_plain
from enginery.runtime.tasks.task import ModelInputs, Task, count_characters
from enginery.serve.api.endpoints import (
    Routes,
    json_response,
    run_inference,
    select_model,
)
from enginery.serve.api.errors import (
    error_response,
    fault_response,
    invalid_field,
    scope_protocol,
    to_http_error,
)
from enginery.serve.api.requests import (
    Schema,
    StrictRequestBody,
    Texts,
    file_from_base64,
    listed,
)
from enginery.serve.batching.generation import Progress
from enginery.serve.batching.scheduler import Timings
from enginery.serve.models.served_model import ServedModel

routes = Routes("plain")


class GenerateRequest(StrictRequestBody):
    """Body of /generate."""

    inputs: Texts
    parameters: dict[str, Any] | None = None
    """Options of generation."""
    model: str | None = None


class GeneratedToken(Schema):
    """A token of a text, in the shape of text-generation-inference."""

    id: int
    text: str
    logprob: float
    special: bool


class Details(Schema):
    """How a text ended."""

    finish_reason: str
    """`stop` after an end token or a stop string, `length` at the largest length."""
    generated_tokens: int
    prompt_tokens: int
    score: float | None
    """Of beam search."""
    tokens: list[GeneratedToken] | None = None
    """With the parameter `top_logprobs`: the tokens, with the one that ended the text."""
    top_tokens: list[list[GeneratedToken]] | None = None
    """With `top_logprobs` above 0: the most probable tokens of each place, best first."""


class Generated(Schema):
    """One result; `chunks` with `return_timestamps`."""

    generated_text: str
    details: Details
    chunks: list[SpeechChunk] | None = None


def generated_json(result: Sequence[Generation], task: Generate) -> Any:
    """Return the texts of an input as text-generation-inference has them: one, or a list."""
    texts = [
        {
            "generated_text": generation.text,
            "details": {
                "finish_reason": generation.finish,
                "generated_tokens": len(generation.tokens),
                "prompt_tokens": generation.prompt_tokens,
                "score": generation.score,
                **_token_details(generation.logprobs, task),
            },
        }
        for generation in result
    ]
    for text, generation in zip(texts, result, strict=True):
        if isinstance(generation, TimedGeneration):
            text["chunks"] = to_plain(generation.chunks)
    return texts[0] if len(texts) == 1 else texts


def _token_details(logprobs: Sequence[TokenLogprob], task: Generate) -> dict[str, Any]:
    """Return what `Details` has of tokens, if their log-probabilities were asked for."""

    def described(token: int, logprob: float) -> dict[str, Any]:
        text = task.token_bytes(token).decode(errors="replace")
        special = not task.shows(token)
        return {"id": token, "text": text, "logprob": logprob, "special": special}

    if not logprobs:
        return {}
    details = {"tokens": [described(entry.token, entry.logprob) for entry in logprobs]}
    if not any(entry.top for entry in logprobs):
        return details
    tops = [[described(*pair) for pair in entry.top] for entry in logprobs]
    return {**details, "top_tokens": tops}


@routes.post(
    "/generate",
    "/generate/{model}",
    summary="Generate text",
    body=GenerateRequest,
    response=Generated | list[Generated | list[Generated]],
    runs_model=True,
)
async def generate(request: Request, body: GenerateRequest) -> Response:
    """Answer POST /generate: the texts for one input or for a list of them."""
    model, task = select_model(request, body.model, Generate.verb)
    inputs = read_files(task, listed(body.inputs))
    results = await run_inference(request, model, task, inputs, body.parameters or {})
    outputs = [generated_json(result, cast("Generate", task)) for result in results]
    return json_response(outputs[0] if isinstance(body.inputs, str) else outputs)


@routes.post(
    "/generate_stream",
    "/generate_stream/{model}",
    summary="Generate text, sent piece by piece",
    body=GenerateRequest,
    response=str,
    response_types=("text/event-stream",),
    runs_model=True,
)
async def generate_stream(request: Request, body: GenerateRequest) -> Response:
    """Answer POST /generate_stream: the text for one input as server-sent events."""
    model, selected = select_model(request, body.model, Generate.verb)
    task = cast("Generate", selected)
    inputs = read_files(task, listed(body.inputs))
    if len(inputs) != 1:
        raise invalid_field(
            f"inputs: found {len(inputs)}, expected one for a stream.",
            field="inputs",
            do="Send a request for each, or send them to /generate.",
        )
    options = task.Options.read(body.parameters or {})
    _, chosen = task.resolve(options)
    if chosen.num_return_sequences > 1:
        raise invalid_field(
            f"parameters.num_return_sequences: found {chosen.num_return_sequences}, expected 1 "
            "for a stream.",
            field="parameters.num_return_sequences",
        )
    prepare = partial(task.preprocess, inputs, options, streams=True)
    steps = run_stream(request, StreamedRequest(model, task, prepare, inputs))

    async def events() -> AsyncGenerator[bytes]:
        index = 0
        async with aclosing(steps):
            async for step in steps:
                last = step.done
                text = "".join(piece for _, piece in step.pieces)
                if not text and not last:
                    continue
                result: dict[str, Any] = {"generated_text": None, "details": None}
                if last:
                    result = generated_json(step.results, task)
                yield sent_event({"index": index, "token": {"text": text}, **result})
                index += 1

    return await event_stream(events())


@dataclass(frozen=True)
class StreamedRequest:
    """What a request asks a model to generate, step by step."""

    model: ServedModel
    """The model, which must be ready."""
    task: Generate
    prepare: Callable[[], ModelInputs]
    """Prepares the inputs; called in a thread."""
    inputs: Sequence[Any]
    """The inputs, for their number and size."""


def read_files(task: Task, inputs: Sequence[str]) -> list[Any]:
    """Return texts as they are, and images or audio from base64.

    Raises:
        HTTPError: an input is not a file in base64.
    """
    if task.modality == "text":
        return list(inputs)
    return [
        file_from_base64(text, f"inputs[{index}]", task.modality)
        for index, text in enumerate(inputs)
    ]


async def run_stream(request: Request, streamed: StreamedRequest) -> AsyncGenerator[Progress]:
    """Yield the progress of each step, and add timings and counts to the request's record."""
    record, timings = request.scope["state"]["record"], Timings()
    record.characters = count_characters(streamed.inputs)
    record.compute_type = "cpu" if streamed.model.backend.on_cpu else "gpu"
    steps = streamed.model.stream(streamed.task, streamed.prepare, timings, streamed.inputs)
    async with aclosing(steps):
        async for step in steps:
            record.timings, record.inputs = timings, len(streamed.inputs)
            record.generated, record.first_token_at = timings.generated, timings.first_token_at
            yield step


def sent_event(value: Any) -> bytes:
    """Return a server-sent event with a JSON value."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


class EventStream(Response):
    """A response of server-sent events (html.spec.whatwg.org/multipage/server-sent-events.html)."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes]) -> None:
        """Take the first event, and a generator of the others, which is closed at the end."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first, self._events = first, events

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; an error after the first one is an event as well."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with aclosing(self._events):
            await send(start)
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            try:
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except EngineryError as error:
                await self._send_error(
                    error_response(scope_protocol(scope), to_http_error(error)), send
                )
            except Exception as error:  # a bug, which must not affect other requests
                await self._send_error(fault_response(scope, error), send)
            await send({"type": "http.response.body", "body": b""})

    @staticmethod
    async def _send_error(response: Response, send: Send) -> None:
        event = b"data: " + bytes(response.body) + b"\n\n"
        await send({"type": "http.response.body", "body": event, "more_body": True})


async def event_stream(events: AsyncGenerator[bytes]) -> Response:
    """Return the response of events; an error before the first one is raised."""
    return EventStream(await anext(events), events)
