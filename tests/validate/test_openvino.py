"""Validation of what OpenVINO answers, in an environment of its own."""

import json

import pytest

pytestmark = pytest.mark.slow

_VALIDATE = """
import json
from enginery import validate_model
report = validate_model(
    sys.argv[1], providers="openvino,cpu", provider_option=tuple(sys.argv[2:])
)
print(json.dumps({
    "passed": report.passed, "summary": report.summary, "notes": report.notes,
    "precision": report.tolerance["precision"],
    "largest": max(output.max_abs for case in report.cases for output in case.outputs),
}))
"""
BF16 = "openvino.load_config=" + json.dumps({"CPU": {"INFERENCE_PRECISION_HINT": "bf16"}})


@pytest.fixture
def validated(with_openvino, exported, copied):
    """`validated("openvino.precision=FP32")`: the report of a tiny BERT with these options."""

    def run(*options):
        artifact = copied(exported("bert", "feature-extraction"))
        return with_openvino(_VALIDATE, artifact.path, *options)

    return run


def test_openvino_passes_in_fp32_and_the_notes_say_so(validated):
    found = validated()
    assert found["passed"]
    assert found["precision"] == "fp32"
    assert found["largest"] < 1e-4
    assert [note for note in found["notes"] if note.startswith("OpenVINO computes in FP32")]


def test_openvino_in_bf16_has_its_tolerance_and_the_notes_name_the_way_to_fp32(validated):
    found = validated(BF16)
    assert found["passed"]
    assert found["precision"] == "bf16"
    (note,) = [note for note in found["notes"] if note.startswith("OpenVINO computes in BF16")]
    assert "INFERENCE_PRECISION_HINT f32" in note


def test_openvino_that_runs_nothing_is_not_proven(validated):
    found = validated("openvino.device_type=AUTO")
    assert not found["passed"]
    assert found["summary"].startswith(
        "not proven: model.onnx: openvino runs none of its nodes, so the answers are the CPU's; "
        "check openvino.device_type=AUTO"
    )
