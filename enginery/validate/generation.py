"""Generate from real inputs, and compare the tokens with those of PyTorch's `generate`.

PyTorch generates first, from each input alone: by greedy search and by beam search. It reads its
own files: the tokenizer or processor, generation_config.json. Tokens of texts have to be those of
its tokenizer, features of images and sounds those of its processor, and its tokenizer has to decode
what is generated to the same texts. Then the artifact does, in one ragged batch and
from each input alone, with the operations that `load_model(…).generate` consists of. Models that
sample are compared by the same two searches.

Near ties may be decided either way. So greedy tokens may part where PyTorch scores the two
candidates within twice the allowed error of a logit, which is the limit of that step with PyTorch's
tokens forced (`decoding.py`). Tokens after a parting are not compared.

Beam search adds up log-probabilities, of which each may be wrong by twice the error of a logit. If
the tokens differ, the scores have to agree within the sum of these errors, divided like the score
by a power of the length; or two beams of which one was dropped were closer to each other than twice
that sum. Quantized graphs have no limit on the error: their partings are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.datasets.folders import list_media
from enginery.core.datasets.samples import holds_arrays, read_texts
from enginery.core.errors import (
    ArtifactError,
    EngineryError,
    InputError,
    ShapeError,
    raise_system_error,
)
from enginery.core.model.feeds import Feeds, make_feeds
from enginery.core.shapes import dynamic_dims
from enginery.reports.validation import GenerationMetrics, ValidationCaseResult
from enginery.runtime.audio.files import load_audio
from enginery.runtime.audio.processor import AudioProcessor
from enginery.runtime.builtin_inputs import SENTENCES, synthetic_images, synthetic_sounds
from enginery.runtime.decoder_graphs import DecoderGraphs, find_generating
from enginery.runtime.generation.batch import RunningBatch
from enginery.runtime.generation.decoder import CachedDecoder
from enginery.runtime.generation.inputs import (
    GenerationInputs,
    GenerationRow,
    open_inputs,
    read_positions,
    require_prepared,
)
from enginery.runtime.generation.options import (
    FILE,
    GenerationOptions,
    parse_generation_config,
    read_generation_config,
)
from enginery.runtime.generation.search import BeamSearch, Hypothesis, Search, make_search
from enginery.runtime.image.files import load_image
from enginery.runtime.pytorch.reference import TorchReference
from enginery.runtime.sample_inputs import takes_images, takes_sounds
from enginery.runtime.tasks import is_generating, require_task
from enginery.runtime.tasks.generate import Generate
from enginery.runtime.text.tokenizer import TextTokenizer
from enginery.validate.cases.sweep import sweep_sizes
from enginery.validate.config import Effort, ValidateConfig
from enginery.validate.context import ValidationContext
from enginery.validate.decoding import (
    Sequences,
    compare_decoding,
    find_prompts,
    make_sequences,
    open_decoder,
    usable_decoders,
)
from enginery.validate.findings import Findings, join_findings, note_refusal

STEPS = 32
"""Tokens to generate."""
BEAMS = 4

_MADE_UP = "made-up prompts"
_INPUTS: dict[Effort, int] = {"quick": 3, "normal": 8, "thorough": 16}
_LONGEST_MADE_UP = 24
"""Tokens of the longest made-up prompt."""
_MEDIA = ("images", "sounds")
_FEATURE_ERROR = 3e-4
"""Allowed error of pixels and features, as a share of the largest one or of 1. Those of Whisper
differ by up to 1e-4, because transformers computes them with PyTorch."""
_NOT_COMPARED = ("pad_token_id", "bos_token_id", "seed")
"""Options of generation that change no token."""


@dataclass(frozen=True)
class _Continuation:
    """What PyTorch generates from one input."""

    tokens: tuple[int, ...]
    scores: Path | None = None
    """Of greedy search: `.npy` file of float32 (steps, vocabulary), the processed logits."""
    score: float = math.nan
    """Of beam search."""


@dataclass(frozen=True)
class _Inputs:
    """The inputs of a generation."""

    what: str
    """`sentences`, `rows`, `images`, `sounds` or `made-up prompts`."""
    names: list[str]
    rows: list[GenerationRow]
    join: Callable[[Sequence[GenerationRow]], Mapping[str, NDArray[Any]] | None]
    """Returns the encoder's inputs of rows in one batch."""
    pad_id: int
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """Options that the inputs need, such as the language to translate to."""


