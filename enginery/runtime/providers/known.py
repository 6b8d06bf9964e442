"""Every execution provider that ONNX Runtime documents: its names and its package.

>>> full_name("CUDA"), short_name("CUDAExecutionProvider")
('CUDAExecutionProvider', 'cuda')
>>> provider_package("openvino")
'onnxruntime-openvino'

Sources: onnxruntime.ai/docs/execution-providers and onnxruntime.ai/docs/install, for 1.31. See
`availability` for what is compiled into the installed build and what is missing on this machine.
"""

from __future__ import annotations

import sys

from enginery.core.errors import ProviderError, nearest

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
TENSORRT_RTX = "NvTensorRTRTXExecutionProvider"
NVIDIA = frozenset({CUDA, TENSORRT, TENSORRT_RTX})
OPENVINO = "OpenVINOExecutionProvider"
AZURE = "AzureExecutionProvider"

_FROM_SOURCE = ""
_PACKAGES = {
    "cpu": (CPU, "onnxruntime"),
    "cuda": (CUDA, "onnxruntime-gpu"),
    "tensorrt": (TENSORRT, "onnxruntime-gpu"),
    "tensorrt-rtx": (TENSORRT_RTX, "onnxruntime-ep-nv-tensorrt-rtx-cu13"),
    "openvino": (OPENVINO, "onnxruntime-openvino"),
    "dnnl": ("DnnlExecutionProvider", _FROM_SOURCE),
    "xnnpack": ("XnnpackExecutionProvider", _FROM_SOURCE),
    "directml": ("DmlExecutionProvider", "onnxruntime-directml"),
    "coreml": ("CoreMLExecutionProvider", "onnxruntime"),
    "rocm": ("ROCMExecutionProvider", _FROM_SOURCE),
    "migraphx": ("MIGraphXExecutionProvider", "onnxruntime-migraphx"),
    "qnn": ("QNNExecutionProvider", "onnxruntime-qnn"),
    "vitisai": ("VitisAIExecutionProvider", _FROM_SOURCE),
    "cann": ("CANNExecutionProvider", "onnxruntime-cann"),
    "nnapi": ("NnapiExecutionProvider", _FROM_SOURCE),
    "acl": ("ACLExecutionProvider", _FROM_SOURCE),
    "armnn": ("ArmNNExecutionProvider", _FROM_SOURCE),
    "rknpu": ("RknpuExecutionProvider", _FROM_SOURCE),
    "vsinpu": ("VSINPUExecutionProvider", _FROM_SOURCE),
    "webgpu": ("WebGpuExecutionProvider", "onnxruntime-webgpu"),
    "webnn": ("WebNNExecutionProvider", _FROM_SOURCE),
    "js": ("JsExecutionProvider", _FROM_SOURCE),
    "azure": (AZURE, "onnxruntime"),
}
"""Short name -> ONNX Runtime's name, and the Python package that includes it; empty if ONNX Runtime
must be built with it."""

_SYSTEMS = {"directml": ("win32", "Windows"), "coreml": ("darwin", "macOS")}
"""Short name -> the only system that a provider runs on: its `sys.platform`, and its name."""

SHORT_NAMES = {short: name for short, (name, _) in _PACKAGES.items()}
"""Short name -> ONNX Runtime's name."""
_BY_NAME = {name: short for short, name in SHORT_NAMES.items()}


def provider_package(name: str) -> str:
    """Return the Python package that includes a provider, by its short or full name.

    Empty if ONNX Runtime must be built with it.

    Raises:
        ProviderError: there is no such provider.
    """
    return _PACKAGES[short_name(full_name(name))][1]


def other_system(name: str) -> str:
    """Return the only system that a provider runs on, if that is not this one; else nothing."""
    platform, system = _SYSTEMS.get(short_name(full_name(name)), (sys.platform, ""))
    return system if platform != sys.platform else ""


def short_name(name: str) -> str:
    """Return `cuda` for `CUDAExecutionProvider`; an unknown name is returned unchanged."""
    return _BY_NAME.get(name, name)


def full_name(name: str) -> str:
    """Return ONNX Runtime's name for a short or full name; case is ignored.

    Raises:
        ProviderError: there is no such provider.
    """
    lowered = name.strip().lower()
    for short, full in SHORT_NAMES.items():
        if lowered in (short, full.lower()):
            return full
    suggestion = nearest(name.strip(), [*SHORT_NAMES, *_BY_NAME]) or nearest(lowered, SHORT_NAMES)
    raise ProviderError(
        f"unknown execution provider '{name.strip()}'{suggestion}",
        do=f"Known: {', '.join(SHORT_NAMES)}.",
    )
