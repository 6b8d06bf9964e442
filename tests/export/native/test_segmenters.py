"""Models that segment what points in an image belong to, in two graphs."""

import pytest

from benchmarks.model_types import save_model
from enginery import export_model, validate_model
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
