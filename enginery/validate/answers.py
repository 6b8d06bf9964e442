"""Compare the answers to raw inputs with those that a user of transformers gets.

Both sides start from the same few texts, pairs, images or sounds. The reference prepares them with
the tokenizer or processor of the model's own files, and answers each alone: with transformers'
pipeline for the task, by the rule of sentence-transformers, or with the outputs of the model's
class (`runtime/pytorch/answers.py`). The artifact's side is what `load_model` consists of: the
task's `preprocess`, its batches, the graph, `postprocess`. It answers each input alone, and all in
one batch, short texts beside long ones.

An FP32 graph runs itself, and an answer may differ by what its outputs may (`core/tolerance.py`).
The error of any other graph is judged elsewhere, so that PyTorch runs in its place, on the inputs
that were prepared for the graph: then the limit is that of two runs of FP32.

Texts that are generated are compared in `generation.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import (
    ArtifactError,
    InputError,
    ProviderError,
    ShapeError,
    raise_system_error,
)
from enginery.core.model.feeds import Feeds
from enginery.core.model.files import ModelConfig, read_logit_score
from enginery.core.model.random_numbers import RANDOM_OPS
from enginery.core.precision import roundoff
from enginery.core.tolerance import QuantizedTolerance, Tolerance
from enginery.core.trust.onnx_structure import read_structure
from enginery.reports.validation import AnswerMetrics, ValidationCaseResult
from enginery.runtime.audio.processor import AudioProcessor
from enginery.runtime.builtin_inputs import (
    CONTEXT,
    QUESTION,
    SENTENCES,
    synthetic_images,
    synthetic_sounds,
)
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.pytorch.reference import TorchReference
from enginery.runtime.sample_inputs import (
    ImageFeeder,
    SoundFeeder,
    TextFeeder,
    fixed_batch,
    pad_batch,
    takes_audio,
    takes_images,
    takes_texts,
)
from enginery.runtime.tasks import is_generating, manifest_task, manifest_tasks
from enginery.runtime.tasks.audio import Transcribe
from enginery.runtime.tasks.batch_runner import BatchRunner
from enginery.runtime.tasks.results import to_plain
from enginery.runtime.tasks.task import Row, Task, UnreadableOutputsError
from enginery.runtime.tasks.zero_shot_images import ZeroShotImages
from enginery.runtime.text.tokenizer import TEXT_INPUTS
from enginery.validate.compare import ComparisonLimits, Run
from enginery.validate.context import ValidationContext
from enginery.validate.findings import Findings
from enginery.validate.metrics.differences import compute_differences
from enginery.validate.objects import ObjectLimits, compare_objects
from enginery.validate.reference import LastStep, Reference
from enginery.validate.segments import Segments, as_segments, compare_segments

_REFERENCES = {
    "classify": "transformers' text-classification pipeline",
    "tag": "transformers' token-classification pipeline",
    "answer": "transformers' question-answering pipeline",
    "fill": "transformers' fill-mask pipeline",
    "classify_images": "transformers' image-classification pipeline",
    "detect": "transformers' object-detection pipeline",
    "segment": "transformers' image-segmentation pipeline",
    "zero_shot_images": "transformers' zero-shot-image-classification pipeline",
    "classify_audio": "transformers' audio-classification pipeline",
    "transcribe": "transformers' automatic-speech-recognition pipeline",
    "embed": "sentence-transformers' rule",
    "embed_both": "get_text_features and get_image_features of the model's class",
    "tensors": "the model and its processor in transformers",
}
_LABELS = ("cat", "two boats", "a street in the rain")
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "answer": {"top_k": 3},
    "fill": {"top_k": 5},
    "detect": {"threshold": 0.0},
    "zero_shot_images": {"candidate_labels": list(_LABELS)},
    "segment": {"threshold": 0.0, "mask_threshold": 0.0, "overlap_mask_area_threshold": 0.0},
}
"""Options of a task beside its defaults: the pipelines are asked for as many results."""

_LONG = SENTENCES[14]
_TEXTS = (SENTENCES[3], SENTENCES[5], SENTENCES[12], SENTENCES[15], "", _LONG)
"""A short text, accents, capitals with a dot, an emoji, nothing, and a long text."""
_PAIRS = ((QUESTION, CONTEXT), (SENTENCES[3], SENTENCES[2]))
_MASKED = ("The engine is {mask}.", "Le {mask} est fermé le lundi, mais le {mask} reste ouvert.")
_IMAGES = 2
_SECONDS = (1.0, 0.5)
"""Of sounds; encoders of speech have a position for 20 ms, tiny ones for each few samples."""
_CHUNK_SECONDS = 0.6
"""Length of the chunks that CTC models transcribe: the longer sound is cut, the other is not."""
_RATE = 16_000
"""Hertz of sounds for a model whose feature extractor cannot be read."""

_FP32_ROUNDINGS = 32
"""Roundings of the largest logit that two runs of one model in PyTorch may differ by, such as one
in a batch: 1.9e-6 of it. Runs of the tiny and of real models were seen below a tenth of that."""
_SCORE_ROUNDING = 1e-6
"""What two correct implementations of softmax and of a mean may differ by."""
_SEGMENT_ROUNDING = 2e-6
"""transformers rounds the score of a segment to six decimals."""
_EDITS_OF_A_TIE, _SPANS_OF_A_TIE = 2, 4
"""How many letters of a text, or spans of both sides, one near tie may change."""
_SHOWN = 40
"""Characters of a text that the name of an input has."""


@dataclass(frozen=True)
class RawInput:
    """An input as a user has it."""

    name: str
    value: Any
    """As `load_model` takes it."""
    item: Mapping[str, Any]
    """As the reference takes it, see `runtime.pytorch.answers.Item`."""


@dataclass(frozen=True)
class AnswerLimits:
    """How far answers may be from the reference's."""

    tolerance: Tolerance
    noise_floors: Mapping[str, float]
    """The largest noise floor of each output, over all cases; empty for two runs in PyTorch."""
    max_abs_error: float | None = None
    """Limit set by the user."""
    min_cosine: float | None = None
    """Limit set by the user."""

    @classmethod
    def of(
        cls, limits: ComparisonLimits, results: Sequence[ValidationCaseResult], *, exact: bool
    ) -> AnswerLimits:
        """Return the limits.

        Args:
            limits: those of the graph's outputs.
            results: the cases of the graph, which have the noise floors.
            exact: PyTorch runs on both sides.
        """
        if exact or isinstance(limits.tolerance, QuantizedTolerance):
            return cls(Tolerance.for_precision("fp32"), {})
        floors: dict[str, float] = {}
        for output in (output for case in results for output in case.outputs):
            if math.isfinite(output.noise_floor):
                floors[output.output] = max(output.noise_floor, floors.get(output.output, 0.0))
        return cls(limits.tolerance, floors, limits.max_abs_error, limits.min_cosine)

    def error(self, scale: float, outputs: Sequence[str] = ()) -> float:
        """Return the largest error of outputs whose largest magnitude is `scale`.

        Args:
            scale: the magnitude.
            outputs: names of the outputs; empty for any of them.
        """
        if self.max_abs_error is not None:
            return self.max_abs_error
        floors = [
            floor for name, floor in self.noise_floors.items() if not outputs or name in outputs
        ]
        floor = max(floors, default=_FP32_ROUNDINGS * roundoff("fp32") * scale)
        return self.tolerance.limit(noise_floor=floor, largest=scale)

    @property
    def distance(self) -> float:
        """The largest distance of two vectors, as a share of their length.

        Two vectors of one length with the cosine c are sqrt(2 - 2c) of it apart.
        """
        cosine = self.tolerance.min_cosine if self.min_cosine is None else self.min_cosine
        return math.sqrt(2 * max(1 - cosine, 0.0))


