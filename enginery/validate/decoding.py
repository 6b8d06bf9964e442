"""Decode several tokens with a cache, and compare the logits of each step with PyTorch's.

The cases of the sweep give each graph a random past. Here the graph's own `present` outputs are fed
back as its past, as in generation, while PyTorch keeps a cache of its own. The tokens are the same
on both sides (teacher forcing). So a cache that is a position short, or grows at the wrong end,
shows in the next step, and so do positions and masks that disagree with it.

A decoder alone gets prompts of different lengths, padded on the left, whose positions count from
the first real token. An encoder-decoder gets inputs of the encoder that are padded on the right;
its graphs run one after the other, as in generation.

PyTorch decodes few tokens, because it is slow. So the graph is first compared with itself: a prompt
that runs at once leaves the same keys, values and logits as the same tokens one by one
(`find_prompts`). One run at once and one token by token show every length of a past; prompts of
several lengths run at once. Where the two differ, PyTorch decodes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import InputError
from enginery.core.model.feeds import FeedLimits, Feeds, make_feeds
from enginery.core.shapes import PAST, TensorSpec, dim_terms, dynamic_dims
from enginery.reports.validation import ValidationCaseResult
from enginery.runtime.decoder_graphs import (
    ENCODER_STATES,
    LOGITS,
    DecoderGraphs,
    is_cross_attention,
    is_past,
    is_present,
    of_encoder,
    present_name,
)
from enginery.runtime.generation.fixed_cache import FixedCacheDecoder, FixedCacheState
from enginery.runtime.generation.search import Candidates, Need
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions
from enginery.validate.cases.sweep import LONGEST, ValidationCase, sweep_sizes
from enginery.validate.compare import GraphComparison, Run
from enginery.validate.config import Effort
from enginery.validate.context import ValidationContext
from enginery.validate.findings import Findings, join_findings
from enginery.validate.reference import ReferenceOutputs

Array = NDArray[Any]

STEPS = 5
"""Tokens after the prompt, one a step."""

_PROMPT = 24
"""Tokens of a long prompt, and length of the encoder's inputs."""

_ROWS = 4
"""Prompts in a batch."""


_ONE_BY_ONE: dict[Effort, int] = {"quick": 48, "normal": 192, "thorough": LONGEST}
"""Effort -> tokens that run one by one. Small graphs run as many as the model has positions."""
_SMALL_BYTES = 64 << 20

_BATCHES = ((1, LONGEST), (_ROWS, LONGEST), (17, 24))
"""Rows, and the longest prompt, of the batches that run at once and token by token."""
_MISSING = (0, 1, 3, 7)
"""By how many tokens the prompts of such a batch are shorter than the longest, in turn."""
_COMPARED_LOGITS = 512
"""Number of logits of each step that are kept: all of a vocabulary take gigabytes."""
_FOLLOWED = 3
"""Lengths of a batch at which PyTorch decodes, where a run at once differs."""

_SUSPICIOUS = {"fp32": 1e-3, "fp16": 3e-2, "bf16": 1e-1}
"""Difference, by the largest value, from which on PyTorch has to decide."""

_TEXT_INPUTS = ("input_ids", "attention_mask", "position_ids")


@dataclass(frozen=True)
class Sequences:
    """Tokens to decode: prompts, and the same number of tokens after each."""

    name: str
    ids: Array
    """int64 (batch, longest prompt + steps)"""
    mask: Array
    """int64 of the same shape: 0 for padding, on the left."""
    encoder: Feeds
    """Inputs of the encoder graph; empty without one."""
    steps: int = STEPS
    """Tokens after the prompt."""
    kind: Literal["decoding", "generation"] = "decoding"

    def feeds(self, graphs: DecoderGraphs, step: int) -> Feeds:
        """Return the inputs of a step without the past, as `TorchDecoder.decode` takes them."""
        prompt = self.ids.shape[1] - self.steps
        new = slice(0, prompt) if step == 0 else slice(prompt + step - 1, prompt + step)
        # Counted from the first real token; the padding before it gets 0.
        positions = np.maximum(np.cumsum(self.mask, axis=1) - 1, 0)
        # The mask covers the past as well.
        text = (self.ids[:, new], self.mask[:, : new.stop], positions[:, new])
        record = graphs.first if step == 0 else graphs.later
        dtypes = {spec.name: spec.dtype for spec in record.inputs}
        return {
            **{
                name: array.astype(dtypes[name])
                for name, array in zip(_TEXT_INPUTS, text, strict=True)
                if name in dtypes
            },
            **{of_encoder(name): array for name, array in self.encoder.items()},
        }

    def cases(self, graphs: DecoderGraphs) -> list[ValidationCase]:
        """Return a case for each step."""
        return [
            ValidationCase(
                f"{self.name}, {f'token {step}' if step else 'the prompt'}",
                self.kind,
                partial(self.feeds, graphs, step),
                decode="resume" if step else "start",
            )
            for step in range(self.steps + 1)
        ]