@dataclass(frozen=True)
class _Source:
    """What both sides generate with."""

    context: ValidationContext
    model: TorchReference
    graphs: DecoderGraphs
    options: GenerationOptions
    positions: int | None
    """Of the decoder; None for any number."""

    @property
    def steps(self) -> int:
        """Tokens to generate: half of a short model's positions are left for the prompt."""
        return STEPS if self.positions is None else max(1, min(STEPS, self.positions // 2))

    @property
    def longest_prompt(self) -> int | None:
        return None if self.positions is None else self.positions - self.steps

    @property
    def artifact(self) -> Artifact:
        return self.context.artifact

    @property
    def count(self) -> int:
        """Number of inputs."""
        return _INPUTS[self.context.config.effort]

    def refusal(self, error: ArtifactError) -> GenerationRefusedError:
        """Return an error as one of the artifact's; raise it again if it is the system's."""
        raise_system_error(error)
        return GenerationRefusedError(self.graphs.later.file, error)


@dataclass(frozen=True)
class _Outcome:
    """How the tokens of one search, or of all with one input, compare with PyTorch's."""

    steps: int = STEPS
    """Greedy tokens that are equal."""
    parted: bool = False
    """The tokens differ."""
    problem: str = ""
    """Why they may not; empty if they may, or are equal."""

    @classmethod
    def of(cls, outcomes: Sequence[_Outcome]) -> _Outcome:
        """Return several as one, with the first problem."""
        return cls(
            min(outcome.steps for outcome in outcomes),
            any(outcome.parted for outcome in outcomes),
            next((outcome.problem for outcome in outcomes if outcome.problem), ""),
        )

    @property
    def equal(self) -> bool:
        return not self.parted and not self.problem


@dataclass(frozen=True)
class GeneratedTexts:
    """Inputs, and what PyTorch generates from them."""

    source: _Source
    inputs: _Inputs
    greedy: list[_Continuation]
    beams: list[_Continuation]
    problems: tuple[ValidationCaseResult, ...]
    """Failures of the tokenizer and of generation_config.json."""

    def sequences(self) -> Sequences:
        """Return the prompts with PyTorch's tokens, as one batch to decode.

        The last token is left out, since nothing follows it; rows that end repeat their last one.
        """
        rows, steps = self.inputs.rows, self.source.steps
        forced = self._forced_prompt + steps - 1
        longest = max(len(row.prompt) for row in rows)
        ids = np.full((len(rows), longest + forced), self.inputs.pad_id, np.int64)
        mask = np.ones_like(ids)
        for index, (row, continuation) in enumerate(zip(rows, self.greedy, strict=True)):
            # On the left, where decoders have their padding.
            start = longest - len(row.prompt)
            filled = [*continuation.tokens, *[continuation.tokens[-1]] * steps][: steps - 1]
            ids[index, start:] = [*_whole_prompt(row), *filled]
            mask[index, :start] = 0
        encoder: Feeds = {}
        graph = self.source.graphs.encoder
        if graph is not None:
            dtypes = {spec.name: spec.dtype for spec in graph.inputs}
            joined = self.inputs.join(rows) or {}
            encoder = {name: array.astype(dtypes[name]) for name, array in joined.items()}
        name = f"{len(rows)} {self.inputs.what} with PyTorch's tokens"
        return Sequences(name, ids, mask, encoder, forced, "generation")

    def compare(
        self, context: ValidationContext, forced: Sequence[ValidationCaseResult]
    ) -> Findings:
        """Generate with the artifact, and compare.

        The results of the steps of `sequences`, which were forced, have the allowed errors.

        Raises:
            ProviderError: a graph cannot be loaded.
        """
        # Steps over the rest of the prompt choose no token.
        outputs = [case.outputs[0] for case in forced if case.outputs][self._forced_prompt :]
        # The error that is allowed for a logit at each step decides what counts as a near tie.
        errors = [output.limit for output in outputs] or [0.0]
        try:
            greedy, beams = self._search(context, errors)
        except ArtifactError as error:
            return note_refusal("not generated", error)
        file, names = self.source.graphs.later.file, self.inputs.names
        searched = [
            *((f"{name}, greedy search", o) for name, o in zip(names, greedy, strict=True)),
            *((f"{name}, beam {BEAMS}", o) for name, o in zip(names, beams, strict=True)),
        ]
        results = [
            *self.problems,
            *(_case(file, name, outcome.problem) for name, outcome in searched),
        ]
        agreement = [output.argmax_agreement for output in outputs]
        metrics = GenerationMetrics(
            what=self.inputs.what,
            inputs=len(names),
            steps=max(len(continuation.tokens) for continuation in self.greedy),
            compared_steps=sum(outcome.steps for outcome in greedy),
            generated_steps=sum(len(continuation.tokens) for continuation in self.greedy),
            equal=sum(outcome.equal for outcome in greedy),
            parted=sum(outcome.parted and not outcome.problem for outcome in greedy),
            beams=BEAMS,
            beams_equal=sum(outcome.equal for outcome in beams),
            agreement=float(np.mean(agreement)) if agreement else math.nan,
            failed=sum(bool(result.problem) for result in results),
        )
        return Findings(cases=tuple(results), generation=metrics)

    def _search(
        self, context: ValidationContext, errors: Sequence[float]
    ) -> tuple[list[_Outcome], list[_Outcome]]:
        """Return how greedy search and beam search of each input compare.

        Raises:
            ArtifactError: the decoder has an input that nothing computes.
            ProviderError: a graph cannot be loaded.
        """
        graphs, rows, batches = self.source.graphs, self.inputs.rows, self._batches()
        greedy: list[list[_Outcome]] = [[] for _ in rows]
        beams: dict[int, _Outcome] = {}
        with (
            ExitStack() as stack,
            context.progress.task("generating", total=len(rows) + len(batches) + 1) as advance,
        ):
            runners = {
                record.file: stack.enter_context(open_decoder(context, record.file))
                for record in (graphs.later, graphs.encoder)
                if record is not None
            }
            decoder = CachedDecoder(graphs, runners, pad_id=self.inputs.pad_id)
            # Padding and neighbours must not change a text, so each runs in a batch and alone.
            runs = [("in a batch", indices) for indices in batches]
            runs += [("alone", [index]) for index in range(len(rows))]
            for where, indices in runs:
                searches = self._run(decoder, indices, 1)
                for index, search in zip(indices, searches, strict=True):
                    greedy[index].append(self._compare_greedy(search, index, where, errors))
                advance()
            for indices in batches:
                searches = self._run(decoder, indices, BEAMS)
                for index, search in zip(indices, searches, strict=True):
                    beams[index] = self._compare_beams(search, index, max(errors))
            advance()
        return [*map(_Outcome.of, greedy)], [beams[index] for index in range(len(rows))]

    @property
    def _forced_prompt(self) -> int:
        """Number of the prompt's tokens behind the first step; the same for all inputs."""
        return len(self.inputs.rows[0].rest)

    def _batches(self) -> list[list[int]]:
        """Return the places of inputs that `generate` runs in one batch."""
        return self.source.graphs.batches([len(row.prompt) for row in self.inputs.rows])

    def _run(
        self, decoder: CachedDecoder, indices: Sequence[int], beams: int
    ) -> list[Search | EngineryError]:
        """Generate from inputs in one batch; an error of the graph stands for each of them."""
        source = self.source
        arguments = _arguments(source.steps, beams, self.inputs.chosen)
        options = source.options.with_arguments(**arguments)
        rows = [self.inputs.rows[index] for index in indices]
        try:
            searches = [
                make_search(row.prompt, options, positions=source.positions, rest=row.rest)
                for row in rows
            ]
            batch = RunningBatch(decoder)
            batch.add(searches, self.inputs.join(rows))
            while batch.searches:
                batch.step()
        except (InputError, ShapeError) as error:
            return [error] * len(rows)
        return list(searches)

    def _compare_greedy(
        self, search: Search | EngineryError, index: int, where: str, errors: Sequence[float]
    ) -> _Outcome:
        if isinstance(search, EngineryError):
            problem = f"the graph fails {where} but PyTorch does not: {search.message}"
            return _Outcome(problem=problem)
        mine, theirs = search.results()[0].tokens, self.greedy[index].tokens
        pairs = enumerate(zip_longest(mine, theirs))
        step, (token, expected) = next(
            ((i, pair) for i, pair in pairs if pair[0] != pair[1]), (len(theirs), (None, None))
        )
        # Tokens after a parting are not compared: they follow different texts.
        if token is None and expected is None:
            return _Outcome(step)
        if token is None or expected is None:
            problem = (
                f"{where}, the text ends after {len(mine)} tokens, PyTorch's after {len(theirs)}"
            )
            return _Outcome(step, problem=problem)
        file = self.greedy[index].scores
        scores = np.load(file, mmap_mode="r")[step] if file else np.zeros(0)
        has_score = token < len(scores)
        margin = float(scores[expected] - scores[token]) if has_score else math.inf
        # A penalty multiplies logits, and their errors, by itself or its reciprocal.
        penalty = self.source.options.repetition_penalty
        # Both logits may be off by the error, in opposite directions.
        allowed = 2 * errors[min(step, len(errors) - 1)] * max(penalty, 1 / penalty)
        if math.isfinite(margin) and margin <= allowed:
            return _Outcome(step, parted=True)
        problem = (
            f"{where}, token {step + 1} is {token}, PyTorch's is {expected}: PyTorch's logits "
            f"are {margin:.3g} apart, a near tie of up to {allowed:.3g} is allowed"
        )
        return _Outcome(step, problem=problem)

    def _compare_beams(self, search: Search | EngineryError, index: int, error: float) -> _Outcome:
        if isinstance(search, EngineryError):
            return _Outcome(problem=f"the graph fails but PyTorch does not: {search.message}")
        mine, theirs = search.results()[0], self.beams[index]
        if mine.tokens == theirs.tokens:
            return _Outcome()
        score = math.nan if mine.score is None else mine.score
        # A score adds up log-probabilities, each wrong by up to twice the error of a logit.
        total, allowed = self._beam_errors(mine, theirs, error)
        closest = search.closest if isinstance(search, BeamSearch) else math.inf
        difference = abs(score - theirs.score)
        # Two beams that are each off by the total may change places. NaN is within no limit.
        if difference <= allowed or closest <= 2 * total:
            return _Outcome(parted=True)
        step = next(i for i, (a, b) in enumerate(zip_longest(mine.tokens, theirs.tokens)) if a != b)
        problem = (
            f"its tokens differ from PyTorch's from the {step + 1}. on, and its score is "
            f"{score:.6g}, PyTorch's {theirs.score:.6g}: {difference:.3g} apart, up to "
            f"{allowed:.3g} allowed"
        )
        return _Outcome(parted=True, problem=problem)

    def _beam_errors(
        self, mine: Hypothesis, theirs: _Continuation, error: float
    ) -> tuple[float, float]:
        """Return the allowed error of a sum of log-probabilities, and that of a score."""
        lengths = len(mine.tokens), len(theirs.tokens)
        penalty = self.source.options.length_penalty
        # transformers divides the sum of the log-probabilities by a power of the length.
        scores = [2 * error * length / length**penalty for length in lengths]
        return 2 * error * max(lengths), max(scores)


def _case(graph: str, name: str, problem: str) -> ValidationCaseResult:
    return ValidationCaseResult(graph, name, "generation", {}, [], problem)


def _arguments(steps: int, beams: int, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a search, which both sides take in place of those of the files."""
    return {
        "max_new_tokens": steps,
        "num_beams": beams,
        "num_return_sequences": 1,
        "do_sample": False,
        **chosen,
    }


def compare_generation(
    context: ValidationContext, lengths: Collection[int], *, engines: bool
) -> Findings:
    """Compare decoders with a cache over several tokens, and generated texts with PyTorch's.

    At these lengths, graphs begin to do something else; with engines, nothing can be decoded.
    """
    decoders = DecoderGraphs.find_all(context.artifact.manifest.graphs)
    obstacle = "only graphs decode here, not engines" if engines else ""
    if context.reference.is_onnx:
        obstacle = f"{context.reference.name} keeps no cache"
    if decoders and obstacle:
        return Findings(notes=(f"no tokens were decoded: {obstacle}",))
    refused = Findings()
    try:
        texts, prepared = generate_reference(context)
    except GenerationRefusedError as error:
        texts, prepared, refused = None, Findings(), Findings(cases=(error.case(),))
    usable, unusable = usable_decoders(decoders)
    parts = [prepared, unusable]
    sequences = []
    if usable:
        prompts: list[tuple[int, int]] = []
        for graphs in usable:
            differing, notes = find_prompts(context, graphs, lengths)
            prompts += differing
            parts.append(notes)
        seed = context.config.seed
        sequences += make_sequences(usable[0], context.feed_limits, seed=seed, more=prompts)
    if texts:
        sequences.append(texts.sequences())
    decoded = compare_decoding(context, usable, sequences)
    parts += [decoded, refused]
    if texts:
        # Their limits say how close two logits must be for either to be chosen.
        forced = [case for case in decoded.cases if case.kind == "generation"]
        parts.append(texts.compare(context, forced))
    return join_findings(parts)


def generate_reference(context: ValidationContext) -> tuple[GeneratedTexts | None, Findings]:
    """Let PyTorch generate from real inputs.

    Returns:
        The inputs with their texts, and notes; None, if the graphs or PyTorch do not generate.

    Raises:
        GenerationRefusedError: `load_model` cannot generate with the artifact's files.
        InputError: the user's data cannot be read.
        ExportError: PyTorch cannot load the source.
        UntrustedModelError: the source needs a permission that was not given, or is malicious.
    """
    artifact = context.artifact
    if not is_generating(artifact.manifest.task):
        return None, Findings()
    try:
        graphs = find_generating(artifact)
        problem = _obstacle(graphs)
        if not problem and graphs.encoder is not None:
            require_prepared(graphs.encoder)
    except ArtifactError as error:
        raise_system_error(error)
        problem = error.message
    if problem:
        # A note, not a failure: such graphs are for other programs, and the verdict is theirs.
        return None, Findings(notes=(f"not generated: {problem}",))
    try:
        options = read_generation_config(artifact.path)
        noun, samples = _samples(artifact, graphs, context.config)
    except ArtifactError as error:
        raise_system_error(error)
        raise GenerationRefusedError(graphs.later.file, error) from error
    positions = read_positions(artifact.path)
    with context.reference.open_pytorch(graphs.later.file) as model:
        source = _Source(context, model, graphs, options, positions)
        try:
            return _generate(source, noun, samples)
        except (ArtifactError, InputError) as error:
            return None, note_refusal("not generated", error)


def _generate(
    source: _Source, noun: str, samples: Sequence[Any]
) -> tuple[GeneratedTexts, Findings]:
    """Prepare the inputs, let PyTorch generate, and compare what it makes of the same files.

    Raises:
        GenerationRefusedError: `load_model` cannot generate with the artifact's files.
        ArtifactError: a file of the artifact is invalid.
        InputError: no input fits, or PyTorch rejects one.
    """
    parts = [Findings(cases=tuple(_compare_options(source)))]
    if noun == _MADE_UP:
        _require_no_tokenizer(source)
        inputs = _made_up(source)
        greedy, beams = _run_torch(source, inputs)
    else:
        inputs, samples, unk_id = _prepare_inputs(source, noun, samples)
        parts.append(_compare_tokens(source, inputs, samples, unk_id))
        parts.append(_compare_features(source, inputs, samples))
        greedy, beams = _run_torch(source, inputs)
        parts.append(_compare_texts(source, inputs, greedy))
    joined = join_findings(parts)
    texts = GeneratedTexts(source, inputs, greedy, beams, joined.cases)
    return texts, Findings(notes=joined.notes)


def _prepare_inputs(
    source: _Source, noun: str, samples: Sequence[Any]
) -> tuple[_Inputs, list[Any], int | None]:
    """Return the inputs that fit, their samples, and the tokenizer's id of unknown tokens."""
    options = source.options
    try:
        tokenizer = TextTokenizer.open(source.artifact.path)
        opened = open_inputs(source.artifact, source.graphs, tokenizer, options, source.positions)
    except ArtifactError as error:
        raise source.refusal(error) from error
    target = opened.fallback(options)
    chosen = opened.implied(**target)
    rows = _fitting(
        lambda item: _prepare(opened, item, options.with_arguments(**chosen), target),
        samples,
        source.longest_prompt,
        source.count,
    )
    names = [f"{noun.removesuffix('s')} {index + 1}" for index in rows]
    pad_id = tokenizer.pad_id or 0
    inputs = _Inputs(noun, names, list(rows.values()), opened.join, pad_id, chosen)
    return inputs, [samples[index] for index in rows], tokenizer.unk_id


class GenerationRefusedError(EngineryError):
    """`load_model` cannot generate with an artifact's files, whatever its graphs compute."""

    def __init__(self, graph: str, error: ArtifactError) -> None:
        super().__init__(error.message, do=error.do)
        self.graph = graph
        """The decoder."""

    def case(self) -> ValidationCaseResult:
        """Return it as a failed case."""
        return _case(self.graph, "answers", f"load_model cannot generate: {self.message}")


def _require_no_tokenizer(source: _Source) -> None:
    """Raise GenerationRefusedError if only the source has a tokenizer that can be read."""
    try:
        source.model.tokenize(SENTENCES[:1])
    except InputError:
        return
    try:
        TextTokenizer.open(source.artifact.path)
    except ArtifactError as error:
        raise source.refusal(error) from error


def _obstacle(graphs: DecoderGraphs) -> str:
    """Return the reason why the graphs do not generate; empty if they do."""
    if graphs.first is not graphs.later:
        return (
            f"the first step of {graphs.later.file} is another graph, {graphs.first.file}; export "
            "with --layout enginery"
        )
    records = (graphs.later, *([graphs.encoder] if graphs.encoder else []))
    fixed = [record.file for record in records if isinstance(record.inputs[0].dims[0], int)]
    return f"{fixed[0]} has a fixed batch" if fixed else ""


def _samples(
    artifact: Artifact, graphs: DecoderGraphs, config: ValidateConfig
) -> tuple[str, Sequence[Any]]:
    """Return what the inputs are, and the inputs: the user's, or built-in ones.

    Without a tokenizer there are none.
    """
    path = Path(config.data).expanduser()
    # Arrays are inputs of a graph, from which no prompt can be made.
    is_user_data = bool(config.data) and not holds_arrays(path)
    count = _INPUTS[config.effort]
    if graphs.encoder is not None and takes_images(graphs.encoder):
        images = list_media(path, "images", rows=count) if is_user_data else synthetic_images(count)
        return "images", images
    if graphs.encoder is not None and takes_sounds(graphs.encoder):
        rate = AudioProcessor.open(artifact.path).sampling_rate
        sounds = (
            list_media(path, "audio", rows=count) if is_user_data else synthetic_sounds(rate, count)
        )
        return "sounds", sounds
    if not (artifact.path / "tokenizer.json").is_file():
        return _MADE_UP, ()
    return (
        ("rows", read_texts(path, config.column, rows=config.rows))
        if is_user_data
        else (
            "sentences",
            SENTENCES,
        )
    )


def _compare_options(source: _Source) -> list[ValidationCaseResult]:
    """Return a failure for each option of the artifact's file that PyTorch has otherwise."""
    graphs, config = source.graphs, source.model.generation_config()
    theirs = parse_generation_config(config, "PyTorch's generation config")
    mine, expected = (config.model_dump(mode="json") for config in (source.options, theirs))
    for config in (mine, expected):
        if graphs.encoder is not None and config["decoder_start_token_id"] is None:
            # transformers starts a decoder so if the file names no other token.
            config["decoder_start_token_id"] = config["bos_token_id"]
    return [
        _case(
            graphs.later.file,
            FILE,
            f"{name} is {_shown(mine.get(name))}, but {_shown(expected.get(name))} in PyTorch",
        )
        for name in dict.fromkeys([*mine, *expected])
        if name not in _NOT_COMPARED and mine.get(name) != expected.get(name)
    ]


def _shown(value: Any) -> str:
    return "not set" if value in (None, []) else str(value)


def _prepare(
    inputs: GenerationInputs, item: Any, options: GenerationOptions, target: Mapping[str, Any]
) -> GenerationRow:
    """Return a prepared input, with the first of the tokens that its prompt may have."""
    row = next(iter(inputs.rows([item], options, **target)))
    if row.part is not None:
        raise InputError(
            f"{row.part.recording.name} is longer than the {row.part.recording.shape.seconds:g} "
            "seconds of a window.",
            do="Validate on shorter audio.",
        )
    return replace(row, rest=tuple(choices[:1] for choices in row.rest))


def _whole_prompt(row: GenerationRow) -> list[int]:
    """Return all tokens of a prompt that leaves no choice."""
    return [*row.prompt, *(choices[0] for choices in row.rest)]


def _fitting(
    prepare: Callable[[Any], GenerationRow], samples: Sequence[Any], longest: int | None, count: int
) -> dict[int, GenerationRow]:
    """Return up to `count` inputs that are short enough for new tokens to follow, by their place.

    Args:
        prepare: prepares an input.
        samples: the inputs.
        longest: largest number of tokens of a decoder's prompt; None for no limit.
        count: the number of inputs.

    Raises:
        InputError: none fits.
    """
    rows: dict[int, GenerationRow] = {}
    refused = InputError(f"all prompts have more than {longest} tokens.")
    for index, sample in enumerate(samples):
        try:
            row = prepare(sample)
        except InputError as error:  # longer than the encoder's positions
            refused = error
            continue
        if longest is None or row.prompt_length <= longest:
            rows[index] = row
        if len(rows) == count:
            break
    if not rows:
        raise refused
    return rows


def _compare_tokens(
    source: _Source, inputs: _Inputs, samples: Sequence[Any], unk_id: int | None
) -> Findings:
    """Return a failure for each text that transformers tokenizes differently, and notes.

    Texts with unknown tokens are only noted: a tokenizer that was made from another one may join
    them differently.
    """
    if not all(isinstance(sample, str) for sample in samples):
        return Findings()
    try:
        theirs = source.model.tokenize(samples)
    except InputError as error:
        return note_refusal("tokens were not compared", error)
    failed, notes = [], []
    for name, row, expected in zip(inputs.names, inputs.rows, theirs, strict=True):
        mine = [int(token) for token in row.arrays.get("input_ids", row.prompt)]
        if mine == expected:
            continue
        step = next(i for i, (a, b) in enumerate(zip_longest(mine, expected)) if a != b)
        problem = (
            f"the tokenizer gives {len(mine)} tokens, transformers' {len(expected)}; from the "
            f"{step + 1}. on they are {mine[step : step + 4]} and {expected[step : step + 4]}"
        )
        # A converted tokenizer may join unknown tokens in another way.
        if unk_id is not None and unk_id in {*mine[step:], *expected[step:]}:
            notes.append(f"{name}, which has unknown tokens: {problem}")
        else:
            failed.append(_case(source.graphs.later.file, f"{name}, tokens", problem))
    return Findings(cases=tuple(failed), notes=tuple(notes))


def _compare_features(source: _Source, inputs: _Inputs, samples: Sequence[Any]) -> Findings:
    """Return a failure for each image or sound whose features are not transformers', and notes."""
    if inputs.what not in _MEDIA:
        return Findings()
    file = source.artifact.manifest.graphs[0].file
    failed: list[ValidationCaseResult] = []
    for index, (name, row) in enumerate(zip(inputs.names, inputs.rows, strict=True)):
        item = _raw_item(source.artifact, inputs.what, samples[index])
        try:
            theirs = source.model.prepare(item)
        except InputError as error:
            note = f"features were not compared: {error.message}"
            return Findings(cases=tuple(failed), notes=(note,))
        for feature, mine in row.arrays.items():
            expected = theirs.get(feature, np.zeros(0))[0:1]
            problem = ""
            if expected.shape != (1, *mine.shape):
                problem = f"has the shape {mine.shape}, transformers' {expected.shape[1:]}"
            else:
                difference = float(np.abs(mine - expected[0]).max())
                allowed = _FEATURE_ERROR * max(float(np.abs(expected).max()), 1.0)
                if not difference <= allowed:  # true for NaN
                    problem = (
                        f"differs by {difference:.3g} from transformers', {allowed:.2g} allowed"
                    )
            if problem:
                failed.append(_case(file, f"{name}, {feature}", problem))
    return Findings(cases=tuple(failed))


def _raw_item(artifact: Artifact, noun: str, sample: Any) -> dict[str, Any]:
    """Return an image or a sound as `TorchReference.prepare` takes it."""
    if noun == "images":
        return {"image": np.asarray(load_image(sample))}
    rate = AudioProcessor.open(artifact.path).sampling_rate
    return {"raw": load_audio(sample, rate), "sampling_rate": rate}


def _compare_texts(source: _Source, inputs: _Inputs, greedy: Sequence[_Continuation]) -> Findings:
    """Return a failure for each continuation that is decoded to another text, and notes."""
    file = source.graphs.later.file
    try:
        task = require_task(source.artifact.manifest).open(source.artifact, source.graphs.later)
    except ArtifactError as error:
        raise source.refusal(error) from error
    if not isinstance(task, Generate):
        raise AssertionError("a task that generates has another class")
    try:
        theirs = source.model.decode_tokens([continuation.tokens for continuation in greedy])
    except InputError as error:
        return note_refusal("texts were not compared", error)
    failed = []
    for name, continuation, expected in zip(inputs.names, greedy, theirs, strict=True):
        mine = task.decode(continuation.tokens)
        if mine != expected:
            problem = f"the tokens of PyTorch are decoded to {mine!r}, by transformers {expected!r}"
            failed.append(_case(file, f"{name}, text", problem))
    return Findings(cases=tuple(failed))


def _made_up(source: _Source) -> _Inputs:
    """Return inputs of different lengths, for an artifact without a tokenizer."""
    graphs, options, count = source.graphs, source.options, source.count
    limits = source.context.feed_limits
    max_length = min(_LONGEST_MADE_UP, source.longest_prompt or _LONGEST_MADE_UP)
    # Different lengths, so that the batch is ragged.
    lengths = np.linspace(max_length, 1, count).round().astype(int)
    names = [f"made-up prompt {index + 1}" for index in range(count)]
    if graphs.encoder is None:
        ids = next(spec for spec in graphs.later.inputs if spec.name == "input_ids")
        sizes = dict.fromkeys(dynamic_dims([ids]), max_length) | {"batch": count}
        drawn = make_feeds([ids], sizes, limits, seed=0)["input_ids"]
        rows = [
            GenerationRow(tuple(map(int, row[:length])), {})
            for row, length in zip(drawn, lengths, strict=True)
        ]
        return _Inputs(_MADE_UP, names, rows, lambda _: None, limits.pad_token_id)
    # The order in which transformers looks for the first token.
    start = options.decoder_start_token_id
    start = options.bos_token_id if start is None else start
    if start is None:
        raise ArtifactError(f"{FILE} has no decoder_start_token_id.")
    sizes = sweep_sizes(
        dynamic_dims(graphs.encoder.inputs), limits, batch=count, sequence=max_length
    )
    feeds = make_feeds(graphs.encoder.inputs, sizes, limits, seed=0, ragged=True)
    rows = [
        GenerationRow((start,), {name: array[index] for name, array in feeds.items()})
        for index in range(count)
    ]
    return _Inputs(
        _MADE_UP,
        names,
        rows,
        lambda batch: {name: np.stack([row.arrays[name] for row in batch]) for name in feeds},
        limits.pad_token_id,
    )


def _run_torch(source: _Source, inputs: _Inputs) -> tuple[list[_Continuation], list[_Continuation]]:
    """Run PyTorch's greedy search and beam search on each input alone."""
    continuations: tuple[list[_Continuation], list[_Continuation]] = [], []
    task = source.context.progress.task("PyTorch's generate", total=2 * len(inputs.rows))
    with task as advance:
        for index, row in enumerate(inputs.rows):
            if source.graphs.encoder is None:
                ids = np.asarray([row.prompt], np.int64)
                feeds: Feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
            else:
                feeds = dict(inputs.join([row]) or {})
                # Without more than the start token, transformers makes the prompt itself.
                if row.rest:
                    feeds["decoder_input_ids"] = np.asarray([_whole_prompt(row)], np.int64)
            # Models that sample are compared by these two searches, which do not depend on chance.
            for texts, beams in zip(continuations, (1, BEAMS), strict=True):
                directory = source.context.scratch / f"generate-{index}-{beams}"
                arguments = _arguments(source.steps, beams, inputs.chosen)
                files = source.model.generate(feeds, directory, arguments)
                texts.append(
                    _Continuation(
                        tuple(np.load(files["tokens"]).tolist()),
                        files.get("scores"),
                        float(np.load(files["score"])) if "score" in files else math.nan,
                    )
                )
                advance()
    return continuations
