"""Objects in images, beside those of transformers' processors and pipeline."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest

from enginery import load_model
from enginery.core.artifact.manifest import GraphRecord, Manifest
from enginery.core.errors import ArtifactError, InputError
from enginery.core.model.files import ModelConfig
from enginery.core.shapes import TensorSpec
from enginery.runtime.pytorch.side_files import load_pillow_processor
from enginery.runtime.tasks import require_task
from enginery.runtime.tasks.detect import _RULES, DetectObjects, read_objects
from enginery.runtime.tasks.results import (
    arrow_fields,
    arrow_rows,
    is_finite,
    result_tensors,
    to_plain,
)
from enginery.runtime.tasks.task import Row, UnreadableOutputsError
from enginery.validate.objects import ObjectLimits, compare_objects
from tests import tiny
from tests.answers import inputs
from tests.tiny_vision import opened_images, save_vision_model

SIZE = (77, 121)
"""Height and width."""
LABELS = 7
CONFIG = ModelConfig(id2label={index: f"thing {index}" for index in range(LABELS)})
LIMITS = ObjectLimits(score=1e-5, box=0.0, ties=0)


def outputs(*, queries, classes, seed=3):
    random = np.random.default_rng(seed)
    logits = random.normal(0, 2, (queries, classes)).astype(np.float32)
    return logits, random.uniform(0.05, 0.9, (queries, 4)).astype(np.float32)


@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("queries", [12, 300])
@pytest.mark.parametrize("kind", list(_RULES))
def test_objects_are_those_of_the_processor(kind, queries, threshold):
    import torch
    import transformers

    logits, boxes = outputs(queries=queries, classes=LABELS + _RULES[kind].no_object)
    processor = getattr(transformers, f"{kind}ImageProcessor")()
    results = transformers.utils.ModelOutput(
        logits=torch.from_numpy(logits)[None], pred_boxes=torch.from_numpy(boxes)[None]
    )
    (expected,) = processor.post_process_object_detection(
        results, threshold, target_sizes=torch.tensor([SIZE])
    )
    objects = read_objects(logits, boxes, SIZE, _RULES[kind], CONFIG, threshold)
    assert [item.label for item in objects] == [f"thing {i}" for i in expected["labels"].tolist()]
    np.testing.assert_allclose(
        [item.score for item in objects], expected["scores"].numpy(), rtol=0, atol=1e-6
    )
    sides = [list(vars(item.box).values()) for item in objects]
    assert sides == expected["boxes"].int().tolist()
    assert all(item.score > threshold for item in objects)
    assert objects


@pytest.mark.parametrize("kind", ["Detr", "RTDetr"])
@pytest.mark.parametrize("where", ["logits", "boxes"])
def test_an_overflow_is_an_object_without_a_score(kind, where):
    logits, boxes = outputs(queries=5, classes=LABELS + _RULES[kind].no_object)
    (logits if where == "logits" else boxes)[2] = np.nan
    objects = read_objects(logits, boxes, SIZE, _RULES[kind], CONFIG, 1.0)
    assert objects
    assert all(math.isnan(item.score) for item in objects)
    assert not is_finite(objects)


def test_results_have_columns_and_tensors():
    rule = _RULES["Detr"]
    objects = read_objects(*outputs(queries=5, classes=LABELS + 1), SIZE, rule, CONFIG, 0.0)
    assert [field.name for field in arrow_fields(DetectObjects.result_type)] == ["detections"]
    ((row,),) = arrow_rows(DetectObjects.result_type, [objects])
    assert row == [item.to_dict() for item in objects]
    tensors = result_tensors(DetectObjects.result_type, [objects, []])["detections"]
    assert [json.loads(item) for item in tensors] == [row, []]


@pytest.fixture(scope="module", params=tiny.with_more(["detr", "rt_detr", "yolos"], "detr"))
def detector(request, tmp_path_factory):
    """A model's directory and its artifact."""
    folder = tmp_path_factory.mktemp(request.param)
    # An image of any shape has 64 pixels on its shorter side, which YOLOS needs.
    size = {"height": 64, "width": 64} if request.param == "yolos" else {}
    processor = {"size": size} if size else {}
    source = save_vision_model(request.param, "object-detection", folder / "source", processor)
    return source, tiny.tiny_artifact("", "object-detection", folder / "artifact", source=source)


def test_answers_are_those_of_the_pipeline(detector, tmp_path):
    import transformers

    source, artifact = detector
    pictures = opened_images(tmp_path)
    processor = load_pillow_processor(source)
    pipeline = transformers.pipeline(
        "object-detection", model=str(source), image_processor=processor, device="cpu"
    )
    expected = [pipeline(picture, threshold=0.0) for picture in pictures]
    with load_model(artifact) as model:
        answers = model.detect(pictures, threshold=0.0)
    for answer, wanted in zip(answers, expected, strict=True):
        assert compare_objects(to_plain(answer), wanted, LIMITS) == (pytest.approx(0, abs=1e-5), "")
        assert [item.label for item in answer] == [item["label"] for item in wanted]


def test_no_image_has_no_answer_and_an_image_may_have_no_object(detector):
    with load_model(detector[1]) as model:
        assert model.detect([]) == []
        assert model.detect([inputs._picture((40, 30), 1)], threshold=1.0) == [[]]
        with pytest.raises(InputError, match=r"threshold: found the number 1.5, .* from 0 to 1"):
            model.detect([], threshold=1.5)
        with pytest.raises(InputError, match="found one str, expected a list of images"):
            model.detect("street.png")


def test_large_images_run_in_small_batches(detector):
    with load_model(detector[1]) as model:
        batches = model._rows
        sides = {}
        for side in (64, 800, 4000):
            pixels = np.zeros((3, side, side), np.float32)
            sides[side] = batches.max_rows(Row({"pixel_values": pixels}))
    assert sides == {64: 32, 800: 8, 4000: 1}


def test_a_processor_without_a_rule_leaves_the_tensors(detector, tmp_path):
    artifact = detector[1]
    settings = {"image_processor_type": "ViTImageProcessor", "size": 64}
    shutil.copytree(artifact.path, tmp_path / "artifact")
    (tmp_path / "artifact" / "preprocessor_config.json").write_text(json.dumps(settings))
    copied = replace(artifact, path=tmp_path / "artifact")
    with pytest.raises(UnreadableOutputsError, match="not known for ViTImageProcessor"):
        DetectObjects.open(copied, artifact.manifest.graphs[0])


def test_other_layouts_are_no_detections():
    graph = GraphRecord.model_construct(
        file="model.onnx",
        inputs=(TensorSpec("pixel_values", "float32", ("batch", 3, 640, 640)),),
        outputs=(TensorSpec("output0", "float32", ("batch", 84, 8400)),),
    )
    manifest = Manifest.model_construct(task="object-detection", graphs=(graph,))
    with pytest.raises(ArtifactError, match="outputs that are not read as results: output0"):
        require_task(manifest)
