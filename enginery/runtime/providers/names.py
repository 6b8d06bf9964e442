"""The names of execution providers: a user's words in, ONNX Runtime's names out.

>>> parse_providers("TensorRT,cuda,CPUExecutionProvider")
('tensorrt', 'cuda', 'cpu')
"""

from __future__ import annotations

from enginery.core.errors import ProviderError, nearest

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
TENSORRT_RTX = "NvTensorRTRTXExecutionProvider"

SHORT_NAMES = {
    "cpu": CPU,
    "cuda": CUDA,
    "tensorrt": TENSORRT,
    "tensorrt-rtx": TENSORRT_RTX,
    "openvino": "OpenVINOExecutionProvider",
    "dnnl": "DnnlExecutionProvider",
    "onednn": "DnnlExecutionProvider",
    "xnnpack": "XnnpackExecutionProvider",
    "directml": "DmlExecutionProvider",
    "dml": "DmlExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "rocm": "ROCMExecutionProvider",
    "migraphx": "MIGraphXExecutionProvider",
    "qnn": "QNNExecutionProvider",
    "vitisai": "VitisAIExecutionProvider",
    "cann": "CANNExecutionProvider",
    "nnapi": "NnapiExecutionProvider",
    "acl": "ACLExecutionProvider",
    "armnn": "ArmNNExecutionProvider",
    "rknpu": "RknpuExecutionProvider",
    "vsinpu": "VSINPUExecutionProvider",
    "webgpu": "WebGpuExecutionProvider",
    "webnn": "WebNNExecutionProvider",
    "js": "JsExecutionProvider",
    "azure": "AzureExecutionProvider",
}
"""What may be asked for, and ONNX Runtime's name for it."""


def short_name(name: str) -> str:
    """`cuda` for `CUDAExecutionProvider`; a name that is not known stays as it is."""
    return next((short for short, full in SHORT_NAMES.items() if full == name), name)


def parse_providers(text: str) -> tuple[str, ...]:
    """Short names from `tensorrt,cuda,cpu`, in order, each once.

    Raises:
        ProviderError: nothing is named, or a name is unknown.
    """
    names = (short_name(full_name(part)) for part in text.split(",") if part.strip())
    if wish := tuple(dict.fromkeys(names)):
        return wish
    raise ProviderError("no execution provider is named.", do="Name one: --provider cuda")


def full_name(name: str) -> str:
    """ONNX Runtime's name for a short or a full one, in any case.

    Raises:
        ProviderError: there is no such provider.
    """
    wanted = name.strip().lower()
    for short, full in SHORT_NAMES.items():
        if wanted in (short, full.lower()):
            return full
    known = [*SHORT_NAMES, *dict.fromkeys(SHORT_NAMES.values())]
    near = nearest(name.strip(), known) or nearest(wanted, SHORT_NAMES)
    raise ProviderError(
        f"unknown execution provider '{name.strip()}'{near}", do=f"Known: {', '.join(SHORT_NAMES)}."
    )