def make_sequences(
    graphs: DecoderGraphs,
    limits: FeedLimits,
    *,
    seed: int,
    more: Sequence[tuple[int, int]] = (),
) -> list[Sequences]:
    """Return prompts of one token and of many, alone and in a batch.

    Args:
        graphs: the graphs.
        limits: limits on their inputs.
        seed: random seed for the tokens.
        more: rows and lengths of more prompts.
    """
    # The steps after the prompt need positions, too.
    longest = max(1, min(_PROMPT, limits.max_positions - STEPS))
    # One row shows errors of the cache; several, those of padding and of mixed rows.
    fixed = _fixed_rows(graphs)
    rows = [fixed] if fixed else [1, _ROWS]
    shapes = [(rows[0], 1), *((batch, longest) for batch in rows if longest > 1)]
    shapes += [(fixed or batch, prompt) for batch, prompt in more]
    return [
        _make_prompts(graphs, limits, batch, prompt, seed=seed + index)
        for index, (batch, prompt) in enumerate(dict.fromkeys(shapes))
    ]


def _make_prompts(
    graphs: DecoderGraphs, limits: FeedLimits, batch: int, prompt: int, *, seed: int
) -> Sequences:
    """Return a batch of prompts of up to `prompt` tokens, and the tokens of the steps."""
    # From a row without padding to one of a single token.
    pads = _pads(graphs)
    lengths = np.linspace(prompt, 1, batch).round().astype(int) if pads else [prompt] * batch
    missing = prompt - np.asarray(lengths)
    ids, mask = _draw(graphs, limits, missing, prompt + STEPS, seed)
    return Sequences(
        _describe(batch, prompt, padded=pads and batch > 1),
        ids,
        mask,
        _encoder_feeds(graphs, limits, batch, seed),
    )


def _fixed_rows(graphs: DecoderGraphs) -> int:
    """Return the only batch that the decoder takes; 0 if it takes any."""
    spec = next(spec for spec in graphs.first.inputs if spec.name == "input_ids")
    return spec.dims[0] if isinstance(spec.dims[0], int) else 0


def _pads(graphs: DecoderGraphs) -> bool:
    """Return True if prompts are padded: of decoders alone, on the left.

    Else the encoder's inputs are, on the right.
    """
    masked = any(spec.name == "attention_mask" for spec in graphs.first.inputs)
    return graphs.encoder is None and masked


def _draw(
    graphs: DecoderGraphs, limits: FeedLimits, missing: Array, length: int, seed: int
) -> tuple[Array, Array]:
    """Return ids and mask, int64 (batch, length), of rows that are padded on the left."""
    spec = next(spec for spec in graphs.first.inputs if spec.name == "input_ids")
    batch_dim, length_dim = spec.dims
    sizes = {str(batch_dim): len(missing), str(length_dim): length}
    drawn = make_feeds([spec], sizes, limits, seed=seed)[spec.name]
    # False for the padding on the left.
    mask = np.arange(length) >= missing[:, None]
    return np.where(mask, drawn, limits.pad_token_id), mask.astype(np.int64)


def _encoder_feeds(graphs: DecoderGraphs, limits: FeedLimits, batch: int, seed: int) -> Feeds:
    """Return the encoder's inputs, of rows of different lengths; none without an encoder."""
    if graphs.encoder is None:
        return {}
    names = dynamic_dims(graphs.encoder.inputs)
    sizes = sweep_sizes(names, limits, batch=batch, sequence=_PROMPT)
    return make_feeds(graphs.encoder.inputs, sizes, limits, seed=seed, ragged=batch > 1)


def _describe(batch: int, prompt: int, *, padded: bool) -> str:
    """Return `1 prompt of 24 tokens` or `4 prompts of 1–24 tokens`."""
    lengths = f"1–{prompt}" if padded else str(prompt)
    return f"{batch} prompt{'s' * (batch > 1)} of {lengths} token{'s' * (prompt > 1)}"


