"""Reasons why a provider is unavailable, and remedies. No test needs a GPU."""

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from enginery.core.errors import MissingPackageError, ProviderError
from enginery.runtime.providers import availability, libraries
from enginery.runtime.providers.availability import OnnxRuntimeBuild
from enginery.runtime.providers.gpus import CudaDriver
from enginery.runtime.providers.known import CPU, CUDA, SHORT_NAMES, TENSORRT, TENSORRT_RTX
from enginery.runtime.providers.selection import Provider, choose_providers
from enginery.runtime.providers.specification import parse_providers
from tests.runtime.providers.doubles import refusal, write_library


def test_a_missing_library_is_named_with_the_line_that_installs_it(machine):
    machine.needs = {CUDA: ["libc.so.6", "libcudagone.so.13", "libothergone.so.9"]}
    error = refusal("cuda", "cpu")
    assert error.message == (
        "cuda requested, but libcudagone.so.13, libothergone.so.9 were not found."
    )
    assert "onnxruntime-gpu[cuda,cudnn]" in error.do
    assert error.do.endswith("Or pass --allow-fallback.")


def test_tensorrt_remedy_pins_the_major_that_onnxruntime_links(machine):
    machine.needs = {TENSORRT: ["libinfergone.so.10"]}
    (machine.wheels / "libinfergone.so.11").touch()
    error = refusal("tensorrt")
    assert "libinfergone.so.10 was not found (libinfergone.so.11 is installed)" in error.message
    assert "'tensorrt-cu13>=10,<11'" in error.do
    assert "--allow-fallback" not in error.do


def test_damaged_library_is_reported_with_the_loaders_message(machine):
    machine.needs = {CUDA: ["libdamaged.so.1"]}
    (machine.wheels / "libdamaged.so.1").write_bytes(b"not a library")
    assert "libdamaged.so.1: file too short" in refusal("cuda").message


def test_a_driver_for_an_older_cuda_is_rejected(machine):
    machine.driver = CudaDriver((12, 8), gpus=1)
    error = refusal("cuda")
    assert "supports CUDA up to 12.8, but this onnxruntime is built for CUDA 13" in error.message
    assert "580" in error.do


def test_a_provider_that_is_not_compiled_in_names_the_build_that_has_it(machine):
    error = refusal("openvino")
    assert "is built without it" in error.message
    assert "pip install 'onnxruntime-openvino>=1.24.1,<1.25'" in error.do
    assert "pip uninstall -y" in error.do


def test_builds_installed_together_are_the_reason_when_cuda_is_gone(machine, monkeypatch):
    monkeypatch.setattr(availability, "compiled_providers", lambda: [CPU])
    install_onnxruntimes(monkeypatch, onnxruntime="/site", onnxruntime_gpu="/site")
    assert "onnxruntime and onnxruntime-gpu are installed together" in refusal("cuda").message


def test_build_that_another_one_hides_is_the_reason_when_cuda_is_gone(machine, monkeypatch):
    monkeypatch.setattr(availability, "compiled_providers", lambda: [CPU])
    install_onnxruntimes(monkeypatch, onnxruntime="/image", onnxruntime_gpu="/site")
    error = refusal("cuda")
    assert "onnxruntime 1.31.1 in /image hides onnxruntime-gpu 1.31.1 in /site" in error.message
    assert "Put /site first on PYTHONPATH" in error.do


def install_onnxruntimes(monkeypatch, **directories):
    builds = tuple(
        OnnxRuntimeBuild(name.replace("_", "-"), "1.31.1", Path(directory))
        for name, directory in directories.items()
    )
    monkeypatch.setattr(availability, "installed_onnxruntimes", lambda: builds)


def test_a_lost_provider_library_is_a_broken_installation(machine):
    machine.needs = {}
    assert "is not in" in refusal("cuda").message


def test_remains_of_an_uninstalled_onnxruntime_are_reported_as_broken(tmp_path):
    (tmp_path / "onnxruntime" / "capi").mkdir(parents=True)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import importlib.machinery, importlib.abc, types\n"
        "sys.modules['onnxruntime'] = types.ModuleType('onnxruntime')\n"
        "from enginery.runtime.providers.availability import unavailable_reason\n"
        "print(unavailable_reason('CUDAExecutionProvider').reason)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cannot be imported (most files of the module are missing" in done.stdout


def test_tensorrt_rtx_names_its_plugin_package(machine, monkeypatch):
    monkeypatch.setattr(availability, "plugin_installed", lambda name: False)
    error = refusal("tensorrt-rtx")
    assert "onnxruntime-ep-nv-tensorrt-rtx-cu13" in error.message
    assert "pip install onnxruntime-ep-nv-tensorrt-rtx-cu13" in error.do