@dataclass(frozen=True)
class RawAnswerComparison:
    """How the answers of one graph to raw inputs compare."""

    compared: set[str]
    refused: dict[str, str]
    """Name of an input -> the error with which the artifact refuses it."""
    rejected: dict[str, str]
    """Name of an input -> the error with which the reference rejects it."""
    problems: dict[str, str]
    """Name of an input -> how its answer differs."""
    largest: float

    def cases(self, graph: str) -> list[ValidationCaseResult]:
        """Return a failed case for each input that is answered otherwise."""
        return [_case(graph, name, problem) for name, problem in self.problems.items()]

    def metrics(self, kind: str, inputs: int, *, is_around_graph: bool) -> AnswerMetrics:
        """Return the figures for the report."""
        return AnswerMetrics(
            reference=_REFERENCES[kind],
            inputs=inputs,
            compared=len(self.compared),
            failed=len(self.problems),
            largest_difference=self.largest,
            refused=[f"{name}: {error}" for name, error in self.refused.items()],
            rejected=[f"{name}: {error}" for name, error in self.rejected.items()],
            is_around_graph=is_around_graph,
        )


def compare_answers(
    context: ValidationContext,
    record: GraphRecord,
    runner: OrtRunner,
    results: Sequence[ValidationCaseResult],
) -> Findings:
    """Compare the answers of an artifact with one graph to raw inputs.

    The graph's results so far have the noise floors.

    Raises:
        ExportError: PyTorch cannot load the source.
        UntrustedModelError: the source needs a permission that was not given, or is malicious.
        ProviderError: the graph fails.
    """
    artifact, scratch = context.artifact, context.scratch / "raw"
    manifest = artifact.manifest
    if is_generating(manifest.task):
        return Findings()
    kind, obstacle = _kind(context.reference, record)
    if kind == "tensors" and runner.profiles:
        obstacle = "engines take sizes of their profiles"
    if obstacle:
        return _not_compared(obstacle)
    inputs = _raw_inputs(artifact, record, kind)
    exact = manifest.precision != "fp32" or manifest.is_quantized
    with context.reference.open_pytorch(record.file) as model:
        items = [raw.item for raw in inputs]
        try:
            expected = model.answers(kind, items)
        except InputError as error:
            return _not_compared(f"{_REFERENCES[kind]}: {error.message}")
        if all(answer["problem"] for answer in expected):
            reason = expected[0]["problem"]
            return _not_compared(f"{_REFERENCES[kind]} rejects all inputs: {reason}")
        run: Run = runner
        if exact:
            run = _TorchGraph(model, LastStep.of(artifact, record), scratch / "answers")
        try:
            side = _open_side(artifact, record, kind, runner, run, as_fp32=exact)
        except ArtifactError as error:
            raise_system_error(error)
            if kind == "tensors":  # no task promises an answer
                return _not_compared(error.message)
            case = _case(record.file, "answers", f"load_model cannot answer: {error}")
            return Findings(cases=(case,))
        allowed = AnswerLimits.of(context.limits, results, exact=exact)
        comparison = _compare(side, inputs, expected, allowed)
    return _judge(record, kind, inputs, comparison, is_around_graph=exact)


