"""Run a decoder step by step, with its cache of keys and values.

    decoder = CachedDecoder(graphs, runners)
    state, candidates = decoder.begin([[5, 6, 7], [8]], Need())
    state, candidates = decoder.step(state, tokens, parents, Need())

The cache stays in ONNX Runtime's values from one step to the next; nothing of it is copied unless
rows change their places. A row may continue any row of the step before (`parents`), which reorders,
copies and drops rows.

A decoder alone takes prompts of different lengths, padded on the left, so that all rows end at the
same position. A decoder with an encoder runs that once; what it attends to is kept for each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError
from enginery.core.shapes import TensorSpec, canonical_dim
from enginery.runtime.decoder_graphs import (
    ENCODER_STATES,
    LOGITS,
    DecoderGraphs,
    is_cross_attention,
    is_past,
    of_encoder,
    present_name,
)
from enginery.runtime.generation.operators import Operators, Values
from enginery.runtime.generation.search import Candidates, Need
from enginery.runtime.onnxruntime.runner import OrtRunner

_TEXT_INPUTS = ("input_ids", "attention_mask", "position_ids")

Feeds = Mapping[str, NDArray[Any]]


State = TypeVar("State")


class Decoder(Protocol[State]):
    """What a batch runs: a decoder with the state of its rows between two steps."""

    takes_more: bool
    """Whether rows may join those that have begun."""

    def begin(
        self, prompts: Sequence[Sequence[int]], need: Need, inputs: Feeds | None = None
    ) -> tuple[State, Candidates]:
        """Run prompts, each in a row; see `CachedDecoder.begin`."""

    def step(
        self, state: State, tokens: list[int], parents: list[int], need: Need
    ) -> tuple[State, Candidates]:
        """Run one token in each row; see `CachedDecoder.step`."""

    def join(self, above: State, below: State) -> State:
        """Return the rows of two states as one; see `takes_more`."""

    def undefined(self, state: State) -> list[int]:
        """Return the rows whose logits of the last run are NaN, if only the best token was read."""

    def keep(self, state: State, rows: list[int]) -> State:
        """Return a state with some of its rows, in ascending order."""

    def warm_up(self, rows: int) -> None:
        """Prepare the present thread for batches of up to this many rows."""


@dataclass(frozen=True)
class DecoderState:
    """The rows of a batch between two steps."""

    mask: NDArray[np.int64]
    """(rows, positions): 0 for padding, on the left."""
    cache: Values
    """The decoder's past, by the names of its inputs."""
    encoded: Values
    """What the decoder reads of the encoder, by the names of its inputs; empty without one."""
    sources: tuple[int, ...]
    """The encoder's input that each row is about."""
    undefined: tuple[int, ...] = ()
    """The rows whose best token has no probability, because logits are NaN."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.mask)


class CachedDecoder:
    """A decoder as one graph that takes its own past, and its encoder if it has one."""

    def __init__(
        self, graphs: DecoderGraphs, runners: Mapping[str, OrtRunner], *, pad_id: int = 0
    ) -> None:
        """Read the names and shapes of the graphs.

        Args:
            graphs: the graphs.
            runners: each graph in ONNX Runtime, by its file; the caller closes them.
            pad_id: token of padding.

        Raises:
            ArtifactError: the decoder's first step needs another graph, or it has an input that
                nothing computes.
            MissingPackageError: the package onnx is not installed.
        """
        record = graphs.later
        self._runner = runners[record.file]
        self._encoder = None if graphs.encoder is None else runners[graphs.encoder.file]
        self._pad_id = pad_id
        self._inputs = {spec.name: spec for spec in record.inputs}
        outputs = {spec.name for spec in record.outputs}
        self._past = [
            s for s in record.inputs if is_past(s.name) and not is_cross_attention(s.name)
        ]
        self._encoded = encoded_inputs(graphs, record)
        supplied = {*_TEXT_INPUTS, *self._encoded, *(spec.name for spec in self._past)}
        unsupplied = [name for name in self._inputs if name not in supplied]
        lacking = [s.name for s in self._past if present_name(s.name) not in outputs]
        problem = ""
        if graphs.first is not record:
            problem = f"its first step is another graph, {graphs.first.file}"
        elif unsupplied:
            problem = f"it has the input {unsupplied[0]}"
        elif not self._past or lacking or LOGITS not in outputs:
            problem = "it has no complete cache"
        if problem:
            raise ArtifactError(
                f"{record.file} does not generate: {problem}.",
                do="Export the model for a task that ends in -with-past, with --layout enginery.",
            )
        self.takes_more = self._encoder is None and "position_ids" in self._inputs
        """Whether rows may join those that have begun: the graph takes the position of each row,
        where others count from the first column of the batch."""
        self._presents = {present_name(spec.name): spec.name for spec in self._past}
        self._operators = Operators(self._runner.device)

    def begin(
        self, prompts: Sequence[Sequence[int]], need: Need, inputs: Feeds | None = None
    ) -> tuple[DecoderState, Candidates]:
        """Run prompts, each in a row.

        Args:
            prompts: one or more tokens each.
            need: what to return of the last position.
            inputs: the encoder's inputs; None without one.
        """
        longest = max(map(len, prompts))
        ids = np.full((len(prompts), longest), self._pad_id, np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            # On the left, so that the last column has each row's last token.
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        cache = {spec.name: _empty(spec, len(prompts)) for spec in self._past}
        rows = tuple(range(len(prompts)))
        encoded = self._encode(self._encoder, inputs or {}) if self._encoder else {}
        return self._run(ids, DecoderState(mask, cache, encoded, rows), need)

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
        state = self._reordered(state, parents)
        mask = np.concatenate([state.mask, np.ones((len(tokens), 1), np.int64)], axis=1)
        ids = np.asarray(tokens, np.int64).reshape(-1, 1)
        return self._run(ids, DecoderState(mask, state.cache, state.encoded, state.sources), need)

    def join(self, above: DecoderState, below: DecoderState) -> DecoderState:
        """Return the rows of two states as one; see `takes_more`.

        Shorter rows get padding on the left, and padding that all rows have is taken away.
        """
        # The first column that holds a token of any row.
        own = [int(state.mask.any(axis=0).argmax()) for state in (above, below)]
        lengths = [
            state.mask.shape[1] - padding
            for state, padding in zip((above, below), own, strict=True)
        ]
        shifts = [max(lengths) - state.mask.shape[1] for state in (above, below)]
        masks = [
            np.pad(state.mask[:, max(0, -shift) :], ((0, 0), (max(0, shift), 0)))
            for state, shift in zip((above, below), shifts, strict=True)
        ]
        cache = self._operators.join(above.cache, below.cache, (shifts[0], shifts[1]))
        # The inputs of `below` are numbered behind those of `above`.
        first = max(above.sources) + 1
        sources = (*above.sources, *(first + source for source in below.sources))
        return DecoderState(np.concatenate(masks), cache, {}, sources)

    def warm_up(self, rows: int) -> None:
        """Do nothing: a cache that grows has no buffers to prepare."""

    def undefined(self, state: DecoderState) -> list[int]:
        """Return the rows whose logits of the last run are NaN, if only the best token was read."""
        return list(state.undefined)

    def keep(self, state: DecoderState, rows: list[int]) -> DecoderState:
        """Return a state with some of its rows, in ascending order."""
        return self._reordered(state, rows)

    def _run(
        self, ids: NDArray[np.int64], state: DecoderState, need: Need
    ) -> tuple[DecoderState, Candidates]:
        new = ids.shape[1]
        # (rows, new). Padding does not count as a position, and gets 0 itself.
        positions = np.maximum(np.cumsum(state.mask, axis=1) - 1, 0)[:, -new:]
        arrays = {"input_ids": ids, "attention_mask": state.mask, "position_ids": positions}
        feeds = {
            name: array.astype(self._inputs[name].dtype, copy=False)
            for name, array in arrays.items()
            if name in self._inputs
        }
        names = [LOGITS, *self._presents]
        outputs = self._runner.run_values({**feeds, **state.cache, **state.encoded}, names)
        cache = {past: outputs[present] for present, past in self._presents.items()}
        candidates, undefined = self._candidates(outputs[LOGITS], need)
        following = DecoderState(state.mask, cache, state.encoded, state.sources, undefined)
        return following, candidates

    def _encode(self, encoder: OrtRunner, inputs: Feeds) -> Values:
        """Run the encoder, and return what the decoder reads of it."""
        from onnxruntime import OrtValue

        computed = {name: output for name, output in self._encoded.items() if output not in inputs}
        outputs = encoder.run_values(inputs, list(computed.values()))
        passed = {
            name: OrtValue.ortvalue_from_numpy(
                np.ascontiguousarray(inputs[output], self._inputs[name].dtype)
            )
            for name, output in self._encoded.items()
            if output in inputs
        }
        return {**passed, **{name: outputs[output] for name, output in computed.items()}}

    def _reordered(self, state: DecoderState, parents: Sequence[int]) -> DecoderState:
        """Return a state whose rows are those of `parents`; the same state if nothing changes."""
        if list(parents) == list(range(len(state.mask))):
            return state
        sources = tuple(state.sources[row] for row in parents)
        # Beams of one input attend to the same states: those stay where they are.
        encoded = state.encoded
        if encoded and sources != state.sources:
            encoded = self._operators.take(encoded, parents)
        cache = self._operators.take(state.cache, parents)
        return DecoderState(state.mask[np.asarray(parents)], cache, encoded, sources)

    def _candidates(self, logits: Any, need: Need) -> tuple[Candidates, tuple[int, ...]]:
        """Return what a search needs of a step's logits, at the last position.

        With it, the rows whose logits are NaN, if only the best token is needed.
        """
        rows, _, vocabulary = logits.shape()
        on_gpu = self._runner.device.kind != "cpu"
        # On a GPU the choice runs there: only the tokens are copied, and not the whole vocabulary.
        if not need.logits and (need.best > 1 or on_gpu):
            log_probs, tokens = self._operators.best(logits, min(need.best, vocabulary))
            return Candidates(tokens, log_probs), _nan_rows(log_probs[:, 0])
        last = logits.numpy()[:, -1]
        if need.logits:
            # On the host this is ONNX Runtime's memory: copy what outlives the value.
            return Candidates(np.empty((rows, 0), np.int64), logits=np.array(last, np.float32)), ()
        best = last.argmax(axis=1)  # of NaN, if there is one
        return Candidates(best[:, None]), _nan_rows(last[np.arange(rows), best])


def _nan_rows(values: NDArray[Any]) -> tuple[int, ...]:
    """Return the indices of values that are NaN."""
    return tuple(int(row) for row in np.flatnonzero(np.isnan(values)))


def encoded_inputs(graphs: DecoderGraphs, record: GraphRecord) -> dict[str, str]:
    """Return a decoder's inputs that come from the encoder: the names of its inputs or outputs.

    Args:
        graphs: the graphs, of which only the encoder matters.
        record: the decoder's graph.

    Returns:
        Nothing without an encoder.
    """
    if graphs.encoder is None:
        return {}
    sources = {of_encoder(spec.name): spec.name for spec in graphs.encoder.inputs}
    # An encoder's states are its first output, whatever its name.
    sources[ENCODER_STATES] = graphs.encoder.outputs[0].name
    names = [spec.name for spec in record.inputs]
    sources |= {name: present_name(name) for name in names if is_cross_attention(name)}
    return {name: source for name, source in sources.items() if name in names}


def _empty(spec: TensorSpec, rows: int) -> Any:
    """Return a past of no positions."""
    from onnxruntime import OrtValue

    # A past of length 0: of its named dims only the batch is not.
    shape = [
        dim if isinstance(dim, int) else rows if canonical_dim(dim) == "batch" else 0
        for dim in spec.dims
    ]
    return OrtValue.ortvalue_from_numpy(np.zeros(shape, spec.dtype))
