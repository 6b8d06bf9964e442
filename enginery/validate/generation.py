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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.datasets.folders import list_media
from enginery.core.datasets.samples import holds_arrays, read_texts
from enginery.core.errors import ArtifactError, EngineryError, InputError, ShapeError
from enginery.core.model.feeds import FeedLimits, Feeds, make_feeds
from enginery.core.progress import Progress
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
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.pytorch.reference import TorchReference
from enginery.runtime.sample_inputs import takes_images, takes_sounds
from enginery.runtime.tasks import is_generating, require_task
from enginery.runtime.tasks.generate import Generate
from enginery.runtime.text.tokenizer import TextTokenizer
from enginery.validate.cases.sweep import sweep_sizes
from enginery.validate.config import Effort, ValidateConfig
from enginery.validate.decoding import Sequences

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
class GeneratedTexts:
    """Inputs, and what PyTorch generates from them."""

    graphs: DecoderGraphs
    options: GenerationOptions
    positions: int | None
    steps: int
    inputs: _Inputs
    greedy: list[_Continuation]
    beams: list[_Continuation]
    problems: list[ValidationCaseResult]
    """Failures of the tokenizer and of generation_config.json."""

    def sequences(self) -> Sequences:
        """Return the prompts with PyTorch's tokens, as one batch to decode.

        The last token is left out, since nothing follows it; rows that end repeat their last one.
        """
        rows, forced = self.inputs.rows, self._forced_prompt + self.steps - 1
        longest = max(len(row.prompt) for row in rows)
        ids = np.full((len(rows), longest + forced), self.inputs.pad_id, np.int64)
        mask = np.ones_like(ids)
        for index, (row, continuation) in enumerate(zip(rows, self.greedy, strict=True)):
            # On the left, where decoders have their padding.
            start = longest - len(row.prompt)
            filled = [*continuation.tokens, *[continuation.tokens[-1]] * self.steps][
                : self.steps - 1
            ]
            ids[index, start:] = [*_whole_prompt(row), *filled]
            mask[index, :start] = 0
        encoder: Feeds = {}
        if self.graphs.encoder is not None:
            dtypes = {spec.name: spec.dtype for spec in self.graphs.encoder.inputs}
            joined = self.inputs.join(rows) or {}
            encoder = {name: array.astype(dtypes[name]) for name, array in joined.items()}
        name = f"{len(rows)} {self.inputs.what} with PyTorch's tokens"
        return Sequences(name, ids, mask, encoder, forced, "generation")

    def compare(
        self,
        forced: Sequence[ValidationCaseResult],
        open_runner: Callable[[str], AbstractContextManager[OrtRunner]],
        progress: Progress,
    ) -> tuple[list[ValidationCaseResult], GenerationMetrics]:
        """Generate with the artifact, and compare.

        Args:
            forced: the results of the steps of `sequences`, which have the allowed errors.
            open_runner: opens the graph of a file.
            progress: receives progress messages.

        Raises:
            ArtifactError: the decoder has an input that nothing computes.
            ProviderError: a graph cannot be loaded.
        """
        # Steps over the rest of the prompt choose no token.
        outputs = [case.outputs[0] for case in forced if case.outputs][self._forced_prompt :]
        # The error that is allowed for a logit at each step decides what counts as a near tie.
        errors = [output.limit for output in outputs] or [0.0]
        records = [self.graphs.later, *([self.graphs.encoder] if self.graphs.encoder else [])]
        rows, file = self.inputs.rows, self.graphs.later.file
        with (
            ExitStack() as stack,
            progress.task("generating", total=len(rows) + len(self._batches()) + 1) as advance,
        ):
            runners = {
                record.file: stack.enter_context(open_runner(record.file)) for record in records
            }
            decoder = CachedDecoder(self.graphs, runners, pad_id=self.inputs.pad_id)
            greedy = [_Compared(file, f"{name}, greedy search") for name in self.inputs.names]
            beams = [_Compared(file, f"{name}, beam {BEAMS}") for name in self.inputs.names]
            # Padding and neighbours must not change a text, so each runs in a batch and alone.
            runs = [("in a batch", indices) for indices in self._batches()]
            runs += [("alone", [index]) for index in range(len(rows))]
            for where, indices in runs:
                searches = self._run(decoder, indices, 1)
                for index, search in zip(indices, searches, strict=True):
                    self._compare_greedy(greedy[index], search, index, where, errors)
                advance()
            for indices in self._batches():
                searches = self._run(decoder, indices, BEAMS)
                for index, search in zip(indices, searches, strict=True):
                    self._compare_beams(beams[index], search, index, max(errors))
            advance()
        results = [
            *self.problems,
            *(compared.result() for compared in (*greedy, *beams)),
        ]
        agreement = [output.argmax_agreement for output in outputs]
        return results, GenerationMetrics(
            what=self.inputs.what,
            inputs=len(rows),
            steps=max(len(continuation.tokens) for continuation in self.greedy),
            compared_steps=sum(compared.steps for compared in greedy),
            generated_steps=sum(len(continuation.tokens) for continuation in self.greedy),
            equal=sum(compared.equal for compared in greedy),
            parted=sum(compared.parted and not compared.problem for compared in greedy),
            beams=BEAMS,
            beams_equal=sum(compared.equal for compared in beams),
            agreement=float(np.mean(agreement)) if agreement else math.nan,
            failed=sum(bool(result.problem) for result in results),
        )

    @property
    def _forced_prompt(self) -> int:
        """Number of the prompt's tokens behind the first step; the same for all inputs."""
        return len(self.inputs.rows[0].rest)

    def _batches(self) -> list[list[int]]:
        """Return the places of inputs that `generate` runs in one batch."""
        return self.graphs.batches([len(row.prompt) for row in self.inputs.rows])

    def _run(
        self, decoder: CachedDecoder, indices: Sequence[int], beams: int
    ) -> list[Search | EngineryError]:
        """Generate from inputs in one batch; an error of the graph stands for each of them."""
        options = self.options.with_arguments(**_arguments(self.steps, beams, self.inputs.chosen))
        rows = [self.inputs.rows[index] for index in indices]
        try:
            searches = [
                make_search(row.prompt, options, positions=self.positions, rest=row.rest)
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
        self,
        compared: _Compared,
        search: Search | EngineryError,
        index: int,
        where: str,
        errors: Sequence[float],
    ) -> None:
        if isinstance(search, EngineryError):
            compared.fail(f"the graph fails {where} but PyTorch does not: {search.message}")
            return
        mine, theirs = search.results()[0].tokens, self.greedy[index].tokens
        pairs = enumerate(zip_longest(mine, theirs))
        step, (token, expected) = next(
            ((i, pair) for i, pair in pairs if pair[0] != pair[1]), (len(theirs), (None, None))
        )
        # Tokens after a parting are not compared: they follow different texts.
        compared.steps = min(step, compared.steps)
        if token is None and expected is None:
            return
        if token is None or expected is None:
            compared.fail(
                f"{where}, the text ends after {len(mine)} tokens, PyTorch's after {len(theirs)}"
            )
            return
        file = self.greedy[index].scores
        scores = np.load(file, mmap_mode="r")[step] if file else np.zeros(0)
        has_score = token < len(scores)
        margin = float(scores[expected] - scores[token]) if has_score else math.inf
        # A penalty multiplies logits, and their errors, by itself or its reciprocal.
        penalty = self.options.repetition_penalty
        # Both logits may be off by the error, in opposite directions.
        allowed = 2 * errors[min(step, len(errors) - 1)] * max(penalty, 1 / penalty)
        if math.isfinite(margin) and margin <= allowed:
            compared.parted = True
        else:
            compared.fail(
                f"{where}, token {step + 1} is {token}, PyTorch's is {expected}: PyTorch's logits "
                f"are {margin:.3g} apart, a near tie of up to {allowed:.3g} is allowed"
            )

    def _compare_beams(
        self, compared: _Compared, search: Search | EngineryError, index: int, error: float
    ) -> None:
        if isinstance(search, EngineryError):
            compared.fail(f"the graph fails but PyTorch does not: {search.message}")
            return
        mine, theirs = search.results()[0], self.beams[index]
        if mine.tokens == theirs.tokens:
            return
        compared.parted = True
        score = math.nan if mine.score is None else mine.score
        # A score adds up log-probabilities, each wrong by up to twice the error of a logit.
        total, allowed = self._beam_errors(mine, theirs, error)
        closest = search.closest if isinstance(search, BeamSearch) else math.inf
        difference = abs(score - theirs.score)
        # Two beams that are each off by the total may change places. `not <=` is true for NaN.
        if not difference <= allowed and not closest <= 2 * total:
            step = next(
                i for i, (a, b) in enumerate(zip_longest(mine.tokens, theirs.tokens)) if a != b
            )
            compared.fail(
                f"its tokens differ from PyTorch's from the {step + 1}. on, and its score is "
                f"{score:.6g}, PyTorch's {theirs.score:.6g}: {difference:.3g} apart, up to "
                f"{allowed:.3g} allowed"
            )

    def _beam_errors(
        self, mine: Hypothesis, theirs: _Continuation, error: float
    ) -> tuple[float, float]:
        """Return the allowed error of a sum of log-probabilities, and that of a score."""
        lengths = len(mine.tokens), len(theirs.tokens)
        penalty = self.options.length_penalty
        # transformers divides the sum of the log-probabilities by a power of the length.
        scores = [2 * error * length / length**penalty for length in lengths]
        return 2 * error * max(lengths), max(scores)


