"""Segments of images, beside those of transformers' processors and pipeline."""

import json
import math
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.model_types import model_types
from enginery import load_model
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import InputError
from enginery.core.model.files import ModelConfig
from enginery.core.shapes import TensorSpec
from enginery.runtime.pytorch.side_files import load_pillow_processor
from enginery.runtime.tasks.results import is_finite
from enginery.runtime.tasks.segment import _PANOPTIC_KINDS, _SEMANTIC_KINDS, SegmentImages
from enginery.runtime.tasks.task import ModelInputs, TaskOptionError, UnreadableOutputsError
from tests import tiny
from tests.tiny_vision import opened_images, save_vision_model

SIZE = (61, 90)
"""Height and width of the image."""
NAMES = {0: "road", 1: "sky", 2: "tree", 3: "car"}
QUERIES = 12
ANY = {"threshold": 0.0, "mask_threshold": 0.3, "overlap_mask_area_threshold": 0.2}


def segmenter(kind, outputs):
    """A task with a processor of a kind and a graph with these outputs."""
    specs = tuple(
        TensorSpec(name, "float32", ("batch", *array.shape)) for name, array in outputs.items()
    )
    record = GraphRecord.model_construct(file="model.onnx", inputs=(), outputs=specs)
    config = ModelConfig(id2label=NAMES)
    return SegmentImages(record, processor=SimpleNamespace(kind=kind), config=config)


def random_outputs(kind, *, seed=4):
    random = np.random.default_rng(seed)
    planes = random.normal(0, 2, (QUERIES, 10, 15)).astype(np.float32)
    if kind in _SEMANTIC_KINDS:
        return {"logits": planes[: len(NAMES)]}
    logits = random.normal(0, 2, (QUERIES, len(NAMES) + 1)).astype(np.float32)
    names = {"Detr": ("logits", "pred_masks")}.get(
        kind, ("class_queries_logits", "masks_queries_logits")
    )
    return dict(zip(names, (logits, planes), strict=True))


def segments_of(kind, outputs, **options):
    task = segmenter(kind, outputs)
    row = (*(outputs[name] for name in task.outputs_read()), SIZE)
    (segments,) = task.postprocess(ModelInputs([]), [row], task.Options.read(options))
    return segments


def transformers_segments(kind, outputs, **options):
    """What transformers' pipeline makes of the outputs of a model."""
    import torch
    import transformers
    from transformers.pipelines.image_segmentation import ImageSegmentationPipeline

    pipeline = ImageSegmentationPipeline.__new__(ImageSegmentationPipeline)
    pipeline.image_processor = getattr(transformers, f"{kind}ImageProcessor")()
    pipeline.model = SimpleNamespace(config=SimpleNamespace(id2label=NAMES))
    tensors = {name: torch.from_numpy(array.copy())[None] for name, array in outputs.items()}
    results = transformers.utils.ModelOutput(**tensors, target_size=[SIZE])
    return pipeline.postprocess(results, **options)


def assert_equal(segments, expected, *, few=0):
    assert [item.label for item in segments] == [item["label"] for item in expected]
    for segment, wanted in zip(segments, expected, strict=True):
        if wanted["score"] is None:
            assert segment.score is None
        else:
            assert segment.score == pytest.approx(wanted["score"], abs=5e-6)
        mask = np.asarray(wanted["mask"])
        assert set(np.unique(mask)) <= {0, 255}
        assert segment.pixels.shape == mask.shape
        assert int((segment.pixels != (mask > 0)).sum()) <= few