def _obstacle(graphs: DecoderGraphs) -> str:
    """Return the reason why the graphs cannot decode prompts; empty if they can."""
    available = {*_TEXT_INPUTS}
    if graphs.encoder is not None:
        available |= {ENCODER_STATES, *(of_encoder(s.name) for s in graphs.encoder.inputs)}
    for record in (graphs.first, graphs.later):
        if not any(spec.name == "input_ids" for spec in record.inputs):
            return "it takes no input_ids"
        for spec in record.inputs:
            if is_past(spec.name):
                # A past of the encoder's length stays as it is; the decoder's own must grow.
                if not is_cross_attention(spec.name) and not dim_terms(spec.dims[-2]):
                    return f"its past has {spec.dims[-2]} positions, neither more nor fewer"
            elif spec.name not in available:
                return f"no graph computes its input {spec.name}"
            elif spec.name == "input_ids" and isinstance(spec.dims[1], int):
                # Later steps have one token each in any case.
                if record is not graphs.first and spec.dims[1] == 1:
                    continue
                return f"it takes {spec.dims[1]} tokens at a time, neither more nor fewer"
    records = (graphs.first, graphs.later, *([graphs.encoder] if graphs.encoder else []))
    returned = {spec.name for record in records for spec in record.outputs}
    missing = [
        spec.name
        for spec in graphs.later.inputs
        if is_past(spec.name) and present_name(spec.name) not in returned
    ]
    return f"no output is fed back as {missing[0]}" if missing else ""


class _Decoder:
    """The graphs in ONNX Runtime, and their cache."""

    def __init__(self, graphs: DecoderGraphs, runners: Mapping[str, Run]) -> None:
        """Take the graphs, and what runs each of them by its file."""
        self._graphs = graphs
        self._runners = runners
        self._cache: Feeds = {}
        self._states: Array | None = None

    def start(self, feeds: Feeds) -> dict[str, Array]:
        """Run the encoder and the prompt."""
        self._cache, self._states = {}, None
        if self._graphs.encoder is not None:
            self._encode(self._graphs.encoder, feeds)
        return self._run(self._graphs.first, feeds, resume=False)

    def resume(self, feeds: Feeds) -> dict[str, Array]:
        """Run the next token."""
        return self._run(self._graphs.later, feeds, resume=True)

    @property
    def graphs(self) -> DecoderGraphs:
        """The graphs."""
        return self._graphs

    @property
    def cache(self) -> Feeds:
        """The keys and values that the next step will get, by the names of its inputs."""
        return self._cache

    def _run(self, record: GraphRecord, feeds: Feeds, *, resume: bool) -> dict[str, Array]:
        inputs = {spec.name: self._input(spec, feeds, resume=resume) for spec in record.inputs}
        outputs = self._runners[record.file](inputs)
        for spec in self._graphs.later.inputs:
            name = present_name(spec.name)
            # The encoder's keys are computed with the prompt, and kept.
            if is_past(spec.name) and name in outputs and not (resume and is_cross_attention(name)):
                self._cache[spec.name] = outputs[name]
        return outputs

    def _encode(self, encoder: GraphRecord, feeds: Feeds) -> None:
        inputs = {spec.name: feeds[of_encoder(spec.name)] for spec in encoder.inputs}
        outputs = self._runners[encoder.file](inputs)
        self._states = outputs[encoder.outputs[0].name]
        self._cache = {
            spec.name: outputs[present_name(spec.name)]
            for spec in self._graphs.later.inputs
            if present_name(spec.name) in outputs
        }

    def _input(self, spec: TensorSpec, feeds: Feeds, *, resume: bool) -> Array:
        if spec.name == ENCODER_STATES and self._states is not None:
            return self._states
        if is_past(spec.name):
            from_cache = resume or (is_cross_attention(spec.name) and spec.name in self._cache)
            return self._cache[spec.name] if from_cache else self._empty_past(spec, feeds)
        return feeds[spec.name]

    def _empty_past(self, spec: TensorSpec, feeds: Feeds) -> Array:
        """Return a past of no positions; the encoder's has all of them: its dim is shared."""
        sizes = {"batch": len(feeds["input_ids"])}
        if self._states is not None:
            sizes["encoder_sequence"] = self._states.shape[1]
        shape = spec.shape({name: sizes.get(name, 0) for name in dynamic_dims([spec])})
        return np.zeros(shape, spec.dtype)


