"""Read the NVIDIA driver and the GPUs that are visible to this process.

    visible_gpus()
    # (CudaGpu(name='NVIDIA L4', compute_capability='8.9', memory_total_bytes=23684710400),)

This only calls the driver, not the CUDA runtime, so it needs no toolkit and creates no context.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginery.core.errors import ProviderError

DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # the compute capability (cuda.h, CUdevice_attribute)
_KERNEL_MODULE = Path("/sys/module/nvidia/version")


@dataclass(frozen=True)
class CudaDriver:
    """Properties of the NVIDIA driver."""

    cuda_version: tuple[int, int] = (0, 0)
    """Newest CUDA version that it supports, (major, minor); (0, 0) if unknown."""
    gpus: int = 0
    problem: str = ""
    """Reason why no GPU can be used; empty otherwise."""


@dataclass(frozen=True)
class CudaGpu:
    """One GPU."""

    name: str
    compute_capability: str
    """Such as `8.9`."""
    memory_total_bytes: int


def cuda_driver() -> CudaDriver:
    """Read the driver's CUDA version and the number of visible GPUs from libcuda."""
    try:
        cuda = ctypes.CDLL(DRIVER)
    except OSError as error:
        absent = sys.platform == "win32" or str(error).startswith(f"{DRIVER}: cannot open")
        detail = f"{DRIVER} was not found" if absent else str(error)
        return CudaDriver(problem=f"there is no NVIDIA driver: {detail}")
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    # The driver returns 1000 * major + 10 * minor: 13010 is CUDA 13.1.
    cuda_version = (version.value // 1000, version.value % 1000 // 10)
    if code := cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        name = ctypes.c_char_p()
        cuda.cuGetErrorName(code, ctypes.byref(name))
        error_name = name.value.decode() if name.value else "error"  # CUDA_ERROR_NO_DEVICE
        return CudaDriver(cuda_version, problem=f"the NVIDIA driver refused: {error_name} ({code})")
    problem = "" if count.value else "the NVIDIA driver sees no GPU"
    return CudaDriver(cuda_version, count.value, problem)


def visible_gpus() -> tuple[CudaGpu, ...]:
    """Return the visible GPUs (see CUDA_VISIBLE_DEVICES) in CUDA's order; at least one.

    Raises:
        ProviderError: there is no driver, or it sees no GPU.
    """
    driver = cuda_driver()
    if driver.problem:
        raise ProviderError(
            f"no GPU can be used: {driver.problem}.",
            do="In a container, give it the GPUs (docker run --gpus all).",
        )
    return gpus_from_driver(ctypes.CDLL(DRIVER))


def gpus_from_driver(cuda: Any) -> tuple[CudaGpu, ...]:
    """Return every visible GPU, from libcuda after `cuInit`."""
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    return tuple(_gpu(cuda, index) for index in range(count.value))


def _gpu(cuda: Any, index: int) -> CudaGpu:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name, size = ctypes.create_string_buffer(256), ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    capability = f"{major.value}.{minor.value}"
    return CudaGpu(name.value.decode(errors="replace"), capability, size.value)


def driver_version() -> str:
    """Return the NVIDIA driver's version, `580.65.06`; empty without its kernel module."""
    try:
        return _KERNEL_MODULE.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
