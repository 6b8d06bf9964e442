"""Choose the execution provider that runs an artifact's graphs in other servers.

INT8 and FP8 are made for one runtime. Elsewhere the products run in floating point between Q and DQ
nodes, or on the CPU. Importing this module is fast, for `enginery --help`.
"""

from __future__ import annotations

from typing import Literal

from enginery.core.errors import OptionError

DeployProvider = Literal["auto", "cuda", "cpu", "tensorrt", "tensorrt-rtx"]
TENSORRT_PROVIDERS = ("tensorrt", "tensorrt-rtx")
"""The providers that run TensorRT's engines; their names are those of the engines' flavors."""
_AUTO = "Leave out --provider for the one that the artifact is made for."


def resolve_provider(
    provider: DeployProvider, *, precision: str, target: str, kind: str = ""
) -> DeployProvider:
    """Return the execution provider for an artifact: the given one, or what `auto` means for it.

    Args:
        provider: the option.
        precision: the precision of the artifact's manifest.
        target: the target of the manifest.
        kind: the precision in words, for errors; empty for `precision`.

    Raises:
        OptionError: the provider does not run the artifact's products in their precision, or
            cannot parse its graphs.
    """
    kind, is_quantized = kind or precision, precision in ("int8", "fp8")
    for_tensorrt = is_quantized and target == "tensorrt"
    if provider == "auto":
        return "tensorrt" if for_tensorrt else "cpu" if target == "cpu" else "cuda"
    if provider == "cuda" and for_tensorrt:
        raise OptionError(
            f"option 'provider' is cuda, but the artifact is {kind}, made for TensorRT: ONNX "
            "Runtime's CUDA provider multiplies it in floating point.",
            do=f"{_AUTO} For cuda, use FP16: enginery optimize --target cuda --precision fp16",
            option="provider",
        )
    if provider == "cuda" and is_quantized:
        raise OptionError(
            f"option 'provider' is cuda, but the artifact is {kind}: ONNX Runtime has these "
            "products only on the CPU.",
            do=f"{_AUTO} For cuda, use FP16: enginery optimize --target cuda --precision fp16",
            option="provider",
        )
    if provider == "cpu" and precision == "fp8":
        raise OptionError(
            f"option 'provider' is cpu, but the artifact is {kind}, made for TensorRT: ONNX "
            "Runtime has no FP8 products on the CPU.",
            do=f"{_AUTO} For the CPU: enginery quantize --scheme dynamic --target cpu",
            option="provider",
        )
    if provider in TENSORRT_PROVIDERS and target in ("cuda", "cpu"):
        raise OptionError(
            f"option 'provider' is {provider}, but the artifact is {kind} for {target}: "
            "TensorRT cannot parse its operators.",
            do=f"{_AUTO} For TensorRT: enginery optimize --target tensorrt, or enginery quantize",
            option="provider",
        )
    return provider
