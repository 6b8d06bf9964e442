"""Classification of texts and of pairs of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from enginery.core.errors import InputError
from enginery.core.model.files import ModelConfig
from enginery.runtime.tasks.results import Ranked, Result
from enginery.runtime.tasks.task import (
    MAX_RESULTS,
    Arrays,
    InputField,
    ModelInputs,
    Row,
    TaskOptionError,
    TaskOptions,
    output_rows,
)
from enginery.runtime.tasks.text import TextOptions, TextTask, softmax
from enginery.runtime.tasks.zero_shot import (
    TEMPLATE,
    Labels,
    entailment_index,
    label_scores,
    make_pairs,
)
from enginery.runtime.text.tokenizer import check_texts

Activation = Literal["auto", "softmax", "sigmoid", "none"]
SCORES = "scores"
"""Name of the output of a graph that turns its logits into scores itself."""

_MAX_DESCRIBED = 3
"""Maximum number of labels in a description."""


@dataclass(frozen=True)
class Label(Result):
    """A label and its score."""

    label: str
    score: float
    """A probability, or the raw value of a regression model."""


@dataclass(frozen=True)
class Classification(Result):
    """The labels of one text or image, best first.

    >>> Classification((Label("angry", 0.9), Label("calm", 0.1))).to_dict()
    {'labels': [{'label': 'angry', 'score': 0.9}, {'label': 'calm', 'score': 0.1}]}
    """

    labels: Annotated[tuple[Label, ...], Ranked("scores")]

    @property
    def label(self) -> str:
        return self.labels[0].label

    @property
    def score(self) -> float:
        return self.labels[0].score


class LabelOptions(TaskOptions):
    """Options of tasks whose results are labels."""

    top_k: Annotated[int, Field(ge=0, le=MAX_RESULTS)] = 0
    """Number of labels to return, best first; 0 for all."""
    activation: Activation = "auto"
    """Function that turns logits into scores; `auto` chooses as transformers' pipelines do."""


class ClassifyOptions(TextOptions, LabelOptions):
    """Options of `classify`."""

    instruction: str = ""
    """What a reranker that is a language model has to judge, in place of its default; empty for
    the default."""
    candidate_labels: Labels | None = None
    """Labels to choose from, for a model of natural language inference; null for its own."""
    hypothesis_template: str = TEMPLATE
    """What is said of a text with a label, in place of `{}`, for `candidate_labels`."""
    multi_label: bool = False
    """Judge each of `candidate_labels` by itself: several may be right."""

    @property
    def rows_per_input(self) -> int:
        """Number of labels that each text is judged with."""
        return len(self.candidate_labels or ()) or 1


class LabelResults:
    """Mixin for tasks whose results are labels."""

    result_type = Classification
    graph_outputs: ClassVar[Mapping[str, int]] = {"logits": 2}
    config: ModelConfig

    def split(
        self, rows: Sequence[Row], feeds: Mapping[str, NDArray[Any]], outputs: Arrays
    ) -> list[Any]:
        """Return the logits of each image or sound: (labels,)."""
        return list(output_rows(outputs, "logits", rows))

    def postprocess(
        self, _work: ModelInputs, outputs: Sequence[Any], options: LabelOptions
    ) -> list[Classification]:
        """Return a `Classification` for each input."""
        if not outputs:
            return []
        return classify_logits(
            np.stack(outputs), self.config, options.activation, top_k=options.top_k
        )

    def describe(self, result: Classification) -> str:
        """Describe the best labels of an input."""
        return describe_labels(result)


