"""Zero-shot classification: a model of natural language inference chooses among given labels.

The model judges the pair of each text and each label's hypothesis, "This example is {label}.", as
transformers' pipeline does (Yin et al., arXiv:1909.00161).

>>> make_pairs(["The engine is warm."], ["cars", "birds"], "It is about {}.")
[('The engine is warm.', 'It is about cars.'), ('The engine is warm.', 'It is about birds.')]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from enginery.core.errors import InputError
from enginery.core.model.files import ModelConfig
from enginery.runtime.tasks.task import TaskOptionError
from enginery.runtime.tasks.text import softmax

MAX_LABELS = 100
_MAX_CHARACTERS = 4_000_000
"""Characters of all pairs: each text is tokenized whole, once for each label."""
TEMPLATE = "This example is {}."


def split_labels(labels: Sequence[str]) -> list[str]:
    """Return labels as a list; a text is split at its commas, as transformers' pipelines do.

    >>> split_labels("cars, birds"), split_labels(["cars, birds"])
    (['cars', 'birds'], ['cars, birds'])
    """
    if isinstance(labels, str):
        return [label.strip() for label in labels.split(",") if label.strip()]
    return list(labels)


Labels = Annotated[list[str], Field(min_length=1, max_length=MAX_LABELS)]


def make_pairs(texts: Sequence[str], labels: Sequence[str], template: str) -> list[tuple[str, str]]:
    """Return the pair of each text with the hypothesis of each label, text by text.

    Raises:
        TaskOptionError: the template has no `{}`, or a label is empty.
        InputError: the pairs together are too long.
    """
    # Before the pairs are made: a template of megabytes would be repeated for every label.
    hypothesis_characters = len(labels) * len(template) + sum(map(len, labels))
    characters = len(labels) * sum(map(len, texts)) + len(texts) * hypothesis_characters
    if characters > _MAX_CHARACTERS:
        raise InputError(
            f"the texts with {len(labels)} labels each have {characters:,} characters, expected "
            f"at most {_MAX_CHARACTERS:,}.",
            do="Use fewer texts, shorter ones or fewer labels.",
        )
    hypotheses = make_hypotheses(labels, template, limit=_MAX_CHARACTERS)
    return [(text, hypothesis) for text in texts for hypothesis in hypotheses]


def make_hypotheses(labels: Sequence[str], template: str, *, limit: int) -> list[str]:
    """Return what is said of an input with each label.

    Args:
        labels: the labels.
        template: a text with `{}` in the place of the label.
        limit: maximum number of characters of all hypotheses.

    Raises:
        TaskOptionError: the template has no `{}`, a label is empty, or they are too long.
    """
    if template.count("{}") != 1 or template.replace("{}", "").count("{"):
        raise TaskOptionError(
            f"hypothesis_template is '{template[:60]}', expected a text with one '{{}}' in the "
            "place of the label.",
            field="hypothesis_template",
        )
    if not all(label.strip() for label in labels):
        raise TaskOptionError("candidate_labels: a label is empty.", field="candidate_labels")
    characters = len(labels) * len(template) + sum(map(len, labels))
    if characters > limit:
        raise TaskOptionError(
            f"candidate_labels: with the template they have {characters:,} characters, expected at "
            f"most {limit:,}.",
            field="candidate_labels",
        )
    return [template.replace("{}", label) for label in labels]


def entailment_index(config: ModelConfig) -> int:
    """Return the index of the label that says that a text entails a hypothesis.

    Raises:
        InputError: no label of the model is named so.
    """
    names = {index: name for name, index in config.label2id.items()} | dict(config.id2label)
    for index, name in sorted(names.items()):
        if name.lower().startswith("entail"):
            return index
    shown = ", ".join(name for _, name in sorted(names.items())[:4]) or "none"
    raise InputError(
        f"the model was not trained for natural language inference: its labels are {shown}, and "
        "none begins with 'entail'.",
        do="Leave out candidate_labels, or name the label of entailment so in config.json.",
    )


def label_scores(
    logits: NDArray[np.float32], entailment: int, *, multi_label: bool
) -> NDArray[np.float32]:
    """Return the scores of the labels for each text: (texts, labels).

    Args:
        logits: (texts, labels, classes of the model).
        entailment: index of entailment among the classes.
        multi_label: each label by itself, entailment against contradiction; else all against each
            other. A single label is always by itself.
    """
    if multi_label or logits.shape[1] == 1:
        contradiction = logits.shape[-1] - 1 if entailment == 0 else 0
        chosen = logits[..., [contradiction, entailment]]
        return np.asarray(softmax(chosen)[..., 1])
    return softmax(logits[..., entailment])
