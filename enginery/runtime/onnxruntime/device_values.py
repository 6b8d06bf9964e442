"""Convert tensors to ONNX Runtime values on a session's device: numpy arrays and DLPack.

    read_value(spec, torch.ones(2, 3), Device()).device_name()    # 'cpu'

A tensor that is already on the device is not copied.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import InputError
from enginery.core.shapes import TensorSpec
from enginery.runtime.providers.known import CUDA, TENSORRT, TENSORRT_RTX

# onnx.TensorProto.DataType from onnx.proto; numpy has no bfloat16, so types are numbers.
ELEMENTS = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "uint16": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "uint32": 12,
    "uint64": 13,
    "bfloat16": 16,
}
# DLDeviceType of dlpack.h: kDLCPU, kDLCUDA; kDLCUDAHost and kDLCUDAManaged.
_CPU, _CUDA = 1, 2
_READ_BY_HOST = (3, 13)
"""Memory of CUDA that the host reads too. ONNX Runtime 1.31 rejects it, numpy does not."""


@dataclass(frozen=True)
class Device:
    """A device, with ONNX Runtime's name."""

    kind: str = "cpu"
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


def device_of(session: Any) -> Device:
    """Return the device of a session's first provider: cuda for NVIDIA's providers, else cpu."""
    providers = session.get_providers() if hasattr(session, "get_providers") else []
    if not providers or providers[0] not in (CUDA, TENSORRT, TENSORRT_RTX):
        return Device()
    options = session.get_provider_options().get(providers[0], {})
    return Device("cuda", int(options.get("device_id", 0)))


def read_value(spec: TensorSpec, value: Any, device: Device) -> Any:
    """Return a numpy array for array-like values, and an `onnxruntime.OrtValue` for other tensors.

    Args:
        spec: spec of the input; dtype and rank are checked.
        value: an array, a list, an OrtValue or another object with DLPack.
        device: device of the session. Values on the host are accepted for every device; pinned
            and managed memory of CUDA counts as the host's.

    Raises:
        InputError: the value is not a tensor, is on another device, or has another dtype or rank.
    """
    import onnxruntime as ort

    if isinstance(value, np.ndarray | np.generic | list | tuple | int | float):
        return _checked(spec, np.ascontiguousarray(value))
    if not hasattr(value, "__dlpack_device__"):
        raise InputError(
            f"{spec.name}: found a {type(value).__name__}, expected a numpy array or a tensor "
            "that supports DLPack."
        )
    kind, index = (int(part) for part in value.__dlpack_device__())
    location = Device("cuda", index) if kind == _CUDA else Device()
    if kind not in (_CPU, _CUDA, *_READ_BY_HOST) or location not in (Device(), device):
        name = str(location) if kind == _CUDA else f"a device of DLPack type {kind}"
        raise InputError(f"{spec.name} is on {name}, but the session is on {device}.")
    _synchronize(value)
    if isinstance(value, ort.OrtValue):
        return _checked(spec, value)
    try:
        if kind in _READ_BY_HOST:
            return _checked(spec, np.ascontiguousarray(np.from_dlpack(value)))
        # ONNX Runtime does not support strides; torch can make tensors contiguous.
        contiguous = value.contiguous() if hasattr(value, "contiguous") else value
        ort_value = _bool_tensor(contiguous) or ort.OrtValue.from_dlpack(contiguous)
    except Exception as error:  # each library raises other types: for a gradient, strides, a dtype
        raise InputError(f"{spec.name}: DLPack failed: {error}") from error
    return _checked(spec, ort_value)


def _bool_tensor(value: Any) -> Any:
    """Return a torch tensor of bool as an OrtValue; None for other values.

    torch uses DLPack's bool type, which ONNX Runtime 1.31 does not support. It accepts bytes with a
    flag that they are bool.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor) or value.dtype != torch.bool:
        return None
    import onnxruntime as ort
    from onnxruntime.capi import onnxruntime_pybind11_state as runtime

    capsule = value.view(torch.uint8).__dlpack__()
    return ort.OrtValue(runtime.OrtValue.from_dlpack(capsule, True))


def _checked(spec: TensorSpec, value: Any) -> Any:
    dtype, shape = dtype_of(value), shape_of(value)
    if (dtype, len(shape)) != (spec.dtype, len(spec.dims)):
        raise InputError(
            f"{spec.name}: found {dtype} with {len(shape)} dims {shape}, "
            f"expected {spec.dtype} with {len(spec.dims)} dims."
        )
    return value


def new_buffer(dtype: str, shape: Sequence[int], device: Device) -> Any:
    """Return an uninitialized `onnxruntime.OrtValue` of this dtype and shape on the device."""
    import onnxruntime as ort

    return ort.OrtValue.ortvalue_from_shape_and_type(
        list(shape), ELEMENTS[dtype], device.kind, device.index
    )


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a numpy array or an OrtValue."""
    return tuple(value.shape if isinstance(value, np.ndarray) else value.shape())


def shape_only_array(value: Any) -> NDArray[Any]:
    """Return an array with the shape of the value that takes one byte of memory."""
    return np.broadcast_to(np.int8(0), shape_of(value))


def dtype_of(value: Any) -> str:
    """Return numpy's name of the dtype, or `bfloat16`."""
    if isinstance(value, np.ndarray):
        return str(value.dtype.name)
    number = value.element_type()
    return next((name for name, element in ELEMENTS.items() if element == number), str(number))


def is_on(value: Any, device: Device) -> bool:
    """Return True if an OrtValue or a numpy array is in the memory of the device."""
    if isinstance(value, np.ndarray):
        return device.kind == "cpu"
    kind, index = value.__dlpack_device__()
    return (Device("cuda", index) if kind == _CUDA else Device()) == device


def _synchronize(value: Any) -> None:
    """Wait for the kernels that torch has queued for a tensor on a GPU.

    ONNX Runtime uses a stream of its own, which does not wait for torch's. torch is not imported
    here.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.is_cuda:
        torch.cuda.current_stream(value.device).synchronize()