@dataclass
class Classify(LabelResults, TextTask):
    """Classify texts, or pairs of texts for models that compare two."""

    verb = "classify"
    purpose = "classifies texts"
    tasks = ("text-classification",)
    inputs = (*TextTask.inputs, InputField("text_pair", optional=True))
    Options = ClassifyOptions

    def preprocess(
        self, inputs: Sequence[str | tuple[str, str]], options: ClassifyOptions
    ) -> ModelInputs:
        """Tokenize each text or pair into one row, or each text into a row for each label."""
        if options.candidate_labels:
            return self._preprocess_zero_shot(inputs, options)
        if self.tokenizer.pair_template is None:
            if options.instruction:
                raise TaskOptionError(
                    "instruction: the model takes none; rerankers that are language models do.",
                    field="instruction",
                )
            return self._model_inputs(self.encode(inputs, options), options)
        check_texts(inputs, pairs=True)
        for index, item in enumerate(inputs):
            if isinstance(item, str):
                raise InputError(
                    f"text {index} is a single text, but the model compares a query with a "
                    "document.",
                    do="Pass pairs: (query, document).",
                )
        encodings = self.tokenizer.encode(inputs, instruction=options.instruction)
        return self._model_inputs(self.rows(encodings, options), options)

    def _preprocess_zero_shot(
        self, inputs: Sequence[str | tuple[str, str]], options: ClassifyOptions
    ) -> ModelInputs:
        entailment_index(self.config)  # its error comes before any work
        check_texts(inputs)
        texts = [str(text) for text in inputs]
        labels = options.candidate_labels or ()
        rows = self.encode(make_pairs(texts, labels, options.hypothesis_template), options)
        return self._model_inputs(rows, options)

    def outputs_read(self, *, raw: bool = False) -> tuple[str, ...]:
        """Return `scores` if the graph has this output, else `logits`; see `RowTask`."""
        return (SCORES,) if self._has_scores and not raw else tuple(self.graph_outputs)

    @property
    def _has_scores(self) -> bool:
        return any(spec.name == SCORES for spec in self.record.outputs)

    def _model_inputs(self, rows: list[Row], options: ClassifyOptions) -> ModelInputs:
        """Mark the rows whose activation is not the one of the graph's scores, and group rows."""
        ends = self.config.eos_token_id if self.config.reads_the_end else None
        for row in rows:
            unlike = options.activation != "auto" or options.candidate_labels
            row.reads_raw = self._has_scores and bool(unlike)
            if isinstance(ends, int):
                # The classifiers of BART and T5 mix up rows with different numbers of ends, of
                # which a pair has more than a single text.
                row.group = list(row.content.ids).count(ends)
        return ModelInputs(rows)

    def postprocess(
        self, work: ModelInputs, outputs: Sequence[Any], options: LabelOptions
    ) -> list[Classification]:
        """Return a `Classification` for each input."""
        if outputs and isinstance(options, ClassifyOptions) and options.candidate_labels:
            return self._postprocess_zero_shot(np.stack(outputs), options)
        if not outputs or not self._has_scores or work.rows[0].reads_raw:
            return super().postprocess(work, outputs, options)
        return classify_logits(np.stack(outputs), self.config, "none", top_k=options.top_k)

    def _postprocess_zero_shot(
        self, logits: NDArray[Any], options: ClassifyOptions
    ) -> list[Classification]:
        labels = options.candidate_labels or ()
        by_text = logits.astype(np.float32).reshape(-1, len(labels), logits.shape[-1])
        scores = label_scores(
            by_text, entailment_index(self.config), multi_label=options.multi_label
        )
        return best_labels(scores, labels, top_k=options.top_k)

    def split(
        self, rows: Sequence[Row], feeds: Mapping[str, NDArray[Any]], outputs: Arrays
    ) -> list[Any]:
        """Return the logits or, from a graph that has them, the scores of each row: (labels,)."""
        raw = not self._has_scores or rows[0].reads_raw
        return list(output_rows(outputs, "logits" if raw else SCORES, rows))


def describe_labels(result: Classification) -> str:
    """Return the best labels with their scores, for people."""
    best = result.labels[:_MAX_DESCRIBED]
    return ", ".join(f"{label.label} {label.score:.2f}" for label in best)


def label_names(config: ModelConfig, count: int) -> list[str]:
    """Return the names of `count` labels from config.json; `LABEL_3` if it has no name for 3."""
    return [config.id2label.get(index, f"LABEL_{index}") for index in range(count)]


def choose_activation(config: ModelConfig, count: int) -> Activation:
    """Choose the activation for `count` logits by the rules of transformers' pipelines."""
    if config.problem_type == "regression":
        return "none"
    if config.problem_type == "multi_label_classification" or count == 1:
        return "sigmoid"
    return "softmax"


def classify_logits(
    logits: NDArray[Any], config: ModelConfig, activation: Activation, *, top_k: int
) -> list[Classification]:
    """Return a classification for each row of logits, best label first.

    Args:
        logits: (batch, labels).
        config: the model's config.json, which has the names of the labels.
        activation: softmax, sigmoid or none; `auto` chooses by `config`.
        top_k: number of labels to keep; 0 for all.
    """
    names = label_names(config, logits.shape[-1])
    if activation == "auto":
        activation = choose_activation(config, len(names))
    return best_labels(activated(logits, activation), names, top_k=top_k)


def best_labels(scores: NDArray[Any], names: Sequence[str], *, top_k: int) -> list[Classification]:
    """Return a classification for each row of scores, best label first; `top_k` 0 for all."""
    order = np.argsort(-scores, axis=-1, kind="stable")[:, : top_k or None]
    best = np.take_along_axis(scores, order, axis=-1)
    return [
        Classification(tuple(map(Label, [names[label] for label in labels], values)))
        for labels, values in zip(order.tolist(), best.tolist(), strict=True)
    ]


def activated(logits: NDArray[Any], activation: Activation) -> NDArray[np.float32]:
    """Return the scores of logits (batch, labels) by softmax, sigmoid or, for `none`, unchanged."""
    logits = logits.astype(np.float32, copy=False)
    if activation == "softmax":
        return softmax(logits)
    if activation == "sigmoid":
        # Equal to 1 / (1 + exp(-x)), which overflows for large negative x.
        return np.asarray(0.5 * (1 + np.tanh(0.5 * logits)), np.float32)
    return logits
