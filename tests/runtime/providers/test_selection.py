"""Providers: what is had, what is refused, and the words for it. Nothing here needs a GPU."""

import ctypes
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from enginery.core.errors import ProviderError
from enginery.runtime.providers import availability, libraries
from enginery.runtime.providers.libraries import CudaDriver
from enginery.runtime.providers.names import CPU, CUDA, SHORT_NAMES, TENSORRT, TENSORRT_RTX
from enginery.runtime.providers.onnxruntime_build import cuda_major, provider_library
from enginery.runtime.providers.selection import (
    Provider,
    choose_providers,
    parse_providers,
    parse_wishes,
)


def write_library(path, needed):
    """A 64-bit ELF file with nothing but the libraries that it needs, mapped at 0x10000."""
    base, dynamic_at = 0x10000, 64 + 2 * 56
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in needed)
    offsets = [strings.index(b"\0" + name.encode() + b"\0") + 1 for name in needed]
    entries = [(1, offset) for offset in offsets]
    strings_at = dynamic_at + (len(entries) + 2) * 16
    entries += [(5, base + strings_at), (0, 0)]
    dynamic = b"".join(struct.pack("<qQ", *entry) for entry in entries)
    size = strings_at + len(strings)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0
    )
    load = struct.pack("<IIQQQQQQ", 1, 4, 0, base, base, size, size, 4096)
    dyn = struct.pack(
        "<IIQQQQQQ", 2, 4, dynamic_at, base + dynamic_at, 0, len(dynamic), len(dynamic), 8
    )
    path.write_bytes(header + load + dyn + dynamic + strings)
    return path


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a driver and a GPU; each provider's library needs what a test says."""

    machine = SimpleNamespace(
        needs={CUDA: ["libc.so.6"], TENSORRT: ["libc.so.6"]},
        driver=CudaDriver((13, 0), gpus=1),
        wheels=tmp_path / "wheels",
    )

    def library(name):
        path = tmp_path / f"{name}.so"
        return write_library(path, machine.needs[name]) if name in machine.needs else path

    machine.wheels.mkdir()
    monkeypatch.setattr(availability, "provider_library", library)
    monkeypatch.setattr(availability, "preload_nvidia", lambda: None)
    monkeypatch.setattr(availability, "find_caveat", lambda name: "")
    monkeypatch.setattr(availability, "compiled_providers", lambda: [TENSORRT, CUDA, CPU])
    monkeypatch.setattr(availability, "cuda_major", lambda: 13)
    monkeypatch.setattr(libraries, "cuda_driver", lambda: machine.driver)
    monkeypatch.setattr(libraries, "wheel_directories", lambda: [machine.wheels])
    monkeypatch.setattr("enginery.runtime.providers.selection.find_caveat", lambda name: "")
    return machine


def refusal(*wish, **options):
    with pytest.raises(ProviderError) as caught:
        choose_providers(wish, **options)
    return caught.value


def test_names_are_taken_short_full_and_in_any_case_each_once():
    wish = parse_providers("TensorRT, cuda,CPUExecutionProvider,CUDAExecutionProvider,oneDNN")
    assert wish == ("tensorrt", "cuda", "cpu", "dnnl")


@pytest.mark.parametrize(
    ("text", "near"), [("cudda", "cuda"), ("CUDAExecutionProvidr", "CUDAExecutionProvider")]
)
def test_an_unknown_name_is_an_error_with_the_nearest(text, near):
    with pytest.raises(ProviderError, match=f"unknown execution provider '{text}'.*'{near}'"):
        parse_providers(text)


def test_naming_no_provider_is_an_error():
    with pytest.raises(ProviderError, match="no execution provider is named"):
        parse_providers(" , ")
    assert "no execution provider is named" in refusal().message


def test_every_provider_that_onnxruntime_knows_has_a_short_name():
    import onnxruntime

    assert set(onnxruntime.get_all_providers()) <= set(SHORT_NAMES.values())