class _FixedCacheSteps:
    """The same with the graph whose cache has a fixed size, as `load_model` runs it on CUDA."""

    def __init__(self, graphs: DecoderGraphs, decoder: FixedCacheDecoder) -> None:
        self.graphs = graphs
        self._decoder = decoder
        self._state: FixedCacheState | None = None

    def start(self, feeds: Feeds) -> dict[str, Array]:
        """Run the encoder and the prompt."""
        ids = feeds["input_ids"]
        mask = feeds.get("attention_mask", np.ones_like(ids)).astype(bool)
        prompts = [row[is_token].tolist() for row, is_token in zip(ids, mask, strict=True)]
        encoder = self.graphs.encoder
        inputs = None
        if encoder is not None:
            inputs = {spec.name: feeds[of_encoder(spec.name)] for spec in encoder.inputs}
        self._state, candidates = self._decoder.begin(prompts, Need(logits=True), inputs)
        return _last_logits(candidates)

    def resume(self, feeds: Feeds) -> dict[str, Array]:
        """Run the next token."""
        state = self._state
        if state is None:
            raise AssertionError("the prompt runs before the tokens behind it")
        tokens = feeds["input_ids"][:, 0].tolist()
        self._state, candidates = self._decoder.step(
            state, tokens, list(range(len(tokens))), Need(logits=True)
        )
        return _last_logits(candidates)


def _last_logits(candidates: Candidates) -> dict[str, Array]:
    """Return logits as the decoder's graph gives them: (batch, 1, vocabulary)."""
    if candidates.logits is None:
        raise AssertionError("logits were asked for")
    return {LOGITS: candidates.logits[:, None]}


def open_decoder(context: ValidationContext, file: str) -> OrtRunner:
    """Open a graph for decoding, on the requested providers."""
    # Every step has other shapes, so that bound buffers would never be used again.
    return context.open_runner(file, RunnerOptions(io_binding=False, spinning=False))


def find_prompts(
    context: ValidationContext, graphs: DecoderGraphs, special: Collection[int]
) -> tuple[list[tuple[int, int]], Findings]:
    """Return rows and lengths of prompts at which a run at once differs from one token by token.

    Powers of two, their neighbours and `special` lengths run at once. There is a note if the
    model takes longer prompts.

    Raises:
        ProviderError: a graph cannot be loaded.
    """
    limits, longest = context.feed_limits, _scanned_length(context, graphs)
    file, fixed = graphs.later.file, _fixed_rows(graphs)
    suspicious: list[tuple[int, int]] = []
    with ExitStack() as stack, context.progress.task(f"prompts at once and token by token, {file}"):
        decoder = _Decoder(graphs, _open_all(context, graphs, stack))
        for rows, limit in dict.fromkeys((fixed or rows, limit) for rows, limit in _BATCHES):
            length = min(longest, limit, limits.max_positions)
            differing = _find_differing(context, decoder, rows, length, special)
            # The shortest prompts, and the longest.
            chosen = [*differing[:_FOLLOWED], *differing[_FOLLOWED:][-1:]]
            suspicious += [(rows, n) for n in chosen if n + STEPS <= limits.max_positions]
            suspicious += [
                (rows, limits.max_positions - STEPS)
                for n in chosen
                if n + STEPS > limits.max_positions > STEPS
            ]
    note = (
        f"{file}: prompts were compared with single tokens up to {longest} of "
        f"{limits.max_positions} positions"
    )
    notes = (note,) if longest < limits.max_positions else ()
    return list(dict.fromkeys(suspicious)), Findings(notes=notes)


def _find_differing(
    context: ValidationContext,
    decoder: _Decoder,
    rows: int,
    length: int,
    special: Collection[int],
) -> list[int]:
    """Return the lengths at which a batch of prompts of up to `length` tokens differs."""
    graphs, limits, seed = decoder.graphs, context.feed_limits, context.config.seed
    missing = np.resize(_MISSING, rows) if _pads(graphs) and rows > 1 else np.zeros(rows)
    start = int(missing.max()) + 1
    if length <= start:
        return []
    ids, mask = _draw(graphs, limits, missing, length, seed)
    tokens = Sequences("", ids, mask, _encoder_feeds(graphs, limits, rows, seed))
    powers = {2**k + step for k in range(length.bit_length()) for step in (0, 1)}
    at_once = sorted(n for n in {*powers, *special, length} if start < n <= length)
    limit = _SUSPICIOUS.get(context.artifact.manifest.precision, 0.2)
    try:
        return _PromptScan(decoder, tokens, limit).run(start, at_once)
    except InputError:  # the graph fails: what PyTorch decodes shows it
        return [length]


