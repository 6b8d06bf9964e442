"""Memory, energy and load of a GPU, with a fake of the driver's library."""

import ctypes
import os

import pytest

from enginery.core.errors import ProviderError
from enginery.runtime.nvml import GpuStatus, Nvml, _Process
from tests.runtime.fake_nvml import FakeNvml


def test_energy_is_in_joules():
    with Nvml(FakeNvml(), b"0000:65:00.0") as nvml:
        assert nvml.energy_joules() == 5.0


def test_memory_is_that_of_the_process():
    others = [(pid, 1 << 20) for pid in range(2, 102)]
    with Nvml(FakeNvml(pids=[*others, (os.getpid(), 3 << 30)]), b"") as nvml:
        assert nvml.memory_bytes(os.getpid()) == 3 << 30


@pytest.mark.parametrize("pids", [[], [(1, 2**64 - 1)]], ids=["hidden", "unknown"])
def test_unknown_memory_is_an_error(pids):
    with Nvml(FakeNvml(pids=pids), b"") as nvml, pytest.raises(ProviderError, match="not list"):
        nvml.memory_bytes(1)


@pytest.mark.parametrize("failing", ["nvmlInit_v2", "nvmlDeviceGetHandleByPciBusId_v2"])
def test_error_of_nvml_is_quoted(failing):
    with pytest.raises(ProviderError, match="Not Supported"):
        Nvml(FakeNvml(failing=[failing]), b"")


def test_missing_energy_is_an_error():
    library = FakeNvml(failing=["nvmlDeviceGetTotalEnergyConsumption"])
    with Nvml(library, b"") as nvml, pytest.raises(ProviderError, match="not report its energy"):
        nvml.energy_joules()


def test_close_shuts_nvml_down_once():
    library = FakeNvml()
    nvml = Nvml(library, b"")
    nvml.close()
    nvml.close()
    assert library.shutdowns == 1


def test_status_is_in_units_of_one():
    with Nvml(FakeNvml(), b"") as nvml:
        assert nvml.status() == GpuStatus(3 << 30, 80 << 30, 0.63, 41.0, 213.5)


def test_what_the_gpu_does_not_report_is_unknown():
    with Nvml(
        FakeNvml(failing=["nvmlDeviceGetPowerUsage", "nvmlDeviceGetMemoryInfo"]), b""
    ) as nvml:
        assert nvml.status() == GpuStatus(None, None, 0.63, 41.0, None)


def test_process_structure_has_the_layout_of_nvml():
    # nvml.h: unsigned int, 4 bytes of padding, unsigned long long, two unsigned ints.
    assert ctypes.sizeof(_Process) == 24
