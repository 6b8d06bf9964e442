"""Choose the execution provider that runs an artifact's graphs in other servers.

INT8 and FP8 are made for one runtime. Elsewhere the products run in floating point between Q and DQ
nodes, or on the CPU. Importing this module is
fast, for `enginery --help`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from enginery.core.errors import OptionError

if TYPE_CHECKING:
    from enginery.core.artifact.manifest import Manifest

DeployProvider = Literal["auto", "cuda", "cpu", "tensorrt"]
_AUTO = "Leave out --provider for the one that the artifact is made for."


def resolve_provider(manifest: Manifest, given: DeployProvider) -> DeployProvider:
    """Return the execution provider for an artifact: the given one, or for `auto` the best.

    Raises:
        OptionError: the provider does not run the artifact's products in their precision, or
            cannot parse its graphs.
    """
    kind = manifest.describe_precision()
    if given == "auto":
        if needs_tensorrt(manifest):
            return "tensorrt"
        return "cpu" if manifest.target == "cpu" else "cuda"
    if given == "cuda" and needs_tensorrt(manifest):
        raise OptionError(
            f"option 'provider' is cuda, but the artifact is {kind}, made for TensorRT: ONNX "
            "Runtime's CUDA provider multiplies it in floating point.",
            do=f"{_AUTO} For cuda, use FP16: enginery optimize --target cuda --precision fp16",
            option="provider",
        )
    if given == "cuda" and manifest.is_quantized:
        raise OptionError(
            f"option 'provider' is cuda, but the artifact is {kind}: ONNX Runtime has these "
            "products only on the CPU.",
            do=f"{_AUTO} For cuda, use FP16: enginery optimize --target cuda --precision fp16",
            option="provider",
        )
    if given == "cpu" and manifest.precision == "fp8":
        raise OptionError(
            f"option 'provider' is cpu, but the artifact is {kind}, made for TensorRT: ONNX "
            "Runtime has no FP8 products on the CPU.",
            do=f"{_AUTO} For the CPU: enginery quantize --scheme dynamic --target cpu",
            option="provider",
        )
    if given == "tensorrt" and manifest.target in ("cuda", "cpu"):
        raise OptionError(
            f"option 'provider' is tensorrt, but the artifact is {kind} for {manifest.target}: "
            "TensorRT cannot parse its operators.",
            do=f"{_AUTO} For TensorRT: enginery optimize --target tensorrt, or enginery quantize",
            option="provider",
        )
    return given


def needs_tensorrt(manifest: Manifest) -> bool:
    """Return True if only TensorRT multiplies an artifact's weights in their precision."""
    return manifest.is_quantized and manifest.target == "tensorrt"