def test_a_wish_for_the_cpu_imports_no_onnxruntime_and_no_driver():
    code = (
        "import sys; from enginery.runtime.providers import libraries, selection\n"
        "libraries.cuda_driver = libraries.load_error = None\n"
        "print(selection.choose_providers(['cpu']), 'onnxruntime' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{[Provider(CPU, 'asked for')]} False"


def test_cuda_is_given_with_the_cpu_beneath_for_shape_operations(machine):
    assert choose_providers(["cuda", "cpu"]) == [
        Provider(CUDA, "asked for"),
        Provider(CPU, "shape operations that CUDA leaves to the CPU"),
    ]


@pytest.mark.parametrize("wish", [["tensorrt"], ["tensorrt", "cuda", "cpu"]])
def test_tensorrt_has_cuda_then_the_cpu_beneath(machine, wish):
    chosen = choose_providers(wish)
    assert [provider.name for provider in chosen] == [TENSORRT, CUDA, CPU]
    assert chosen[1].reason == "operations that tensorrt leaves over"


def test_a_wish_of_tensorrt_and_cpu_leaves_cuda_out(machine):
    assert [p.name for p in choose_providers(["tensorrt", "cpu"])] == [TENSORRT, CPU]


def test_cuda_that_cannot_be_had_beneath_tensorrt_is_said(machine):
    machine.needs[CUDA] = ["libgone.so.1"]
    chosen = choose_providers(["tensorrt"])
    assert [provider.name for provider in chosen] == [TENSORRT, CPU]
    assert chosen[1].reason.endswith("cuda is not beneath it: libgone.so.1 was not found")


def test_a_missing_library_is_named_with_the_line_that_installs_it(machine):
    machine.needs = {CUDA: ["libc.so.6", "libcudagone.so.13", "libothergone.so.9"]}
    error = refusal("cuda", "cpu")
    assert error.message == (
        "cuda asked for, but libcudagone.so.13, libothergone.so.9 were not found."
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


def test_a_library_that_is_there_but_damaged_is_reported_in_the_loaders_words(machine):
    machine.needs = {CUDA: ["libdamaged.so.1"]}
    (machine.wheels / "libdamaged.so.1").write_bytes(b"not a library")
    assert "libdamaged.so.1: file too short" in refusal("cuda").message


def test_fallback_takes_the_next_wish_and_says_what_was_not_had(machine):
    machine.needs = {TENSORRT: ["libgone.so.1"], CUDA: ["libalsogone.so.2"]}
    assert choose_providers(["tensorrt", "cuda", "cpu"], allow_fallback=True) == [
        Provider(
            CPU,
            "tensorrt asked for, but libgone.so.1 was not found; "
            "cuda asked for, but libalsogone.so.2 was not found",
        )
    ]


def test_fallback_takes_only_what_the_wish_names(machine):
    machine.needs = {CUDA: ["libgone.so.1"]}
    assert "libgone.so.1 was not found" in refusal("cuda", allow_fallback=True).message


def test_no_driver_stands_before_missing_libraries_and_is_said_once(machine):
    machine.driver = CudaDriver(problem="there is no NVIDIA driver: libcuda.so.1 was not found")
    (cpu,) = choose_providers(["tensorrt", "cuda", "cpu"], allow_fallback=True)
    assert cpu.reason == (
        "tensorrt and cuda asked for, but there is no NVIDIA driver: libcuda.so.1 was not found"
    )
    assert "--gpus all" in refusal("cuda").do


def test_a_driver_for_an_older_cuda_is_refused(machine):
    machine.driver = CudaDriver((12, 8), gpus=1)
    error = refusal("cuda")
    assert "runs CUDA up to 12.8, and this onnxruntime is built for CUDA 13" in error.message
    assert "580" in error.do


def test_a_provider_that_is_not_compiled_in_names_the_build_that_has_it(machine):
    error = refusal("openvino")
    assert "is built without it" in error.message
    assert "pip install 'onnxruntime-openvino'" in error.do
    assert "pip uninstall -y" in error.do


def test_builds_installed_together_are_the_reason_when_cuda_is_gone(machine, monkeypatch):
    both = {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"}
    monkeypatch.setattr(availability, "compiled_providers", lambda: [CPU])
    monkeypatch.setattr(availability, "installed_onnxruntimes", lambda: both)
    assert "onnxruntime and onnxruntime-gpu are installed together" in refusal("cuda").message


def test_a_lost_provider_library_is_a_broken_installation(machine):
    machine.needs = {}
    assert "is not in" in refusal("cuda").message


def test_what_is_left_of_an_uninstalled_onnxruntime_is_said_to_be_broken(tmp_path):
    (tmp_path / "onnxruntime" / "capi").mkdir(parents=True)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import importlib.machinery, importlib.abc, types\n"
        "sys.modules['onnxruntime'] = types.ModuleType('onnxruntime')\n"
        "from enginery.runtime.providers.availability import find_obstacle\n"
        "print(find_obstacle('CUDAExecutionProvider').reason)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cannot be imported (the module is there, and most of its files are gone" in done.stdout


def test_tensorrt_rtx_names_its_plugin_package(machine, monkeypatch):
    monkeypatch.setattr(availability, "plugin_installed", lambda name: False)
    error = refusal("tensorrt-rtx")
    assert "onnxruntime-ep-nv-tensorrt-rtx-cu13" in error.message
    assert "pip install onnxruntime-ep-nv-tensorrt-rtx-cu13" in error.do


def test_a_plugin_library_that_cannot_load_is_refused_in_onnxruntimes_words(
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
    assert "convolutions and other cuDNN operations will fail" in availability.find_caveat(CUDA)
    assert availability.find_caveat(CPU) == ""


def test_a_reservation_is_part_of_the_reason(machine, monkeypatch):
    monkeypatch.setattr(
        "enginery.runtime.providers.selection.find_caveat", lambda name: "no convolutions"
    )
    assert choose_providers(["cuda"])[0].reason == "asked for; no convolutions"


def test_needed_libraries_are_read_in_order(tmp_path):
    needed = ["libnvinfer.so.10", "libcudart.so.13", "libc.so.6"]
    assert libraries.needed_libraries(write_library(tmp_path / "x.so", needed)) == needed


@pytest.mark.parametrize("content", [b"", b"MZ", b"\x7fELF\x02\x01" + b"\0" * 100])
def test_files_that_are_not_elf_libraries_need_nothing(tmp_path, content):
    (tmp_path / "x.so").write_bytes(content)
    assert libraries.needed_libraries(tmp_path / "x.so") == []


@pytest.mark.skipif(sys.platform != "linux", reason="the libraries are ELF files on Linux")
def test_onnxruntimes_own_library_is_read():
    needed = libraries.needed_libraries(provider_library(CUDA))
    assert f"libcudart.so.{cuda_major()}" in needed
    assert "libc.so.6" in needed


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_library_beside_the_provider_is_found(tmp_path):
    # A copy under a name that the loader knows nowhere: only the directory can find it.
    maps = Path("/proc/self/maps").read_text().splitlines()
    source = next(line.split()[-1] for line in maps if line.endswith("libm.so.6"))
    shutil.copy(source, tmp_path / "libbeside.so.1")
    library = write_library(tmp_path / "x.so", ["libbeside.so.1", "libgone.so.1"])
    assert list(libraries.missing_libraries(library)) == ["libgone.so.1"]


class FakeCuda:
    """libcuda as far as it is asked, with the driver API's way of returning values."""

    def __init__(self, version=13010, gpus=2, init=0):
        self.version, self.gpus, self.init = version, gpus, init

    def cuInit(self, flags):  # noqa: N802
        return self.init

    def cuDriverGetVersion(self, out):  # noqa: N802
        out._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, out):  # noqa: N802
        out._obj.value = self.gpus
        return 0

    def cuGetErrorName(self, code, out):  # noqa: N802
        out._obj.value = b"CUDA_ERROR_NO_DEVICE"
        return 0


@pytest.mark.parametrize(
    ("fake", "expected"),
    [
        (FakeCuda(), CudaDriver((13, 1), 2)),
        (FakeCuda(gpus=0), CudaDriver((13, 1), 0, "the NVIDIA driver sees no GPU")),
        (
            FakeCuda(init=100),
            CudaDriver((13, 1), 0, "the NVIDIA driver refused: CUDA_ERROR_NO_DEVICE (100)"),
        ),
    ],
)
def test_the_driver_is_asked_for_version_and_gpus(monkeypatch, fake, expected):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    assert libraries.cuda_driver() == expected


def test_no_libcuda_is_no_driver(monkeypatch):
    monkeypatch.setattr(libraries, "DRIVER", "libcudagone.so.1")
    driver = libraries.cuda_driver()
    assert driver.problem == "there is no NVIDIA driver: libcudagone.so.1 was not found"


def test_options_go_to_the_providers_that_they_are_for(machine):
    wishes = parse_wishes(
        "tensorrt,cuda,cpu", ["cuda.gpu_mem_limit=2GiB", "tensorrt.trt_engine_cache_enable=1"]
    )
    chosen = choose_providers(wishes)
    assert [(provider.name, provider.options) for provider in chosen] == [
        (TENSORRT, {"trt_engine_cache_enable": "True"}),
        (CUDA, {"gpu_mem_limit": "2147483648"}),
        (CPU, {}),
    ]


def test_cuda_beneath_tensorrt_is_on_its_gpu_unless_it_is_told_another(machine):
    machine.driver = CudaDriver((13, 0), gpus=3)
    beneath = choose_providers(parse_wishes("tensorrt", ["tensorrt.device_id=2"]))[1]
    assert beneath.options == {"device_id": "2"}
    wish = parse_wishes("tensorrt,cuda", ["tensorrt.device_id=2", "cuda.device_id=1"])
    assert choose_providers(wish)[1].options == {"device_id": "1"}


@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_a_gpu_beyond_those_that_are_there_is_refused(machine, provider):
    wish = parse_wishes(f"{provider},cpu", [f"{provider}.device_id=1"])
    error = refusal(*wish)
    assert error.message == (
        f"{provider} asked for, but device_id is 1, and this process sees one GPU, 0."
    )
    assert "CUDA_VISIBLE_DEVICES" in error.do
    (cpu,) = choose_providers(wish, allow_fallback=True)
    assert cpu.reason.startswith(f"{provider} asked for, but device_id is 1")
    machine.driver = CudaDriver((13, 0), gpus=2)
    assert choose_providers(wish)[0].options == {"device_id": "1"}
    assert (
        "2 GPUs, 0 to 1" in refusal(parse_wishes(f"{provider}; {provider}.device_id=2")[0]).message
    )


@pytest.mark.parametrize(("provider", "name"), [("cuda", CUDA), ("tensorrt", TENSORRT)])
def test_a_library_that_is_there_and_lacks_another_is_refused_for_that(machine, provider, name):
    write_library(machine.wheels / "libthere.so.1", ["libdeeper.so.2"])
    machine.needs[name] = ["libthere.so.1"]
    assert refusal(provider).message == f"{provider} asked for, but libdeeper.so.2 was not found."
    (cpu,) = choose_providers([provider, "cpu"], allow_fallback=True)
    assert cpu == Provider(CPU, f"{provider} asked for, but libdeeper.so.2 was not found")


def test_tensorrt_11_in_place_of_10_falls_back_to_cuda_and_says_so(machine):
    machine.needs[TENSORRT] = ["libinfergone.so.10"]
    (machine.wheels / "libinfergone.so.11").touch()
    cuda, cpu = choose_providers(["tensorrt", "cuda", "cpu"], allow_fallback=True)
    assert (cuda.name, cpu.name) == (CUDA, CPU)
    assert cuda.reason == (
        "tensorrt asked for, but libinfergone.so.10 was not found (libinfergone.so.11 is installed)"
    )


@pytest.mark.parametrize(
    ("provider", "words"),
    [
        ("xnnpack", "has to be built from source"),
        ("dnnl", "has to be built from source"),
        ("qnn", "pip install 'onnxruntime-qnn'"),
        ("nnapi", "Name a provider for this system"),
    ],
)
def test_what_is_not_here_says_what_brings_it(machine, provider, words):
    assert words in refusal(provider).do


@pytest.mark.parametrize("provider", ["xnnpack", "dnnl"])
def test_a_provider_of_processors_runs_where_it_is_compiled_in(provider):
    from enginery.doctor.child import examine_provider
    from enginery.runtime.providers.onnxruntime_build import compiled_providers

    name = SHORT_NAMES[provider]
    if name not in compiled_providers():
        pytest.skip(f"this onnxruntime is built without {provider}")
    assert examine_provider(name)["runs"]


def test_the_doctor_has_a_row_for_every_provider_with_what_brings_it():
    from enginery.doctor.config import DoctorConfig
    from enginery.doctor.stage import examine

    report = examine(DoctorConfig())
    assert {status.name for status in report.providers} == set(SHORT_NAMES.values())
    plain = {provider["short_name"]: provider for provider in report.as_json()["providers"]}
    assert plain["openvino"]["package"] == "onnxruntime-openvino"
    assert "gpu_mem_limit" in plain["cuda"]["options"]
    for provider in plain.values():
        assert provider["state"] == "runs" or (provider["reason"] and provider["remedy"])
    (table,) = [table for table in report.tables() if table.title == "Execution providers"]
    rows = {row[0].split(" (")[0]: row for row in table.rows}
    assert rows["cuda"][2:4] == ("onnxruntime-gpu", "23 checked")
    assert rows["xnnpack"][2] == "build from source"


def test_those_that_are_not_here_have_no_answer_where_the_child_died():
    from enginery.doctor.asking import Answer
    from enginery.doctor.stage import absent_statuses

    (status,) = absent_statuses(["CoreMLExecutionProvider"], Answer(reason="the process died"))
    assert (status.runs, status.reason) == (False, "the process died")
