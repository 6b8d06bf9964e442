"""The routes of Hugging Face's text-embeddings-inference, in its shapes.

    $ curl -d '{"inputs": "The engine is warm."}' localhost:8000/embed
    [[0.0123,…]]

Source: docs/openapi.json and router/src/http of text-embeddings-inference 1.9. With several models,
the body's `model` or the path, `/models/{model}/embed`, says which one; where neither does, the
only one answers that is for what the route does. What that server does and
this one refuses: cutting texts on the left. A model of another task is 422 here, 424 there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from enginery.serve.call import Call, vocabulary_size
from enginery.serve.messages import Response
from enginery.serve.reading import EmptyInputError, FieldError, JsonObject
from enginery.serve.refusals import InvalidInputError
from enginery.serve.rooms import HostedModel
from enginery.serve.routes.asking import require_finite
from enginery.serve.routes.vectors import finish_vectors, read_dimensions

Pair = str | tuple[str, str]


def model_of(call: Call, body: JsonObject, fits: Callable[[HostedModel], bool]) -> HostedModel:
    """The model that the path or the body names, or the only one that fits."""
    name = call.path_values.get("model", "")
    if name:
        return call.parts.models.get(name)
    return call.parts.models.only(body.string("model"), fits)


def embeds(model: HostedModel) -> bool:
    """Whether it makes vectors of texts."""
    return model.method == "embed"


def classifies(model: HostedModel) -> bool:
    """Whether it has labels for texts."""
    return model.method == "classify"


def ranks(model: HostedModel) -> bool:
    """Whether it scores pairs with one number."""
    return classifies(model) and _has_one_label(model)


async def embed(call: Call) -> Response:
    """POST /embed: vectors of texts or token ids."""
    body = call.json()
    model = call.take(model_of(call, body, embeds), "embed")
    return await _embed(call, body, model)


async def _embed(call: Call, body: JsonObject, model: HostedModel) -> Response:
    inputs = body.texts_or_ids("inputs", vocabulary_size(model))
    normalize = body.flag("normalize", True)
    dimensions = read_dimensions(body, model)
    reply = await model.embed(
        inputs, prompt_name=body.string("prompt_name"), normalize=normalize,
        truncate=_truncate(body),
    )  # fmt: skip
    letters = sum(map(len, inputs))
    values = call.keep(reply, inputs=len(inputs), characters=letters)
    return Response.of_json(
        finish_vectors(values, normalize=bool(normalize), dimensions=dimensions)
    )


async def similarity(call: Call) -> Response:
    """POST /similarity: cosines of one text and others."""
    body = call.json()
    model = call.take(model_of(call, body, embeds), "embed")
    body.need("inputs", "an object with source_sentence and sentences")
    inputs, options = body.object("inputs"), body.object("parameters")
    inputs.need("source_sentence", "a string")
    sentences = _listed(inputs, "sentences")
    texts = [inputs.string("source_sentence"), *sentences]
    reply = await model.embed(
        texts, prompt_name=options.string("prompt_name"), truncate=_truncate(options)
    )
    values = call.keep(reply, inputs=len(texts), characters=sum(map(len, texts)))
    vectors = np.stack(finish_vectors(values, normalize=True))
    return Response.of_json(vectors[1:] @ vectors[0])


async def predict(call: Call) -> Response:
    """POST /predict: labels of texts or pairs of texts, best first."""
    body = call.json()
    model = call.take(model_of(call, body, classifies), "classify")
    return await _predict(call, body, model)


async def _predict(call: Call, body: JsonObject, model: HostedModel) -> Response:
    inputs, is_single = read_pairs(body)
    raw = body.flag("raw_scores")
    reply = await model.classify(
        inputs, activation="none" if raw else "auto", truncate=_truncate(body)
    )
    values = call.keep(reply, inputs=len(inputs), characters=_letters(inputs))
    require_finite(model, values)
    answers = [
        [{"score": label.score, "label": label.label} for label in value.labels] for value in values
    ]
    return Response.of_json(answers[0] if is_single else answers)


async def rerank(call: Call) -> Response:
    """POST /rerank: texts in the order in which they answer a query, best first."""
    body = call.json()
    model = call.take(model_of(call, body, ranks), "classify")
    return await _rerank(call, body, model)


async def _rerank(call: Call, body: JsonObject, model: HostedModel) -> Response:
    require_one_label(model)
    body.need("query", "a string")
    query, texts = body.string("query"), _listed(body, "texts")
    raw, return_text = body.flag("raw_scores"), body.flag("return_text")
    pairs: list[Pair] = [(query, text) for text in texts]
    reply = await model.classify(
        pairs, activation="none" if raw else "sigmoid", truncate=_truncate(body)
    )
    values = call.keep(reply, inputs=len(pairs), characters=_letters(pairs))
    require_finite(model, values)
    scores = [value.labels[0].score for value in values]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return Response.of_json([
        {"index": index, **({"text": texts[index]} if return_text else {}), "score": scores[index]}
        for index in order
    ])  # fmt: skip


async def root(call: Call) -> Response:
    """POST /: what the only model is for: /embed, /predict, or /rerank for one label."""
    body = call.json()
    model = model_of(call, body, lambda model: embeds(model) or classifies(model))
    call.take(model, "embed", "classify")
    if model.method == "embed":
        return await _embed(call, body, model)
    return await (_rerank if _has_one_label(model) else _predict)(call, body, model)


def read_pairs(body: JsonObject) -> tuple[list[Pair], bool]:
    """The texts of /predict, and whether they are one input.

    "text" and ["text"] and ["text", "its pair"] are one; [["text"], ["text", "its pair"]] several.
    """
    expected = "a string, a pair [string, string], or a list of such lists"
    value = body.need("inputs", expected)
    if type(value) is str:
        return [value], True
    if type(value) is not list:
        raise body.wrong("inputs", expected, value)
    if not value:
        raise EmptyInputError("inputs is empty, expected one input or more.", field="inputs")
    if type(value[0]) is str:
        return [_pair(body, "inputs", value)], True
    return [_pair(body, f"inputs[{i}]", item) for i, item in enumerate(value)], False


def _pair(body: JsonObject, name: str, value: Any) -> Pair:
    if type(value) is not list or not all(type(text) is str for text in value):
        wrong = value
        if type(value) is list:
            index = next(i for i, text in enumerate(value) if type(text) is not str)
            name, wrong = f"{name}[{index}]", value[index]
            raise body.wrong(name, "a string", wrong)
        raise body.wrong(name, "a list of one or two strings", wrong)
    if len(value) not in (1, 2):
        raise FieldError(
            f"{name}: found a list of {len(value)} strings, expected one or two.",
            field=name,
            do='Several inputs are a list of lists: [["text"], ["text", "its pair"]].',
        )
    return cast("tuple[str, str]", tuple(value)) if len(value) == 2 else cast("str", value[0])


def _listed(body: JsonObject, name: str) -> list[str]:
    value = body.need(name, "a list of strings")
    if type(value) is not list:
        raise body.wrong(name, "a list of strings", value)
    return body.texts(name)


def _truncate(body: JsonObject) -> bool | None:
    """Whether to cut long texts; None for what the server does by itself."""
    direction = body.choice("truncation_direction", ("right", "Right", "left", "Left"), "right")
    if direction.lower() == "left":
        raise FieldError(
            "truncation_direction: found left, expected right.",
            field="truncation_direction",
            do="Cut the text on the left before sending it.",
        )
    return body.flag("truncate", None)


def require_one_label(model: HostedModel) -> None:
    """Raises InvalidInputError unless the model scores pairs with one number."""
    if not _has_one_label(model):
        raise InvalidInputError(
            f"model '{model.name}' has several labels, expected a re-ranker, which has one.",
            do="Send pairs to /predict.",
        )


def _has_one_label(model: HostedModel) -> bool:
    # transformers takes two where config.json does not say.
    return len(model.config.id2label or (0, 1)) == 1


def _letters(inputs: Sequence[Pair]) -> int:
    return sum(len(item) if type(item) is str else len(item[0]) + len(item[1]) for item in inputs)
