"""Which execution providers a session is given, in order, each with its reason.

    >>> choose_providers(parse_providers("cuda,cpu"), allow_fallback=True)
    [Provider('CPUExecutionProvider', reason='cuda requested, but libcudart.so.13 was not found')]

Strict by default: the first requested provider is had, or the error says why not and what to
install. A request for the CPU alone probes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from enginery.core.errors import ProviderError
from enginery.runtime.providers.availability import provider_warning, unavailable_reason
from enginery.runtime.providers.known import CPU, CUDA, TENSORRT, TENSORRT_RTX, short_name
from enginery.runtime.providers.specification import Providers, parse_providers

REQUESTED = "requested"
"""The reason of a provider that is simply the one that was requested."""


@dataclass(frozen=True)
class Provider:
    """One execution provider of a session, and why it is there."""

    name: str
    reason: str
    options: dict[str, str] = field(default_factory=dict)


def choose_providers(requested: Providers, *, allow_fallback: bool = False) -> list[Provider]:
    """Return what a session is given, in ONNX Runtime's order of preference.

    The requested provider leads. CUDA follows classic TensorRT where it is named too, or where
    nothing but TensorRT is. The CPU ends every list: ONNX Runtime adds it anyway.

    Args:
        requested: names, or specifications with their options; the first is meant, the others are
            for fallback and take what it leaves over.
        allow_fallback: take the first that can be had, and say what was not.

    Raises:
        ProviderError: a name is unknown, or the provider cannot be had.
        OptionError: an option does not fit its provider.
    """
    options = {spec.full_name: spec.options for spec in parse_providers(requested)}
    refused: dict[str, list[str]] = {}
    remedies: list[str] = []
    for name, given in options.items():
        unavailable = unavailable_reason(name, given)
        if unavailable is None:
            reason = _refusals(refused) or REQUESTED
            warning = provider_warning(name)
            head = Provider(name, f"{reason}; {warning}" if warning else reason, given)
            return [head, *_beneath(name, options)]
        refused.setdefault(unavailable.reason, []).append(short_name(name))
        remedies.append(unavailable.do)
        if not allow_fallback:
            break
    rest = "" if allow_fallback or len(options) == 1 else " Or pass --allow-fallback."
    raise ProviderError(f"{_refusals(refused)}.", do=remedies[0] + rest)


def _refusals(refused: Mapping[str, list[str]]) -> str:
    """Return `tensorrt and cuda requested, but …`, from the providers that each reason is for."""
    return "; ".join(f"{' and '.join(n)} requested, but {why}" for why, n in refused.items())


def _beneath(head: str, options: Mapping[str, dict[str, str]]) -> list[Provider]:
    """Return who takes the nodes that `head` leaves over; `options` are all requested ones'."""
    if head == CPU:
        return []
    below = []
    missed = ""
    # Beside a plugin's devices, as TensorRT for RTX has them, a session takes no other names.
    if head == TENSORRT and (CUDA in options or len(options) == 1):
        # Both have to be on one GPU: tensors pass between them.
        device = {k: v for k, v in options[head].items() if k == "device_id"}
        wanted = {**device, **options.get(CUDA, {})}
        unavailable = unavailable_reason(CUDA, wanted)
        if unavailable is None:
            below.append(Provider(CUDA, f"operations that {short_name(head)} leaves over", wanted))
        else:
            missed = f"; cuda is not beneath it: {unavailable.reason}"
    if head in (CUDA, TENSORRT, TENSORRT_RTX):
        lowest = "CUDA" if head == CUDA or below else short_name(head)
        return [*below, Provider(CPU, f"shape operations that {lowest} leaves to the CPU{missed}")]
    return [Provider(CPU, f"operations that {short_name(head)} leaves over")]