def _judge(
    record: GraphRecord,
    kind: str,
    inputs: Sequence[RawInput],
    comparison: RawAnswerComparison,
    *,
    is_around_graph: bool,
) -> Findings:
    """Return the result; it fails if the artifact refuses all that the reference answers."""
    cases = comparison.cases(record.file)
    answered = [raw.name for raw in inputs if raw.name not in comparison.rejected]
    if answered and all(name in comparison.refused for name in answered):
        problem = f"load_model answers nothing: {comparison.refused[answered[0]]}"
        names = {spec.name for spec in record.inputs}
        if "input_ids" in names and not names <= set(TEXT_INPUTS):
            # Boxes of words, for example, which callers of the graph make themselves.
            return _not_compared(problem)
        cases.append(_case(record.file, "answers", problem))
    metrics = comparison.metrics(kind, len(inputs), is_around_graph=is_around_graph)
    return Findings(cases=tuple(cases), answers=metrics)


def _not_compared(reason: str) -> Findings:
    return Findings(notes=(f"answers: not compared: {reason}",))


def _case(graph: str, name: str, problem: str) -> ValidationCaseResult:
    return ValidationCaseResult(graph, name, "answer", {}, [], problem)


def _kind(reference: Reference, record: GraphRecord) -> tuple[str, str]:
    """Return how answers are compared, and the reason if they are not."""
    artifact = reference.artifact
    manifest = artifact.manifest
    if reference.is_onnx:
        return "", f"{reference.name} has neither a tokenizer nor a processor"
    if manifest.library == "timm":
        return "", "timm prepares images with torchvision"
    if len(manifest.graphs) > 1:
        return "", "the artifact has several graphs"
    task = manifest_task(manifest, record)
    if len(manifest_tasks(manifest, record)) > 1 and task is not ZeroShotImages:
        return "embed_both", ""
    if task is not None and task.verb in _REFERENCES and _is_readable(task, artifact, record):
        if task.verb == "classify" and read_logit_score(artifact.path) is not None:
            return "", "transformers has no pipeline for language models that rerank"
        return task.verb, ""
    if not RANDOM_OPS.isdisjoint(read_structure(artifact.path / record.file).op_types()):
        return "", "the model draws random numbers"
    if takes_texts(record) or takes_images(record) or takes_audio(record):
        return "tensors", ""
    names = ", ".join(spec.name for spec in record.inputs)
    return "", f"nothing here prepares {names} from raw inputs"


