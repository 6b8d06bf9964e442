"""Memory, energy and load of an NVIDIA GPU, read through NVML, the driver's library.

    with Nvml.open() as nvml:
        nvml.energy_joules(), nvml.memory_bytes(os.getpid())  # (182934.1, 1203765248)
        nvml.status().temperature_celsius                     # 41.0

The library is called through ctypes, so that no package is needed. The functions are those of the
NVML API reference: nvmlDeviceGetTotalEnergyConsumption (millijoules since the driver was loaded,
from Volta on), nvmlDeviceGetComputeRunningProcesses_v3 (bytes per process; a container may hide
processes), nvmlDeviceGetMemoryInfo, nvmlDeviceGetUtilizationRates (per cent of the driver's last
sample period), nvmlDeviceGetTemperature and nvmlDeviceGetPowerUsage (milliwatts).
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

from enginery.core.closing import Closeable
from enginery.core.errors import ProviderError
from enginery.runtime.providers import gpus

_LIBRARY = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
_NOT_AVAILABLE = 2**64 - 1
"""NVML's value for unknown memory of a process."""
_TOO_SMALL = 7  # NVML_ERROR_INSUFFICIENT_SIZE


class _Process(ctypes.Structure):
    """nvmlProcessInfo_v2_t, the structure of nvmlDeviceGetComputeRunningProcesses_v3."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


_CORE_SENSOR = 0  # NVML_TEMPERATURE_GPU


@dataclass(frozen=True)
class GpuStatus:
    """What `nvidia-smi` shows of a GPU, of all processes; None for what it does not report."""

    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilization_ratio: float | None = None
    """Share of the driver's last sample period in which a kernel ran, 0 to 1."""
    temperature_celsius: float | None = None
    power_watts: float | None = None


class Nvml(Closeable):
    """A GPU in NVML. A context manager."""

    def __init__(self, library: Any, bus_id: bytes) -> None:
        """Initialize NVML and find the GPU.

        Args:
            library: the loaded NVML.
            bus_id: PCI bus id, such as `0000:65:00.0`. CUDA and NVML number GPUs differently.

        Raises:
            ProviderError: NVML returned an error.
        """
        self._library = library
        self._device = ctypes.c_void_p()
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        self._require(self._library.nvmlInit_v2(), "NVML cannot be initialized")
        self._require(
            self._library.nvmlDeviceGetHandleByPciBusId_v2(bus_id, ctypes.byref(self._device)),
            "NVML does not find the GPU",
        )

    @classmethod
    def open(cls, device_id: int = 0) -> Nvml:
        """Open the GPU with this CUDA device id.

        Raises:
            ProviderError: NVML is not installed, or the machine has no GPU.
        """
        driver = gpus.cuda_driver()
        if driver.problem:
            raise ProviderError(f"{driver.problem}.")
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise ProviderError(f"{error}.") from error
        return cls(library, _bus_id(ctypes.CDLL(gpus.DRIVER), device_id))

    def energy_joules(self) -> float:
        """Return the energy used since the driver was loaded, in joules.

        Raises:
            ProviderError: the GPU does not report its energy.
        """
        millijoules = ctypes.c_ulonglong()
        self._require(
            self._library.nvmlDeviceGetTotalEnergyConsumption(
                self._device, ctypes.byref(millijoules)
            ),
            "the GPU does not report its energy",
        )
        return millijoules.value / 1e3

    def memory_bytes(self, pid: int) -> int:
        """Return the GPU memory of a process, in bytes.

        Raises:
            ProviderError: the driver does not report it.
        """
        # If there is too little space, the driver writes the number that it needs into `count`.
        # Processes may start in between, so ask again until it fits.
        count = ctypes.c_uint(64)
        while True:
            processes = (_Process * count.value)()
            code = self._library.nvmlDeviceGetComputeRunningProcesses_v3(
                self._device, ctypes.byref(count), processes
            )
            if code != _TOO_SMALL:
                break
        self._require(code, "the GPU does not report memory per process")
        for process in processes[: count.value]:
            if process.pid == pid and process.used_bytes != _NOT_AVAILABLE:
                return int(process.used_bytes)
        raise ProviderError("the driver does not list this process: a container may hide it.")

    def status(self) -> GpuStatus:
        """Return the GPU's memory, utilization, temperature and power."""
        memory, rates = _Memory(), _Utilization()
        celsius, milliwatts = ctypes.c_uint(), ctypes.c_uint()
        query, device = self._library, self._device
        # NVML returns 0 on success. Not every GPU supports every query.
        has_memory = not query.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
        has_rates = not query.nvmlDeviceGetUtilizationRates(device, ctypes.byref(rates))
        has_celsius = not query.nvmlDeviceGetTemperature(
            device, _CORE_SENSOR, ctypes.byref(celsius)
        )
        has_power = not query.nvmlDeviceGetPowerUsage(device, ctypes.byref(milliwatts))
        return GpuStatus(
            int(memory.used) if has_memory else None,
            int(memory.total) if has_memory else None,
            rates.gpu / 100 if has_rates else None,
            float(celsius.value) if has_celsius else None,
            milliwatts.value / 1e3 if has_power else None,
        )

    def close(self) -> None:
        """Shut NVML down; may be called again."""
        if self._library is not None:
            self._library.nvmlShutdown()
            self._library = None

    def _require(self, code: int, problem: str) -> None:
        if code:
            words = self._library.nvmlErrorString(code)
            raise ProviderError(f"{problem}: {words.decode() if words else f'error {code}'}.")


def _bus_id(cuda: Any, device_id: int) -> bytes:
    """Return the PCI bus id of one of CUDA's visible devices; libcuda must be initialized."""
    device = ctypes.c_int()
    buffer = ctypes.create_string_buffer(32)
    cuda.cuDeviceGet(ctypes.byref(device), device_id)
    cuda.cuDeviceGetPCIBusId(buffer, len(buffer), device)
    return buffer.value
