"""Embed texts or images with a graph that takes both, such as CLIP's or SigLIP's.

Their vectors are of one space: `text_embeds` and `image_embeds`. A call has inputs of one kind. The
graph gets one blank input of the other, whose vector nothing reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord, Manifest
from enginery.core.model.feeds import FeedLimits
from enginery.core.shapes import TensorSpec
from enginery.runtime.image.processor import PIXELS
from enginery.runtime.tasks.embed import Embed
from enginery.runtime.tasks.images import EmbedImages
from enginery.runtime.tasks.task import NO_LIMITS, Arrays, InputLimits, Row

_TASKS = ("feature-extraction", "zero-shot-image-classification")
_TEXT_VECTOR, _IMAGE_VECTOR = "text_embeds", "image_embeds"


def has_two_towers(manifest: Manifest, record: GraphRecord | None = None) -> bool:
    """Return True if a graph embeds texts and images.

    Args:
        manifest: the artifact's manifest.
        record: the graph to run; None for the only one.
    """
    if manifest.task not in _TASKS or len(manifest.graphs) != 1:
        return False
    graph = record or manifest.graphs[0]
    inputs = {spec.name for spec in graph.inputs}
    outputs = {spec.name for spec in graph.outputs}
    return {"input_ids", PIXELS} <= inputs and {_TEXT_VECTOR, _IMAGE_VECTOR} <= outputs


def tower_record(record: GraphRecord, *, images: bool) -> GraphRecord:
    """Return the record of a graph with the inputs and outputs of one kind alone."""
    vector = _IMAGE_VECTOR if images else _TEXT_VECTOR
    inputs = tuple(spec for spec in record.inputs if (spec.name == PIXELS) == images)
    outputs = tuple(spec for spec in record.outputs if spec.name == vector)
    return record.model_copy(update={"inputs": inputs, "outputs": outputs})


def _blank(artifact: Artifact, specs: Sequence[TensorSpec]) -> Arrays:
    """Return one text of one token, or one grey image."""
    sizes = FeedLimits.from_artifact(artifact).sizes
    free = (1, 3, sizes.get("height", 1), sizes.get("width", 1))
    blank: Arrays = {}
    for spec in specs:
        is_image = spec.name == PIXELS
        shape = [
            dim if isinstance(dim, int) else free[axis] if is_image else 1
            for axis, dim in enumerate(spec.dims)
        ]
        value = 0 if is_image else 1
        blank[spec.name] = np.full(shape, value, spec.dtype)
    return blank


@dataclass
class EmbedTextsOfBoth(Embed):
    """Embed texts with a graph that takes images as well."""

    purpose = "embeds texts here, and images in `load_model` and `predict`"
    blank_images: Arrays = field(kw_only=True)

    @classmethod
    def fits(cls, manifest: Manifest, record: GraphRecord | None) -> bool:
        """Return True for a graph that embeds texts and images."""
        return has_two_towers(manifest, record)

    @classmethod
    def open(cls, artifact: Artifact, record: GraphRecord, limits: InputLimits = NO_LIMITS) -> Self:
        """Read the tokenizer and config.json; see `RowTask.open`."""
        task = super().open(artifact, tower_record(record, images=False), limits)
        task.notes += ("the graph takes texts and images: one blank image runs with each batch",)
        return task

    @classmethod
    def _read_settings(
        cls, artifact: Artifact, record: GraphRecord
    ) -> tuple[list[str], dict[str, Any]]:
        notes, settings = super()._read_settings(artifact, record)
        images = tower_record(artifact.manifest.graphs[0], images=True).inputs
        return notes, {**settings, "blank_images": _blank(artifact, images)}

    def collate(self, rows: Sequence[Row], width: int) -> Arrays:
        """Return the graph's inputs: the texts' and a blank image."""
        return {**super().collate(rows, width), **self.blank_images}


@dataclass
class EmbedImagesOfBoth(EmbedImages):
    """Embed images with a graph that takes texts as well."""

    purpose = "embeds images, and texts in the same space"
    blank_texts: Arrays | None = None

    @classmethod
    def fits(cls, manifest: Manifest, record: GraphRecord | None) -> bool:
        """Return True for a graph that embeds texts and images."""
        return has_two_towers(manifest, record)

    @classmethod
    def open(cls, artifact: Artifact, record: GraphRecord, limits: InputLimits = NO_LIMITS) -> Self:
        """Read preprocessor_config.json and config.json; see `RowTask.open`."""
        task = super().open(artifact, tower_record(record, images=True), limits)
        task.blank_texts = _blank(artifact, tower_record(record, images=False).inputs)
        task.notes += ("the graph takes texts and images: one blank text runs with each batch",)
        return task

    def collate(self, rows: Sequence[Row], width: int) -> Arrays:
        """Return the graph's inputs: the images' and a blank text."""
        return {**super().collate(rows, width), **(self.blank_texts or {})}