def _is_readable(task: type[Task], artifact: Artifact, record: GraphRecord) -> bool:
    """Return False if only tensors can be compared, because no rule reads the graph's outputs."""
    if task.modality != "image":
        return True
    try:
        task.open(artifact, record)
    except UnreadableOutputsError:
        return False
    except ArtifactError:  # told when the artifact's side is opened
        return True
    return True


def _raw_inputs(artifact: Artifact, record: GraphRecord, kind: str) -> list[RawInput]:
    """Return the raw inputs of a task."""
    images: list[RawInput] = []
    if takes_images(record) or kind in ("embed_both", "zero_shot_images"):
        labels = {"labels": _LABELS} if kind == "zero_shot_images" else {}
        images = [
            RawInput(
                f"image of {image.shape[1]} × {image.shape[0]}", image, {"image": image, **labels}
            )
            for image in (*synthetic_images(_IMAGES), _wide(synthetic_images(1)[0]))
        ]
    if images and kind != "embed_both":
        return images
    if takes_audio(record):
        try:
            rate = AudioProcessor.open(artifact.path).sampling_rate
        except ArtifactError as error:
            raise_system_error(error)
            rate = _RATE
        voices = synthetic_sounds(rate, len(_SECONDS))
        sounds = [
            samples[: int(seconds * rate)]
            for (samples, _), seconds in zip(voices, _SECONDS, strict=True)
        ]
        has_chunks = kind == "transcribe" and ModelConfig.read(artifact.path).merged().audio_stride
        chunks = {"chunk_length_s": _CHUNK_SECONDS} if has_chunks else {}
        return [
            RawInput(
                f"sound of {len(samples) / rate:g} s",
                (samples, rate),
                {"raw": samples, "sampling_rate": rate, **chunks},
            )
            for samples in sounds
        ]
    if kind == "answer":
        contexts = (CONTEXT, _LONG, " ".join([_LONG] * 2 + [CONTEXT]))
        return [
            RawInput(
                f"question {number}, {_short(context)}",
                (QUESTION, context),
                {"question": QUESTION, "context": context},
            )
            for number, context in enumerate(contexts, start=1)
        ]
    texts = _MASKED if kind == "fill" else _TEXTS
    inputs = [
        RawInput(f"text {number}, {_short(text)}", text, {"text": text})
        for number, text in enumerate(texts, start=1)
    ]
    if kind == "classify":
        inputs += [
            RawInput(
                f"pair {number}, {_short(first)}",
                (first, second),
                {"text": first, "text_pair": second},
            )
            for number, (first, second) in enumerate(_PAIRS, start=1)
        ]
    return inputs + images


def _short(text: str) -> str:
    if not text:
        return "empty"
    return f"{text if len(text) <= _SHOWN else text[: _SHOWN - 1] + '…'}"