@dataclass
class _Compared:
    """The comparison of one input."""

    graph: str
    name: str
    steps: int = STEPS
    """Greedy tokens that are equal."""
    parted: bool = False
    problem: str = ""

    @property
    def equal(self) -> bool:
        return not self.parted and not self.problem

    def fail(self, problem: str) -> None:
        """Take the first problem."""
        self.problem = self.problem or problem

    def result(self) -> ValidationCaseResult:
        """Return it as a case."""
        return _case(self.graph, self.name, self.problem)


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


def generate_reference(
    artifact: Artifact,
    config: ValidateConfig,
    limits: FeedLimits,
    open_reference: Callable[[str], TorchReference],
    scratch: Path,
    progress: Progress,
) -> tuple[GeneratedTexts | None, list[str]]:
    """Let PyTorch generate from real inputs.

    Args:
        artifact: the artifact.
        config: options of the validation: the data, and the effort, which sets the number of
            inputs.
        limits: limits on made-up inputs.
        open_reference: loads the model in PyTorch, as the reference of a graph.
        scratch: directory for PyTorch's outputs.
        progress: receives progress messages.

    Returns:
        The inputs with their texts, and notes; None, if the graphs or PyTorch do not generate.

    Raises:
        GenerationRefusedError: `load_model` cannot generate with the artifact's files.
        InputError: the user's data cannot be read.
        ExportError: PyTorch cannot load the source.
        UntrustedModelError: the source needs a permission that was not given, or is malicious.
    """
    if not is_generating(artifact.manifest.task):
        return None, []
    try:
        graphs = find_generating(artifact)
        problem = _obstacle(graphs)
        if not problem and graphs.encoder is not None:
            require_prepared(graphs.encoder)
    except ArtifactError as error:
        problem = error.message
    if problem:
        # A note, not a failure: such graphs are for other programs, and the verdict is theirs.
        return None, [f"not generated: {problem}"]
    try:
        options = read_generation_config(artifact.path)
        noun, samples = _samples(artifact, graphs, config)
    except ArtifactError as error:
        raise GenerationRefusedError(graphs.later.file, error) from error
    positions = read_positions(artifact.path)
    # Half of a short model's positions are left for the prompt.
    steps = STEPS if positions is None else max(1, min(STEPS, positions // 2))
    with open_reference(graphs.later.file) as model:
        try:
            problems = _compare_options(model, options, graphs)
            longest = None if positions is None else positions - steps
            if noun == _MADE_UP:
                _require_no_tokenizer(model, artifact, graphs)
                inputs = _made_up(graphs, options, limits, longest, _INPUTS[config.effort])
                notes: list[str] = []
            else:
                try:
                    tokenizer = TextTokenizer.open(artifact.path)
                    source = open_inputs(artifact, graphs, tokenizer, options, positions)
                except ArtifactError as error:
                    raise GenerationRefusedError(graphs.later.file, error) from error
                target = source.fallback(options)
                chosen = source.implied(**target)
                rows = _fitting(
                    lambda item: _prepare(source, item, options.with_arguments(**chosen), target),
                    samples,
                    longest,
                    _INPUTS[config.effort],
                )
                names = [f"{noun.removesuffix('s')} {index + 1}" for index in rows]
                inputs = _Inputs(
                    noun, names, list(rows.values()), source.join, tokenizer.pad_id or 0, chosen
                )
                taken = [samples[index] for index in rows]
                failed, notes = _compare_tokens(model, graphs, inputs, taken, tokenizer.unk_id)
                problems += failed
                failed, more_notes = _compare_features(model, artifact, inputs, taken, scratch)
                problems += failed
                notes += more_notes
            greedy, beams = _run_torch(model, graphs, inputs, steps, scratch, progress)
            if noun != _MADE_UP:
                failed, more_notes = _compare_texts(model, artifact, graphs, inputs, greedy)
                problems += failed
                notes += more_notes
        except (ArtifactError, InputError) as error:
            return None, [f"not generated: {error.message}"]
    return (
        GeneratedTexts(graphs, options, positions, steps, inputs, greedy, beams, problems),
        notes,
    )


class GenerationRefusedError(EngineryError):
    """`load_model` cannot generate with an artifact's files, whatever its graphs compute."""

    def __init__(self, graph: str, error: ArtifactError) -> None:
        super().__init__(error.message, do=error.do)
        self.graph = graph
        """The decoder."""

    def case(self) -> ValidationCaseResult:
        """Return it as a failed case."""
        return _case(self.graph, "answers", f"load_model cannot generate: {self.message}")


def _require_no_tokenizer(model: TorchReference, artifact: Artifact, graphs: DecoderGraphs) -> None:
    """Raise GenerationRefusedError if only the source has a tokenizer that can be read."""
    try:
        model.tokenize(SENTENCES[:1])
    except InputError:
        return
    try:
        TextTokenizer.open(artifact.path)
    except ArtifactError as error:
        raise GenerationRefusedError(graphs.later.file, error) from error


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


def _compare_options(
    model: TorchReference, options: GenerationOptions, graphs: DecoderGraphs
) -> list[ValidationCaseResult]:
    """Return a failure for each option of the artifact's file that PyTorch has otherwise."""
    theirs = parse_generation_config(model.generation_config(), "PyTorch's generation config")
    mine, expected = (config.model_dump(mode="json") for config in (options, theirs))
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
    model: TorchReference,
    graphs: DecoderGraphs,
    inputs: _Inputs,
    samples: Sequence[Any],
    unk_id: int | None,
) -> tuple[list[ValidationCaseResult], list[str]]:
    """Return a failure for each text that transformers tokenizes differently, and notes.

    Texts with unknown tokens are only noted: a tokenizer that was made from another one may join
    them differently.
    """
    if not all(isinstance(sample, str) for sample in samples):
        return [], []
    try:
        theirs = model.tokenize(samples)
    except InputError as error:
        return [], [f"tokens were not compared: {error.message}"]
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
            failed.append(_case(graphs.later.file, f"{name}, tokens", problem))
    return failed, notes


def _compare_features(
    model: TorchReference,
    artifact: Artifact,
    inputs: _Inputs,
    samples: Sequence[Any],
    scratch: Path,
) -> tuple[list[ValidationCaseResult], list[str]]:
    """Return a failure for each image or sound whose features are not transformers', and notes."""
    if inputs.what not in _MEDIA:
        return [], []
    file = artifact.manifest.graphs[0].file
    failed: list[ValidationCaseResult] = []
    for index, (name, row) in enumerate(zip(inputs.names, inputs.rows, strict=True)):
        item = _raw_item(artifact, inputs.what, samples[index])
        try:
            theirs = model.prepare(item, scratch / f"raw-{index}")
        except InputError as error:
            return failed, [f"features were not compared: {error.message}"]
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
    return failed, []


def _raw_item(artifact: Artifact, noun: str, sample: Any) -> dict[str, Any]:
    """Return an image or a sound as `TorchReference.prepare` takes it."""
    if noun == "images":
        return {"image": np.asarray(load_image(sample))}
    rate = AudioProcessor.open(artifact.path).sampling_rate
    return {"raw": load_audio(sample, rate), "sampling_rate": rate}


def _compare_texts(
    model: TorchReference,
    artifact: Artifact,
    graphs: DecoderGraphs,
    inputs: _Inputs,
    greedy: Sequence[_Continuation],
) -> tuple[list[ValidationCaseResult], list[str]]:
    """Return a failure for each continuation that is decoded to another text, and notes."""
    try:
        task = require_task(artifact.manifest).open(artifact, graphs.later)
    except ArtifactError as error:
        raise GenerationRefusedError(graphs.later.file, error) from error
    if not isinstance(task, Generate):
        raise AssertionError("a task that generates has another class")
    try:
        theirs = model.decode_tokens([continuation.tokens for continuation in greedy])
    except InputError as error:
        return [], [f"texts were not compared: {error.message}"]
    failed = []
    for name, continuation, expected in zip(inputs.names, greedy, theirs, strict=True):
        mine = task.decode(continuation.tokens)
        if mine != expected:
            problem = f"the tokens of PyTorch are decoded to {mine!r}, by transformers {expected!r}"
            failed.append(_case(graphs.later.file, f"{name}, text", problem))
    return failed, []


def _made_up(
    graphs: DecoderGraphs,
    options: GenerationOptions,
    limits: FeedLimits,
    longest: int | None,
    count: int,
) -> _Inputs:
    """Return inputs of different lengths, for an artifact without a tokenizer."""
    max_length = min(_LONGEST_MADE_UP, longest or _LONGEST_MADE_UP)
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


def _run_torch(
    model: TorchReference,
    graphs: DecoderGraphs,
    inputs: _Inputs,
    steps: int,
    scratch: Path,
    progress: Progress,
) -> tuple[list[_Continuation], list[_Continuation]]:
    """Run PyTorch's greedy search and beam search on each input alone."""
    continuations: tuple[list[_Continuation], list[_Continuation]] = [], []
    with progress.task("PyTorch's generate", total=2 * len(inputs.rows)) as advance:
        for index, row in enumerate(inputs.rows):
            if graphs.encoder is None:
                ids = np.asarray([row.prompt], np.int64)
                feeds: Feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
            else:
                feeds = dict(inputs.join([row]) or {})
                # Without more than the start token, transformers makes the prompt itself.
                if row.rest:
                    feeds["decoder_input_ids"] = np.asarray([_whole_prompt(row)], np.int64)
            # Models that sample are compared by these two searches, which do not depend on chance.
            for texts, beams in zip(continuations, (1, BEAMS), strict=True):
                directory = scratch / f"generate-{index}-{beams}"
                files = model.generate(feeds, directory, _arguments(steps, beams, inputs.chosen))
                texts.append(
                    _Continuation(
                        tuple(np.load(files["tokens"]).tolist()),
                        files.get("scores"),
                        float(np.load(files["score"])) if "score" in files else math.nan,
                    )
                )
                advance()
    return continuations
