"""Calibrate a decoder with a cache on texts: each is a prompt, and a step behind it.

feeder = PromptFeeder.open(artifact, record)
feeder.prompt(["The engine is warm"])    # all tokens but the last, and an empty cache
feeder.step(["The engine is warm"])      # the last token, with the cache of the others
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.model.feeds import FeedLimits, Feeds
from enginery.core.shapes import dynamic_dims
from enginery.runtime.decoder_graphs import is_cross_attention, is_past, present_name
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.text.tokenizer import TextTokenizer

_INPUTS = {"input_ids", "attention_mask", "position_ids"}
_MAX_TOKENS = 512


def takes_prompts(record: GraphRecord) -> bool:
    """Return True for a decoder with a cache that attends to no encoder."""
    past = {spec.name for spec in record.inputs if is_past(spec.name)}
    others = {spec.name for spec in record.inputs} - past
    return bool(past) and others <= _INPUTS and not any(map(is_cross_attention, past))


class PromptFeeder:
    """Turn texts into the inputs of prompts and of steps.

    The cache of a step is computed anew each time by the graph itself, so that it takes no memory
    in between.
    """

    def __init__(
        self, record: GraphRecord, tokenizer: TextTokenizer, runner: OrtRunner, longest: int
    ) -> None:
        """Take the graph's record, the tokenizer, the graph in FP32, and the longest text."""
        self._record = record
        self._tokenizer = tokenizer
        self._runner = runner
        self._longest = longest

    @classmethod
    def open(cls, artifact: Artifact, record: GraphRecord) -> PromptFeeder:
        """Load the tokenizer and the graph.

        Raises:
            ArtifactError: the tokenizer or the graph cannot be loaded.
        """
        limit = FeedLimits.from_artifact(artifact).position_limit
        longest = min(limit or _MAX_TOKENS, _MAX_TOKENS)
        runner = OrtRunner(artifact, graph=record.file)
        return cls(record, TextTokenizer.open(artifact.path), runner, longest)

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text."""
        return [len(ids) for ids in self._encode(texts)]

    def prompt(self, texts: Sequence[str]) -> Feeds:
        """Return the inputs of prompts: all tokens but the last.

        Args:
            texts: texts of two tokens or more, all of the same length.
        """
        return self._feeds(np.array(self._encode(texts), np.int64)[:, :-1], {})

    def step(self, texts: Sequence[str]) -> Feeds:
        """Return the inputs of the step behind `prompt`."""
        ids = np.array(self._encode(texts), np.int64)
        names = [spec.name for spec in self._record.inputs if is_past(spec.name)]
        outputs = self._runner(self._feeds(ids[:, :-1], {}))
        return self._feeds(ids, {name: outputs[present_name(name)] for name in names})

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._tokenizer.encode_untruncated(texts, special=True)
        return [encoding.ids[: self._longest] for encoding in encodings]

    def _feeds(self, ids: NDArray[np.int64], past: Feeds) -> Feeds:
        """Return the inputs of the tokens behind a cache; an empty one if none is given."""
        rows, length = ids.shape
        # A cache is (batch, heads, positions, head_dim).
        start = next(iter(past.values())).shape[-2] if past else 0
        text = {
            "input_ids": ids[:, start:],
            "attention_mask": np.ones_like(ids),
            "position_ids": np.broadcast_to(np.arange(start, length), (rows, length - start)),
        }
        # What is not provided is an empty cache: all its dims but the batch are 0.
        sizes = {**dict.fromkeys(dynamic_dims(self._record.inputs), 0), "batch": rows}
        provided = {**text, **past}
        empty = {
            spec.name: np.zeros(spec.shape(sizes))
            for spec in self._record.inputs
            if spec.name not in provided
        }
        arrays = {**provided, **empty}
        return {spec.name: arrays[spec.name].astype(spec.dtype) for spec in self._record.inputs}
