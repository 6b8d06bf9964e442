"""Notes on a benchmark, and advice where one of its ratios speaks against a choice.

A note says what limits the figures: fallbacks, missing CUDA graphs, a busy machine, unstable
warm-ups. Advice rests on a clear ratio with its interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from enginery.bench.config import BenchConfig
from enginery.reports.benchmark import (
    Advice,
    BenchCase,
    BenchResult,
    ContenderRecord,
    is_clear_ratio,
)
from enginery.runtime.providers.known import CUDA, TENSORRT, TENSORRT_RTX, full_name, short_name
from enginery.runtime.providers.selection import REQUESTED
from enginery.runtime.providers.specification import has_cuda_graphs

_BUSY = 0.5
"""Load average per CPU from which the machine counts as busy."""
_GPUS = (
    CUDA,
    TENSORRT,
    TENSORRT_RTX,
    *map(full_name, ("directml", "rocm", "migraphx", "webgpu")),
)
"""Providers that run only on GPUs. Others, such as OpenVINO, run on CPUs as well."""
_GPU_SLOWER = (
    "the GPU is slower than the CPU",
    "Run larger batches, or keep this model on the CPU. The table 'Compute on the CPU' has the "
    "operations that the GPU's provider does not run.",
)
_INT8_SLOWER = (
    "INT8 is slower than FP16",
    "Use FP16 for these shapes. Memory and kernel launches limit small batches; ONNX Runtime's "
    "CUDA provider does not fuse Q/DQ: run INT8 in TensorRT.",
)


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
        notes.append(f"warm-ups that reached a limit before the times were stable: {unsettled}")
    return notes


def fallback_notes(backends: Iterable[tuple[str, Sequence[Mapping[str, Any]]]]) -> list[str]:
    """Return a note for each fallback: `enginery, onnxruntime on cpu: cuda requested, but …`.

    Args:
        backends: each backend with the records of its providers.
    """
    names: dict[tuple[str, str], list[str]] = {}
    for name, providers in backends:
        if providers and providers[0]["reason"] != REQUESTED:
            key = (short_name(providers[0]["name"]), providers[0]["reason"])
            names.setdefault(key, []).append(name)
    return [
        f"{', '.join(who)} on {provider}: {reason}" for (provider, reason), who in names.items()
    ]


def advise(result: BenchResult) -> list[Advice]:
    """Return advice where a backend is clearly slower than one that it should be faster than.

    Each finding is reported once, for the first shape where it holds.
    """
    advice: dict[str, Advice] = {}
    for shape, comparison in result.comparisons():
        names = (comparison.contender, comparison.base)
        for slow, fast in (names, names[::-1]):
            ratio, interval = comparison.speedup_of(slow)
            is_slower = ratio < 1 and comparison.different and is_clear_ratio(ratio, interval)
            rule = _rule(result, result.contender(slow), result.contender(fast))
            if is_slower and rule:
                finding, remedy = rule
                evidence = f"{slow} compared with {fast}: {comparison.words_of(slow)}"
                advice.setdefault(finding, Advice(f"{finding} at {shape}", evidence, remedy))
    return list(advice.values())


def _rule(
    result: BenchResult, slow: ContenderRecord, fast: ContenderRecord
) -> tuple[str, str] | None:
    """Return the finding and its remedy if the first backend should be the faster one."""
    if slow.subject == fast.subject and _is_on_gpu(slow) and fast.kind == "enginery-cpu":
        return _GPU_SLOWER
    precision = {subject["name"]: subject["precision"] for subject in result.subjects}
    if slow.is_enginery and fast.is_enginery:
        precisions = (precision[slow.subject], precision[fast.subject])
        return _INT8_SLOWER if precisions == ("int8", "fp16") else None
    return None


def _is_on_gpu(record: ContenderRecord) -> bool:
    return record.is_enginery and bool(record.providers) and record.providers[0]["name"] in _GPUS
