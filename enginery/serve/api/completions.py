"""OpenAI-compatible routes that generate text: completions and chat.

    client = openai.OpenAI(base_url="http://localhost:8000/v1", api_key="none")
    client.completions.create(model="gpt2", prompt="The engine", max_tokens=32).choices[0].text
    for chunk in client.chat.completions.create(model=…, messages=[…], stream=True): …

Source: platform.openai.com/docs/api-reference/completions and /chat. What a request leaves out is
as in the model's generation_config.json; a temperature of 0 means greedy search. For translation
models the prompt is the text to translate, and `source_language` and `target_language` name the
languages. A field that would change the text and is not supported is an error.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, cast

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from enginery.runtime.tasks.generate import Generate
from enginery.runtime.tasks.task import describe_value
from enginery.serve.api.endpoints import (
    Routes,
    has_task,
    json_response,
    registry_of,
    require_task,
)
from enginery.serve.api.errors import invalid_field
from enginery.serve.api.generate import (
    StreamedRequest,
    event_stream,
    run_stream,
    sent_event,
)
from enginery.serve.api.openai import find_model
from enginery.serve.api.requests import RequestBody, Schema, Texts, invalid_value
from enginery.serve.models.served_model import ServedModel

routes = Routes("openai")

STATUSES = (400, 404, 413, 429, 503)

_DEFAULT_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""
_GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this count as 0: logits divided by them would overflow."""
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
"""Fields that are not supported, with the values that ask for nothing."""


class StreamOptions(RequestBody):
    """Options of a stream."""

    include_usage: bool | None = None


class SamplingRequest(RequestBody):
    """The fields that completions and chat have in common."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[str | list[str] | None, Field(description="a string or a list of strings")] = (
        None
    )
    seed: Annotated[int, Field(ge=0)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    best_of: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    logprobs: Any = None
    presence_penalty: Any = None


class CompletionRequest(SamplingRequest):
    """Body of /v1/completions."""

    prompt: Texts
    echo: bool | None = None
    suffix: Any = None
    source_language: str | None = None
    target_language: str | None = None


class ChatMessage(RequestBody):
    """A message of a conversation; content is a text, or a list of parts of the type `text`."""

    role: str
    content: Annotated[
        str | list[dict[str, Any]] | None,
        Field(description="a string or a list of parts of the type text"),
    ] = None


class ChatRequest(SamplingRequest):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, description="a list of messages")]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    function_call: Any = None
    functions: Any = None
    response_format: Any = None
    tool_choice: Any = None
    tools: Any = None
    top_logprobs: Any = None


class CompletionUsage(Schema):
    """Number of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(Schema):
    """One text."""

    index: int
    text: str
    logprobs: None
    finish_reason: Literal["stop", "length"] | None


class CompletionResponse(Schema):
    """Response of /v1/completions, and each event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage | None


class AnswerMessage(Schema):
    """The answer of the model."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Schema):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: None
    finish_reason: Literal["stop", "length"]


