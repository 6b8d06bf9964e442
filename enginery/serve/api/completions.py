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

from enginery.runtime.generation.options import MAX_BEAMS, MAX_BIASES, MAX_TOP_LOGPROBS
from enginery.runtime.generation.search import TokenLogprob
from enginery.runtime.tasks.generate import Generate
from enginery.serve.api.endpoints import (
    Routes,
    json_response,
    select_model,
)
from enginery.serve.api.errors import invalid_field
from enginery.serve.api.generate import (
    StreamedRequest,
    event_stream,
    run_stream,
    sent_event,
)
from enginery.serve.api.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    Placed,
    TextLogprobs,
    chat_logprobs,
    completion_logprobs,
)
from enginery.serve.api.requests import RequestBody, Schema, Texts, invalid_value, listed
from enginery.serve.models.served_model import ServedModel

routes = Routes("openai")

ToLogprobs = Callable[[Generate, list[Placed]], dict[str, Any]]
"""Describes the tokens of a piece of text in the shape of a route."""

_DEFAULT_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""
_GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this count as 0: logits divided by them would overflow."""
EmptyList = Annotated[list[Any], Field(max_length=0)] | None
"""A list of something that is not supported."""


class StreamOptions(RequestBody):
    """Options of a stream."""

    include_usage: bool | None = None


class ResponseFormat(RequestBody):
    """What a text is: anything, or JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None
    """With the type `json_schema`: an object with the schema as `schema`."""

    def to_option(self) -> dict[str, Any] | None:
        """Return the schema of the text; None for any text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": "object"}
        schema = (self.json_schema or {}).get("schema")
        if not isinstance(schema, dict):
            raise invalid_value("response_format.json_schema.schema", "an object", schema)
        return schema


class SamplingRequest(RequestBody):
    """The fields that completions and chat have in common."""

    unsupported = frozenset(
        {"best_of", "function_call", "functions", "min_p", "suffix", "tool_choice", "tools"}
    )

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_BEAMS)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Not in OpenAI's API, as the next; -1 or 0 for all tokens."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=MAX_BIASES)] | None = None
    """A number for each token id."""
    response_format: ResponseFormat | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=0)] | None = None


class CompletionRequest(SamplingRequest):
    """Body of /v1/completions."""

    prompt: Texts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    suffix: Literal[""] | None = None
    source_language: str | None = None
    target_language: str | None = None


class ChatMessage(RequestBody):
    """A message of a conversation; content is a text, or a list of parts of the type `text`."""

    role: str
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


class ChatRequest(SamplingRequest):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    function_call: Literal["none"] | None = None
    functions: EmptyList = None
    tool_choice: Literal["none", "auto"] | None = None
    tools: EmptyList = None


class CompletionUsage(Schema):
    """Number of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(Schema):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
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
    logprobs: ChatLogprobs | None
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
class _Piece:
    """A piece of a text, or a whole one."""

    index: int
    """The text's place among those of the request."""
    text: str
    finish: str | None
    """Why the text ends with it; None if it goes on."""
    logprobs: dict[str, Any] | None
    """In the shape of the route; None if they are not asked for."""


@dataclass(frozen=True)
class _Answer:
    """How the texts of a request are sent."""

    request: Request
    streamed: StreamedRequest
    count: int
    """Number of texts of each input."""
    head: Mapping[str, Any]
    """`id`, `created` and `model` of the response and each event."""
    to_logprobs: ToLogprobs | None = None
    """Describes the tokens of a piece; None if they are not asked for."""
    has_stops: bool = False
    """True if a stop string may cut a text."""

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

    async def texts(self) -> list[_Piece]:
        """Return the texts."""
        count = len(self.streamed.inputs) * self.count
        results = [_Piece(index, "", "", None) for index in range(count)]
        steps = run_stream(self.request, self.streamed)
        async with aclosing(steps):
            async for step in steps:
                for position, generation in enumerate(step.results):
                    index = step.index * self.count + position
                    text, finish = generation.text, generation.finish
                    logprobs = self._logprobs(self._tokens(), text, generation.logprobs, finish)
                    results[index] = _Piece(index, text, finish, logprobs)
        return results

    async def events(
        self,
        first: Callable[[int], Mapping[str, Any]],
        to_choices: Callable[[_Piece], Sequence[Mapping[str, Any]]],
        *,
        with_usage: bool,
    ) -> AsyncGenerator[bytes]:
        """Yield the events of a stream.

        Args:
            first: returns the choice that a text with this index begins with.
            to_choices: returns the choices for a piece.
            with_usage: send the numbers of tokens before the end.
        """
        usage: dict[str, Any] = {"usage": None} if with_usage else {}
        begun: dict[int, TextLogprobs | None] = {}
        steps = run_stream(self.request, self.streamed)
        async with aclosing(steps):
            async for step in steps:
                for position in range(self.count):
                    index = step.index * self.count + position
                    if index not in begun:
                        begun[index] = self._tokens()
                        if choice := first(index):
                            yield sent_event({**self.head, "choices": [choice], **usage})
                for position, text in step.pieces:
                    index = step.index * self.count + position
                    finish = step.results[position].finish if step.results else None
                    entries = step.logprobs[position] if step.logprobs else ()
                    logprobs = self._logprobs(begun[index], text, entries, finish)
                    for choice in to_choices(_Piece(index, text, finish, logprobs)):
                        yield sent_event({**self.head, "choices": [choice], **usage})
        if with_usage:
            yield sent_event({**self.head, "choices": [], "usage": self.usage})
        yield b"data: [DONE]\n\n"

    def _tokens(self) -> TextLogprobs | None:
        """Return what gives out the tokens of a text; None if they are not asked for."""
        if self.to_logprobs is None:
            return None
        return TextLogprobs(self.streamed.task, has_stops=self.has_stops)

    def _logprobs(
        self,
        tokens: TextLogprobs | None,
        text: str,
        entries: Sequence[TokenLogprob],
        finish: str | None,
    ) -> dict[str, Any] | None:
        """Return the tokens of a piece, in the shape of the route."""
        if tokens is None or self.to_logprobs is None:
            return None
        placed = tokens.take(text, entries, is_last=finish is not None)
        return self.to_logprobs(self.streamed.task, placed)


