"""POST /predict/{model}: every task by one route.

    $ curl -d '{"inputs": "The pump runs again.", "parameters": {"top_k": 1}}' \
        localhost:8000/predict/mood
    {"model":"mood","outputs":{"labels":[{"label":"glad","score":0.97}]},"truncated":0}

One input has one answer, a list of inputs a list of answers. A body of the type image/png (or any
other image) is one image, with the parameters in the query: `/predict/photos?top_k=3`. A form has
images as files, and the parameters as JSON in a field `parameters`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import orjson

from enginery.serve.call import Call, vocabulary_size
from enginery.serve.messages import Response
from enginery.serve.reading import EmptyInputError, FieldError, JsonObject, json_object
from enginery.serve.refusals import InvalidBodyError, InvalidInputError
from enginery.serve.rooms import HostedModel
from enginery.serve.routes.asking import ask, finish
from enginery.serve.routes.forms import image_from_base64, parse_form
from enginery.serve.routes.schemas import (
    ANYTHING,
    COUNT,
    FREE_OBJECT,
    INFERENCE_STATUSES,
    STRING,
    array,
    either,
    nullable,
    obj,
)
from enginery.serve.routing import Operation, Route, post

_JSON_STARTS = (b"", *(bytes([byte]) for byte in b'{["-0123456789tfn'))


@dataclass(frozen=True)
class Asked:
    """The inputs of a request, and how they came."""

    inputs: list[Any]
    single: bool
    parameters: JsonObject


async def predict(call: Call) -> Response:
    """POST /predict/{model}."""
    model = call.take(call.parts.models.get(call.path_values["model"]))
    if not model.method:
        raise InvalidInputError(
            f"model '{model.name}' was exported for {model.task}, which has no answer in words.",
            do=f"Send it tensors: POST /v2/models/{model.name}/infer.",
        )
    asked = _asked(call, model)
    reply = await ask(model, asked.inputs, asked.parameters)
    values = call.keep(
        reply, inputs=len(asked.inputs), characters=0 if model.takes_images else _letters(asked)
    )
    values = finish(model, values, asked.parameters)
    return Response.of_json({
        "model": model.name,
        "outputs": values[0] if asked.single else values,
        "truncated": reply.timings.truncated,
    })  # fmt: skip


def _asked(call: Call, model: HostedModel) -> Asked:
    call.require_plain_bytes()
    kind, _, _ = call.request.headers.get("content-type", "").partition(";")
    kind = kind.strip().lower()
    if kind == "multipart/form-data" or kind.startswith("image/"):
        if not model.takes_images:
            raise InvalidBodyError(
                f"model '{model.name}' takes texts, found a body of {kind[:60]!r}.",
                do='Send JSON: {"inputs": "a text"}.',
            )
        return _image_body(call) if kind.startswith("image/") else _form(call)
    if model.takes_images and not _may_be_json(call.request.body):
        return _image_body(call)  # curl --data-binary says that a file is a form
    try:
        body = json_object(call.request.body)
    except InvalidBodyError as error:
        if not model.takes_images:
            raise
        raise InvalidBodyError(
            error.message, do="To send an image's file itself: content-type image/png."
        ) from None
    body.only(("inputs", "parameters"))
    inputs, single = _READ[model.method](body, model)
    return Asked(inputs, single, body.object("parameters"))


def _may_be_json(body: bytes) -> bool:
    """Whether the first byte could be that of JSON, which no image begins with."""
    return body[:64].lstrip(b" \t\r\n")[:1] in _JSON_STARTS


def _image_body(call: Call) -> Asked:
    if not call.request.body:
        raise EmptyInputError("the body is empty, expected an image file.", field="inputs")
    return Asked([call.request.body], True, _query(call.request.query))


def _form(call: Call) -> Asked:
    form = parse_form(call.request.headers["content-type"], call.request.body)
    text = form.fields.pop("parameters", b"{}")
    JsonObject(form.fields).only(("parameters",))
    parameters = json_object(text, "parameters.") if text.strip() else JsonObject({})
    if not form.files:
        raise EmptyInputError("the form has no file, expected images.", field="inputs")
    return Asked(form.files, len(form.files) == 1, parameters)


def _query(query: str) -> JsonObject:
    """Parameters of a query; numbers and booleans are read as such."""
    values: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True, max_num_fields=None):
        try:
            values[name] = orjson.loads(text)
        except orjson.JSONDecodeError:
            values[name] = text
    return JsonObject(values)


def _letters(asked: Asked) -> int:
    return sum(sum(map(len, x)) if type(x) is tuple else len(x) for x in asked.inputs)


def _read_embed(body: JsonObject, model: HostedModel) -> tuple[list[Any], bool]:
    inputs = body.texts_or_ids("inputs", vocabulary_size(model))
    given = body.values["inputs"]
    return inputs, type(given) is str or type(given[0]) is int


def _read_texts(body: JsonObject, _: HostedModel) -> tuple[list[Any], bool]:
    return body.texts("inputs"), type(body.values["inputs"]) is str


def _read_pairs(body: JsonObject, _: HostedModel) -> tuple[list[Any], bool]:
    """Texts, pairs [text, text_pair], or {"text": …, "text_pair": …} as transformers has them."""
    return _listed(body, "a text, a pair {text, text_pair}, or a list of them", _pair)


def _read_questions(body: JsonObject, _: HostedModel) -> tuple[list[Any], bool]:
    return _listed(body, "{question, context}, or a list of them", _question)


def _read_images(body: JsonObject, _: HostedModel) -> tuple[list[Any], bool]:
    texts = body.texts("inputs")
    single = type(body.values["inputs"]) is str
    names = ["inputs"] if single else [f"inputs[{i}]" for i in range(len(texts))]
    return [image_from_base64(text, name) for text, name in zip(texts, names, strict=True)], single


_READ = {
    "embed": _read_embed, "classify": _read_pairs, "tag": _read_texts, "answer": _read_questions,
    "fill": _read_texts, "classify_images": _read_images, "embed_images": _read_images,
}  # fmt: skip


def _listed(
    body: JsonObject, expected: str, read: Callable[[JsonObject, str, Any, str], Any]
) -> tuple[list[Any], bool]:
    value = body.need("inputs", expected)
    if type(value) is not list:
        return [read(body, "inputs", value, expected)], True
    if not value:
        raise EmptyInputError("inputs is empty, expected one input or more.", field="inputs")
    return [read(body, f"inputs[{i}]", item, expected) for i, item in enumerate(value)], False


def _pair(body: JsonObject, name: str, value: Any, expected: str) -> Any:
    if type(value) is str:
        return value
    if type(value) is dict:
        fields = JsonObject(value, f"{name}.")
        fields.only(("text", "text_pair"))
        fields.need("text", "a string")
        text, other = fields.string("text"), value.get("text_pair")
        return text if other is None else (text, fields.string("text_pair"))
    return _two_strings(body, name, value, expected)


def _question(body: JsonObject, name: str, value: Any, expected: str) -> Any:
    if type(value) is dict:
        fields = JsonObject(value, f"{name}.")
        fields.only(("question", "context"))
        for field in ("question", "context"):
            fields.need(field, "a string")
        return fields.string("question"), fields.string("context")
    return _two_strings(body, name, value, expected)


def _two_strings(body: JsonObject, name: str, value: Any, expected: str) -> tuple[str, str]:
    if name == "inputs" or type(value) is not list:
        raise body.wrong(name, expected.partition(", or a list")[0] or expected, value)
    if len(value) != 2 or not all(type(text) is str for text in value):
        raise FieldError(f"{name}: found a list of {len(value)}, expected two strings.", field=name)
    return value[0], value[1]


_FORM_OF = {"type": "string", "contentMediaType": "application/octet-stream"}
_PREDICT_ANY = Operation(
    "The answer of a model, whatever its task",
    body={
        **obj({"inputs": either(STRING, FREE_OBJECT, array(ANYTHING, least=1))},
              {"parameters": nullable(FREE_OBJECT)}),
        "additionalProperties": False,
    },
    other_bodies={
        "multipart/form-data": obj({"image": _FORM_OF}, {"parameters": STRING}),
        "image/*": {},
    },
    answer=obj({"model": STRING, "outputs": either(FREE_OBJECT, array(ANYTHING)),
                "truncated": COUNT}),
    statuses=INFERENCE_STATUSES,
)  # fmt: skip


def plain_routes() -> Iterator[Route]:
    """The routes."""
    yield post("plain", "/predict/{model}", predict, _PREDICT_ANY)
