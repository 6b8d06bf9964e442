"""Tell the precision in which a provider computes a graph of FP32.

NVIDIA GPUs multiply in TensorFloat-32 by default, and OpenVINO computes in BF16 or FP16 on some
devices or on request. A comparison with PyTorch has to allow for that, and to say so.

>>> compute_precision("OpenVINOExecutionProvider", {}).precision
'fp32'
>>> compute_precision("OpenVINOExecutionProvider", {"device_type": "GPU"}).precision
'fp16'
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from enginery.runtime.machine import read_cpuinfo
from enginery.runtime.providers.known import CUDA, OPENVINO

_BF16_FEATURES = {"avx512_bf16", "amx_bf16"}
_FP16_FEATURES = {"avx512_fp16", "amx_fp16"}
_OPENVINO_HINTS = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}
_HINT_REMEDY = "INFERENCE_PRECISION_HINT f32 there, or no hint, computes in FP32"
_OPENVINO_OPTIONS = {"FP32": "fp32", "FP16": "fp16", "ACCURACY": "fp32"}


@dataclass(frozen=True)
class ComputePrecision:
    """The precision in which a provider computes a graph of FP32, and why."""

    precision: str = "fp32"
    reason: str = ""
    """The reason in words; empty if nothing else was to be expected."""
    remedy: str = ""
    """How to compute in FP32; empty if it does."""


def compute_precision(provider: str, options: Mapping[str, str]) -> ComputePrecision:
    """Return the precision in which a provider computes a graph of FP32.

    Args:
        provider: ONNX Runtime's name.
        options: its options.
    """
    if provider == CUDA and options.get("use_tf32", "1") not in ("0", "False"):
        return ComputePrecision(
            "tf32",
            "NVIDIA GPUs from Ampere on multiply FP32 in TensorFloat-32",
            "--provider-option cuda.use_tf32=0 multiplies in FP32",
        )
    return _of_openvino(options) if provider == OPENVINO else ComputePrecision()


def _of_openvino(options: Mapping[str, str]) -> ComputePrecision:
    """Return OpenVINO's precision.

    The hint in `load_config` precedes `precision`, and that precedes the device's default. On the
    device CPU, ONNX Runtime sets FP32; on GPU and NPU, FP16; on AUTO, HETERO and MULTI nothing, so
    that OpenVINO's own default applies, which is BF16 on processors that have it.
    Source: outputs of onnxruntime-openvino 1.24.1 on a processor with AVX512-BF16; for GPU and NPU,
    onnxruntime.ai/docs/execution-providers/OpenVINO-ExecutionProvider.html.
    """
    device = options.get("device_type", "") or "CPU"
    on_cpu = "GPU" not in device and "NPU" not in device
    remedy = "--provider-option openvino.precision=FP32 computes in FP32"
    if hint := _hint(device, options.get("load_config", "")):
        if on_cpu and hint == "fp16" and not _has(_FP16_FEATURES):
            hint = "bf16"  # measured: both hints give the same outputs
        reason = f"OpenVINO computes in {hint.upper()}, which load_config asks for"
        return ComputePrecision(hint, reason, "" if hint == "fp32" else _HINT_REMEDY)
    requested = options.get("precision", "")
    if requested in _OPENVINO_OPTIONS:
        precision, reason = _OPENVINO_OPTIONS[requested], f"which precision={requested} asks for"
    elif device == "CPU":
        precision, reason = "fp32", "its default on the device CPU in ONNX Runtime"
    elif not on_cpu:
        precision, reason = "fp16", f"its default on the device {device}"
    elif _has(_BF16_FEATURES):
        precision, reason = "bf16", f"its default on the device {device} of this processor"
    else:
        precision, reason = "fp32", f"its default on the device {device} of this processor"
    return ComputePrecision(
        precision,
        f"OpenVINO computes in {precision.upper()}, {reason}",
        "" if precision == "fp32" else remedy,
    )


def _hint(device: str, load_config: str) -> str:
    """Return the precision of `INFERENCE_PRECISION_HINT` for a device; empty if there is none."""
    try:
        config = json.loads(load_config)
    except ValueError:
        return ""  # ONNX Runtime rejects it when the session is opened
    if not isinstance(config, dict):
        return ""
    for name, properties in config.items():
        if name in device and isinstance(properties, dict):
            hint = str(properties.get("INFERENCE_PRECISION_HINT", "")).lower()
            if hint in _OPENVINO_HINTS:
                return _OPENVINO_HINTS[hint]
    return ""


def _has(features: set[str]) -> bool:
    return bool(features.intersection(read_cpuinfo()[1]))
