"""Image segmentation: a mask for each label or object of an image, at the image's own size.

The results are those of transformers' image-segmentation pipeline. Semantic models have a plane of
scores for each label, and each pixel gets its best label. Panoptic models have queries, each with
scores of the labels and a plane: a pixel belongs to the query whose plane is the highest there.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord, Manifest
from enginery.runtime.detections import class_scores
from enginery.runtime.image.planes import Size, best_planes, count_at_least, scale_plane
from enginery.runtime.tasks.classify import label_names
from enginery.runtime.tasks.images import ImageTask
from enginery.runtime.tasks.results import Nested, Result
from enginery.runtime.tasks.task import (
    NO_LIMITS,
    Arrays,
    InputLimits,
    ModelInputs,
    Row,
    TaskOptionError,
    TaskOptions,
    UnreadableOutputsError,
    has_outputs,
    output_rows,
)
from enginery.runtime.tasks.text import softmax

Subtask = Literal["auto", "panoptic", "semantic"]

_MAX_DESCRIBED = 3
"""Maximum number of segments in a description."""
_PNG_LEVEL = 1
"""Of zlib, 1 to 9: a mask of 2 megapixels takes 10 ms and 10 KB; level 6 makes it a third
smaller in three times as long."""

_SEMANTIC: Mapping[str, int] = {"logits": 4}
_QUERIES: tuple[Mapping[str, int], ...] = (
    {"class_queries_logits": 3, "masks_queries_logits": 4},
    {"logits": 3, "pred_masks": 4},
)
"""Outputs of panoptic models with their ranks: scores of labels, then planes."""
_SEMANTIC_KINDS = ("Segformer", "Beit", "MobileViT", "MobileNetV2", "DPT")
_PANOPTIC_KINDS: Mapping[str, int] = {"Detr": 0, "MaskFormer": 0, "Mask2Former": 384}
"""Image processors of panoptic models, and the edge of the square that they scale planes to first,
0 for none. Source: `post_process_*_segmentation` in transformers 4.57."""


@dataclass(frozen=True)
class Segment(Result):
    """A part of an image: the pixels of a label, or of one object."""

    label: str
    score: float | None
    """A probability; None for a label of a semantic model."""
    mask: str
    """A PNG in base64 of the upright image's size: 255 for the pixels of the segment, else 0."""

    @property
    def pixels(self) -> NDArray[np.bool_]:
        """The mask as an array (height, width)."""
        from PIL import Image

        with Image.open(io.BytesIO(base64.b64decode(self.mask)), formats=("PNG",)) as image:
            return np.asarray(image) > 0


class SegmentOptions(TaskOptions):
    """Options of `segment`. All but `subtask` are for panoptic models."""

    threshold: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Queries with a higher score are segments."""
    mask_threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Score from which a pixel counts towards the area of a query."""
    overlap_mask_area_threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    """A query of whose area other queries leave no more than this share is no segment."""
    subtask: Subtask = "auto"
    """`semantic` joins the objects of a panoptic model by label; `auto` is panoptic where the model
    can."""


