"""Notes on a benchmark: fallbacks, missing CUDA graphs, a busy machine, unstable warm-ups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from enginery.bench.config import BenchConfig
from enginery.reports.benchmark import BenchCase, ContenderRecord
from enginery.runtime.providers.known import short_name
from enginery.runtime.providers.selection import REQUESTED
from enginery.runtime.providers.specification import has_cuda_graphs

_REQUESTED = (REQUESTED, "asked for")
"""The reason of a requested provider; reports of version 0.1.0 have the second."""
_BUSY = 0.5
"""Load average per CPU from which the machine counts as busy."""


def stage_notes(
    machine: Mapping[str, Any],
    cases: Sequence[BenchCase],
    backends: Sequence[ContenderRecord],
    config: BenchConfig,
) -> list[str]:
    """Return the notes on a benchmark.

    Args:
        machine: the machine, from `describe_machine`.
        cases: the measured shapes.
        backends: the records of the backends.
        config: the options.
    """
    notes = fallback_notes([(record.name, record.providers) for record in backends])
    heads = {r.providers[0]["name"] for r in backends if r.is_enginery and r.providers}
    without = sorted(short_name(name) for name in heads if not has_cuda_graphs(name))
    if config.cuda_graph and without:
        notes.append(f"no CUDA graph was captured: {', '.join(without)} does not support them")
    load, cpus = machine["load"], machine["usable_cpus"]
    if load is not None and load > _BUSY * cpus:
        notes.append(
            f"the machine was busy before the measurement: load {load:.1f} on {cpus} CPUs; ratios "
            "are more reliable than times"
        )
    unsettled = sum(not m.settled for case in cases for m in case.measurements)
    if unsettled:
        notes.append(f"{unsettled} warm-ups reached a limit before the times were stable")
    return notes


def fallback_notes(backends: Iterable[tuple[str, Sequence[Mapping[str, Any]]]]) -> list[str]:
    """Return a note for each fallback: `enginery, onnxruntime on cpu: cuda requested, but …`.

    Args:
        backends: each backend with the records of its providers.
    """
    names: dict[tuple[str, str], list[str]] = {}
    for name, providers in backends:
        if providers and providers[0]["reason"] not in _REQUESTED:
            key = (short_name(providers[0]["name"]), providers[0]["reason"])
            names.setdefault(key, []).append(name)
    return [
        f"{', '.join(who)} on {provider}: {reason}" for (provider, reason), who in names.items()
    ]
