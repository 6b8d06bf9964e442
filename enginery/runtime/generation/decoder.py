"""Run a decoder step by step, with its cache of keys and values.

    decoder = CachedDecoder(runner)
    state, found = decoder.begin([[5, 6, 7], [8]], Need())
    state, found = decoder.step(state, tokens, parents, Need())

The cache stays in ONNX Runtime's values from one step to the next; nothing of it is copied unless
rows change their places. Prompts of different lengths are padded on the left, so that all rows end
at the same position. A row may continue any row of the step before (`parents`), which reorders,
copies and drops rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import ArtifactError
from enginery.core.shapes import TensorSpec, canonical_dim
from enginery.runtime.decoder_graphs import is_past, present_name
from enginery.runtime.generation.processors import log_softmax
from enginery.runtime.generation.search import Candidates, Need
from enginery.runtime.onnxruntime.runner import OrtRunner

LOGITS = "logits"
_TEXT_INPUTS = ("input_ids", "attention_mask", "position_ids")

Values = dict[str, Any]
"""`onnxruntime.OrtValue` by name."""


@dataclass(frozen=True)
class DecoderState:
    """The rows of a batch between two steps."""

    mask: NDArray[np.int64]
    """(rows, positions): 0 for padding, on the left."""
    cache: Values
    """The graph's past, by the names of its inputs."""


class CachedDecoder:
    """A decoder without encoder, as one graph that takes its own past."""

    def __init__(self, runner: OrtRunner, *, pad_id: int = 0) -> None:
        """Read the names and shapes of the graph.

        Args:
            runner: the graph in ONNX Runtime; the caller closes it.
            pad_id: token of padding.

        Raises:
            ArtifactError: the graph takes no past, or has an input that a decoder has not.
        """
        self._runner = runner
        self._pad_id = pad_id
        record = runner.record
        self._inputs = {spec.name: spec for spec in record.inputs}
        self._past = [spec for spec in record.inputs if is_past(spec.name)]
        outputs = {spec.name for spec in record.outputs}
        unknown = [name for name in self._inputs if not is_past(name) and name not in _TEXT_INPUTS]
        lacking = [s.name for s in self._past if present_name(s.name) not in outputs]
        if not self._past or unknown or lacking or LOGITS not in outputs:
            reason = f"it has the input {unknown[0]}" if unknown else "it has no complete cache"
            raise ArtifactError(
                f"{record.file} does not generate: {reason}.",
                do="Export the model for text-generation-with-past.",
            )

    def begin(
        self, prompts: Sequence[Sequence[int]], need: Need
    ) -> tuple[DecoderState, Candidates]:
        """Run prompts, each in a row.

        Args:
            prompts: one or more tokens each.
            need: what to return of the last position.
        """
        longest = max(map(len, prompts))
        ids = np.full((len(prompts), longest), self._pad_id, np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        cache = {spec.name: _empty(spec, len(prompts)) for spec in self._past}
        return self._run(ids, DecoderState(mask, cache), need)

    def step(
        self,
        state: DecoderState,
        tokens: Sequence[int],
        parents: Sequence[int],
        need: Need,
    ) -> tuple[DecoderState, Candidates]:
        """Run one token in each row.

        Args:
            state: the state after the last step.
            tokens: the token of each row.
            parents: for each row, the one of `state` that it continues.
            need: what to return.
        """
        state = reordered(state, parents)
        mask = np.concatenate([state.mask, np.ones((len(tokens), 1), np.int64)], axis=1)
        ids = np.asarray(tokens, np.int64).reshape(-1, 1)
        return self._run(ids, DecoderState(mask, state.cache), need)

    def _run(
        self, ids: NDArray[np.int64], state: DecoderState, need: Need
    ) -> tuple[DecoderState, Candidates]:
        new = ids.shape[1]
        positions = np.maximum(np.cumsum(state.mask, axis=1) - 1, 0)[:, -new:]
        arrays = {"input_ids": ids, "attention_mask": state.mask, "position_ids": positions}
        feeds = {
            name: array.astype(self._inputs[name].dtype, copy=False)
            for name, array in arrays.items()
            if name in self._inputs
        }
        names = [LOGITS, *(present_name(spec.name) for spec in self._past)]
        found = self._runner.run_values({**feeds, **state.cache}, names)
        cache = {spec.name: found[present_name(spec.name)] for spec in self._past}
        return DecoderState(state.mask, cache), candidates(found, need)


def reordered(state: DecoderState, parents: Sequence[int]) -> DecoderState:
    """Return a state whose rows are those of `parents`; the same state if nothing changes."""
    if list(parents) == list(range(len(state.mask))):
        return state
    from onnxruntime import OrtValue

    rows = np.asarray(parents, np.int64)
    cache = {
        name: OrtValue.ortvalue_from_numpy(np.take(value.numpy(), rows, axis=0))
        for name, value in state.cache.items()
    }
    return DecoderState(state.mask[rows], cache)


def candidates(found: Mapping[str, Any], need: Need) -> Candidates:
    """Return what a search needs of a step's outputs, at the last position."""
    logits = found[LOGITS].numpy()[:, -1].astype(np.float32, copy=False)
    if need.logits:
        return Candidates(np.empty((len(logits), 0), np.int64), logits=logits)
    if need.best == 1:
        return Candidates(logits.argmax(axis=1)[:, None])
    count = min(need.best, logits.shape[1])
    best = np.argpartition(-logits, count - 1, axis=1)[:, :count]
    order = np.argsort(-np.take_along_axis(logits, best, axis=1), axis=1, kind="stable")
    best = np.take_along_axis(best, order, axis=1)
    return Candidates(best, np.take_along_axis(log_softmax(logits), best, axis=1))


def _empty(spec: TensorSpec, rows: int) -> Any:
    """Return a past of no positions."""
    from onnxruntime import OrtValue

    shape = [
        dim if isinstance(dim, int) else rows if canonical_dim(dim) == "batch" else 0
        for dim in spec.dims
    ]
    return OrtValue.ortvalue_from_numpy(np.zeros(shape, spec.dtype))