def _open_all(
    context: ValidationContext, graphs: DecoderGraphs, stack: ExitStack
) -> dict[str, OrtRunner]:
    """Open the graphs of a decoder, by their files, until the stack is closed."""
    records = (graphs.first, graphs.later, *([graphs.encoder] if graphs.encoder else []))
    # The first and later steps often share a graph, which is opened once.
    files = dict.fromkeys(record.file for record in records)
    return {file: stack.enter_context(open_decoder(context, file)) for file in files}


def _scanned_length(context: ValidationContext, graphs: DecoderGraphs) -> int:
    """Return the number of tokens that run one by one."""
    effort, longest = context.config.effort, context.feed_limits.max_positions
    file = context.artifact.path / graphs.later.file
    if effort == "normal" and file.stat().st_size < _SMALL_BYTES:
        return min(LONGEST, longest)
    return min(_ONE_BY_ONE[effort], longest)


@dataclass(frozen=True)
class _PromptScan:
    """Compares runs of a prompt at once with the same tokens one by one."""

    decoder: _Decoder
    tokens: Sequences
    suspicious: float
    """Difference, by the largest value, that counts as one."""

    @property
    def graphs(self) -> DecoderGraphs:
        return self.decoder.graphs

    def run(self, start: int, at_once: Sequence[int]) -> list[int]:
        """Return the lengths of prompts, and of pasts before one token, that differ.

        Args:
            start: tokens of the first run, after which one follows the other.
            at_once: lengths of the prompts that run at once.
        """
        length = self.tokens.ids.shape[1]
        stepwise = replace(self.tokens, steps=length - start)
        logits = {start: self._last_logits(self.decoder.start(stepwise.feeds(self.graphs, 0)))}
        for step in range(1, stepwise.steps + 1):
            outputs = self.decoder.resume(stepwise.feeds(self.graphs, step))
            logits[start + step] = self._last_logits(outputs)
        cache = self._own_cache()
        differing: set[int] = set()
        for count in at_once:
            prompt = replace(
                self.tokens,
                ids=self.tokens.ids[:, :count],
                mask=self.tokens.mask[:, :count],
                steps=0,
            )
            outputs = self.decoder.start(prompt.feeds(self.graphs, 0))
            if self._differ(self._last_logits(outputs), logits[count]):
                differing |= {count - 1, count}
            if (position := self._first_differing(cache, count)) is not None:
                # Either may be wrong: the prompt, or the token after a past of this length.
                differing |= {max(1, position), count}
        return sorted(differing)

    def _last_logits(self, outputs: Mapping[str, Array]) -> Array:
        return np.asarray(outputs[LOGITS][:, -1, :_COMPARED_LOGITS], np.float32)

    def _own_cache(self) -> dict[str, Array]:
        """Return the decoder's own keys and values, as float32 (batch, positions, …)."""
        arrays = {}
        for spec in self.graphs.later.inputs:
            if is_past(spec.name) and not is_cross_attention(spec.name):
                grows = [
                    axis
                    for axis, dim in enumerate(spec.dims)
                    if axis and any(term.startswith(PAST) for term in dim_terms(dim))
                ]
                array = self.decoder.cache[spec.name]
                if len(grows) == 1 and array.dtype.kind == "f":
                    arrays[spec.name] = np.moveaxis(array, grows[0], 1).astype(np.float32)
        return arrays

    def _first_differing(self, cache: Mapping[str, Array], count: int) -> int | None:
        """Return the first position whose keys or values differ; None if none do."""
        real = self.tokens.mask[:, :count] != 0
        first: int | None = None
        for name, array in self._own_cache().items():
            other = cache[name][:, :count]
            if array.shape != other.shape:
                return 0
            error = np.abs(array - other).reshape(*real.shape, -1).max(axis=2)
            largest = float(np.abs(other[real]).max())
            # NaN is larger than any limit.
            wrong = ~(error <= self.suspicious * largest) & real
            if wrong.any():
                position = int(np.flatnonzero(wrong.any(axis=0))[0])
                first = position if first is None else min(first, position)
        return first

    def _differ(self, mine: Array, other: Array) -> bool:
        return not bool(np.abs(mine - other).max() <= self.suspicious * np.abs(other).max())


