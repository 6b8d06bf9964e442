from dataclasses import dataclass, field

import pytest

from enginery.core.artifact.manifest import GraphRecord
from enginery.core.shapes import TensorSpec
from enginery.core.tolerance import QuantizedTolerance, Tolerance
from enginery.runtime.providers.known import CUDA, OPENVINO
from enginery.validate.cases.sweep import ValidationCase
from enginery.validate.compare import ComparisonLimits, outside_calibrated_ranges


@dataclass
class OnProvider:
    name: str
    options: dict[str, str] = field(default_factory=dict)


def test_fp32_on_cuda_has_the_tolerance_of_tf32():
    limits = ComparisonLimits(Tolerance.for_precision("fp32"))
    found = limits.where([OnProvider(CUDA)])
    assert found.tolerance == Tolerance.for_precision("tf32")
    assert "cuda.use_tf32=0" in found.rule


def test_other_providers_and_precisions_keep_their_tolerance():
    fp32, fp16 = (ComparisonLimits(Tolerance.for_precision(name)) for name in ("fp32", "fp16"))
    assert fp32.where([OnProvider(CUDA, {"use_tf32": "0"})]) is fp32
    assert fp32.where([OnProvider("CPUExecutionProvider")]) is fp32
    assert fp16.where([OnProvider(CUDA)]) is fp16
    quantized = ComparisonLimits(QuantizedTolerance("fp32"))
    assert quantized.where([OnProvider(CUDA)]) is quantized


def test_fp32_on_openvino_has_the_tolerance_of_what_it_computes_in():
    limits = ComparisonLimits(Tolerance.for_precision("fp32"))
    plain = limits.where([OnProvider(OPENVINO)])
    assert plain.tolerance == Tolerance.for_precision("fp32")
    assert plain.rule == (
        "OpenVINO computes in FP32, its default on the device CPU in ONNX Runtime, so its "
        "tolerance applies"
    )
    found = limits.where([OnProvider(OPENVINO, {"device_type": "GPU"})])
    assert found.tolerance == Tolerance.for_precision("fp16")
    assert "openvino.precision=FP32" in found.rule


IMAGES = TensorSpec("x", "float32", ("batch", 3, "height", "width"))
IDS = TensorSpec("input_ids", "int64", ("batch", "sequence"))
MASK = TensorSpec("attention_mask", "float32", ("batch", "sequence"))
CACHE = TensorSpec("past_key_values.0.key", "float32", ("batch", 2, "past_sequence", 8))


@pytest.mark.parametrize(
    ("inputs", "kinds", "expected"),
    [
        ([IMAGES], ["sweep", "real"], "random numbers for x"),
        ([IMAGES], ["sweep", "profile"], ""),
        ([IDS, MASK], ["sweep", "real"], ""),
        ([IDS, CACHE], ["sweep"], "caches that are made up"),
    ],
)
def test_noise_is_outside_calibrated_ranges(inputs, kinds, expected):
    record = GraphRecord(
        file="model.onnx", opset=20, inputs=tuple(inputs), outputs=(), data_files=()
    )
    cases = [ValidationCase("case", kind, dict) for kind in kinds]
    assert outside_calibrated_ranges(record, cases) == expected


def test_generated_inputs_outside_the_ranges_have_no_limit_and_real_ones_do():
    limits = ComparisonLimits(QuantizedTolerance("fp32"), generated_outside_ranges=True)
    lowest = {
        kind: limits.of_case(ValidationCase("case", kind, dict)).tolerance.min_cosine
        for kind in ("sweep", "profile", "real")
    }
    assert lowest == {"sweep": -1.0, "profile": -1.0, "real": 0.5}
