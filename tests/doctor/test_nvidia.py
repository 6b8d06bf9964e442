"""The NVIDIA driver and GPUs.

The samples of nvidia-smi follow its documented format; no GPU was seen.
"""

import ctypes
from dataclasses import replace

import pytest

from enginery.doctor import nvidia
from enginery.doctor.nvidia import examine_nvidia, gpus_from_smi, nvidia_findings
from enginery.doctor.probe_worker import format_version, gpu_fields
from enginery.doctor.report import Gpu, NvidiaStatus
from enginery.doctor.subprocess_probe import ProbeResult

MIB = 1 << 20
TWO_GPUS = """\
NVIDIA GeForce RTX 3090, 580.65.06, 24576, 23000, 8.6
Tesla T4, 580.65.06, 15360, 14900, 7.5
"""
HEALTHY = NvidiaStatus(
    driver="580.65.06",
    driver_cuda="13.0",
    problem="",
    gpus=(Gpu("Tesla T4", "7.5", 15360 * MIB, 14900 * MIB),),
    libraries={},
    onnxruntime_cuda="13",
)


def test_smi_gives_driver_and_gpus():
    driver, gpus = gpus_from_smi(TWO_GPUS)
    assert driver == "580.65.06"
    assert gpus == (
        Gpu("NVIDIA GeForce RTX 3090", "8.6", 24576 * MIB, 23000 * MIB),
        Gpu("Tesla T4", "7.5", 15360 * MIB, 14900 * MIB),
    )


def test_unknown_values_from_smi_are_empty():
    _, gpus = gpus_from_smi("NVIDIA GB10, 580.95.05, [N/A], [N/A], [N/A]\n")
    assert gpus == (Gpu("NVIDIA GB10", "", 0, 0),)


def test_smi_without_gpus_is_empty():
    assert gpus_from_smi("\n") == ("", ())


@pytest.mark.parametrize("text", ["No devices were found\n", "a, b\n"])
def test_unexpected_smi_output_is_an_error(text):
    with pytest.raises(ValueError, match="expected name, driver_version"):
        gpus_from_smi(text)


@pytest.mark.parametrize(
    ("script", "driver", "count"),
    [
        (f"cat <<'E'\n{TWO_GPUS}E", "580.65.06", 2),
        ("echo NVIDIA-SMI has failed because it could not reach the driver; exit 9", "", 0),
        ("echo No devices were found", "", 0),
    ],
)
def test_smi_is_run_when_it_is_installed(monkeypatch, tmp_path, script, driver, count):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(nvidia, "run_probe", lambda *args, **options: ProbeResult({"problem": ""}))
    monkeypatch.setattr(nvidia, "driver_version", lambda: "")
    found = examine_nvidia(timeout_seconds=30)
    assert (found.driver, len(found.gpus)) == (driver, count)


def test_crashed_probe_is_the_problem(monkeypatch):
    died = ProbeResult(reason="the process died of SIGSEGV")
    monkeypatch.setattr(nvidia, "run_probe", lambda *args, **options: died)
    monkeypatch.setattr(nvidia, "_query_nvidia_smi", lambda timeout: ("", ()))
    assert examine_nvidia(timeout_seconds=1).problem == "the process died of SIGSEGV"


class FakeCuda:
    """Simulate the driver API with two GPUs."""

    names = (b"NVIDIA L4", b"Tesla T4")
    capabilities = ((8, 9), (7, 5))

    def cuDeviceGetCount(self, out):  # noqa: N802
        out._obj.value = 2

    def cuDeviceGet(self, out, index):  # noqa: N802
        out._obj.value = index

    def cuDeviceGetName(self, buffer, size, device):  # noqa: N802
        assert size == len(buffer)
        buffer.value = self.names[device.value]

    def cuDeviceTotalMem_v2(self, out, device):  # noqa: N802
        assert isinstance(out._obj, ctypes.c_size_t)
        out._obj.value = 16 << 30

    def cuDeviceGetAttribute(self, out, attribute, device):  # noqa: N802
        out._obj.value = self.capabilities[device.value][attribute - 75]


def test_without_smi_the_gpus_come_from_the_driver():
    assert gpu_fields(FakeCuda()) == [
        {
            "name": name,
            "compute_capability": capability,
            "memory_total_bytes": 16 << 30,
            "memory_free_bytes": 0,
        }
        for name, capability in [("NVIDIA L4", "8.9"), ("Tesla T4", "7.5")]
    ]


@pytest.mark.parametrize(
    ("number", "version"), [(91701, "9.17.1"), (101600, "10.16.0"), (90100, "9.1.0")]
)
def test_library_version_numbers_are_read(number, version):
    assert format_version(number) == version


def only(status):
    (finding,) = nvidia_findings(status)
    return finding


def test_working_machine_has_no_findings():
    assert list(nvidia_findings(HEALTHY)) == []


def test_missing_driver_is_a_note():
    problem = "there is no NVIDIA driver: libcuda.so.1 was not found"
    finding = only(replace(HEALTHY, driver="", driver_cuda="", gpus=(), problem=problem))
    assert (finding.severity, finding.evidence) == ("note", problem)
    assert "models run on the CPU" in finding.problem


def test_a_gpu_that_cuda_cannot_use_is_an_error():
    finding = only(replace(HEALTHY, problem="the NVIDIA driver sees no GPU"))
    assert finding.severity == "error"
    assert "CUDA_VISIBLE_DEVICES" in finding.remedy


def test_a_driver_for_cuda_12_is_too_old():
    finding = only(replace(HEALTHY, driver="535.183.01", driver_cuda="12.2"))
    assert finding.severity == "error"
    assert finding.evidence == "driver 535.183.01 runs CUDA up to 12.2"
    assert "580" in finding.remedy


def test_a_gpu_before_turing_is_too_old_for_cuda_13():
    gpu = Gpu("Tesla V100", "7.0", 16 << 30, 15 << 30)
    assert only(replace(HEALTHY, gpus=(gpu,))).problem.startswith("Tesla V100 is not supported")


def test_a_cpu_build_on_a_machine_with_a_gpu_is_an_error():
    finding = only(replace(HEALTHY, onnxruntime_cuda=""))
    assert "is a CPU build" in finding.problem
    assert "onnxruntime-gpu" in finding.remedy
