"""Models that segment what points in an image belong to, in two graphs."""

import numpy as np
import pytest

from benchmarks.model_types import save_model
from enginery import export_model, validate_model
from enginery.passes.qdq.layers import find_layers
from enginery.quantize.calibration.batches import make_batches
from enginery.quantize.calibration.data import CalibrationData
from enginery.quantize.source_graph import SourceGraph
from enginery.runtime.graph_roles import answer_graph, input_graph
from enginery.runtime.onnxruntime.runner import OrtRunner
from tests.environments import needs_transformers5

pytestmark = [needs_transformers5, pytest.mark.more]

POINTS = ("batch", "point_batch", "nb_points_per_image")
EMBEDDINGS = {
    "sam": ["image_embeddings", "image_positional_embeddings"],
    "sam2": ["image_embeddings.0", "image_embeddings.1", "image_embeddings.2"],
}
MASKS = {
    "sam": ["iou_scores", "pred_masks"],
    "sam2": ["iou_scores", "pred_masks", "object_score_logits"],
}


@pytest.mark.parametrize("kind", ["sam", "sam2"])
def test_images_are_encoded_once_for_all_prompts(kind, tmp_path):
    source = save_model(kind, "feature-extraction", tmp_path / "model")
    artifact = export_model(str(source), task="feature-extraction")
    prompts, images = artifact.manifest.graphs
    assert (images.file, prompts.file) == (
        "vision_encoder.onnx",
        "prompt_encoder_mask_decoder.onnx",
    )
    assert [spec.name for spec in images.inputs] == ["pixel_values"]
    assert [spec.name for spec in images.outputs] == EMBEDDINGS[kind]
    dims = {spec.name: spec.dims for spec in prompts.inputs}
    assert list(dims) == [*EMBEDDINGS[kind], "input_points", "input_labels"]
    assert (dims["input_points"], dims["input_labels"]) == ((*POINTS, 2), POINTS)
    outputs = {spec.name: spec.dims for spec in prompts.outputs}
    assert list(outputs) == MASKS[kind]
    assert all(dims[:2] == ("batch", "point_batch") for dims in outputs.values())
    report = validate_model(artifact, effort="quick")
    assert report.passed, report.summary
    assert_calibrated_on_points_in_images(artifact)


def assert_calibrated_on_points_in_images(artifact):
    """Check that prompts are calibrated on what the other graph makes of the same images."""
    graphs = artifact.manifest.graphs
    images, prompts = input_graph(graphs), answer_graph(graphs)
    assert {images.file, prompts.file} == {record.file for record in graphs}
    names = [
        {layer.name for layer in find_layers(SourceGraph.of(artifact, record).read())}
        for record in (images, prompts)
    ]
    assert not set.intersection(*names), "one calibration has the ranges of both graphs"
    shape = images.inputs[0].shape({"batch": 2})
    items = [
        {"pixel_values": np.random.default_rng(seed).standard_normal(shape, np.float32)}
        for seed in range(4)
    ]
    data = CalibrationData("feeds", items, (), "", "")
    image_batches, _ = make_batches(artifact, images, data, seed=0)
    prompt_batches, _ = make_batches(artifact, prompts, data, seed=0)
    assert [batch.rows for batch in prompt_batches] == [batch.rows for batch in image_batches]
    pixels, feeds = image_batches[0].load(), prompt_batches[0].load()
    rows, _, height, width = pixels["pixel_values"].shape
    assert feeds["input_points"].shape == (rows, 8, 2, 2)
    assert feeds["input_points"].min() >= 0
    assert (feeds["input_points"] < (width, height)).all()
    assert feeds["input_points"].max() > max(height, width) / 2
    with OrtRunner(artifact, graph=images.file) as encode:
        for name, array in encode(pixels).items():
            np.testing.assert_array_equal(feeds[name], array)
