"""Choose the execution providers of a session, in order, each with its reason.

    choose_providers(parse_providers("cuda,cpu"), allow_fallback=True)
    # [Provider('CPUExecutionProvider', reason='cuda requested, but libcudart.so.13 was not found')]

By default this is strict: if the first requested provider is unavailable, an error says why and
what to install. Requesting only the CPU checks nothing.

>>> [provider.name for provider in choose_providers("cpu")]
['CPUExecutionProvider']
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from enginery.core.errors import ProviderError
from enginery.runtime.providers.availability import provider_warning, unavailable_reason
from enginery.runtime.providers.known import CPU, CUDA, TENSORRT, TENSORRT_RTX, short_name
from enginery.runtime.providers.specification import Providers, parse_providers

REQUESTED = "requested"
"""Reason of the requested provider."""
_CONVOLUTION_SEARCH = "cudnn_conv_algo_search"


@dataclass(frozen=True)
class Provider:
    """An execution provider of a session, and the reason why it is used."""

    name: str
    reason: str
    options: dict[str, str] = field(default_factory=dict)


def choose_providers(requested: Providers, *, allow_fallback: bool = False) -> list[Provider]:
    """Return the providers of a session, in order of preference.

    The requested provider comes first. After classic TensorRT comes CUDA, if it was also requested
    or if only TensorRT was. The CPU is always last, because ONNX Runtime adds it anyway.

    Args:
        requested: names, or specifications with options. The first one is requested, the others
            are used for fallback and for operations that the first one does not support.
        allow_fallback: use the first available provider; its reason says what was unavailable.

    Raises:
        ProviderError: a name is unknown, or the provider is unavailable.
        OptionError: an option of a provider is invalid.
    """
    options = {spec.full_name: spec.options for spec in parse_providers(requested)}
    refused: dict[str, list[str]] = {}
    remedies: list[str] = []
    for name, provider_options in options.items():
        unavailable = unavailable_reason(name, provider_options)
        if unavailable is None:
            reason = _refusals(refused) or REQUESTED
            warning = provider_warning(name)
            head = Provider(name, f"{reason}; {warning}" if warning else reason, provider_options)
            return [head, *_fallback_providers(name, options)]
        # Two providers may lack the same library, which is reported once.
        refused.setdefault(unavailable.reason, []).append(short_name(name))
        remedies.append(unavailable.do)
        # Strict: the reason is that of the first provider alone.
        if not allow_fallback:
            break
    alternative = "" if allow_fallback or len(options) == 1 else " Or pass --allow-fallback."
    raise ProviderError(f"{_refusals(refused)}.", do=remedies[0] + alternative)


def with_dynamic_shapes(providers: Sequence[Provider], *, dynamic: bool) -> list[Provider]:
    """Return the providers of a session with CUDA's defaults for a graph with dynamic dims.

    By default cuDNN times all algorithms of a convolution at each new shape, for up to half a
    second. Options that the user has set are unchanged.

    >>> cuda = Provider("CUDAExecutionProvider", "requested")
    >>> with_dynamic_shapes([cuda], dynamic=True)[0].options
    {'cudnn_conv_algo_search': 'HEURISTIC'}
    """
    if not dynamic:
        return list(providers)
    return [
        replace(provider, options={_CONVOLUTION_SEARCH: "HEURISTIC", **provider.options})
        if provider.name == CUDA
        else provider
        for provider in providers
    ]


def _refusals(refused: Mapping[str, list[str]]) -> str:
    """Describe unavailable providers: `tensorrt and cuda requested, but …`."""
    return "; ".join(f"{' and '.join(n)} requested, but {why}" for why, n in refused.items())


def _fallback_providers(head: str, options: Mapping[str, dict[str, str]]) -> list[Provider]:
    """Return the providers for nodes that `head` does not support; `options` has all requested."""
    if head == CPU:
        return []
    fallbacks = []
    missed = ""
    # With a plugin such as TensorRT for RTX, a session accepts no other providers.
    if head == TENSORRT and (CUDA in options or len(options) == 1):
        # Both must use the same GPU, because they exchange tensors.
        device = {k: v for k, v in options[head].items() if k == "device_id"}
        cuda_options = {**device, **options.get(CUDA, {})}
        unavailable = unavailable_reason(CUDA, cuda_options)
        if unavailable is None:
            fallbacks.append(
                Provider(CUDA, f"operations that {short_name(head)} does not support", cuda_options)
            )
        else:
            missed = f"; cuda is unavailable: {unavailable.reason}"
    reason = f"operations that {short_name(head)} does not support"
    if head in (CUDA, TENSORRT, TENSORRT_RTX):
        lowest = "CUDA" if head == CUDA or fallbacks else short_name(head)
        reason = f"shape operations that {lowest} leaves to the CPU{missed}"
    return [*fallbacks, Provider(CPU, reason, options.get(CPU, {}))]
