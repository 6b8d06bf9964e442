"""Zero-shot classification of images: a model of texts and images chooses among given labels.

The graph compares each image with each label's hypothesis, "This is a photo of {label}.", in its
output `logits_per_image`. So the labels run with each batch of images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord, Manifest
from enginery.runtime.image.processor import PIXELS
from enginery.runtime.tasks.classify import Classification, activated, best_labels, describe_labels
from enginery.runtime.tasks.embed import EmbedOptions
from enginery.runtime.tasks.images import ImageTask
from enginery.runtime.tasks.task import (
    MAX_RESULTS,
    NO_LIMITS,
    Arrays,
    InputLimits,
    ModelInputs,
    Row,
    TaskOptionError,
    TaskOptions,
    output_rows,
)
from enginery.runtime.tasks.two_towers import EmbedTextsOfBoth, has_two_towers, tower_record
from enginery.runtime.tasks.zero_shot import Labels, make_hypotheses

IMAGE_TEMPLATE = "This is a photo of {}."
_LOGITS = "logits_per_image"
_MAX_CHARACTERS = 100_000
"""Characters of all hypotheses: of each a model reads less than a hundred tokens."""


class ZeroShotImageOptions(TaskOptions):
    """Options of `zero_shot_images`."""

    candidate_labels: Labels | None = None
    """Labels to choose from."""
    hypothesis_template: str = IMAGE_TEMPLATE
    """What is said of an image with a label, in place of `{}`."""
    top_k: Annotated[int, Field(ge=0, le=MAX_RESULTS)] = 0
    """Number of labels to return, best first; 0 for all."""

    @property
    def rows_per_input(self) -> int:
        """Number of labels that each image is compared with."""
        return len(self.candidate_labels or ()) or 1


@dataclass
class ZeroShotImages(ImageTask):
    """Choose among labels for images."""

    verb = "zero_shot_images"
    purpose = "chooses among given labels for images"
    tasks = ("zero-shot-image-classification",)
    result_type = Classification
    Options = ZeroShotImageOptions

    texts: EmbedTextsOfBoth | None = field(default=None, kw_only=True)
    """Tokenizes the labels."""

    @classmethod
    def fits(cls, manifest: Manifest, record: GraphRecord | None) -> bool:
        """Return True for a graph that compares texts and images."""
        if not has_two_towers(manifest, record):
            return False
        graph = record or next(iter(manifest.graphs), None)
        return graph is not None and _LOGITS in {spec.name for spec in graph.outputs}

    @classmethod
    def open(cls, artifact: Artifact, record: GraphRecord, limits: InputLimits = NO_LIMITS) -> Self:
        """Read the tokenizer, preprocessor_config.json and config.json; see `RowTask.open`."""
        task = super().open(artifact, tower_record(record, images=True), limits)
        task.texts = EmbedTextsOfBoth.open(artifact, record, limits)
        task.notes += ("the labels of a call run with each batch of images",)
        return task

    @property
    def has_sigmoid(self) -> bool:
        """True if each label is judged by itself, as SigLIP was trained to."""
        return "siglip" in self.config.model_type

    def outputs_read(self, *, raw: bool = False) -> tuple[str, ...]:
        """Return the name of the graph output that `split` needs."""
        return (_LOGITS,)

    def read_rows(
        self, inputs: Sequence[Any], options: ZeroShotImageOptions, work: ModelInputs
    ) -> Iterator[Row]:
        """Read images one by one; each row has the tokens of all labels beside its image."""
        texts = self._label_feeds(options)
        content = b"".join(array.tobytes() for array in texts.values())
        # Only images with the same labels share a batch.
        group = int.from_bytes(hashlib.sha256(content).digest()[:7])
        for row in super().read_rows(inputs, options, work):
            row.content.update(texts)
            row.group = group
            yield row

    def collate(self, rows: Sequence[Row], _width: int) -> Arrays:
        """Return the graph's inputs: the images, and the labels once."""
        pixels = np.stack([row.content[PIXELS] for row in rows])
        return {PIXELS: pixels, **{n: a for n, a in rows[0].content.items() if n != PIXELS}}

    def split(
        self, rows: Sequence[Row], feeds: Mapping[str, NDArray[Any]], outputs: Arrays
    ) -> list[Any]:
        """Return the logits of each image: (labels,)."""
        return list(output_rows(outputs, _LOGITS, rows))

    def postprocess(
        self, work: ModelInputs, outputs: Sequence[Any], options: ZeroShotImageOptions
    ) -> list[Classification]:
        """Return a `Classification` for each image."""
        if not len(outputs):
            return []
        scores = activated(np.stack(outputs), "sigmoid" if self.has_sigmoid else "softmax")
        return best_labels(scores, options.candidate_labels or (), top_k=options.top_k)

    def describe(self, result: Classification) -> str:
        """Describe the best labels of an image."""
        return describe_labels(result)

    def _label_feeds(self, options: ZeroShotImageOptions) -> Arrays:
        """Return the graph's inputs for the hypotheses of the labels: (labels, tokens) each.

        Raises:
            TaskOptionError: there are no labels, one is empty or too long, or the template has no
                place for it.
        """
        if self.texts is None:
            raise AssertionError("the task is opened with its tokenizer")
        labels = options.candidate_labels
        if not labels:
            raise TaskOptionError(
                "candidate_labels is missing, expected the labels to choose from.",
                field="candidate_labels",
            )
        hypotheses = make_hypotheses(labels, options.hypothesis_template, limit=_MAX_CHARACTERS)
        rows = self.texts.preprocess(hypotheses, EmbedOptions()).rows
        for label, row in zip(labels, rows, strict=True):
            # transformers' pipeline truncates the texts of SigLIP alone.
            if row.truncated and not self.has_sigmoid:
                raise TaskOptionError(
                    f"candidate_labels: with '{label[:60]}' the hypothesis has more than the "
                    f"{self.texts.max_tokens} tokens that the model takes.",
                    field="candidate_labels",
                )
        feeds = self.texts.collate(rows, max(row.tokens for row in rows))
        return {name: array for name, array in feeds.items() if name != PIXELS}
