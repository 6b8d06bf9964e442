"""The providers of a session: order, fallback and reasons."""

import subprocess
import sys

import pytest

from enginery.runtime.providers import selection
from enginery.runtime.providers.gpus import CudaDriver
from enginery.runtime.providers.known import CPU, CUDA, TENSORRT
from enginery.runtime.providers.selection import Provider, choose_providers
from enginery.runtime.providers.specification import parse_providers
from tests.runtime.providers.doubles import refusal


def test_a_request_for_the_cpu_imports_no_onnxruntime_and_no_driver():
    code = (
        "import sys; from enginery.runtime.providers import gpus, libraries, selection\n"
        "gpus.cuda_driver = libraries.load_error = None\n"
        "print(selection.choose_providers(['cpu']), 'onnxruntime' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{[Provider(CPU, 'requested')]} False"


def test_cuda_is_given_with_the_cpu_beneath_for_shape_operations(machine):
    assert choose_providers(["cuda", "cpu"]) == [
        Provider(CUDA, "requested"),
        Provider(CPU, "shape operations that CUDA leaves to the CPU"),
    ]


@pytest.mark.parametrize("requested", [["tensorrt"], ["tensorrt", "cuda", "cpu"]])
def test_tensorrt_has_cuda_then_the_cpu_beneath(machine, requested):
    chosen = choose_providers(requested)
    assert [provider.name for provider in chosen] == [TENSORRT, CUDA, CPU]
    assert chosen[1].reason == "operations that tensorrt does not support"


def test_naming_tensorrt_and_cpu_leaves_cuda_out(machine):
    assert [p.name for p in choose_providers(["tensorrt", "cpu"])] == [TENSORRT, CPU]


def test_unavailable_cuda_below_tensorrt_is_reported(machine):
    machine.needs[CUDA] = ["libgone.so.1"]
    chosen = choose_providers(["tensorrt"])
    assert [provider.name for provider in chosen] == [TENSORRT, CPU]
    assert chosen[1].reason.endswith("cuda is unavailable: libgone.so.1 was not found")


def test_fallback_uses_the_next_provider_and_reports_the_unavailable_one(machine):
    machine.needs = {TENSORRT: ["libgone.so.1"], CUDA: ["libalsogone.so.2"]}
    assert choose_providers(["tensorrt", "cuda", "cpu"], allow_fallback=True) == [
        Provider(
            CPU,
            "tensorrt requested, but libgone.so.1 was not found; "
            "cuda requested, but libalsogone.so.2 was not found",
        )
    ]


def test_fallback_uses_only_requested_providers(machine):
    machine.needs = {CUDA: ["libgone.so.1"]}
    assert "libgone.so.1 was not found" in refusal("cuda", allow_fallback=True).message


def test_missing_driver_is_reported_once_before_missing_libraries(machine):
    machine.driver = CudaDriver(problem="there is no NVIDIA driver: libcuda.so.1 was not found")
    (cpu,) = choose_providers(["tensorrt", "cuda", "cpu"], allow_fallback=True)
    assert cpu.reason == (
        "tensorrt and cuda requested, but there is no NVIDIA driver: libcuda.so.1 was not found"
    )
    assert "--gpus all" in refusal("cuda").do


def test_a_reservation_is_part_of_the_reason(machine, monkeypatch):
    monkeypatch.setattr(selection, "provider_warning", lambda name: "no convolutions")
    assert choose_providers(["cuda"])[0].reason == "requested; no convolutions"


def test_options_go_to_the_providers_that_they_are_for(machine):
    specs = parse_providers(
        "tensorrt,cuda,cpu", ["cuda.gpu_mem_limit=2GiB", "tensorrt.trt_engine_cache_enable=1"]
    )
    chosen = choose_providers(specs)
    assert [(provider.name, provider.options) for provider in chosen] == [
        (TENSORRT, {"trt_engine_cache_enable": "True"}),
        (CUDA, {"gpu_mem_limit": "2147483648"}),
        (CPU, {}),
    ]


@pytest.mark.parametrize("head", ["cuda", "tensorrt"])
def test_options_of_the_cpu_hold_beneath_another_provider(machine, head):
    chosen = choose_providers(f"{head},cpu; cpu.enable_cpu_mem_arena=false")
    assert chosen[-1].name == CPU
    assert chosen[-1].options == {"enable_cpu_mem_arena": "0"}


def test_cuda_beneath_tensorrt_is_on_its_gpu_unless_it_is_told_another(machine):
    machine.driver = CudaDriver((13, 0), gpus=3)
    beneath = choose_providers(parse_providers("tensorrt", ["tensorrt.device_id=2"]))[1]
    assert beneath.options == {"device_id": "2"}
    spec = parse_providers("tensorrt,cuda", ["tensorrt.device_id=2", "cuda.device_id=1"])
    assert choose_providers(spec)[1].options == {"device_id": "1"}


def test_tensorrt_11_instead_of_10_falls_back_to_cuda_with_the_reason(machine):
    machine.needs[TENSORRT] = ["libinfergone.so.10"]
    (machine.wheels / "libinfergone.so.11").touch()
    cuda, cpu = choose_providers(["tensorrt", "cuda", "cpu"], allow_fallback=True)
    assert (cuda.name, cpu.name) == (CUDA, CPU)
    assert cuda.reason == (
        "tensorrt requested, but libinfergone.so.10 was not found (libinfergone.so.11 is installed)"
    )
