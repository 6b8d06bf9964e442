"""Execution providers: an ordered wish in, what ONNX Runtime is given out, each with its reason.

    >>> choose_providers(parse_wishes("cuda,cpu"), allow_fallback=True)
    [Provider('CPUExecutionProvider', reason='cuda asked for, but libcudart.so.13 was not found')]

Strict by default: the first wish is had, or the error says why not and what to install. A wish for
the CPU alone probes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from enginery.core.errors import ProviderError
from enginery.runtime.providers.availability import (
    Obstacle,
    find_caveat,
    find_device_obstacle,
    find_obstacle,
    register_plugin,
)
from enginery.runtime.providers.names import (
    CPU,
    CUDA,
    TENSORRT,
    TENSORRT_RTX,
    full_name,
    parse_providers,
    short_name,
)
from enginery.runtime.providers.specification import ProviderWish, parse_wishes

__all__ = [
    "Provider",
    "ProviderWish",
    "choose_providers",
    "full_name",
    "parse_providers",
    "parse_wishes",
    "register_plugin",
    "short_name",
]


@dataclass(frozen=True)
class Provider:
    """One execution provider of a session, and why it is there."""

    name: str
    reason: str
    options: dict[str, str] = field(default_factory=dict)


def choose_providers(
    wish: Sequence[str | ProviderWish], *, allow_fallback: bool = False
) -> list[Provider]:
    """What a session is given, in ONNX Runtime's order of preference.

    The provider that was asked for leads. CUDA follows classic TensorRT where the wish names it, or
    names nothing but TensorRT. The CPU ends every list: ONNX Runtime adds it anyway, so it is said.

    Args:
        wish: names, or wishes with their options; the first is meant, the others are for fallback
            and take what it leaves over.
        allow_fallback: take the first of the wish that can be had, and say what was not.

    Raises:
        ProviderError: a name is unknown, or the provider cannot be had.
        OptionError: an option of a wish does not fit its provider.
    """
    given = wish if isinstance(wish, str) else tuple(wish)
    options = {wished.full_name: wished.options for wished in parse_wishes(given)}
    names = list(options)
    refused: dict[str, list[str]] = {}
    remedies: list[str] = []
    for name in names:
        obstacle = _obstacle(name, options[name])
        if obstacle is None:
            caveat = find_caveat(name)
            reason = _refusals(refused) or "asked for"
            head = Provider(name, f"{reason}; {caveat}" if caveat else reason, options[name])
            return [head, *_beneath(name, options)]
        refused.setdefault(obstacle.reason, []).append(short_name(name))
        remedies.append(obstacle.do)
        if not allow_fallback:
            break
    rest = "" if allow_fallback or len(names) == 1 else " Or pass --allow-fallback."
    raise ProviderError(f"{_refusals(refused)}.", do=remedies[0] + rest)


def _obstacle(name: str, options: Mapping[str, str]) -> Obstacle | None:
    return find_obstacle(name) or find_device_obstacle(name, options)


def _refusals(refused: Mapping[str, Sequence[str]]) -> str:
    """`tensorrt and cuda asked for, but …`, for the providers that each reason stands against."""
    return "; ".join(f"{' and '.join(n)} asked for, but {why}" for why, n in refused.items())


def _beneath(head: str, options: Mapping[str, dict[str, str]]) -> list[Provider]:
    """Who takes the nodes that `head` leaves over; `options` are those of all that are named."""
    if head == CPU:
        return []
    below = []
    missed = ""
    # Beside a plugin's devices, as TensorRT for RTX has them, a session takes no other names.
    if head == TENSORRT and (CUDA in options or len(options) == 1):
        # Both have to be on one GPU: tensors pass between them.
        device = {k: v for k, v in options[head].items() if k == "device_id"}
        wanted = {**device, **options.get(CUDA, {})}
        obstacle = _obstacle(CUDA, wanted)
        if obstacle is None:
            below.append(Provider(CUDA, f"operations that {short_name(head)} leaves over", wanted))
        else:
            missed = f"; cuda is not beneath it: {obstacle.reason}"
    if head in (CUDA, TENSORRT, TENSORRT_RTX):
        lowest = "CUDA" if head == CUDA or below else short_name(head)
        return [*below, Provider(CPU, f"shape operations that {lowest} leaves to the CPU{missed}")]
    return [Provider(CPU, f"operations that {short_name(head)} leaves over")]
