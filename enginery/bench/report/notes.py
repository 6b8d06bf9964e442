"""What a reader of a bench has to know beside its figures, in sentences.

>>> stage_notes(machine, cases, contenders, BenchConfig())
['the machine was busy before: a load of 3.1 on 4 CPUs; ratios hold better than times']
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from enginery.bench.config import OURS, BenchConfig
from enginery.core.artifact.reports import BenchCase, ContenderRecord
from enginery.runtime.providers.known import short_name
from enginery.runtime.providers.selection import REQUESTED
from enginery.runtime.providers.specification import has_cuda_graphs

_REQUESTED = (REQUESTED, "asked for")
"""The reason of a provider that is no fallback; the second is in reports of version 0.1.0."""
_BUSY = 0.5
"""Processes a CPU that wanted to run before anything was measured."""


def stage_notes(
    machine: Mapping[str, Any],
    cases: Sequence[BenchCase],
    contenders: Sequence[ContenderRecord],
    config: BenchConfig,
) -> list[str]:
    """Providers that are there for a reason, ways of running that were not had, a busy machine."""
    notes = fallback_notes([(record.name, record.providers) for record in contenders])
    heads = {r.providers[0]["name"] for r in contenders if r.kind == OURS and r.providers}
    without = sorted(short_name(name) for name in heads if not has_cuda_graphs(name))
    if config.cuda_graph and without:
        notes.append(f"no CUDA graph was recorded: {', '.join(without)} has none")
    load, cpus = machine["load"], machine["usable_cpus"]
    if load is not None and load > _BUSY * cpus:
        notes.append(
            f"the machine was busy before: a load of {load:.1f} on {cpus} CPUs; ratios hold "
            "better than times"
        )
    unsettled = sum(not m.settled for case in cases for m in case.measurements)
    if unsettled:
        notes.append(f"{unsettled} warm-ups ended by their bounds before the times had settled")
    return notes


def fallback_notes(found: Iterable[tuple[str, Sequence[Mapping[str, Any]]]]) -> list[str]:
    """`enginery, onnxruntime on cpu: cuda requested, but …`, for fallbacks.

    Args:
        found: each contender with its providers, as a result has them.
    """
    names: dict[tuple[str, str], list[str]] = {}
    for name, providers in found:
        if providers and providers[0]["reason"] not in _REQUESTED:
            key = (short_name(providers[0]["name"]), providers[0]["reason"])
            names.setdefault(key, []).append(name)
    return [
        f"{', '.join(who)} on {provider}: {reason}" for (provider, reason), who in names.items()
    ]


def is_overloaded(machine: Mapping[str, Any]) -> bool:
    """Whether more wanted to run before the bench than there are CPUs."""
    load = machine["load"]
    return load is not None and bool(load > machine["usable_cpus"])
