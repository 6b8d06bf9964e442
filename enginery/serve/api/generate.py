"""POST /generate and /generate_stream: generate text, with the options of `TextGenerator`.

    $ curl localhost:8000/generate \
        -d '{"inputs": "The engine", "parameters": {"max_new_tokens": 32}}'
    {"generated_text":" is warm.","details":{"finish_reason":"stop","generated_tokens":4,…}}

One input gets one result, a list of inputs a list; with `num_return_sequences` above 1 each input
has a list of results. /generate_stream takes one input and sends server-sent events, as Hugging
Face's text-generation-inference does: `token.text` is the next piece, and the last event has the
whole text. /predict/{model} answers as /generate does.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from time import perf_counter
from typing import Annotated, Any

import orjson
from pydantic import Field, PlainValidator, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from enginery.core.errors import EngineryError
from enginery.runtime.generation.generator import Generation
from enginery.runtime.tasks.task import ProcessingCost
from enginery.serve.api.endpoints import (
    INFERENCE_STATUSES,
    Routes,
    json_response,
    registry_of,
    require_ready,
)
from enginery.serve.api.errors import (
    error_response,
    fault_response,
    invalid_field,
    scope_protocol,
    to_http_error,
)
from enginery.serve.api.requests import (
    STRING,
    FieldValueError,
    Schema,
    StrictRequestBody,
    any_of,
    array_of,
    file_from_base64,
)
from enginery.serve.batching.scheduler import Timings
from enginery.serve.generation.jobs import GenerationJob, GenerationPlan, Progress
from enginery.serve.models.registry import ModelRegistry
from enginery.serve.models.served_model import ServedModel

routes = Routes("plain")

_MEDIUM_CHARACTERS = 2048
"""Number of characters that take about a millisecond to tokenize."""

Parameters = Annotated[
    dict[str, Any] | None, Field(description="an object with options of generation")
]


def _texts(value: Any) -> tuple[list[str], bool]:
    """Return the texts, and True if there is a single text instead of a list."""
    if isinstance(value, str):
        return [value], True
    if not isinstance(value, list):
        raise FieldValueError(value, "a string or a list of strings")
    if not value:
        raise FieldValueError(value, "one input or more", is_empty=True)
    for index, text in enumerate(value):
        if not isinstance(text, str):
            raise FieldValueError(text, "a string", f"[{index}]")
    return value, False


class GenerateRequest(StrictRequestBody):
    """Body of /generate."""

    inputs: Annotated[
        Any,
        PlainValidator(_texts),
        WithJsonSchema(any_of(STRING, array_of(STRING, 1))),
        Field(description="a string or a list of strings"),
    ]
    parameters: Parameters = None
    model: str | None = None


class Details(Schema):
    """How a text ended."""

    finish_reason: str
    """`stop` after an end token or a stop string, `length` at the largest length."""
    generated_tokens: int
    prompt_tokens: int
    score: float | None
    """Of beam search."""


class Generated(Schema):
    """One result."""

    generated_text: str
    details: Details


@routes.post(
    "/generate",
    "/generate/{model}",
    summary="Generate text",
    body=GenerateRequest,
    response=Generated | list[Generated | list[Generated]],
    statuses=INFERENCE_STATUSES,
    runs_model=True,
)
async def generate(request: Request, body: GenerateRequest) -> Response:
    """Answer POST /generate: the texts for one input or for a list of them."""
    model, plan = select_generator(request, body.model)
    texts, single = body.inputs
    inputs = read_files(plan, texts)
    results = await generate_texts(request, model, plan, inputs, body.parameters or {})
    return json_response(results[0] if single else results)


@routes.post(
    "/generate_stream",
    "/generate_stream/{model}",
    summary="Generate text, sent piece by piece",
    body=GenerateRequest,
    response=str,
    response_types=("text/event-stream",),
    statuses=INFERENCE_STATUSES,
    runs_model=True,
)
async def generate_stream(request: Request, body: GenerateRequest) -> Response:
    """Answer POST /generate_stream: the text for one input as server-sent events."""
    model, plan = select_generator(request, body.model)
    inputs, parameters = read_files(plan, body.inputs[0]), body.parameters or {}
    if len(inputs) != 1:
        raise invalid_field(
            f"inputs: found {len(inputs)}, expected one for a stream.",
            field="inputs",
            do="Send a request for each, or send them to /generate.",
        )
    _, options = plan.read_options(parameters)
    if options.num_return_sequences > 1:
        raise invalid_field(
            f"parameters.num_return_sequences: found {options.num_return_sequences}, expected 1 "
            "for a stream.",
            field="parameters.num_return_sequences",
        )
    prepare = partial(plan.jobs, inputs, parameters, streams=True)
    steps = run_generation(request, model, prepare, inputs)

    async def events() -> AsyncGenerator[bytes]:
        index = 0
        async with aclosing(steps):
            async for step in steps:
                last = bool(step.results)
                text = "".join(piece for _, piece in step.pieces)
                if not text and not last:
                    continue
                result: dict[str, Any] = {"generated_text": None, "details": None}
                if last:
                    result = _describe(step.results[0], step.prompt_tokens)
                yield sent_event({"index": index, "token": {"text": text}, **result})
                index += 1

    return await event_stream(events())


def select_generator(request: Request, name: str | None) -> tuple[ServedModel, GenerationPlan]:
    """Return the model that the path or body names, or the only one that generates text.

    Raises:
        UnknownModelError: no model has this name.
        ModelChoiceError: the request names no model, and not exactly one generates text.
        UnavailableError: the model is not ready.
        HTTPError: the model was exported for another task.
    """
    registry: ModelRegistry = registry_of(request)
    named = request.path_params.get("model") or name or ""
    model = registry.select(named, lambda model: model.plan is not None)
    return model, require_generator(request, model)


def require_generator(request: Request, model: ServedModel) -> GenerationPlan:
    """Return how a model's requests are prepared.

    Raises:
        UnavailableError: the model is not ready.
        HTTPError: the model was exported for another task.
    """
    plan = require_ready(request, model).plan
    if plan is not None:
        return plan
    task = model.task
    raise invalid_field(
        f"model '{model.name}' was exported for {model.artifact.manifest.task}, expected a model "
        "that generates text.",
        field="model",
        do=f"It {task.purpose}: POST /predict/{model.name}."
        if task
        else f"Send tensors: POST /v2/models/{model.name}/infer.",
    )


def read_files(plan: GenerationPlan, inputs: Sequence[str]) -> list[Any]:
    """Return texts as they are, and images from base64.

    Raises:
        HTTPError: an input is not an image in base64.
    """
    if plan.modality == "text":
        return list(inputs)
    return [
        file_from_base64(text, f"inputs[{index}]", plan.modality)
        for index, text in enumerate(inputs)
    ]


async def generate_texts(
    request: Request,
    model: ServedModel,
    plan: GenerationPlan,
    inputs: Sequence[Any],
    parameters: Mapping[str, Any],
) -> list[Any]:
    """Generate the texts of inputs.

    Args:
        request: the request.
        model: the model.
        plan: how its requests are prepared.
        inputs: texts, or contents of image files.
        parameters: the options by name.

    Returns:
        A result for each input, or a list of `num_return_sequences` results.
    """
    prepare = partial(plan.jobs, inputs, parameters)
    results: list[Any] = [None] * len(inputs)
    async with aclosing(run_generation(request, model, prepare, inputs)) as steps:
        async for step in steps:
            if step.results:
                described = [
                    _describe(generation, step.prompt_tokens) for generation in step.results
                ]
                results[step.index] = described[0] if len(described) == 1 else described
    return results


async def run_generation(
    request: Request,
    model: ServedModel,
    prepare: Callable[[], list[GenerationJob]],
    inputs: Sequence[Any],
) -> AsyncGenerator[Progress]:
    """Yield the progress of each step, and add timings and counts to the request's record.

    Args:
        request: the request.
        model: the model, which must be ready.
        prepare: prepares the inputs; called in a thread.
        inputs: the inputs, for their number and size.
    """
    record, timings = request.scope["state"]["record"], Timings()
    texts = [item for item in inputs if isinstance(item, str)]
    record.characters = sum(map(len, texts))
    record.compute_type = "cpu" if model.backend.on_cpu else "gpu"
    short = len(texts) == len(inputs) and record.characters <= _MEDIUM_CHARACTERS
    cost: ProcessingCost = "medium" if short else "heavy"
    tokens: dict[int, int] = {}
    steps = model.generate(prepare, timings, inputs=len(inputs), cost=cost)
    async with aclosing(steps):
        async for step in steps:
            record.timings, record.inputs = timings, len(inputs)
            record.first_token_at = record.first_token_at or perf_counter()
            tokens[step.index] = step.tokens
            record.generated = sum(tokens.values())
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


def _describe(generation: Generation, prompt_tokens: int) -> dict[str, Any]:
    return {
        "generated_text": generation.text,
        "details": {
            "finish_reason": generation.finish,
            "generated_tokens": len(generation.tokens),
            "prompt_tokens": prompt_tokens,
            "score": generation.score,
        },
    }
