"""Tokens of texts, and texts of tokens, as text-embeddings-inference gives them.

    $ curl -d '{"inputs": "warm"}' localhost:8000/tokenize
    [[{"id":101,"text":"[CLS]","special":true,"start":null,"stop":null},…]]

Texts are not cut here. `start` and `stop` count bytes of UTF-8, as they do there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from enginery.runtime.tokenizer import TextTokenizer
from enginery.serve.call import Call
from enginery.serve.messages import Response
from enginery.serve.reading import EmptyInputError, FieldError
from enginery.serve.refusals import InvalidInputError, TooLargeError
from enginery.serve.rooms import HostedModel
from enginery.serve.routes.tei import model_of

_QUICK_SIZE = 2048
"""Letters or token ids that should take about a millisecond."""


async def tokenize(call: Call) -> Response:
    """POST /tokenize: the tokens of texts, not cut, with their places in bytes of UTF-8."""
    body = call.json()
    model = call.take(model_of(call, body, _has_tokens))
    texts = body.texts("inputs")
    special = bool(body.flag("add_special_tokens", True))
    if body.string("prompt_name"):
        raise FieldError(
            "prompt_name: prompts are for /embed, expected none.",
            field="prompt_name",
            do="Put the prompt before the text.",
        )
    _check_count(call, len(texts))
    tokenizer = _tokenizer(model)
    if tokenizer.lower_case:  # as the model gets them
        texts = [text.lower() for text in texts]

    def tokens() -> list[list[dict[str, Any]]]:
        encodings = tokenizer.encode_whole(texts, special=special)
        return [_tokens(text, encoding) for text, encoding in zip(texts, encodings, strict=True)]

    quick = sum(map(len, texts)) <= _QUICK_SIZE
    return Response.of_json(await model.read(len(texts), lambda _: tokens(), quick=quick))


async def decode(call: Call) -> Response:
    """POST /decode: token ids as texts."""
    body = call.json()
    model = call.take(model_of(call, body, _has_tokens))
    tokenizer = _tokenizer(model)
    vocabulary = tokenizer.texts.get_vocab_size()
    ids = body.need("ids", "a list of token ids, or a list of those")
    if type(ids) is not list:
        raise body.wrong("ids", "a list of token ids, or a list of those", ids)
    if not ids:
        raise EmptyInputError("ids is empty, expected one token id or more.", field="ids")
    skip = bool(body.flag("skip_special_tokens", True))
    many = ids if type(ids[0]) is list else [ids]
    for index, row in enumerate(many):
        if type(row) is not list:
            raise body.wrong(f"ids[{index}]", "a list of token ids", row)
        body.ids(f"ids[{index}]" if many is ids else "ids", row, vocabulary)
    _check_count(call, len(many))

    def texts() -> list[str]:
        return [tokenizer.decode(row, skip_special=skip) for row in many]

    quick = sum(map(len, many)) <= _QUICK_SIZE
    return Response.of_json(await model.read(len(many), lambda _: texts(), quick=quick))


def _has_tokens(model: HostedModel) -> bool:
    return model.tokenizer is not None


def _check_count(call: Call, count: int) -> None:
    if count > call.parts.config.max_inputs:
        raise TooLargeError(
            f"found {count} inputs, expected {call.parts.config.max_inputs} at most.",
            do="Send several requests.",
        )


def _tokenizer(model: HostedModel) -> TextTokenizer:
    if model.tokenizer is None:
        raise InvalidInputError(f"model '{model.name}' takes no texts, so it has no tokenizer.")
    return model.tokenizer


def _tokens(text: str, encoding: Any) -> list[dict[str, Any]]:
    places = _byte_places(text)
    tokens = []
    for token_id, token, (start, stop), special in zip(
        encoding.ids, encoding.tokens, encoding.offsets, encoding.special_tokens_mask, strict=True
    ):
        tokens.append({
            "id": token_id,
            "text": token if special else text[start:stop],
            "special": bool(special),
            "start": None if special else places[start],
            "stop": None if special else places[stop],
        })  # fmt: skip
    return tokens


def _byte_places(text: str) -> Sequence[int]:
    """Where each character begins in UTF-8, and the end."""
    if text.isascii():
        return range(len(text) + 1)
    places = [0]
    for letter in text:
        places.append(places[-1] + len(letter.encode()))
    return places
