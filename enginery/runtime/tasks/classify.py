"""Labels of texts, and of pairs of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from enginery.core.model_files import ModelConfig
from enginery.runtime.tasks.task import (
    MAX_RESULTS,
    Arrays,
    InputField,
    ModelInputs,
    OutputTensor,
    Result,
    ResultDescription,
    Row,
    TaskOptions,
    are_finite,
    string_tensor,
)
from enginery.runtime.tasks.text import TextOptions, TextTask, output_rows, softmax

Activation = Literal["auto", "softmax", "sigmoid", "none"]

_MAX_DESCRIBED = 3
"""Labels of one input in words; the rest says little."""


@dataclass(frozen=True)
class Label(Result):
    """One label and its score."""

    label: str
    score: float
    """A probability, or the raw value of a regression."""


@dataclass(frozen=True)
class Classification(Result):
    """Labels of one text or image, best first.

    >>> Classification((Label("angry", 0.9), Label("calm", 0.1))).to_dict()
    {'labels': [{'label': 'angry', 'score': 0.9}, {'label': 'calm', 'score': 0.1}]}
    """

    labels: tuple[Label, ...]

    @property
    def label(self) -> str:
        return self.labels[0].label

    @property
    def score(self) -> float:
        return self.labels[0].score


class LabelOptions(TaskOptions):
    """Which labels are given, and what their scores are."""

    top_k: Annotated[int, Field(ge=0, le=MAX_RESULTS)] = 0
    """How many labels, best first; 0 for all."""
    activation: Activation = "auto"
    """What makes scores of logits; `auto` as transformers' pipelines choose."""


class ClassifyOptions(TextOptions, LabelOptions):
    """Options of `classify`."""


class LabelResults:
    """What the tasks share whose results are labels."""

    result_type = Classification
    outputs = (OutputTensor("label", "string", 2), OutputTensor("score", "float32", 2))
    graph_outputs: ClassVar[Mapping[str, int]] = {"logits": 2}
    config: ModelConfig

    def postprocess(
        self, _work: ModelInputs, outputs: Sequence[Any], options: LabelOptions
    ) -> list[Classification]:
        """Return a `Classification` for each input."""
        if not outputs:
            return []
        return classify_logits(
            np.stack(outputs), self.config, options.activation, top_k=options.top_k
        )

    def is_finite(self, result: Any) -> bool:
        """Whether every score is finite."""
        return are_finite(label.score for label in result.labels)

    def tensors(self, results: Sequence[Any]) -> Arrays:
        """Return `label` and `score`: (n, labels)."""
        return {
            "label": string_tensor([[each.label for each in r.labels] for r in results]),
            "score": np.array([[each.score for each in r.labels] for r in results], np.float32),
        }

    @classmethod
    def arrow_fields(cls, options: Any, _dim: int) -> list[Any]:
        """Return the best label and its score; where several are kept, also all of them."""
        import pyarrow as pa

        best = [pa.field("label", pa.string()), pa.field("score", pa.float32())]
        if options.top_k == 1:
            return best
        return [*best, pa.field("scores", pa.list_(pa.struct(best)))]

    @classmethod
    def arrow_values(cls, result: Any) -> tuple[Any, ...]:
        """Return the best label, its score, and all labels."""
        return result.label, result.score, [vars(label) for label in result.labels]

    def describe(self, inputs: Sequence[str], results: Sequence[Any]) -> list[ResultDescription]:
        """Return each input's best labels."""
        return [
            ResultDescription(
                {
                    "answer": ", ".join(
                        f"{x.label} {x.score:.2f}" for x in r.labels[:_MAX_DESCRIBED]
                    )
                },
                r.to_dict(),
            )
            for r in results
        ]


@dataclass
class Classify(LabelResults, TextTask):  # type: ignore[misc]
    """Labels of texts, or of pairs for a model that compares two."""

    verb = "classify"
    purpose = "classifies texts"
    tasks = ("text-classification",)
    takes_pairs = True
    inputs = (InputField("text"), InputField("text_pair", optional=True))
    example = ("The engine is warm.",)
    Options = ClassifyOptions

    def preprocess(
        self, inputs: Sequence[str | tuple[str, str]], options: ClassifyOptions
    ) -> ModelInputs:
        """Return a row for each text or pair."""
        return ModelInputs(self.encode(inputs, options))

    def split(
        self, rows: Sequence[Row], feeds: Mapping[str, NDArray[Any]], outputs: Arrays
    ) -> list[Any]:
        """Return the logits of each row: (labels,)."""
        return list(output_rows(outputs, "logits", rows))


def label_names(config: ModelConfig, count: int) -> list[str]:
    """Return the names of `count` labels, as config.json has them; `LABEL_3` where it has none."""
    return [config.id2label.get(index, f"LABEL_{index}") for index in range(count)]


def choose_activation(config: ModelConfig, count: int) -> Activation:
    """Return what makes scores of `count` logits, as transformers' pipelines choose it."""
    if config.problem_type == "regression":
        return "none"
    if config.problem_type == "multi_label_classification" or count == 1:
        return "sigmoid"
    return "softmax"


def classify_logits(
    logits: NDArray[Any], config: ModelConfig, activation: Activation, *, top_k: int
) -> list[Classification]:
    """Return a classification for each row, best label first.

    Args:
        logits: (batch, labels).
        config: the model's config.json, which names the labels.
        activation: softmax, sigmoid or none; `auto` for what `config` says.
        top_k: how many labels to keep; 0 for all.
    """
    names = label_names(config, logits.shape[-1])
    if activation == "auto":
        activation = choose_activation(config, len(names))
    logits = logits.astype(np.float32, copy=False)
    if activation == "softmax":
        scores = softmax(logits)
    elif activation == "sigmoid":
        # The same as 1 / (1 + exp(-x)), without its overflow.
        scores = 0.5 * (1 + np.tanh(0.5 * logits))
    else:
        scores = logits
    results = []
    for row in scores:
        order = np.argsort(-row, kind="stable")[: top_k or None]
        results.append(Classification(tuple(Label(names[i], float(row[i])) for i in order)))
    return results
