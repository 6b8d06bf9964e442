"""The NVIDIA GPUs that this process may use, as the driver names them.

    >>> visible_gpus()
    (CudaGpu(name='NVIDIA L4', compute_capability='8.9', memory_total_bytes=23684710400),)

Nothing is asked of the CUDA runtime, so that no toolkit is needed and no context is made.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginery.core.errors import ProviderError
from enginery.runtime.providers import libraries

_MAJOR, _MINOR = 75, 76  # the compute capability (cuda.h, CUdevice_attribute)
_KERNEL_MODULE = Path("/sys/module/nvidia/version")


@dataclass(frozen=True)
class CudaGpu:
    """One GPU."""

    name: str
    compute_capability: str
    """`8.9`."""
    memory_total_bytes: int


def visible_gpus() -> tuple[CudaGpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in CUDA's order; at least one.

    Raises:
        ProviderError: there is no driver, or it sees no GPU.
    """
    driver = libraries.cuda_driver()
    if driver.problem:
        raise ProviderError(
            f"no GPU can be used: {driver.problem}.",
            do="In a container, give it the GPUs (docker run --gpus all).",
        )
    return gpus_from_driver(ctypes.CDLL(libraries.DRIVER))


def gpus_from_driver(cuda: Any) -> tuple[CudaGpu, ...]:
    """Every visible GPU, from libcuda after `cuInit`."""
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
    """The NVIDIA driver's version, `580.65.06`; empty where the kernel does not tell."""
    try:
        return _KERNEL_MODULE.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
