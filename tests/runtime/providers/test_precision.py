"""The precision in which providers compute a graph of FP32."""

import json

import pytest

from enginery.runtime.providers import precision
from enginery.runtime.providers.known import CPU, CUDA, OPENVINO
from enginery.runtime.providers.precision import ComputePrecision, compute_precision


@pytest.fixture
def processor(monkeypatch):
    """`processor("avx512_bf16")`: what the processor can do."""

    def has(*features):
        monkeypatch.setattr(precision, "read_cpuinfo", lambda: ("a processor", features))

    has("avx2", "avx512_bf16")
    return has


def hint(device, value):
    return {"load_config": json.dumps({device: {"INFERENCE_PRECISION_HINT": value}})}


def of_openvino(**options):
    return compute_precision(OPENVINO, options).precision


def test_the_cpu_computes_in_fp32_and_needs_no_words():
    assert compute_precision(CPU, {}) == ComputePrecision("fp32", "", "")


@pytest.mark.parametrize("value", ["0", "False"])
def test_cuda_multiplies_in_tf32_unless_it_is_switched_off(value):
    assert compute_precision(CUDA, {}).precision == "tf32"
    assert compute_precision(CUDA, {"use_tf32": value}).precision == "fp32"


def test_openvino_computes_in_fp32_on_its_cpu_even_if_the_processor_has_bf16(processor):
    assert of_openvino() == of_openvino(device_type="CPU") == "fp32"
    assert of_openvino(precision="ACCURACY") == "fp32"


@pytest.mark.parametrize("device", ["AUTO:CPU", "HETERO:CPU", "MULTI:CPU"])
def test_openvino_computes_in_bf16_on_its_virtual_devices_if_the_processor_has_it(
    processor, device
):
    found = compute_precision(OPENVINO, {"device_type": device})
    assert found.precision == "bf16"
    assert "openvino.precision=FP32" in found.remedy
    assert of_openvino(device_type=device, precision="FP32") == "fp32"
    processor("avx2")
    assert of_openvino(device_type=device) == "fp32"


@pytest.mark.parametrize("device", ["GPU", "GPU.1", "NPU", "AUTO:GPU,CPU"])
def test_openvino_computes_in_fp16_on_gpus_and_npus_unless_it_is_told_otherwise(processor, device):
    assert of_openvino(device_type=device) == "fp16"
    assert of_openvino(device_type=device, precision="ACCURACY") == "fp32"


def test_a_hint_in_the_configuration_precedes_the_option_and_the_device(processor):
    assert of_openvino(**hint("CPU", "bf16")) == "bf16"
    assert of_openvino(**hint("CPU", "bf16"), precision="FP32") == "bf16"
    assert of_openvino(**hint("CPU", "f32"), device_type="AUTO:CPU") == "fp32"
    assert of_openvino(**hint("GPU", "f32"), device_type="GPU.0") == "fp32"


def test_fp16_on_a_processor_without_it_is_bf16(processor):
    assert of_openvino(**hint("CPU", "f16")) == "bf16"
    processor("avx512_fp16")
    assert of_openvino(**hint("CPU", "f16")) == "fp16"


@pytest.mark.parametrize(
    "text", ["f32.json", "[]", "{}", '{"CPU": 1}', '{"GPU": {"INFERENCE_PRECISION_HINT": "bf16"}}']
)
def test_a_configuration_without_a_hint_for_the_device_changes_nothing(processor, text):
    assert of_openvino(load_config=text) == "fp32"