def test_plugin_that_cannot_load_is_reported_with_onnxruntimes_message(
    machine, monkeypatch, tmp_path
):
    library = tmp_path / "plugin.so"
    library.write_bytes(b"nothing")
    module = tmp_path / "onnxruntime_ep_nv_tensorrt_rtx.py"
    module.write_text(f"def get_library_path():\n    return {str(library)!r}\n")
    monkeypatch.syspath_prepend(tmp_path)
    error = refusal("tensorrt-rtx")
    assert f"{TENSORRT_RTX} could not be registered" in error.message
    assert "plugin.so" in error.message


def test_missing_cudnn_is_a_reservation_under_cuda(monkeypatch):
    missing = "libcudnn.so.9: cannot open shared object file: No such file or directory"
    monkeypatch.setattr(libraries, "load_error", lambda name, directories=(): missing)
    assert "convolutions and other cuDNN operations will fail" in availability.provider_warning(
        CUDA
    )
    assert availability.provider_warning(CPU) == ""


@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_device_id_of_a_missing_gpu_is_rejected(machine, provider):
    spec = parse_providers(f"{provider},cpu", [f"{provider}.device_id=1"])
    error = refusal(*spec)
    assert error.message == (
        f"{provider} requested, but device_id is 1, but this process sees one GPU, 0."
    )
    assert "CUDA_VISIBLE_DEVICES" in error.do
    (cpu,) = choose_providers(spec, allow_fallback=True)
    assert cpu.reason.startswith(f"{provider} requested, but device_id is 1")
    machine.driver = CudaDriver((13, 0), gpus=2)
    assert choose_providers(spec)[0].options == {"device_id": "1"}
    assert (
        "2 GPUs, 0 to 1"
        in refusal(parse_providers(f"{provider}; {provider}.device_id=2")[0]).message
    )


@pytest.mark.parametrize(("provider", "name"), [("cuda", CUDA), ("tensorrt", TENSORRT)])
def test_library_with_a_missing_dependency_reports_the_dependency(machine, provider, name):
    write_library(machine.wheels / "libthere.so.1", ["libdeeper.so.2"])
    machine.needs[name] = ["libthere.so.1"]
    assert refusal(provider).message == f"{provider} requested, but libdeeper.so.2 was not found."
    (cpu,) = choose_providers([provider, "cpu"], allow_fallback=True)
    assert cpu == Provider(CPU, f"{provider} requested, but libdeeper.so.2 was not found")


@pytest.mark.parametrize(
    ("provider", "words"),
    [
        ("xnnpack", "Build ONNX Runtime from source"),
        ("dnnl", "Build ONNX Runtime from source"),
        ("qnn", "pip install 'onnxruntime-qnn'"),
    ],
)
def test_unavailable_provider_names_the_package(machine, provider, words):
    assert words in refusal(provider).do


@pytest.mark.parametrize("provider", ["xnnpack", "dnnl"])
def test_a_provider_of_processors_runs_where_it_is_compiled_in(provider):
    from enginery.doctor.probe import examine_provider
    from enginery.runtime.providers.availability import compiled_providers

    name = SHORT_NAMES[provider]
    if name not in compiled_providers():
        pytest.skip(f"this onnxruntime is built without {provider}")
    assert examine_provider(name)["state"] == "runs"


# Nothing, or not all, is installed


def test_without_a_build_nothing_is_uninstalled(monkeypatch):
    monkeypatch.setattr(availability, "installed_onnxruntimes", tuple)
    assert availability.reinstall() == "Run: pip install 'onnxruntime-gpu>=1.31,<1.32'"
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    for name in (CPU, CUDA, TENSORRT_RTX):
        missing = availability.unavailable_reason(name)
        assert missing.reason == "onnxruntime is not installed"
        assert missing.do.startswith("Install it: pip install 'enginery[gpu]', or 'enginery[cpu]'")
    with pytest.raises(MissingPackageError, match=r"'onnxruntime'.*enginery\[gpu\]"):
        availability.require_onnxruntime("Testing", "onnxruntime")


def test_build_of_which_most_files_are_missing_is_installed_again(monkeypatch):
    build = OnnxRuntimeBuild("onnxruntime", "1.31.1", Path("/site"))
    monkeypatch.setattr(availability, "installed_onnxruntimes", lambda: (build,))
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    folder = ModuleSpec("onnxruntime", None)  # without __init__.py
    monkeypatch.setattr(availability.importlib.util, "find_spec", lambda name: folder)
    with pytest.raises(ProviderError) as caught:
        availability.require_onnxruntime("Testing", "onnxruntime")
    assert caught.value.message == (
        "onnxruntime cannot be imported (most files of the module are missing)."
    )
    command = "pip uninstall -y onnxruntime && pip install 'onnxruntime>=1.31,<1.32'"
    assert caught.value.do == f"Run: {command}"
