from dataclasses import dataclass, field

from enginery.core.tolerance import QuantizedTolerance, Tolerance
from enginery.runtime.providers.known import CUDA, OPENVINO
from enginery.validate.compare import ComparisonLimits


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
