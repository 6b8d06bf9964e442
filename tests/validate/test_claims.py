"""What a manifest claims of its graphs allows no error that they have no reason for."""

import pytest

from enginery import Artifact, validate_model
from enginery.core.errors import ArtifactError
from tests.core.artifacts import edit_manifest

BERT = ("bert", "text-classification")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_fp32_graph_is_not_held_to_the_limits_of_half_precision(exported, copied, precision):
    artifact = copied(exported(*BERT))
    edit_manifest(artifact.path, precision=precision)
    with pytest.raises(ArtifactError, match=rf"precision is {precision}, and 0\.0% of the graph"):
        validate_model(artifact.path)


def test_fp32_graph_is_not_held_to_the_budget_of_a_quantized_one(exported, copied):
    artifact = copied(exported(*BERT))
    (export,) = artifact.manifest.stages
    quantize = export.model_copy(update={"stage": "quantize", "options": {"min_cosine": 0.9}})
    edit_manifest(
        artifact.path, stages=[stage.model_dump(mode="json") for stage in (export, quantize)]
    )
    with pytest.raises(ArtifactError, match="no graph has a quantized operator"):
        validate_model(artifact.path)


def test_right_claims_are_believed(exported, copied):
    from enginery import optimize_model

    artifact = copied(exported(*BERT))
    half = optimize_model(artifact, target="tensorrt", precision="fp16")
    assert Artifact.open(half.path).manifest.precision == "fp16"
    assert validate_model(half).passed