@dataclass
class SegmentImages(ImageTask):
    """Segment images."""

    verb = "segment"
    purpose = "segments images"
    tasks = ("image-segmentation", "semantic-segmentation")
    result_type = Annotated[list[Segment], Nested("segments", "segments")]
    Options = SegmentOptions
    has_large_outputs = True

    @classmethod
    def fits(cls, manifest: Manifest, record: GraphRecord | None) -> bool:
        """Return True for outputs of transformers' semantic or panoptic models."""
        if not super().fits(manifest, record):
            return False
        graph = record or next(iter(manifest.graphs), None)
        return any(has_outputs(graph, outputs) for outputs in (_SEMANTIC, *_QUERIES))

    @classmethod
    def open(cls, artifact: Artifact, record: GraphRecord, limits: InputLimits = NO_LIMITS) -> Self:
        """Read the model's files; see `RowTask.open`.

        Raises:
            UnreadableOutputsError: it is not known how masks are made of the outputs.
        """
        task = super().open(artifact, record, limits)
        kind = task.processor.kind
        kinds = _PANOPTIC_KINDS if task.is_panoptic else _SEMANTIC_KINDS
        if kind not in kinds:
            raise UnreadableOutputsError(
                f"{artifact.path}: how masks are made of {', '.join(task.outputs_read())} is not "
                f"known for {kind}ImageProcessor, only for {', '.join(kinds)}.",
                do="Use the graph's own outputs: `predict --out masks.npz`, or OrtRunner.",
            )
        subtask = "panoptic" if task.is_panoptic else "semantic"
        task.notes += (f"masks are {subtask}, as by {kind}ImageProcessor of transformers",)
        return task

    @property
    def is_panoptic(self) -> bool:
        """True if the graph has queries instead of a plane for each label."""
        return not has_outputs(self.record, _SEMANTIC)

    def outputs_read(self, *, raw: bool = False) -> tuple[str, ...]:
        """Return the names of the graph outputs that `split` needs."""
        layouts = (_SEMANTIC, *_QUERIES)
        return tuple(next(names for names in layouts if has_outputs(self.record, names)))

    def preprocess(self, inputs: Sequence[Any], options: SegmentOptions) -> ModelInputs:
        """Read each image into one row."""
        self._check(options)
        work = super().preprocess(inputs, options)
        work.postprocess_cost = "heavy"
        return work

    def split(
        self, rows: Sequence[Row], feeds: Mapping[str, NDArray[Any]], outputs: Arrays
    ) -> list[Any]:
        """Return the outputs of each image and, last, its height and width."""
        arrays = [output_rows(outputs, name, rows) for name in self.outputs_read()]
        return list(zip(*arrays, [row.image_size for row in rows], strict=True))

    def postprocess(
        self, work: ModelInputs, outputs: Sequence[Any], options: SegmentOptions
    ) -> list[list[Segment]]:
        """Return the segments of each image."""
        self._check(options)
        return [list(self._segments(*output, options=options)) for output in outputs]

    def describe(self, result: list[Segment]) -> str:
        """Describe the largest segments of an image with their share of it."""
        shares = [(float(segment.pixels.mean()), segment) for segment in result]
        shares.sort(key=lambda item: -item[0])
        named = []
        for share, segment in shares[:_MAX_DESCRIBED]:
            score = "" if segment.score is None else f" {segment.score:.2f}"
            named.append(f"{segment.label}{score} on {share:.0%}")
        more = len(result) - len(named)
        return ", ".join(named) + (f" and {more} more" if more else "") or "nothing found"

    def _check(self, options: SegmentOptions) -> None:
        if options.subtask == "panoptic" and not self.is_panoptic:
            raise TaskOptionError(
                "subtask is panoptic, but the model has a plane for each label: it is semantic.",
                field="subtask",
            )

    def _segments(self, *arrays: Any, options: SegmentOptions) -> Iterator[Segment]:
        """Yield the segments of an image from its outputs and its size."""
        *values, size = arrays
        floats = [array.astype(np.float32, copy=False) for array in values]
        if not all(np.isfinite(array).all() for array in floats):
            # A score tells that the outputs have overflowed, where a mask would look like others.
            yield make_segment("", np.nan, np.zeros(size, dtype=bool))
            return
        if not self.is_panoptic:
            yield from self._by_label(floats[0], tuple(size))
            return
        logits, planes = floats
        if edge := _PANOPTIC_KINDS[self.processor.kind]:
            planes = np.stack([scale_plane(plane, (edge, edge)) for plane in planes])
        probabilities = class_scores(planes, no_object=False)
        if options.subtask == "semantic":
            labels = class_scores(logits, no_object=True)
            merged = np.einsum("qc,qhw->chw", labels, probabilities, optimize=True)
            yield from self._by_label(merged, tuple(size))
            return
        yield from self._by_query(softmax(logits), probabilities, tuple(size), options)

    def _by_label(self, planes: NDArray[np.float32], size: Size) -> Iterator[Segment]:
        """Yield a segment for each label that is the best one somewhere, in order."""
        best = best_planes(planes, size)
        names = label_names(self.config, len(planes))
        for label in np.unique(best).tolist():
            yield make_segment(names[label], None, best == label)

    def _by_query(
        self,
        scores: NDArray[np.float32],
        planes: NDArray[np.float32],
        size: Size,
        options: SegmentOptions,
    ) -> Iterator[Segment]:
        """Yield the objects of a panoptic model in the order of its queries.

        Args:
            scores: (queries, labels + 1), the last one of "no object".
            planes: (queries, rows, columns), probabilities.
            size: height and width of the image.
            options: the thresholds.
        """
        labels, best = scores.argmax(axis=-1), scores.max(axis=-1)
        queries = np.flatnonzero((labels != scores.shape[-1] - 1) & (best > options.threshold))
        if not len(queries):
            return
        planes = planes[queries] * best[queries, None, None]
        owners = best_planes(planes, size)
        areas = np.bincount(owners.reshape(-1), minlength=len(queries))
        names = label_names(self.config, scores.shape[-1] - 1)
        for query, index in enumerate(queries.tolist()):
            if not areas[query]:
                continue
            whole = count_at_least(planes[query], size, options.mask_threshold)
            if whole and areas[query] / whole > options.overlap_mask_area_threshold:
                score = round(float(best[index]), 6)  # as in transformers
                yield make_segment(names[int(labels[index])], score, owners == query)


def make_segment(label: str, score: float | None, mask: NDArray[np.bool_]) -> Segment:
    """Return the segment with a mask (height, width)."""
    from PIL import Image

    content = io.BytesIO()
    pixels = mask.astype(np.uint8) * np.uint8(255)
    Image.fromarray(pixels).save(content, "png", compress_level=_PNG_LEVEL)
    return Segment(label, score, base64.b64encode(content.getvalue()).decode("ascii"))
