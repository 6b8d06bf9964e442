"""Tensors on a session's device: numpy arrays and whatever speaks DLPack, as ONNX Runtime has them.

    >>> read_value(spec, torch.ones(2, 3), Device()).device_name()
    'cpu'

A tensor that is on the device already is taken without a copy. Tested with numpy and torch on the
CPU; nothing here has run on a GPU yet.
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

# onnx.TensorProto.DataType, from onnx.proto; numpy has no bfloat16, so types go by number.
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
# DLDeviceType of dlpack.h: the host's own memory, then CUDA's on the device and managed.
_HOST, _ON_CUDA = (1, 3), (2, 13)


@dataclass(frozen=True)
class Device:
    """Where a session's tensors are, by ONNX Runtime's name."""

    kind: str = "cpu"
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


def device_of(session: Any) -> Device:
    """The device of a session's first provider: CUDA's where that is NVIDIA's, else the host."""
    providers = session.get_providers() if hasattr(session, "get_providers") else []
    if not providers or providers[0] not in (CUDA, TENSORRT, TENSORRT_RTX):
        return Device()
    options = session.get_provider_options().get(providers[0], {})
    return Device("cuda", int(options.get("device_id", 0)))


def read_value(spec: TensorSpec, value: Any, device: Device) -> Any:
    """A numpy array of what numpy makes an array of, an `onnxruntime.OrtValue` of other tensors.

    Args:
        spec: the input that it is for; its type and rank are checked.
        value: an array, a list, an OrtValue, or what else speaks DLPack.
        device: of the session. What is on the host may go to any.

    Raises:
        InputError: it is no tensor, on another device, or not of the input's type and rank.
    """
    import onnxruntime as ort

    if isinstance(value, np.ndarray | np.generic | list | tuple | int | float):
        return _checked(spec, np.ascontiguousarray(value))
    if not hasattr(value, "__dlpack_device__"):
        raise InputError(
            f"{spec.name}: found a {type(value).__name__}, expected a numpy array or a tensor "
            "that speaks DLPack."
        )
    kind, index = (int(part) for part in value.__dlpack_device__())
    there = Device("cuda", index) if kind in _ON_CUDA else Device()
    if kind not in (*_HOST, *_ON_CUDA) or there not in (Device(), device):
        name = str(there) if kind in _ON_CUDA else f"a device of DLPack's kind {kind}"
        raise InputError(f"{spec.name} is on {name}, and the session on {device}.")
    _finish(value)
    if isinstance(value, ort.OrtValue):
        return _checked(spec, value)
    try:
        # ONNX Runtime takes no strides; torch has a method for that, and others say no.
        whole = value.contiguous() if hasattr(value, "contiguous") else value
        found = _truth_values(whole) or ort.OrtValue.from_dlpack(whole)
    except Exception as error:  # each library raises its own: a gradient, strides, a type
        raise InputError(f"{spec.name}: DLPack gives no tensor: {error}") from error
    return _checked(spec, found)


def _truth_values(value: Any) -> Any:
    """A torch tensor of bool as an OrtValue; None for any other.

    torch sends DLPack's own type for them, which ONNX Runtime 1.31 does not know: it takes bytes
    and the word that they are truth values.
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
    """An `onnxruntime.OrtValue` of this type and shape on the device, its values not set."""
    import onnxruntime as ort

    return ort.OrtValue.ortvalue_from_shape_and_type(
        list(shape), ELEMENTS[dtype], device.kind, device.index
    )


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a numpy array or an OrtValue."""
    return tuple(value.shape if isinstance(value, np.ndarray) else value.shape())


def shaped_like(value: Any) -> NDArray[Any]:
    """An array of the value's shape that takes one byte, for those who read shapes alone."""
    return np.broadcast_to(np.int8(0), shape_of(value))


def dtype_of(value: Any) -> str:
    """The type, as numpy names it; `bfloat16` too."""
    if isinstance(value, np.ndarray):
        return str(value.dtype.name)
    number = value.element_type()
    return next((name for name, element in ELEMENTS.items() if element == number), str(number))


def is_on(value: Any, device: Device) -> bool:
    """Whether an OrtValue or a numpy array is in the device's own memory."""
    if isinstance(value, np.ndarray):
        return device.kind == "cpu"
    kind, index = value.__dlpack_device__()
    return (kind in _ON_CUDA and Device("cuda", index) == device) or (
        kind in _HOST and device.kind == "cpu"
    )


def _finish(value: Any) -> None:
    """Waits for the kernels that torch has queued for a tensor on a GPU.

    ONNX Runtime computes on a stream of its own, which knows nothing of torch's. Torch is asked
    only where the tensor is its own: nothing here imports it.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.is_cuda:
        torch.cuda.current_stream(value.device).synchronize()
