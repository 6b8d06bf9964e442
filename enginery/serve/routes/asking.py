"""A model asked for what its task is, with a client's parameters.

>>> reply = await ask(model, ["The pump runs again."], JsonObject({"top_k": 1}))
>>> finish(model, reply.values, JsonObject({}))[0].label
'glad'
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, cast

from enginery.runtime.answers import Classification, ContextAnswer, MaskFillings, TokenSpan
from enginery.runtime.classification import Activation, Aggregation
from enginery.runtime.question_answering import MAX_ANSWER_TOKENS
from enginery.serve.reading import JsonObject
from enginery.serve.refusals import UnavailableError
from enginery.serve.replies import Reply
from enginery.serve.rooms import HostedModel
from enginery.serve.routes.vectors import finish_vectors, read_dimensions

ACTIVATIONS = ("auto", "softmax", "sigmoid", "none")
AGGREGATIONS = ("none", "simple", "first", "average", "max")
MOST_LABELS = 10_000
_VECTORS = ("embed", "embed_images")


def ask(model: HostedModel, inputs: Sequence[Any], parameters: JsonObject) -> Awaitable[Reply]:
    """Asks the model what its task says.

    Args:
        model: one whose `method` is not empty.
        inputs: what that method takes.
        parameters: the client's.

    Raises:
        FieldError: a parameter is unknown for the task, or has a wrong value.
    """
    parameters.only(PARAMETERS[model.method])
    if model.method in _VECTORS:  # read again by `finish`; wrong before the model has run
        parameters.flag("normalize")
        read_dimensions(parameters, model)
    return _ASK[model.method](model, list(inputs), parameters)


def finish(model: HostedModel, values: Sequence[Any], parameters: JsonObject) -> Sequence[Any]:
    """The values of a reply as the parameters want them: vectors cut and normalized.

    Raises:
        FieldError: the vectors have fewer numbers than are wanted.
        UnavailableError: a vector or a score is NaN or infinite.
    """
    if model.method not in _VECTORS:
        require_finite(model, values)
        return values
    return finish_vectors(
        values,
        normalize=bool(parameters.flag("normalize")),
        dimensions=read_dimensions(parameters, model),
    )


def require_finite(model: HostedModel, values: Sequence[Any]) -> None:
    """Raises UnavailableError where a score is NaN or infinite, which JSON would make null."""
    scores = _SCORES[model.method]
    if not all(math.isfinite(score) for value in values for score in scores(value)):
        raise UnavailableError(
            "the model's scores are NaN or infinite.",
            do="Its precision cannot hold this input; `enginery validate` says more.",
        )


def _label_scores(value: Classification) -> Iterator[float]:
    return (label.score for label in value.labels)


def _mask_scores(value: MaskFillings) -> Iterator[float]:
    return (filling.score for mask in value.masks for filling in mask)


def _part_scores(value: Sequence[TokenSpan | ContextAnswer]) -> Iterator[float]:
    return (part.score for part in value)


_SCORES: dict[str, Callable[[Any], Iterator[float]]] = {
    "classify": _label_scores, "classify_images": _label_scores, "tag": _part_scores,
    "answer": _part_scores, "fill": _mask_scores,
}  # fmt: skip


def _embed(model: HostedModel, inputs: list[Any], given: JsonObject) -> Awaitable[Reply]:
    return model.embed(
        inputs, prompt_name=given.string("prompt_name"),
        normalize=given.flag("normalize", None), truncate=given.flag("truncate", None),
    )  # fmt: skip


def _classify(model: HostedModel, inputs: list[Any], given: JsonObject) -> Awaitable[Reply]:
    top_k, activation = _top_k(given, 0), _activation(given)
    return model.classify(
        inputs, top_k=top_k, activation=activation, truncate=given.flag("truncate", None)
    )


def _tag(model: HostedModel, inputs: list[Any], given: JsonObject) -> Awaitable[Reply]:
    aggregation = cast("Aggregation", given.choice("aggregation", AGGREGATIONS, "simple"))
    return model.tag(inputs, aggregation=aggregation, truncate=given.flag("truncate", None))


def _answer(model: HostedModel, inputs: list[Any], given: JsonObject) -> Awaitable[Reply]:
    return model.answer(
        inputs,
        top_k=_top_k(given, 1, least=1),
        max_tokens=given.whole("max_tokens", MAX_ANSWER_TOKENS, least=1, most=512),
        allow_none=bool(given.flag("allow_none")),
    )


def _fill(model: HostedModel, inputs: list[Any], given: JsonObject) -> Awaitable[Reply]:
    return model.fill(
        inputs, top_k=_top_k(given, 5, least=1), truncate=given.flag("truncate", None)
    )


def _classify_images(model: HostedModel, inputs: list[Any], given: JsonObject) -> Awaitable[Reply]:
    return model.classify_images(inputs, top_k=_top_k(given, 0), activation=_activation(given))


def _embed_images(model: HostedModel, inputs: list[Any], _: JsonObject) -> Awaitable[Reply]:
    return model.embed_images(inputs)


_ASK: dict[str, Callable[[HostedModel, list[Any], JsonObject], Awaitable[Reply]]] = {
    "embed": _embed, "classify": _classify, "tag": _tag, "answer": _answer, "fill": _fill,
    "classify_images": _classify_images, "embed_images": _embed_images,
}  # fmt: skip

PARAMETERS: dict[str, tuple[str, ...]] = {
    "embed": ("prompt_name", "truncate", "normalize", "dimensions"),
    "classify": ("top_k", "activation", "truncate"),
    "tag": ("aggregation", "truncate"),
    "answer": ("top_k", "max_tokens", "allow_none"),
    "fill": ("top_k", "truncate"),
    "classify_images": ("top_k", "activation"),
    "embed_images": ("normalize", "dimensions"),
}
"""What each method can be told."""


def _top_k(given: JsonObject, default: int, *, least: int = 0) -> int:
    return given.whole("top_k", default, least=least, most=MOST_LABELS)


def _activation(given: JsonObject) -> Activation:
    return cast("Activation", given.choice("activation", ACTIVATIONS, "auto"))
