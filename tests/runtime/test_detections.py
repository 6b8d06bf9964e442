"""Boxes in the outputs of known detectors."""

import numpy as np
import pytest

from enginery.runtime.agreement import AnswerAgreement
from enginery.runtime.detections import read_detections

IMAGES = {"images": np.zeros((1, 3, 64, 96), np.float32)}
CELLS = [(8, 12, 8), (4, 6, 16), (2, 3, 32)]
POSITIONS = sum(height * width for height, width, _ in CELLS)
BOXES = {5: (40.0, 24.0, 20.0, 16.0), 100: (70.0, 50.0, 12.0, 12.0)}
"""Position -> center x, center y, width, height in pixels."""


def rows(columns):
    found = np.zeros((1, POSITIONS, columns), np.float32)
    found[0, :, :4] = (90, 60, 1, 1)
    return found


def yolov8(score=0.9, shift=0.0):
    found = rows(4 + 2)
    for label, (position, box) in enumerate(BOXES.items()):
        found[0, position, :4] = np.add(box, (shift, 0, 0, 0))
        found[0, position, 4 + label] = score
    return {"output0": found.transpose(0, 2, 1)}


def yolox(*, relative):
    found = rows(5 + 2)
    x, y, strides = (
        np.concatenate([part(*size).ravel() for size in CELLS])
        for part in (
            lambda h, w, s: np.tile(np.arange(w), h),
            lambda h, w, s: np.repeat(np.arange(h), w),
            lambda h, w, s: np.full(h * w, s),
        )
    )
    for label, (position, box) in enumerate(BOXES.items()):
        found[0, position, :4] = box
        found[0, position, 4], found[0, position, 5 + label] = 0.9, 1
    if relative:
        found[0, :, 0] = found[0, :, 0] / strides - x
        found[0, :, 1] = found[0, :, 1] / strides - y
        found[0, :, 2:4] = np.log(found[0, :, 2:4] / strides[:, None])
        found[0, [i for i in range(POSITIONS) if i not in BOXES], :4] = 0
    return {"output": found}


def detr(*, background):
    logits = np.full((1, 10, 2 + background), -5.0, np.float32)
    boxes = np.full((1, 10, 4), 0.5, np.float32)
    if background:
        logits[..., 2] = 5
    for label, (position, box) in enumerate(BOXES.items()):
        logits[0, position % 8] = (-5, -5) + ((-5,) if background else ())
        logits[0, position % 8, label] = 5
        boxes[0, position % 8] = np.divide(box, (96, 64, 96, 64))
    return {"logits": logits, "pred_boxes": boxes}


@pytest.mark.parametrize(
    "outputs",
    [yolov8(), yolox(relative=False), yolox(relative=True)],
    ids=["yolov8", "yolox", "yolox of the grid"],
)
def test_boxes_of_yolo(outputs):
    (found,) = read_detections(outputs, IMAGES)
    order = np.argsort(found.classes)
    assert found.classes[order].tolist() == [0, 1]
    expected = [[30, 16, 50, 32], [64, 44, 76, 56]]
    np.testing.assert_allclose(found.boxes[order], expected, atol=1e-4)


@pytest.mark.parametrize("background", [False, True])
def test_boxes_of_detr(background):
    (found,) = read_detections(detr(background=background), IMAGES, labels=2)
    order = np.argsort(found.classes)
    scaled = found.boxes[order] * np.tile((96, 64), 2)
    np.testing.assert_allclose(scaled, [[30, 16, 50, 32], [64, 44, 76, 56]], atol=1e-4)


def test_overlapping_boxes_count_once():
    outputs = yolov8()
    outputs["output0"][0, :, 6] = outputs["output0"][0, :, 5] + (1, 0, 0, 0, -0.1, 0)
    (found,) = read_detections(outputs, IMAGES)
    assert len(found.boxes) == 2


@pytest.mark.parametrize(
    "outputs",
    [
        {"output0": np.zeros((1, 6, POSITIONS + 1), np.float32)},
        {"output0": np.zeros((1, 6), np.float32)},
        {"logits": np.zeros((1, 6), np.float32)},
        {"a": yolov8()["output0"], "b": np.zeros((1, 2), np.float32)},
    ],
)
def test_other_outputs_have_no_boxes(outputs):
    assert read_detections(outputs, IMAGES) is None


@pytest.mark.parametrize(
    ("found", "f1"),
    [(yolov8(shift=3.0), 1.0), (yolov8(shift=30.0), 0.0), (yolov8(score=0.1), 0.0)],
    ids=["near", "far", "below the score"],
)
def test_f1_of_the_boxes(found, f1):
    agreement = AnswerAgreement(None)
    agreement.add(found, yolov8(), IMAGES)
    assert agreement.metrics().box_f1 == f1


def test_a_box_that_only_one_side_finds():
    found = yolov8()
    found["output0"][0, 4:, 5] = 0
    agreement = AnswerAgreement(None)
    agreement.add(found, yolov8(), IMAGES)
    assert agreement.metrics().box_f1 == pytest.approx(2 / 3)


def test_without_boxes_there_is_no_f1():
    agreement = AnswerAgreement(None)
    agreement.add(yolov8(score=0.1), yolov8(score=0.1), IMAGES)
    assert agreement.metrics().box_f1 is None