class ChatResponse(Schema):
    """Response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage


@dataclass(frozen=True)
class _Answer:
    """How the texts of a request are sent."""

    request: Request
    streamed: StreamedRequest
    count: int
    """Number of texts of each input."""
    head: Mapping[str, Any]
    """`id`, `created` and `model` of the response and each event."""

    @property
    def usage(self) -> dict[str, int]:
        """The numbers of tokens so far."""
        record = self.request.scope["state"]["record"]
        prompt_tokens, generated = record.timings.tokens, record.generated
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": prompt_tokens + generated,
        }

    async def texts(self) -> list[tuple[str, str]]:
        """Return the texts, each with the reason of its end."""
        results: list[tuple[str, str]] = [("", "")] * (len(self.streamed.inputs) * self.count)
        steps = run_stream(self.request, self.streamed)
        async with aclosing(steps):
            async for step in steps:
                for position, generation in enumerate(step.results):
                    results[step.index * self.count + position] = (
                        generation.text,
                        generation.finish,
                    )
        return results

    async def events(
        self,
        first: Callable[[int], Mapping[str, Any]],
        piece: Callable[[int, str, str | None], Sequence[Mapping[str, Any]]],
        *,
        with_usage: bool,
    ) -> AsyncGenerator[bytes]:
        """Yield the events of a stream.

        Args:
            first: returns the choice that a text with this index begins with.
            piece: returns the choices for an index, a piece, and the reason of the end or None.
            with_usage: send the numbers of tokens before the end.
        """
        usage: dict[str, Any] = {"usage": None} if with_usage else {}
        begun: set[int] = set()
        steps = run_stream(self.request, self.streamed)
        async with aclosing(steps):
            async for step in steps:
                for position in range(self.count):
                    index = step.index * self.count + position
                    if index not in begun:
                        begun.add(index)
                        if choice := first(index):
                            yield sent_event({**self.head, "choices": [choice], **usage})
                for position, text in step.pieces:
                    finish = step.results[position].finish if step.results else None
                    for choice in piece(step.index * self.count + position, text, finish):
                        yield sent_event({**self.head, "choices": [choice], **usage})
        if with_usage:
            yield sent_event({**self.head, "choices": [], "usage": self.usage})
        yield b"data: [DONE]\n\n"


@routes.post(
    "/v1/completions",
    summary="Continue prompts; translate or summarize texts",
    body=CompletionRequest,
    response=CompletionResponse,
    response_types=("application/json", "text/event-stream"),
    statuses=STATUSES,
    runs_model=True,
)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Answer POST /v1/completions."""
    model, task = _select(request, body)
    if task.modality != "text":
        raise invalid_field(
            f"model '{model.name}' takes images, expected one that takes texts.",
            field="model",
            do="Send images to /generate.",
        )
    if body.echo and task.has_encoder:
        raise invalid_field(
            "echo: found true, but this model does not continue its prompt.", field="echo"
        )
    options = _options(body, task, body.max_tokens)
    if task.has_encoder or body.source_language or body.target_language:
        options |= {
            "source_language": body.source_language,
            "target_language": body.target_language,
        }
    if not (body.max_tokens or task.has_encoder or task.has_own_length):
        options["max_new_tokens"] = _DEFAULT_TOKENS
    stream = bool(body.stream)
    prepare = partial(
        task.preprocess,
        body.prompt,
        task.Options.read(options),
        streams=stream,
        keep_stop=False,
        whole=task.has_encoder,
    )
    streamed = StreamedRequest(model, task, prepare, body.prompt)
    answer = _answer(request, streamed, body, "cmpl", "text_completion")

    def echoed(index: int) -> str:
        return body.prompt[index // answer.count] if body.echo else ""

    def choice(index: int, text: str, finish: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}

    if stream:
        events = answer.events(
            lambda index: choice(index, echoed(index), None) if body.echo else {},
            lambda index, text, finish: [choice(index, text, finish)],
            with_usage=_wants_usage(body),
        )
        return await event_stream(events)
    choices = [
        choice(index, echoed(index) + text, finish)
        for index, (text, finish) in enumerate(await answer.texts())
    ]
    return json_response({**answer.head, "choices": choices, "usage": answer.usage})


@routes.post(
    "/v1/chat/completions",
    summary="Answer the messages of a conversation",
    body=ChatRequest,
    response=ChatResponse,
    response_types=("application/json", "text/event-stream"),
    statuses=STATUSES,
    runs_model=True,
)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answer POST /v1/chat/completions."""
    model, task = _select(request, body)
    messages = [
        {"role": message.role, "content": _content(message, position)}
        for position, message in enumerate(body.messages)
    ]
    if body.max_tokens and body.max_completion_tokens not in (None, body.max_tokens):
        raise invalid_field(
            f"max_tokens is {body.max_tokens} and max_completion_tokens is "
            f"{body.max_completion_tokens}, expected one of them.",
            field="max_completion_tokens",
        )
    options = _options(body, task, body.max_completion_tokens or body.max_tokens)
    stream = bool(body.stream)
    prepare = partial(task.preprocess_chat, messages, task.Options.read(options), streams=stream)
    text = "".join(message["content"] for message in messages)
    kind = "chat.completion.chunk" if stream else "chat.completion"
    streamed = StreamedRequest(model, task, prepare, [text])
    answer = _answer(request, streamed, body, "chatcmpl", kind)

    def change(index: int, delta: Mapping[str, Any], finish: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}

    def pieces(index: int, text: str, finish: str | None) -> list[dict[str, Any]]:
        deltas = [change(index, {"content": text}, None)] if text else []
        return [*deltas, change(index, {}, finish)] if finish else deltas

    if stream:
        events = answer.events(
            lambda index: change(index, {"role": "assistant", "content": ""}, None),
            pieces,
            with_usage=_wants_usage(body),
        )
        return await event_stream(events)
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": finish,
        }
        for index, (text, finish) in enumerate(await answer.texts())
    ]
    return json_response({**answer.head, "choices": choices, "usage": answer.usage})


def _select(request: Request, body: SamplingRequest) -> tuple[ServedModel, Generate]:
    """Return the model of a request, whose fields are all supported, and its task."""
    model = find_model(
        registry_of(request),
        body.model or "",
        fits=lambda model: has_task(model, (Generate.verb,)),
    )
    task = cast("Generate", require_task(request, model, Generate.verb))
    for name, harmless in _UNSUPPORTED.items():
        value = getattr(body, name, None)
        if value is not None and not any(
            value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
            for allowed in harmless
        ):
            raise invalid_field(
                f"{name}: found {describe_value(value)}, which is not supported.",
                field=name,
                do="Leave it out.",
            )
    return model, task


def _options(body: SamplingRequest, task: Generate, max_tokens: int | None) -> dict[str, Any]:
    """Return the options of generation by name; None for the model's own."""
    options: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "stop_strings": body.stop or None,
        "seed": body.seed,
        "top_p": body.top_p,
        "num_return_sequences": body.n or 1,
    }
    if body.temperature is not None:
        options |= {"do_sample": body.temperature >= _GREEDY_TEMPERATURE, "num_beams": 1}
        options["temperature"] = body.temperature if options["do_sample"] else None
    elif body.top_p is not None and body.top_p < 1:
        options |= {"do_sample": True, "num_beams": 1}
    defaults = task.defaults
    draws = options.get("do_sample", defaults.do_sample)
    if (body.n or 1) > 1 and not draws and options.get("num_beams", defaults.num_beams) == 1:
        raise invalid_field(
            f"n is {body.n}, but greedy search has one text.",
            field="n",
            do="Set a temperature above 0.",
        )
    if max_tokens is not None and max_tokens > task.limits.max_new_tokens:
        raise invalid_field(
            f"max_tokens is {max_tokens}, expected at most {task.limits.max_new_tokens}.",
            field="max_tokens",
        )
    return options


def _answer(
    request: Request, streamed: StreamedRequest, body: SamplingRequest, prefix: str, kind: str
) -> _Answer:
    record = request.scope["state"]["record"]
    head = {
        "id": f"{prefix}-{record.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": streamed.model.name,
    }
    return _Answer(request, streamed, body.n or 1, head)


def _wants_usage(body: SamplingRequest) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _content(message: ChatMessage, position: int) -> str:
    """Return the text of a message."""
    if not isinstance(message.content, list):
        return message.content or ""
    texts = []
    for index, part in enumerate(message.content):
        text = part.get("text")
        if part.get("type") != "text" or not isinstance(text, str):
            path = f"messages[{position}].content[{index}]"
            raise invalid_value(path, "a part of the type text", part)
        texts.append(text)
    return "".join(texts)
