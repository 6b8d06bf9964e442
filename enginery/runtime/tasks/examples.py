"""Example inputs: for the forms of the server, model cards, published models and `enginery run`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from enginery.core.artifact.artifact import Artifact
from enginery.runtime.tasks import manifest_task
from enginery.runtime.tasks.audio import AudioTask, example_wav
from enginery.runtime.tasks.classify import Classify
from enginery.runtime.tasks.fill import Fill
from enginery.runtime.tasks.generate import GenerateFromAudio, GenerateFromImages
from enginery.runtime.tasks.images import EXAMPLE_SIDE, ImageTask, example_png
from enginery.runtime.tasks.task import Task
from enginery.runtime.tasks.text import TextTask
from enginery.runtime.text.chat_template import PairTemplate
from enginery.runtime.text.tokenizer import TextTokenizer

_PAIR = ("Who built the bridge?", "The bridge was built by the engineers of the city.")
"""A query and a document for a reranker."""


def example_input(task: Task) -> Any:
    """Return an input as JSON has it: a text, texts by name, or a small file in base64."""
    if isinstance(task, ImageTask):
        height, width = (
            dim if isinstance(dim, int) else EXAMPLE_SIDE for dim in task.record.inputs[0].dims[2:]
        )
        return base64.b64encode(example_png(height, width)).decode()
    if isinstance(task, AudioTask):
        return base64.b64encode(example_wav(task.processor.sampling_rate)).decode()
    if isinstance(task, GenerateFromImages):
        return base64.b64encode(example_png()).decode()
    if isinstance(task, GenerateFromAudio):
        return base64.b64encode(example_wav()).decode()
    texts = _PAIR if takes_only_pairs(task) else _texts(type(task))
    if isinstance(task, Fill):
        texts = tuple(text.replace("{mask}", task.tokenizer.mask_token) for text in texts)
    if len(texts) == 1:
        return texts[0]
    return {field.name: text for field, text in zip(task.inputs, texts, strict=True)}


def example_texts(artifact: Artifact) -> tuple[str, ...]:
    """Return the texts of an example input, with the mask token of the tokenizer.

    Empty for images, audio and tasks that are not supported.
    """
    task = manifest_task(artifact.manifest)
    if task is None:
        return ()
    if task is Classify and PairTemplate.open(artifact.path):
        return _PAIR
    texts = _texts(task)
    if task is Fill:
        mask = TextTokenizer.open(artifact.path).mask_token
        texts = tuple(text.replace("{mask}", mask) for text in texts)
    return texts


def inputs_from_sentences(task: Task, sentences: Sequence[str]) -> tuple[str, ...]:
    """Return sentences as inputs of a task; empty if the task does not take single texts."""
    if not isinstance(task, TextTask) or takes_only_pairs(task) or len(_texts(type(task))) > 1:
        return ()
    if isinstance(task, Fill):  # the mask is in place of the last word
        mask = task.tokenizer.mask_token
        return tuple(f"{sentence.rpartition(' ')[0]} {mask}." for sentence in sentences)
    return tuple(sentences)


def takes_only_pairs(task: Task) -> bool:
    """Return True for a reranker, whose prompt has a place for a query and one for a document."""
    return isinstance(task, Classify) and task.tokenizer.pair_template is not None


def _texts(task: type[Task]) -> tuple[str, ...]:
    return tuple(field.example for field in task.inputs if field.example)
