"""Check settings that slow models down or keep them off the GPU, without measuring.

`enginery bench` finds what only a measurement shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from enginery.core.errors import EngineryError
from enginery.doctor.report import Finding, NvidiaStatus, ProviderStatus
from enginery.runtime.providers.known import (
    CPU,
    CUDA,
    TENSORRT,
    TENSORRT_RTX,
    short_name,
)
from enginery.runtime.providers.specification import ENVIRONMENT, ProviderSpec, parse_providers

_NVIDIA = (CUDA, TENSORRT, TENSORRT_RTX)


def check_settings(
    environment: Mapping[str, str],
    nvidia: NvidiaStatus,
    providers: Sequence[ProviderStatus],
) -> Iterator[Finding]:
    """Yield a finding for each setting that slows models down on this machine.

    Args:
        environment: environment variables, as in `os.environ`.
        nvidia: has the GPUs.
        providers: status of each execution provider.
    """
    specs: tuple[ProviderSpec, ...] = ()
    try:
        if environment.get(ENVIRONMENT, "").strip():
            specs = parse_providers(environment[ENVIRONMENT])
    except EngineryError as error:
        yield Finding(
            "error",
            f"{ENVIRONMENT} cannot be used",
            error.message,
            error.do or f"Correct it, or unset {ENVIRONMENT}.",
        )
    else:
        yield from _check_gpu(environment, specs, nvidia, providers)


def _check_gpu(
    environment: Mapping[str, str],
    specs: Sequence[ProviderSpec],
    nvidia: NvidiaStatus,
    providers: Sequence[ProviderStatus],
) -> Iterator[Finding]:
    """Report a provider that does not run here, and a GPU that no variable names."""
    by_name = {status.name: status for status in providers}
    head = specs[0].full_name if specs else CPU
    if specs and head in by_name and not by_name[head].runs:
        status = by_name[head]
        yield Finding(
            "error",
            f"{ENVIRONMENT} names {specs[0].name}, which does not run here",
            status.reason,
            status.remedy or f"Unset {ENVIRONMENT}.",
        )
    running = [short_name(name) for name in _NVIDIA if name in by_name and by_name[name].runs]
    if head == CPU and running and nvidia.gpus:
        state = f"is {environment[ENVIRONMENT]}" if specs else "is not set"
        yield Finding(
            "note",
            "there is a GPU, but models run on the CPU unless a command names it",
            f"{nvidia.gpus[0].name}, which {' and '.join(running)} can use; {ENVIRONMENT} {state}",
            f"Set {ENVIRONMENT}={running[0]}, or pass --providers {running[0]}.",
        )
