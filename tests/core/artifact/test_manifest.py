import json

import pytest
from pydantic import ValidationError

from enginery.core.artifact.manifest import Manifest
from tests.core.artifacts import manifest, verdict


def test_manifest_is_the_same_after_json():
    one = manifest().model_copy(update={"verdicts": (verdict(),)})
    assert Manifest.model_validate_json(one.model_dump_json()) == one


def test_fixed_and_named_dims_keep_their_types():
    raw = json.loads(manifest().model_dump_json())
    assert raw["graphs"][0]["outputs"][0]["dims"] == ["batch", 2]
    assert Manifest.model_validate(raw).graphs[0].outputs[0].dims == ("batch", 2)


def test_manifest_is_never_changed_in_place():
    with pytest.raises(ValidationError, match="frozen"):
        manifest().task = "other"


@pytest.mark.parametrize(
    "change", [{"schema_version": 3}, {"surprise": 1}, {"task": None}, {"graphs": [{"file": "a"}]}]
)
def test_manifest_rejects_unknown_members(change):
    raw = json.loads(manifest().model_dump_json())
    with pytest.raises(ValidationError):
        Manifest.model_validate({**raw, **change})


def quantized(scheme, **change):
    raw = json.loads(manifest().model_dump_json())
    stage = {**raw["stages"][0], "stage": "quantize", "options": {"scheme": scheme}}
    return {
        **raw,
        "stages": [*raw["stages"], stage],
        "precision": "int8",
        "residual": "fp16",
    } | change


def test_precision_of_a_quantized_artifact():
    static = Manifest.model_validate(quantized("int8"))
    assert (static.is_quantized, static.precision, static.float_precision) == (True, "int8", "fp16")
    assert static.describe_precision() == "int8, fp16 elsewhere"
    dynamic = Manifest.model_validate(quantized("dynamic", residual="fp32"))
    assert dynamic.describe_precision() == "dynamic int8, fp32 elsewhere"
    plain = manifest()
    assert (plain.is_quantized, plain.float_precision) == (False, plain.precision)
    assert plain.describe_precision() == plain.precision


def test_residual_precision_and_quantize_stage_belong_together():
    with pytest.raises(ValidationError, match="a quantize stage, but no residual precision"):
        Manifest.model_validate(quantized("int8", residual=""))
    raw = json.loads(manifest().model_dump_json())
    with pytest.raises(ValidationError, match="the residual precision fp16, but no quantize stage"):
        Manifest.model_validate({**raw, "residual": "fp16"})


def test_verdict_is_the_newest_of_its_stage():
    both = (verdict(passed=False), verdict(stage="bench"), verdict(summary="newest"))
    one = manifest().model_copy(update={"verdicts": both})
    assert one.verdict("validate").summary == "newest"
    assert one.verdict("serve") is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dims": ["batch", -5]}, "greater than or equal to 0"),
        ({"dims": ["batch", 10**12]}, "less than or equal to 2147483647"),
        ({"dims": ["batch", "past + 9999999999"]}, "has a size above 2147483647"),
        ({"dims": ["batch", "\x1b]52;c;eA==\x07"]}, "no control character"),
        ({"dims": ["x" * 2000]}, "up to 1024 characters"),
        ({"dims": [1] * 40}, "at most 32 items"),
        ({"name": "x\x9b31m"}, "no control character"),
        ({"dtype": "float32\n"}, "String should match pattern"),
    ],
)
def test_impossible_dims_and_names_are_rejected(change, said):
    raw = json.loads(manifest().model_dump_json())
    raw["graphs"][0]["inputs"][0].update(change)
    with pytest.raises(ValidationError, match=said):
        Manifest.model_validate_json(json.dumps(raw))


@pytest.mark.parametrize("number", [-1, 2**63, 10**400])
def test_numbers_of_bytes_have_64_bits(number):
    raw = json.loads(manifest().model_dump_json())
    raw["stages"][0]["peak_rss_bytes"] = number
    with pytest.raises(ValidationError, match="peak_rss_bytes"):
        Manifest.model_validate_json(json.dumps(raw))
