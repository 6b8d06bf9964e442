"""Measure how texts of different lengths can share a batch of a graph.

The outputs of a text must not depend on the other texts of its batch. The settings of a tokenizer
do not ensure that: a classifier of GPT-2 reads the last token that is not the padding token of
config.json, and its positions count padding on the left; one of RoBERTa reads the first position;
ConvBERT's convolutions read padded positions. So texts run alone and in a batch, which is padded in
one way after the other until the outputs are the same. The result is in the manifest, and
everything that pads texts follows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.manifest import GraphRecord, PaddingRecord
from enginery.core.errors import ArtifactError
from enginery.core.model.feeds import FeedLimits
from enginery.core.model.files import SpecialTokens
from enginery.core.model.random_numbers import is_random_input
from enginery.core.shapes import TensorSpec
from enginery.runtime.text.batching import fill_rows
from enginery.runtime.text.tokenizer import (
    EQUAL_LENGTHS,
    TextTokenizer,
    TokenIds,
    fixed_sequence,
)
from enginery.runtime.text.tokenizer_files import special_token_id

_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "position_ids"})
_LENGTHS = (13, 4, 1, 7)
"""Tokens of the texts, besides special tokens."""
_TOLERANCE = {"fp32": 1e-3, "fp16": 3e-2}
"""Largest difference between a text alone and in a batch, as a share of its largest output.
Rounding makes 1e-6 of it in FP32; a model that reads padding makes more than a hundredth."""

Side = Literal["left", "right"]


@dataclass(frozen=True)
class GraphSession:
    """A graph that ONNX Runtime has loaded."""

    session: Any
    record: GraphRecord
    precision: str
    """fp32 or fp16."""

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the outputs in the order of the record."""
        outputs: list[NDArray[Any]] = self.session.run(
            [spec.name for spec in self.record.outputs], dict(feeds)
        )
        return outputs


def measure_padding(
    graph: GraphSession, directory: Path, limits: FeedLimits
) -> tuple[PaddingRecord | None, list[str]]:
    """Return how a graph's texts are padded, and notes; None if it takes no texts to pad.

    Args:
        graph: the graph, with its final record.
        directory: directory with the model's tokenizer.
        limits: limits on its inputs.
    """
    inputs = graph.record.inputs
    if not _takes_padded_texts(inputs):
        return None, []
    try:
        tokenizer = TextTokenizer.open(directory)
    except ArtifactError:  # no tokenizer, or one that cannot be read: clients send tensors
        return None, []
    texts = _random_texts(tokenizer, limits)
    if tokenizer.pad_id is None or len(set(map(len, texts))) < 2:
        return None, []
    own_id = special_token_id(tokenizer.backend, tokenizer.special.pad_token)
    candidates = _candidates(tokenizer, own_id)
    for padding in candidates:
        padded = tokenizer.for_graph(graph.record.model_copy(update={"padding": padding}))
        try:
            deviation = _deviation(graph, padded, texts)
        except _NotComparableError:
            return None, []
        if deviation <= _TOLERANCE[graph.precision]:
            return padding, _notes(padding, candidates[0])
    return PaddingRecord(side="none"), [EQUAL_LENGTHS]


def _takes_padded_texts(inputs: Sequence[TensorSpec]) -> bool:
    """Return True if all inputs are (batch, sequence) of tokens, with a mask."""
    names = {spec.name for spec in inputs}
    return (
        {"input_ids", "attention_mask"} <= names <= _INPUTS
        and all(len(spec.dims) == 2 for spec in inputs)
        and fixed_sequence(inputs) is None
        and not any(is_random_input(name) for name in names)
    )


def _candidates(tokenizer: TextTokenizer, own_id: int | None) -> list[PaddingRecord]:
    """Return ways to pad: on the tokenizer's side and with config.json's token first."""
    sides: list[Side] = ["left", "right"] if tokenizer.pad_left else ["right", "left"]
    ids = dict.fromkeys([tokenizer.pad_id, own_id])
    return [
        PaddingRecord(side=side, token_id=token_id)
        for token_id, side in product(ids, sides)
        if token_id is not None
    ]


