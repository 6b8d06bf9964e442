import json

import pytest
from pydantic import ValidationError

from enginery.core.manifest import Manifest
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
def test_manifest_refuses_what_it_does_not_know(change):
    raw = json.loads(manifest().model_dump_json())
    with pytest.raises(ValidationError):
        Manifest.model_validate({**raw, **change})


def test_verdict_is_the_newest_of_its_stage():
    both = (verdict(passed=False), verdict(stage="bench"), verdict(summary="newest"))
    one = manifest().model_copy(update={"verdicts": both})
    assert one.verdict("validate").summary == "newest"
    assert one.verdict("serve") is None