def _wide(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return an image that is three times as wide as high."""
    height = image.shape[1] // 3
    return np.ascontiguousarray(image[:height])


# -- the artifact's side --------------------------------------------------------------------------


@dataclass(frozen=True)
class _TorchGraph:
    """Runs PyTorch on the inputs of a graph."""

    model: TorchReference
    last_step: LastStep
    directory: Path

    def __call__(self, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """Return its outputs, by the graph's names."""
        number = len(list(self.directory.glob("*"))) if self.directory.exists() else 0
        files = self.model(feeds, self.directory / str(number))
        outputs = {name: np.load(file) for name, file in files.items()}
        return {**outputs, **self.last_step(files, feeds)}


@dataclass(frozen=True)
class _TaskSide:
    """Answers as `load_model` does."""

    task: Task
    batches: BatchRunner
    run: Run

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Answer inputs in one batch, if they can share one."""
        task = self.task
        chosen = dict(_OPTIONS.get(task.verb, {}))
        if isinstance(task, Transcribe) and task.config.audio_stride:
            chosen["chunk_length_s"] = _CHUNK_SECONDS
        options = task.Options.read(chosen)
        work = task.preprocess(self._with_masks(values), options)
        outputs: list[Any] = [None] * len(work.rows)
        for indices in self._plan(work.rows):
            rows = [work.rows[index] for index in indices]
            feeds = self.batches.feeds(rows)
            split = self.batches.split(rows, feeds, self.run(feeds))
            for index, output in zip(indices, split, strict=True):
                outputs[index] = output
        return [_plain(task.verb, result) for result in task.postprocess(work, outputs, options)]

    def _plan(self, rows: Sequence[Row]) -> list[list[int]]:
        """Return the rows of each batch: all in one, where load_model may put them into one."""
        alike: dict[Any, list[int]] = {}
        for index, row in enumerate(rows):
            length = () if self.task.can_pad else (row.tokens,)
            alike.setdefault((self.batches.batch_key(row), length), []).append(index)
        largest = self.batches.fixed_rows or len(rows)
        if self.batches.runner.profiles:
            return self.batches.plan(rows)
        return [
            indices[start : start + largest]
            for indices in alike.values()
            for start in range(0, len(indices), largest)
        ]

    def _with_masks(self, values: Sequence[Any]) -> list[Any]:
        if self.task.verb != "fill":
            return list(values)
        mask = self.task.tokenizer.mask_token or "{mask}"  # type: ignore[attr-defined]
        return [value.replace("{mask}", mask) for value in values]


@dataclass(frozen=True)
class _BothSides:
    """Answers of a graph that embeds texts and images."""

    texts: _TaskSide
    images: _TaskSide

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Answer inputs of one kind in one batch."""
        return self.texts(values) if isinstance(values[0], str) else self.images(values)


@dataclass(frozen=True)
class _TensorSide:
    """The graph's outputs for raw inputs, as `predict` writes them."""

    record: GraphRecord
    feed: TextFeeder | ImageFeeder | SoundFeeder
    run: Run

    def __call__(self, values: Sequence[Any]) -> list[dict[str, NDArray[Any]]]:
        """Return the outputs for each input, without the batch's dim and padding."""
        answers: list[Any] = [None] * len(values)
        for indices in self._groups(values):
            items = pad_batch([values[index] for index in indices], self.record)
            feeds = self.feed(items)
            outputs = self.run(feeds)
            mask = feeds.get("attention_mask")
            for row, index in enumerate(indices):
                answers[index] = {
                    name: _without_padding(array[row : row + 1], mask, row)
                    for name, array in outputs.items()
                    if array.ndim and len(array) == len(items) and _pads_one_dim(array, mask)
                }
        return answers

    def _groups(self, values: Sequence[Any]) -> list[list[int]]:
        """Return the inputs of each batch."""
        groups = [list(range(len(values)))]
        if not isinstance(self.feed, TextFeeder):
            groups = list(self.feed.by_shape(values).values())
        elif not self.feed.can_pad:
            groups = [[index] for index in groups[0]]
        elif self.feed.width and max(self.feed.lengths(values)) > self.feed.width:
            raise InputError(f"a text has more than the graph's {self.feed.width} tokens.")
        size = fixed_batch(self.record) or len(values)
        return [
            indices[start : start + size]
            for indices in groups
            for start in range(0, len(indices), size)
        ]


def _pads_one_dim(output: NDArray[Any], mask: NDArray[Any] | None) -> bool:
    """Return True unless a batch of texts has padded positions in another dim than the second."""
    if mask is None or len(output) == 1:
        return True
    return mask.shape[1] not in output.shape[2:]


def _without_padding(output: NDArray[Any], mask: NDArray[Any] | None, row: int) -> NDArray[Any]:
    """Return the output of one row, (1, …), at the positions of its tokens."""
    if mask is None or output.ndim < 2 or output.shape[1] != mask.shape[1]:
        return output
    return output[:, mask[row].astype(bool)]


def _open_side(
    artifact: Artifact,
    record: GraphRecord,
    kind: str,
    runner: OrtRunner,
    run: Run,
    *,
    as_fp32: bool,
) -> _TaskSide | _BothSides | _TensorSide:
    """Open what answers on the artifact's side.

    Raises:
        ArtifactError: the artifact's files do not allow it.
    """
    if as_fp32:  # PyTorch takes FP32: pixels that are rounded to FP16 would be other ones
        inputs = tuple(
            replace(spec, dtype="float32") if "float" in spec.dtype else spec
            for spec in record.inputs
        )
        record = record.model_copy(update={"inputs": inputs})
    if kind == "tensors":
        feeder: Any = ImageFeeder if takes_images(record) else TextFeeder
        if takes_audio(record):
            feeder = SoundFeeder
        return _TensorSide(record, feeder.open(artifact, record), run)
    verbs = ("embed", "embed_images") if kind == "embed_both" else (kind,)
    sides = []
    for task_class in manifest_tasks(artifact.manifest, record):
        if task_class.verb in verbs:
            task = task_class.open(artifact, record)
            sides.append(_TaskSide(task, BatchRunner(task, runner), run))
    return _BothSides(*sides) if kind == "embed_both" else sides[0]


def _plain(verb: str, result: Any) -> Any:
    """Return a result in the form of a `RawAnswer`."""
    if verb in ("classify", "classify_images", "classify_audio", "zero_shot_images"):
        return [[label.label, label.score] for label in result.labels]
    if verb == "tag":
        return [[span.label, span.start, span.end, span.score] for span in result]
    if verb == "answer":
        return {f"{answer.start}–{answer.end}": answer.score for answer in result}
    if verb == "fill":
        return [{str(f.token_id): f.score for f in mask} for mask in result.masks]
    if verb == "transcribe":
        return result.text
    if verb == "detect":
        return {"objects": to_plain(result)}
    if verb == "segment":
        masks = [segment.pixels for segment in result]
        return as_segments([(segment.label, segment.score) for segment in result], masks)
    return result


# -- the comparison -------------------------------------------------------------------------------


def _compare(
    side: _TaskSide | _BothSides | _TensorSide,
    inputs: Sequence[RawInput],
    expected: Sequence[Mapping[str, Any]],
    limits: AnswerLimits,
) -> RawAnswerComparison:
    """Compare each input alone, then all that were answered in one batch."""
    rejected = {
        raw.name: answer["problem"]
        for raw, answer in zip(inputs, expected, strict=True)
        if answer["problem"]
    }
    refused: dict[str, str] = {}
    problems: dict[str, str] = {}
    differences: dict[str, float] = {}

    def compare(index: int, where: str, answer: Any) -> None:
        name = inputs[index].name
        if not expected[index]["problem"]:
            difference = _difference(answer, expected[index], limits)
            differences[name] = max(differences.get(name, 0.0), difference.size)
            if difference.problem:  # the first of each input is kept
                problems.setdefault(name, f"{where}, {difference.problem}")

    batches: dict[type, list[int]] = {}
    for index, raw in enumerate(inputs):
        try:
            (answer,) = side([raw.value])
        # An ArtifactError is of a graph for other programs, which takes what nothing here makes.
        except (ArtifactError, InputError, ShapeError) as error:
            raise_system_error(error)
            refused[raw.name] = error.message
            continue
        # Pairs have a batch of their own: BART takes as many end tokens in each row.
        batches.setdefault(type(raw.value), []).append(index)
        compare(index, "alone", answer)
    for indices in batches.values():
        try:
            answers = side([inputs[index].value for index in indices])
        except (ArtifactError, InputError, ShapeError, ProviderError) as error:
            raise_system_error(error)
            problems["a batch"] = f"fails, but not its inputs alone: {error.message}"
            continue
        for index, answer in zip(indices, answers, strict=True):
            compare(index, "in a batch", answer)
    largest = max(differences.values(), default=0.0)
    return RawAnswerComparison({*differences}, refused, rejected, problems, largest)


@dataclass(frozen=True)
class Difference:
    """How an answer differs from the reference's."""

    size: float
    """The largest difference of two numbers."""
    problem: str = ""
    """Why that is too much; empty if it is not."""


def _difference(answer: Any, expected: Mapping[str, Any], limits: AnswerLimits) -> Difference:
    """Compare an answer with the reference's.

    Args:
        answer: scores by label, spans, a text, a vector, or outputs by name.
        expected: the fields of a `RawAnswer`.
        limits: how far they may be apart.
    """
    arrays = expected["arrays"]
    if isinstance(answer, Segments):
        error = limits.error(expected["scale"])
        # The planes' margins are evenly spaced quantiles.
        tied = float(np.mean([margin <= 2 * error for margin in expected["margins"]] or [0.0]))
        reference = as_segments(expected["answer"], arrays["masks"])
        score_error = error + _SEGMENT_ROUNDING
        return Difference(*compare_segments(answer, reference, score_error=score_error, tied=tied))
    if isinstance(answer, np.ndarray):
        return _compare_vectors(answer, arrays["vector"], limits)
    if isinstance(answer, dict) and arrays:
        return _compare_tensors(answer, arrays, limits)
    error = limits.error(expected["scale"])
    # Each of two logits may be off by the error, so that a closer pair may change places.
    ties = sum(margin <= 2 * error for margin in expected["margins"])
    if isinstance(answer, str):
        # A frame changes a letter, and whether its neighbours are one letter or two.
        same = _edits(answer, expected["answer"]) <= _EDITS_OF_A_TIE * ties
        problem = f"the text is '{answer}', the reference's '{expected['answer']}'"
        return Difference(0.0, "" if same else problem)
    # A probability differs by less than its logit: softmax and sigmoid have a slope below 1.
    tolerance = error + _SCORE_ROUNDING
    if "objects" in expected["answer"]:
        box_error = limits.error(1.0, ("pred_boxes",))
        allowed = ObjectLimits(tolerance, box_error, ties)
        return Difference(
            *compare_objects(answer["objects"], expected["answer"]["objects"], allowed)
        )
    spans = [item for item in (*answer, *expected["answer"]) if isinstance(item, list)]
    sizes, unmatched = [0.0], 0
    for name, mine, theirs in _paired(answer, expected["answer"]):
        if mine is None or theirs is None:
            unmatched += 1
            # A token may end a span or begin one, on either side.
            if unmatched > _SPANS_OF_A_TIE * ties or any(len(span) == 2 for span in spans):
                which = "the reference has no" if theirs is None else "it lacks the"
                return Difference(max(sizes), f"{which} {name}, {_scores(mine, theirs)}")
            continue
        sizes.append(abs(mine - theirs))
        if not sizes[-1] <= tolerance:  # true for NaN
            return Difference(
                max(sizes),
                f"{name} is {mine:.4g}, the reference's {theirs:.4g}"
                f" ({tolerance:.2g} apart allowed)",
            )
    return Difference(max(sizes))


def _edits(first: str, second: str) -> int:
    """Return how many letters have to be changed, added or removed (Levenshtein's distance)."""
    distances = list(range(len(second) + 1))
    for row, letter in enumerate(first, start=1):
        diagonal, distances[0] = distances[0], row
        for column, other in enumerate(second, start=1):
            best = min(
                diagonal + (letter != other), distances[column] + 1, distances[column - 1] + 1
            )
            diagonal, distances[column] = distances[column], best
    return distances[-1]


def _scores(mine: float | None, theirs: float | None) -> str:
    return f"whose score is {theirs if mine is None else mine:.4g}"


def _paired(answer: Any, expected: Any) -> Iterator[tuple[str, float | None, float | None]]:
    """Yield the name of each score with its two values; None for one that a side does not have."""
    if isinstance(answer, dict):  # the best of many: those at the end may be a near tie
        yield from _paired_best(answer, expected)
        return
    if answer and isinstance(answer[0], dict):
        for index, (mine, theirs) in enumerate(zip(answer, expected, strict=False)):
            for name, *scores in _paired_best(mine, theirs):
                yield (f"token {name} for mask {index + 1}", scores[0], scores[1])
        if len(answer) != len(expected):
            mask = f"mask {min(len(answer), len(expected)) + 1}"
            has_more = len(answer) > len(expected)
            yield mask, math.nan if has_more else None, None if has_more else math.nan
        return
    # Several labels may have one name: their scores are compared in order.
    mine, theirs = _by_name(answer), _by_name(expected)
    for name in dict.fromkeys([*theirs, *mine]):
        first, second = mine.get(name, []), theirs.get(name, [])
        for index in range(max(len(first), len(second))):
            yield (
                name,
                first[index] if index < len(first) else None,
                second[index] if index < len(second) else None,
            )


def _by_name(answer: Sequence[Sequence[Any]]) -> dict[str, list[float]]:
    """Return the scores of labels, or of labels at places of a text."""
    scores: dict[str, list[float]] = {}
    for label, *offsets, score in answer:
        name = f"{label} at {offsets[0]}–{offsets[1]}" if offsets else str(label)
        scores.setdefault(name, []).append(score)
    return {name: sorted(values, reverse=True) for name, values in scores.items()}


def _paired_best(
    mine: Mapping[str, float], theirs: Mapping[str, float]
) -> Iterator[tuple[str, float | None, float | None]]:
    """Yield the scores of the best few; the last ones of a side may be a near tie with others."""
    lasts = min(mine.values(), default=0.0), min(theirs.values(), default=0.0)
    for name in dict.fromkeys([*theirs, *mine]):
        first, second = mine.get(name), theirs.get(name)
        # One that a side left out scores no more there than the last that it has.
        if first is None and second is not None and len(mine) >= len(theirs):
            first = min(second, lasts[0])
        if second is None and first is not None and len(theirs) >= len(mine):
            second = min(first, lasts[1])
        yield name, first, second


def _compare_vectors(
    vector: NDArray[Any], expected: NDArray[Any], limits: AnswerLimits
) -> Difference:
    if vector.shape != expected.shape:
        return Difference(
            math.inf, f"the vector has {vector.size} numbers, the reference's {expected.size}"
        )
    mine, theirs = vector.astype(np.float64), expected.astype(np.float64)
    largest = float(np.abs(mine - theirs).max(initial=0.0))
    length, distance = float(np.linalg.norm(theirs)), float(np.linalg.norm(mine - theirs))
    # A vector that is no larger than the noise has no direction.
    if distance <= limits.distance * length or largest <= limits.error(float(np.abs(theirs).max())):
        return Difference(largest)
    cosine = float(mine @ theirs) / max(length * float(np.linalg.norm(mine)), 1e-30)
    return Difference(
        largest,
        f"the vector is {distance / max(length, 1e-30):.2g} of its length away from the "
        f"reference's, {limits.distance:.2g} allowed (cosine {cosine:.6f})",
    )


def _compare_tensors(
    outputs: Mapping[str, NDArray[Any]],
    expected: Mapping[str, NDArray[Any]],
    limits: AnswerLimits,
) -> Difference:
    largest = 0.0
    for name in outputs.keys() & expected.keys():
        mine, theirs = outputs[name], expected[name]
        if mine.shape != theirs.shape:
            return Difference(
                math.inf, f"{name} has the shape {mine.shape}, the reference's {theirs.shape}"
            )
        if mine.dtype.kind not in "fiub" or not theirs.size:
            continue
        # Masks of attention are infinite, or the lowest number, on both sides.
        differences = compute_differences(mine, theirs, None)
        largest = max(largest, differences.max_abs)
        if differences.unequal:
            return Difference(largest, f"{name} is infinite or NaN on one side only")
        allowed = limits.error(differences.largest, (name,))
        if differences.max_abs > allowed:
            return Difference(
                largest,
                f"{name} differs by {differences.max_abs:.3g} from the reference's, "
                f"{allowed:.2g} allowed",
            )
    return Difference(largest)