def _notes(padding: PaddingRecord, first: PaddingRecord) -> list[str]:
    if padding == first:
        return []
    return [
        f"texts are padded on the {padding.side} with the token {padding.token_id}: padded on the "
        f"{first.side} with {first.token_id}, as the model's files say, a text's outputs would "
        "depend on the other texts of its batch"
    ]


def _random_texts(tokenizer: TextTokenizer, limits: FeedLimits) -> list[TokenIds]:
    """Return texts of different lengths, of tokens that are not special; nothing if all are."""
    backend = tokenizer.backend
    roles = [getattr(tokenizer.special, role) for role in SpecialTokens.model_fields]
    added = backend.get_added_tokens_decoder().items()
    excluded = [limits.pad_token_id, tokenizer.pad_id or 0, *limits.special_ids]
    excluded += [token_id for token_id, token in added if token.special]
    excluded += [i for i in map(backend.token_to_id, filter(None, roles)) if i is not None]
    size = min(limits.vocab_size, tokenizer.vocabulary_size)
    plain = np.setdiff1d(np.arange(size), excluded)
    if not plain.size:
        return []
    generator = np.random.default_rng(0)
    return [tokenizer.encode_ids(generator.choice(plain, n).tolist()) for n in _LENGTHS]


class _NotComparableError(Exception):
    """A graph does not run on one text alone, or has no output with a row for each text."""


def _deviation(graph: GraphSession, tokenizer: TextTokenizer, texts: Sequence[TokenIds]) -> float:
    """Return the largest difference of a text's outputs alone and in a batch of all texts.

    Infinity if the graph rejects the batch.
    """
    rows = next((d for s in graph.record.inputs for d in s.dims[:1] if isinstance(d, int)), 0)
    texts = texts[: rows or len(texts)]

    def run(encodings: Sequence[TokenIds]) -> list[NDArray[Any]]:
        feeds = tokenizer.feeds(encodings, graph.record.inputs)
        return graph.run(fill_rows(feeds, rows or len(encodings)))

    try:
        alone = [run([text]) for text in texts]
    except Exception as error:  # a graph may fail in any way
        raise _NotComparableError from error
    try:
        together = run(texts)
    except Exception:  # as above: the positions of RoBERTa end, for example
        return float("inf")
    width = max(map(len, texts))
    differences: list[float] = []
    for index, text in enumerate(texts):
        for padded, single in zip(together, alone[index], strict=True):
            if padded.ndim and single.ndim and len(padded) >= len(texts):
                difference = _difference(padded[index], single[0], len(text), width, tokenizer)
                differences += [] if difference is None else [difference]
    if not differences:
        raise _NotComparableError
    return max(differences)


def _difference(
    padded: NDArray[Any], single: NDArray[Any], tokens: int, width: int, tokenizer: TextTokenizer
) -> float | None:
    """Return the difference of one text's output to that alone, as a share of the largest number.

    None if the output is not of numbers, or has axes of unknown size.
    """
    if single.dtype.kind != "f":
        return None
    for axis, (size, wide) in enumerate(zip(single.shape, padded.shape, strict=True)):
        if size == wide:
            continue
        if (size, wide) != (tokens, width):
            return None
        start = width - tokens if tokenizer.pad_left else 0
        padded = padded.take(range(start, start + tokens), axis=axis)
    wide_single, wide_padded = single.astype(np.float64), padded.astype(np.float64)
    finite = np.isfinite(wide_single)
    if not np.array_equal(finite, np.isfinite(wide_padded)):
        return float("inf")
    largest = np.abs(wide_single[finite]).max(initial=0.0)
    difference = np.abs(wide_single[finite] - wide_padded[finite]).max(initial=0.0)
    return float(difference / largest) if difference else 0.0
