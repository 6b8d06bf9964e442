"""Memory and energy of an NVIDIA GPU, where the driver gives them.

>>> with Nvml.open() as nvml:
...     nvml.energy_joules(), nvml.memory_bytes(os.getpid())
(182934.1, 1203765248)

Through NVML, the driver's own library, by ctypes: no package is needed. Its functions and their
units: the NVML API reference, nvmlDeviceGetTotalEnergyConsumption (millijoules since the driver
was loaded, from Volta on) and nvmlDeviceGetComputeRunningProcesses_v3 (bytes by process, which a
container may hide). Nothing here has been run on a GPU by this project yet.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from enginery.core.closing import Closeable
from enginery.core.errors import ProviderError
from enginery.runtime.providers import gpus

_LIBRARY = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
_NOT_AVAILABLE = 2**64 - 1
"""What NVML says of a process's memory that it does not know."""
_TOO_SMALL = 7  # NVML_ERROR_INSUFFICIENT_SIZE


class _Process(ctypes.Structure):
    """nvmlProcessInfo_v2_t, which version 3 of the call takes."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Nvml(Closeable):
    """A GPU that CUDA sees, as NVML knows it. A context manager."""

    def __init__(self, library: Any, bus_id: bytes) -> None:
        """Finds the GPU.

        Args:
        library: NVML, loaded.
        bus_id: `0000:65:00.0`: CUDA and NVML number GPUs differently.

        Raises:
            ProviderError: the driver refuses; the message has its words.
        """
        self._library = library
        self._device = ctypes.c_void_p()
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        self._require(self._library.nvmlInit_v2(), "NVML cannot be used")
        self._require(
            self._library.nvmlDeviceGetHandleByPciBusId_v2(bus_id, ctypes.byref(self._device)),
            "NVML does not know the GPU",
        )

    @classmethod
    def open(cls, device_id: int = 0) -> Nvml:
        """NVML on this machine, for the GPU of CUDA's number.

        Raises:
            ProviderError: there is no NVML, or no GPU.
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
        """What the GPU has used since the driver was loaded; raises ProviderError."""
        found = ctypes.c_ulonglong()
        self._require(
            self._library.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(found)),
            "the GPU tells no energy",
        )
        return found.value / 1e3

    def memory_bytes(self, pid: int) -> int:
        """What a process holds of the GPU's memory; raises ProviderError where it is not told."""
        count = ctypes.c_uint(64)
        while True:
            processes = (_Process * count.value)()
            code = self._library.nvmlDeviceGetComputeRunningProcesses_v3(
                self._device, ctypes.byref(count), processes
            )
            if code != _TOO_SMALL:
                break
        self._require(code, "the GPU tells no memory by process")
        for process in processes[: count.value]:
            if process.pid == pid and process.used_bytes != _NOT_AVAILABLE:
                return int(process.used_bytes)
        raise ProviderError("the driver does not list this process: a container may hide it.")

    def close(self) -> None:
        """Lets go of NVML; closing twice is fine."""
        if self._library is not None:
            self._library.nvmlShutdown()
            self._library = None

    def _require(self, code: int, what: str) -> None:
        if code:
            words = self._library.nvmlErrorString(code)
            raise ProviderError(f"{what}: {words.decode() if words else f'error {code}'}.")


def _bus_id(cuda: Any, device_id: int) -> bytes:
    """The PCI bus id of one of CUDA's visible devices, from libcuda after `cuInit`."""
    device = ctypes.c_int()
    found = ctypes.create_string_buffer(32)
    cuda.cuDeviceGet(ctypes.byref(device), device_id)
    cuda.cuDeviceGetPCIBusId(found, len(found), device)
    return found.value