@routes.post(
    "/v1/completions",
    summary="Continue prompts; translate or summarize texts",
    body=CompletionRequest,
    response=CompletionResponse,
    response_types=("application/json", "text/event-stream"),
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
    if body.echo and body.logprobs is not None:
        raise invalid_field(
            "logprobs: the tokens of a prompt have none here, and echo asks for its text.",
            field="logprobs",
            do="Leave out echo.",
        )
    options = _options(body, task, body.max_tokens) | {"top_logprobs": body.logprobs}
    if task.has_encoder or body.source_language or body.target_language:
        options |= {
            "source_language": body.source_language,
            "target_language": body.target_language,
        }
    if not (body.max_tokens or task.has_encoder or task.has_own_length):
        options["max_new_tokens"] = _DEFAULT_TOKENS
    stream, prompts = bool(body.stream), listed(body.prompt)
    prepare = partial(
        task.preprocess,
        prompts,
        task.Options.read(options),
        streams=stream,
        keep_stop=False,
        whole=task.has_encoder,
    )
    streamed = StreamedRequest(model, task, prepare, prompts)
    to_logprobs = None if body.logprobs is None else completion_logprobs
    answer = _answer(request, streamed, body, ("cmpl", "text_completion"), to_logprobs)

    def echoed(index: int) -> str:
        return prompts[index // answer.count] if body.echo else ""

    def choice(piece: _Piece, before: str = "") -> dict[str, Any]:
        return {
            "index": piece.index,
            "text": before + piece.text,
            "logprobs": piece.logprobs,
            "finish_reason": piece.finish,
        }

    if stream:
        events = answer.events(
            lambda index: choice(_Piece(index, echoed(index), None, None)) if body.echo else {},
            lambda piece: [choice(piece)],
            with_usage=_wants_usage(body),
        )
        return await event_stream(events)
    choices = [choice(piece, echoed(piece.index)) for piece in await answer.texts()]
    return json_response({**answer.head, "choices": choices, "usage": answer.usage})


@routes.post(
    "/v1/chat/completions",
    summary="Answer the messages of a conversation",
    body=ChatRequest,
    response=ChatResponse,
    response_types=("application/json", "text/event-stream"),
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
    if body.top_logprobs and not body.logprobs:
        raise invalid_field(
            f"top_logprobs is {body.top_logprobs}, but logprobs is not true.",
            field="top_logprobs",
            do="Set logprobs to true.",
        )
    options = _options(body, task, body.max_completion_tokens or body.max_tokens)
    if body.logprobs:
        options["top_logprobs"] = body.top_logprobs or 0
    stream = bool(body.stream)
    prepare = partial(task.preprocess_chat, messages, task.Options.read(options), streams=stream)
    text = "".join(message["content"] for message in messages)
    kind = "chat.completion.chunk" if stream else "chat.completion"
    streamed = StreamedRequest(model, task, prepare, [text])
    to_logprobs = chat_logprobs if body.logprobs else None
    answer = _answer(request, streamed, body, ("chatcmpl", kind), to_logprobs)

    def change(
        index: int,
        delta: Mapping[str, Any],
        finish: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def changes(piece: _Piece) -> list[dict[str, Any]]:
        index, text = piece.index, piece.text
        deltas = [change(index, {"content": text}, logprobs=piece.logprobs)] if text else []
        if piece.finish:
            deltas.append(change(index, {}, piece.finish, None if text else piece.logprobs))
        return deltas

    if stream:
        events = answer.events(
            lambda index: change(index, {"role": "assistant", "content": ""}),
            changes,
            with_usage=_wants_usage(body),
        )
        return await event_stream(events)
    choices = [
        {
            "index": piece.index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": piece.logprobs,
            "finish_reason": piece.finish,
        }
        for piece in await answer.texts()
    ]
    return json_response({**answer.head, "choices": choices, "usage": answer.usage})


def _select(request: Request, body: SamplingRequest) -> tuple[ServedModel, Generate]:
    """Return the model of a request, and its task."""
    model, task = select_model(request, body.model, Generate.verb)
    return model, cast("Generate", task)


def _options(body: SamplingRequest, task: Generate, max_tokens: int | None) -> dict[str, Any]:
    """Return the options of generation by name; None for the model's own."""
    options: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "stop_strings": body.stop or None,
        "seed": body.seed,
        "top_p": body.top_p,
        "num_return_sequences": body.n or 1,
        "top_k": None if body.top_k is None else max(body.top_k, 0),
        "repetition_penalty": body.repetition_penalty,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "logit_bias": body.logit_bias,
        "json_schema": body.response_format and body.response_format.to_option(),
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
    request: Request,
    streamed: StreamedRequest,
    body: SamplingRequest,
    kinds: tuple[str, str],
    to_logprobs: ToLogprobs | None,
) -> _Answer:
    prefix, kind = kinds
    record = request.scope["state"]["record"]
    head = {
        "id": f"{prefix}-{record.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": streamed.model.name,
    }
    return _Answer(request, streamed, body.n or 1, head, to_logprobs, bool(body.stop))


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
