"""Read the boxes that a detector finds from its outputs, and count those that two graphs share.

`runtime.tasks.detect` makes the results of a user from the same scores and boxes.

Three layouts are known, by the names and shapes of the outputs:

- DETR and its successors in transformers: `logits` (batch, queries, classes) and `pred_boxes`
  (batch, queries, 4), centers and sizes as fractions of the image. One class more than the config
  has labels means softmax and "no object", otherwise the scores are sigmoids.
- YOLOv8 and later: one output (batch, 4 + classes, positions), in pixels.
- YOLOX and YOLOv5: one output (batch, positions, 5 + classes), the fifth of which says whether
  there is an object. YOLOX's boxes can be relative to the grid, as its authors' exporter leaves
  them.

The positions of YOLO are the cells of three grids, with strides of 8, 16 and 32 pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SCORE = 0.25
"""Minimum score of a box."""
_OVERLAP = 0.5
"""Minimum intersection over union of boxes that count as the same, as in COCO's AP50."""
_MOST = 300
"""Boxes of an image, the best, as ultralytics and COCO limit them."""
_STRIDES = (8, 16, 32)

Arrays = Mapping[str, NDArray[Any]]
Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Detections:
    """The boxes of one image, in descending order of their scores."""

    boxes: Floats
    """(boxes, 4): left, top, right, bottom."""
    classes: NDArray[np.intp]
    """(boxes,)"""

    def count_same(self, other: Detections) -> int:
        """Return how many boxes have a partner of the same class that covers the same place."""
        overlaps = _overlaps(self.boxes, other.boxes)
        overlaps[self.classes[:, None] != other.classes[None]] = 0.0
        # The best boxes choose first, and a partner is taken only once.
        same = 0
        for row in range(len(overlaps)):
            partner = int(overlaps[row].argmax()) if overlaps.shape[1] else 0
            if overlaps.shape[1] and overlaps[row, partner] >= _OVERLAP:
                overlaps[:, partner] = 0.0
                same += 1
        return same


def read_detections(outputs: Arrays, feeds: Arrays, labels: int = 0) -> list[Detections] | None:
    """Return the boxes of each image; None if the outputs are not those of a known detector.

    Args:
        outputs: the graph's outputs.
        feeds: its inputs, of which one has the images: (batch, 3, height, width), or with the
            channels last.
        labels: number of labels in the model's config; 0 if it has none.
    """
    if {"logits", "pred_boxes"} <= set(outputs):
        return _read_detr(outputs["logits"], outputs["pred_boxes"], labels)
    size = _image_size(feeds)
    floats = [value for value in outputs.values() if value.dtype.kind == "f"]
    if size is None or len(floats) != 1 or floats[0].ndim != 3:
        return None
    (output,) = (value.astype(np.float32, copy=False) for value in floats)
    grids = [(size[0] // stride, size[1] // stride, stride) for stride in _STRIDES]
    positions = sum(height * width for height, width, _ in grids)
    # YOLOv8 and its like: (batch, 4 + classes, positions).
    if output.shape[2] == positions and output.shape[1] > 4:
        rows = output.transpose(0, 2, 1)
        return [_best(image[:, :4], image[:, 4:], suppress=True) for image in rows]
    # YOLOX has a row for each position, YOLOv5 one for each of three anchors: centers, sizes, the
    # score of an object, and those of the classes.
    if output.shape[1] not in (positions, 3 * positions) or output.shape[2] < 6:
        return None
    # Centers in pixels reach the far side of the image; those relative to a cell stay near it.
    if output.shape[1] == positions and output[..., :2].max() < min(size) / 2:
        output = _from_grids(output, grids)
    return [_best(image[:, :4], image[:, 4:5] * image[:, 5:], suppress=True) for image in output]


def class_scores(logits: NDArray[Any], *, no_object: bool) -> Floats:
    """Return the score of each label: float32 (…, labels).

    Args:
        logits: (…, classes).
        no_object: the last class means "no object": the scores are a softmax without it. Else each
            label has a sigmoid of its own.
    """
    values: Floats = logits.astype(np.float32, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        if not no_object:
            return np.asarray(1 / (1 + np.exp(-values)))
        powers = np.exp(values - values.max(axis=-1, keepdims=True))
        return np.asarray((powers / powers.sum(axis=-1, keepdims=True))[..., :-1])


def corners(centers: NDArray[Any]) -> Floats:
    """Return boxes by their left, top, right and bottom, from centers and sizes: (…, 4)."""
    values: Floats = centers.astype(np.float32, copy=False)
    middle, half = values[..., :2], values[..., 2:] / 2
    return np.concatenate([middle - half, middle + half], axis=-1)


def _read_detr(logits: NDArray[Any], boxes: NDArray[Any], labels: int) -> list[Detections]:
    # DETR has a last class for "no object" beside the labels; newer ones have a sigmoid for each
    # label.
    scores = class_scores(logits, no_object=bool(labels) and logits.shape[-1] == labels + 1)
    return [
        _best(centers.astype(np.float32, copy=False), image, suppress=False)
        for centers, image in zip(boxes, scores, strict=True)
    ]


def _image_size(feeds: Arrays) -> tuple[int, int] | None:
    """Return height and width of the images, if one input has images."""
    shapes = [value.shape for value in feeds.values() if value.ndim == 4]
    if len(shapes) != 1:
        return None
    _, first, second, last = shapes[0]
    return (second, last) if first in (1, 3) else (first, second) if last in (1, 3) else None


def _from_grids(output: Floats, grids: list[tuple[int, int, int]]) -> Floats:
    """Return YOLOX's rows with boxes in pixels. Source: `demo_postprocess` in its repository."""
    cells, strides = [], []
    for height, width, stride in grids:
        y, x = np.mgrid[:height, :width]
        cells.append(np.stack([x, y], axis=-1).reshape(-1, 2))
        strides.append(np.full((height * width, 1), stride))
    pixels = np.concatenate(strides)
    decoded = output.copy()
    decoded[..., :2] = (output[..., :2] + np.concatenate(cells)) * pixels
    with np.errstate(over="ignore"):
        decoded[..., 2:4] = np.exp(output[..., 2:4]) * pixels
    return decoded


def _best(centers: Floats, scores: Floats, *, suppress: bool) -> Detections:
    """Return the boxes above the minimum score, of those that overlap only the best.

    Args:
        centers: (positions, 4), centers and sizes.
        scores: (positions, classes).
        suppress: drop boxes that overlap a better one of the same class.
    """
    classes, best = scores.argmax(axis=-1), scores.max(axis=-1)
    order = np.argsort(-best, kind="stable")
    order = order[best[order] >= _SCORE]  # NaN is never above
    boxes, classes = corners(centers[order]), classes[order]
    selected: list[int] = []
    for index in range(len(boxes)):
        if len(selected) == _MOST:
            break
        rivals = [k for k in selected if classes[k] == classes[index]] if suppress else []
        if not rivals or _overlaps(boxes[index : index + 1], boxes[rivals]).max() <= _OVERLAP:
            selected.append(index)
    return Detections(boxes[selected], classes[selected])


def _overlaps(first: Floats, second: Floats) -> NDArray[np.float64]:
    """Return the intersection over union of each pair of boxes: (len(first), len(second))."""
    a, b = first[:, None].astype(np.float64), second[None].astype(np.float64)
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    shared = sides.clip(min=0).prod(axis=-1)
    areas = [(boxes[..., 2:] - boxes[..., :2]).clip(min=0).prod(axis=-1) for boxes in (a, b)]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.nan_to_num(shared / (areas[0] + areas[1] - shared)))