def usable_decoders(decoders: Sequence[DecoderGraphs]) -> tuple[list[DecoderGraphs], Findings]:
    """Return the decoders of a model that can decode here, and notes on the others."""
    usable, notes = [], []
    for graphs in decoders:
        if obstacle := _obstacle(graphs):
            notes.append(f"{graphs.later.file}: no tokens were decoded: {obstacle}")
        else:
            usable.append(graphs)
    return usable, Findings(notes=tuple(notes))


def compare_decoding(
    context: ValidationContext,
    decoders: Sequence[DecoderGraphs],
    sequences: Sequence[Sequences],
) -> Findings:
    """Decode the same tokens with PyTorch and with each usable decoder, and compare every step."""
    if not decoders:
        return Findings()
    cases = [case for tokens in sequences for case in tokens.cases(decoders[0])]
    # One run serves all decoders of a model, because the tokens are the same (teacher forcing).
    reference = context.run_reference(
        decoders[0].later, "decoding", cases, noise=not context.artifact.manifest.is_quantized
    )
    if not any(expected.files for expected in reference.outputs):
        return Findings(notes=(f"no tokens were decoded: {reference.outputs[0].problem}",))
    comparison = GraphComparison(reference, context.limits)
    return join_findings(
        _compare_decoder(context, graphs, sequences, comparison) for graphs in decoders
    )


def _compare_decoder(
    context: ValidationContext,
    graphs: DecoderGraphs,
    sequences: Sequence[Sequences],
    comparison: GraphComparison,
) -> Findings:
    results: list[ValidationCaseResult] = []
    with (
        ExitStack() as stack,
        context.progress.task(f"decoding, {graphs.later.file}", total=len(sequences)) as advance,
    ):
        runners = _open_all(context, graphs, stack)
        fixed, note = _fixed_graph(graphs)
        fixed_steps: _FixedCacheSteps | None = None
        if fixed is not None:
            runners[fixed.file] = stack.enter_context(open_decoder(context, fixed.file))
            decoder = FixedCacheDecoder(graphs, runners, pad_id=context.feed_limits.pad_token_id)
            stack.callback(decoder.close)
            fixed_steps = _FixedCacheSteps(graphs, decoder)
        # The outputs are those of all sequences, one after the other, step by step.
        expected = iter(comparison.reference.outputs)
        for tokens in sequences:
            steps = [(case, next(expected)) for case in tokens.cases(graphs)]
            results += _compare_steps(_Decoder(graphs, runners), steps, comparison)
            if fixed is not None and fixed_steps is not None:
                # Its steps are the same; only what keeps the past differs.
                results += [
                    replace(result, graph=fixed.file)
                    for result in _compare_steps(fixed_steps, steps, comparison)
                ]
            advance()
    return Findings(cases=tuple(results), notes=(note,) if note else ())


def _fixed_graph(graphs: DecoderGraphs) -> tuple[GraphRecord | None, str]:
    """Return the graph with a cache of fixed size if it can be compared, and a note if not."""
    record = graphs.fixed
    if record is None or graphs.first is not graphs.later:
        return None, ""
    logits = next(spec for spec in graphs.later.outputs if spec.name == LOGITS)
    if logits.dims[1] != 1 or any(spec.dtype == "bfloat16" for spec in record.inputs):
        return None, f"{record.file}: not compared, since it cannot decode here"
    return record, ""


def _compare_steps(
    decoder: _Decoder | _FixedCacheSteps,
    steps: Sequence[tuple[ValidationCase, ReferenceOutputs]],
    comparison: GraphComparison,
) -> list[ValidationCaseResult]:
    """Decode one sequence, up to the first step that does not run."""
    graphs, results = decoder.graphs, []
    for case, expected in steps:
        starts = case.decode == "start"
        record = graphs.first if starts else graphs.later
        # The cache is compared by what the next steps make of it.
        shown = tuple(spec for spec in record.outputs if not is_present(spec.name))
        step = replace(comparison, reference=replace(comparison.reference, outputs=[expected]))
        results += step.compare(
            decoder.start if starts else decoder.resume,
            record.model_copy(update={"outputs": shown}),
            [case],
        )
        if not results[-1].outputs:
            break
    return results