@pytest.mark.parametrize("kind", _SEMANTIC_KINDS)
def test_labels_are_those_of_the_processor(kind):
    outputs = random_outputs(kind)
    segments = segments_of(kind, outputs)
    assert_equal(segments, transformers_segments(kind, outputs))
    assert len(segments) == len(NAMES)
    assert sum(segment.pixels for segment in segments).tolist() == np.ones(SIZE).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"threshold": 0.5},
        ANY,
        {"threshold": 0.0, "mask_threshold": 0.0, "overlap_mask_area_threshold": 0.0},
        {"threshold": 0.2, "mask_threshold": 0.9},
        {"threshold": 1.0},
        {"subtask": "semantic"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", _PANOPTIC_KINDS)
def test_objects_are_those_of_the_processor(kind, options):
    outputs = random_outputs(kind)
    expected = transformers_segments(kind, outputs, **options)
    assert_equal(segments_of(kind, outputs, **options), expected)


def test_thresholds_choose_among_the_objects():
    outputs = random_outputs("MaskFormer")
    counts = {
        len(segments_of("MaskFormer", outputs, **{**ANY, "threshold": step / 20}))
        for step in range(21)
    }
    assert 0 in counts
    assert len(counts) > 2


@pytest.mark.parametrize("kind", ["Segformer", "MaskFormer"])
def test_an_overflow_is_a_segment_without_a_score(kind):
    outputs = random_outputs(kind)
    next(iter(outputs.values()))[0, 0] = np.inf
    (segment,) = segments_of(kind, outputs, **ANY)
    assert math.isnan(segment.score)
    assert not is_finite([segment])


def test_a_semantic_model_has_no_objects():
    with pytest.raises(TaskOptionError, match=r"subtask is panoptic, .* it is semantic"):
        segments_of("Segformer", random_outputs("Segformer"), subtask="panoptic")


MODELS = {
    "segformer": ("semantic-segmentation", {}),
    "mobilevit": ("image-segmentation", {}),
    "maskformer": ("image-segmentation", ANY),
    "detr": ("image-segmentation", ANY),
    "mask2former": ("image-segmentation", ANY),
}


@pytest.fixture(scope="module", params=tiny.with_more(MODELS, "segformer"))
def model(request, tmp_path_factory):
    """A model's directory, its artifact, and options with which it finds segments."""
    if request.param not in model_types():
        pytest.skip("it is no type of this environment")
    folder = tmp_path_factory.mktemp(request.param)
    task, options = MODELS[request.param]
    source = save_vision_model(request.param, task, folder / "source")
    return source, tiny.tiny_artifact("", task, folder / "artifact", source=source), options


def test_answers_are_those_of_the_pipeline(model, tmp_path):
    import transformers

    source, artifact, options = model
    pictures = opened_images(tmp_path)
    if artifact.manifest.model_type == "mask2former":
        # Its attention masks are True or False: on a plain image rounding decides which, and
        # PyTorch's own logits differ by 0.9 with and without a mask of ones.
        pictures = [
            picture for picture in pictures if len(set(picture.convert("L").getextrema())) > 1
        ]
    processor = load_pillow_processor(source)
    pipeline = transformers.pipeline(
        "image-segmentation", model=str(source), image_processor=processor, device="cpu"
    )
    with load_model(artifact) as loaded:
        answers = loaded.segment(pictures, **options)
    for answer, picture in zip(answers, pictures, strict=True):
        # Where two planes are equal, rounding decides.
        few = 2 + picture.width * picture.height // 1000
        assert_equal(answer, pipeline(picture, **options), few=few)


def test_outputs_are_masks_before_the_next_batch(model, monkeypatch):
    with load_model(model[1]) as loaded:
        monkeypatch.setattr(loaded._rows, "max_rows", lambda row: 2)
        sizes = []
        postprocess = loaded.definition.postprocess
        monkeypatch.setattr(
            loaded.definition,
            "postprocess",
            lambda work, outputs, options: (
                sizes.append(len(outputs)) or postprocess(work, outputs, options)
            ),
        )
        pictures = [np.full((40, 50, 3), value, np.uint8) for value in range(5)]
        assert len(loaded.segment(pictures)) == 5
        assert sizes == [2, 2, 1]
        assert loaded.segment([]) == []
        with pytest.raises(InputError, match="threshold: found the number 2, expected"):
            loaded.segment([], threshold=2)


def test_a_processor_without_a_rule_leaves_the_tensors(model, tmp_path):
    artifact = model[1]
    settings = {"image_processor_type": "ViTImageProcessor", "size": 64}
    shutil.copytree(artifact.path, tmp_path / "artifact")
    (tmp_path / "artifact" / "preprocessor_config.json").write_text(json.dumps(settings))
    copied = replace(artifact, path=tmp_path / "artifact")
    with pytest.raises(UnreadableOutputsError, match="not known for ViTImageProcessor"):
        SegmentImages.open(copied, artifact.manifest.graphs[0])
