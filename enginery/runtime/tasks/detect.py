"""Object detection: find objects in images, with their boxes in pixels.

The results are those of transformers' object-detection pipeline, in its order. Which of a model's
boxes are results is a rule of its image processor, `post_process_object_detection`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord, Manifest
from enginery.core.model.files import ModelConfig
from enginery.runtime.detections import class_scores, corners
from enginery.runtime.tasks.classify import label_names
from enginery.runtime.tasks.images import ImageTask
from enginery.runtime.tasks.results import Nested, Result
from enginery.runtime.tasks.task import (
    NO_LIMITS,
    Arrays,
    InputLimits,
    ModelInputs,
    Row,
    TaskOptions,
    UnreadableOutputsError,
    has_outputs,
    output_rows,
)

_MAX_DESCRIBED = 3
"""Maximum number of objects in a description."""


@dataclass(frozen=True)
class _Rule:
    """How an image processor chooses among the boxes of a model."""

    no_object: bool
    """The last class means "no object", and a query has its best label alone; else a query may have
    several labels, and the best scores of all queries are chosen."""
    best: int = 0
    """Number of scores to choose; 0 for the number of queries."""


_RULES: Mapping[str, _Rule] = {
    "Detr": _Rule(no_object=True),
    "Yolos": _Rule(no_object=True),
    "ConditionalDetr": _Rule(no_object=False, best=100),
    "DeformableDetr": _Rule(no_object=False, best=100),
    "RTDetr": _Rule(no_object=False),
}
"""Rules by image processor. Source: `post_process_object_detection` in transformers 4.57,
`models/*/image_processing_*.py`."""


@dataclass(frozen=True)
class Box(Result):
    """The sides of an object in pixels of the upright image, which they may exceed.

    They are whole numbers, cut off as in transformers.
    """

    xmin: int
    ymin: int
    xmax: int
    ymax: int


@dataclass(frozen=True)
class Detection(Result):
    """An object in an image.

    >>> Detection("cat", 0.875, Box(8, 16, 100, 64)).to_dict()["box"]["xmax"]
    100
    """

    label: str
    score: float
    """A probability."""
    box: Box


class DetectOptions(TaskOptions):
    """Options of `detect`."""

    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Objects with a higher score are returned."""


@dataclass
class DetectObjects(ImageTask):
    """Find objects in images."""

    verb = "detect"
    purpose = "detects objects in images"
    tasks = ("object-detection",)
    graph_outputs: ClassVar[Mapping[str, int]] = {"logits": 3, "pred_boxes": 3}
    result_type = Annotated[list[Detection], Nested("detections", "detections")]
    Options = DetectOptions

    @classmethod
    def fits(cls, manifest: Manifest, record: GraphRecord | None) -> bool:
        """Return True for a detector whose outputs are those of transformers' models.

        Others, such as YOLO's, have layouts of their own, and only their tensors are read.
        """
        graph = record or next(iter(manifest.graphs), None)
        return super().fits(manifest, record) and has_outputs(graph, cls.graph_outputs)

    @classmethod
    def open(cls, artifact: Artifact, record: GraphRecord, limits: InputLimits = NO_LIMITS) -> Self:
        """Read the model's files; see `RowTask.open`.

        Raises:
            UnreadableOutputsError: it is not known which boxes are results.
        """
        task = super().open(artifact, record, limits)
        kind = task.processor.kind
        if kind not in _RULES:
            raise UnreadableOutputsError(
                f"{artifact.path}: how boxes are read from the outputs is not known for "
                f"{kind}ImageProcessor, only for {', '.join(_RULES)}.",
                do="Use the graph's own outputs: `predict --out boxes.npz`, or OrtRunner.",
            )
        task.notes += (f"boxes are chosen as by {kind}ImageProcessor of transformers",)
        return task

    def split(
        self, rows: Sequence[Row], feeds: Mapping[str, NDArray[Any]], outputs: Arrays
    ) -> list[Any]:
        """Return (logits, boxes, image_size) of each image, boxes as fractions of the image."""
        logits, boxes = (output_rows(outputs, name, rows) for name in self.graph_outputs)
        sizes = [row.image_size for row in rows]
        return list(zip(logits, boxes, sizes, strict=True))

    def postprocess(
        self, work: ModelInputs, outputs: Sequence[Any], options: DetectOptions
    ) -> list[list[Detection]]:
        """Return the objects of each image."""
        rule = _RULES[self.processor.kind]
        return [
            read_objects(logits, boxes, size, rule, self.config, options.threshold)
            for logits, boxes, size in outputs
        ]

    def describe(self, result: list[Detection]) -> str:
        """Describe the best objects of an image, with their boxes."""
        best = sorted(result, key=lambda detection: -detection.score)[:_MAX_DESCRIBED]
        named = [f"{item.label} {item.score:.2f} at {_sides(item.box)}" for item in best]
        more = len(result) - len(named)
        return ", ".join(named) + (f" and {more} more" if more else "") or "nothing found"


def _sides(box: Box) -> str:
    return f"({box.xmin}, {box.ymin}, {box.xmax}, {box.ymax})"


def read_objects(
    logits: NDArray[Any],
    centers: NDArray[Any],
    image_size: tuple[int, int],
    rule: _Rule,
    config: ModelConfig,
    threshold: float,
) -> list[Detection]:
    """Return the objects of one image.

    An object with a score or a box that is NaN or infinite is returned with the score NaN: without
    it, an image whose outputs have overflowed would seem to show nothing.

    Args:
        logits: (queries, classes).
        centers: (queries, 4), centers and sizes as fractions of the image.
        image_size: height and width of the image in pixels.
        rule: which boxes are chosen.
        config: the model's config.json, which has the names of the labels.
        threshold: score above which objects are returned.
    """
    height, width = image_size
    boxes = corners(centers) * np.array([width, height, width, height], np.float32)
    scores = class_scores(logits, no_object=rule.no_object)
    names = label_names(config, scores.shape[-1])
    scores[~np.isfinite(boxes).all(axis=-1)] = np.nan
    if rule.no_object:
        labels, scores = scores.argmax(axis=-1), scores.max(axis=-1)
    else:
        flat, classes = scores.reshape(-1), scores.shape[-1]
        # NaN first, so that it is among the best.
        order = np.argsort(-np.nan_to_num(flat, nan=np.inf), kind="stable")
        order = order[: rule.best or len(logits)]
        labels, boxes, scores = order % classes, boxes[order // classes], flat[order]
    above = ~(scores <= threshold)  # NaN is above
    whole = np.nan_to_num(boxes[above], nan=0, posinf=0, neginf=0).astype(int)
    return [
        Detection(names[label], score, Box(*box))
        for label, score, box in zip(
            labels[above].tolist(), scores[above].tolist(), whole.tolist(), strict=True
        )
    ]
