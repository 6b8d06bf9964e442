"""Resolve the GPUs to build an engine for to compute capabilities.

>>> resolve_capabilities(RTX, "8.9,8.0"), resolve_capabilities(RTX, "portable")
(('8.0', '8.9'), ())

On a machine with a GPU, `current` is its compute capability: ('9.0',).
"""

from __future__ import annotations

from collections.abc import Sequence

from enginery.core.errors import OptionError, ProviderError
from enginery.runtime.providers.gpus import CudaGpu, visible_gpus
from enginery.runtime.tensorrt.options import CLASSIC, RTX, Flavor, capability_name

CURRENT, PORTABLE = "current", "portable"


def resolve_capabilities(flavor: Flavor, names: str | Sequence[str]) -> tuple[str, ...]:
    """Return the distinct compute capabilities in ascending order; empty for a portable plan.

    Args:
        flavor: TensorRT flavor.
        names: `8.0,8.9,12.0` or a sequence; `current` for the first GPU of this machine; `portable`
            or an empty sequence for a plan that runs on all of the flavor's GPUs except Turing
            (source: support matrix of TensorRT for RTX).

    Raises:
        OptionError: the flavor cannot build for one of the capabilities.
        ProviderError: for `current`, there is no GPU, or the flavor cannot build for it.
    """
    if isinstance(names, str):
        names = names.split(",")
    words = [capability_name(word.strip()) for word in names]
    if not words or PORTABLE in words:
        return _portable(flavor, words)
    capabilities = [_current(flavor) if word == CURRENT else word for word in words]
    for capability in capabilities:
        _check(flavor, capability)
    return tuple(
        sorted(dict.fromkeys(capabilities), key=lambda name: tuple(map(int, name.split("."))))
    )


def current_gpu(flavor: Flavor) -> CudaGpu:
    """Return the GPU that TensorRT uses by default: the first visible one.

    Raises:
        ProviderError: there is no GPU; the message says what to do without one.
    """
    try:
        return visible_gpus()[0]
    except ProviderError as error:
        raise ProviderError(
            f"capability 'current' is that of this machine's GPU, but {error.message}"
            if not flavor.needs_gpu
            else f"{flavor.title} builds on the GPU that it builds for, but {error.message}",
            do=f"Pass the GPUs to build for: --capability {RTX.capabilities[-3]}. {RTX.title} "
            f"builds for {', '.join(RTX.capabilities)} without a GPU"
            + ("." if not flavor.needs_gpu else f": --flavor {RTX.name}."),
        ) from error


def _portable(flavor: Flavor, words: Sequence[str]) -> tuple[str, ...]:
    if flavor.needs_gpu:
        raise OptionError(
            f"capability 'portable': {flavor.title} builds only for the GPU that it runs on.",
            do="Use --capability current; option 'hardware_compatibility' lets the engine run on "
            f"other GPUs, and --flavor {RTX.name} has portable plans.",
        )
    if len(words) > 1:
        raise OptionError(
            f"capability 'portable' is for all GPUs, found {', '.join(words)}.",
            do="Pass either `portable` or capabilities.",
        )
    return ()


def _current(flavor: Flavor) -> str:
    gpu = current_gpu(flavor)
    if not flavor.supports(gpu.compute_capability):
        raise ProviderError(
            unsupported_gpu(flavor, gpu),
            do=f"Build with --flavor {CLASSIC.name}, or run the model with ONNX Runtime's CUDA "
            "provider: --providers cuda. To build here for other GPUs, name their capabilities.",
        )
    return gpu.compute_capability


def unsupported_gpu(flavor: Flavor, gpu: CudaGpu) -> str:
    """Return a message that a flavor does not support a GPU, with those that it supports."""
    return (
        f"{gpu.name} has compute capability {gpu.compute_capability}, but {flavor.title} has no "
        f"support for {gpu.compute_capability}: it supports {', '.join(flavor.capabilities)}."
    )


def _check(flavor: Flavor, capability: str) -> None:
    if flavor.needs_gpu:
        current = current_gpu(flavor).compute_capability
        if capability != current:
            raise OptionError(
                f"capability '{capability}': {flavor.title} builds only for the GPU that it runs "
                f"on, which has compute capability {current}.",
                do=f"Use --capability current; --flavor {RTX.name} builds for other GPUs.",
            )
    elif not flavor.supports(capability):
        raise OptionError(
            f"{flavor.title} does not build for compute capability '{capability}'.",
            do=f"It builds for {', '.join(flavor.capabilities)}; also: {CURRENT}, {PORTABLE}. "
            f"{CLASSIC.title} (--flavor {CLASSIC.name}) builds for the GPU that it runs on.",
        )
