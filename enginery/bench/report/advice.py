"""Rules that derive advice from the result of a benchmark.

A rule depends only on the result, so that it can be applied to any `benchmark.json`. A rule that
compares two times applies only if their difference is significant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from enginery.bench.config import ENGINERY
from enginery.reports.benchmark import (
    BenchCase,
    BenchResult,
    ContenderRecord,
    Measurement,
    describe_ratio,
)
from enginery.runtime.onnxruntime import session
from enginery.runtime.onnxruntime.binding import BUCKETS
from enginery.runtime.onnxruntime.session import Advice
from enginery.runtime.providers.known import CUDA, TENSORRT, TENSORRT_RTX, full_name

_GPUS = (
    CUDA,
    TENSORRT,
    TENSORRT_RTX,
    *map(full_name, ("directml", "rocm", "migraphx", "webgpu")),
)
"""Providers that run only on GPUs. Others, such as OpenVINO, run on CPUs as well."""
_MAX_PADDING = 0.3
"""Share of padding tokens above which the rule gives advice."""
_MAX_COPYING = 0.25
"""Share of copies in the time of a run above which the rule gives advice."""
_READ_LESS = (
    "and copy back only the outputs you need, such as the pooled output instead of every token's."
)
_FLAT = 1.3
"""The GPU was not busy if a larger batch takes less than this multiple of a single input's time."""


def advise(result: BenchResult) -> list[Advice]:
    """Return the advice of all rules."""
    return [advice for rule in RULES for advice in rule(result)]


def searching_convolutions(result: BenchResult) -> Iterator[Advice]:
    """Advise against cuDNN's exhaustive search, which runs again for each new shape."""
    shapes = _shapes(result)
    for record in _on_gpu(result):
        facts = _facts_of(result, record)
        search = facts.get("provider_options", {}).get(CUDA, {}).get("cudnn_conv_algo_search", "")
        if not facts.get("convolutions") or search != "EXHAUSTIVE" or shapes < 2:
            continue
        yield session.exhaustive_search(
            f"{record.name} has {facts['convolutions']} convolutions, ran {shapes} shapes, and "
            f"cudnn_conv_algo_search is EXHAUSTIVE{_first_runs(result, record.name)}"
        )


def more_shapes_than_profiles(result: BenchResult) -> Iterator[Advice]:
    """Advise to pad to the profiles: an engine is tuned for each profile's optimum only."""
    shapes = _shapes(result)
    for record in result.contenders:
        profiles = record.facts.get("profiles", [])
        if record.kind == ENGINERY and profiles and shapes > len(profiles):
            yield Advice(
                "shapes and profiles",
                "there are more shapes than profiles",
                f"{shapes} shapes ran in {len(profiles)} profiles: {'; '.join(profiles)}",
                "Pad inputs to the sizes of the profiles, or build profiles from the data: "
                "enginery build --data FILE --count N.",
            )


def more_shapes_than_buckets(result: BenchResult) -> Iterator[Advice]:
    """Advise to use fewer shapes: one without a bucket has no GPU buffers and no CUDA graph."""
    shapes = _shapes(result)
    if shapes <= BUCKETS or not result.options.get("io_binding", True):
        return
    for record in _on_gpu(result):
        if record.facts.get("profiles"):
            continue
        without = (
            "run without a CUDA graph" if _has_graph(result) else "allocate outputs on each run"
        )
        yield Advice(
            "shapes and buckets",
            "there are more shapes than buckets of buffers on the GPU",
            f"{record.name} ran {shapes} shapes; by default a runner keeps {BUCKETS}, and the "
            f"others {without}",
            f"Pad inputs to at most {BUCKETS} sizes, or keep more buckets, which takes more GPU "
            f"memory: OrtRunner(…, RunnerOptions(buckets={shapes})).",
        )


def launches_dominate(result: BenchResult) -> Iterator[Advice]:
    """Advise CUDA graphs or batching if several inputs take about as long as one."""
    for record in _on_gpu(result):
        if record.kind != ENGINERY:
            continue
        for single, several in _batches(result, record.name):
            ratio = several[1].latency.median_ms / single[1].latency.median_ms
            if several[0].rows >= 4 and ratio < _FLAT:
                captured = _has_graph(result) and not single[1].notes
                yield Advice(
                    "launches",
                    "at batch 1 the GPU is not busy, even with a CUDA graph"
                    if captured
                    else "at batch 1 the GPU waits for kernel launches",
                    f"{record.name}: {single[1].latency.median_ms:.2f} ms for 1 input, "
                    f"{several[1].latency.median_ms:.2f} ms for {several[0].rows}",
                    "Batch requests together."
                    if captured
                    else "Capture a CUDA graph (--cuda-graph; each shape has its own), or batch "
                    "requests together.",
                )
                break


def copies_dominate(result: BenchResult) -> Iterator[Advice]:
    """Advise to keep tensors on the GPU if copies take a large share of the time."""
    for case in result.cases:
        for measurement in case.measurements:
            if measurement.copies and measurement.copies["share"] > _MAX_COPYING:
                copies = measurement.copies
                unbound = result.contender(measurement.contender).kind == "onnxruntime"
                suffix = ", a session without binding," if unbound else ""
                yield Advice(
                    "host copies",
                    "copies between host and GPU take a large share of the time",
                    f"{measurement.contender}{suffix} at {_describe(case)}: "
                    f"{copies['in_ms']:.2f} ms in, {copies['out_ms']:.2f} ms out, "
                    f"{copies['device_ms']:.2f} ms on the GPU",
                    "enginery's runner already binds inputs and outputs. Keep tensors on the GPU "
                    f"from one model to the next (OrtRunner.run_on_device), {_READ_LESS}"
                    if result.options.get("io_binding", True)
                    else "Bind inputs and outputs to the GPU (leave --no-io-binding out), "
                    f"{_READ_LESS}",
                )
                return


def gpu_slower_than_cpu(result: BenchResult) -> Iterator[Advice]:
    """Report that the CPU is faster than the GPU, with possible reasons from the result."""
    comparisons = [(_describe(case), c) for case in result.cases for c in case.comparisons]
    if result.images:
        comparisons += [("all images", c) for c in result.images.comparisons]
    for where, comparison in comparisons:
        pair = [result.contender(name) for name in (comparison.contender, comparison.base)]
        if len({record.subject for record in pair}) > 1:
            continue
        gpu = next((r for r in pair if r.kind == ENGINERY and _is_gpu(r)), None)
        cpu = next((r for r in pair if r.kind == "enginery-cpu"), None)
        gpu_is_faster = (comparison.speedup > 1) == (gpu is pair[0])
        if gpu is None or cpu is None or not comparison.different or gpu_is_faster:
            continue
        yield Advice(
            "GPU slower than CPU",
            f"the GPU is slower than the CPU at {where}",
            f"the CPU is {describe_ratio(*comparison.speedup_of(cpu.name))} as fast; "
            + ("; ".join(_why_slow(result, gpu)) or "the result shows no reason"),
            "Fix the causes that are listed, run larger batches, or keep this model on the CPU.",
        )
        return


def int8_slower_than_fp16(result: BenchResult) -> Iterator[Advice]:
    """Advise FP16 where INT8 is slower."""
    precision = {subject["name"]: subject["precision"] for subject in result.subjects}
    for case in result.cases:
        for comparison in case.comparisons:
            pair = [result.contender(name) for name in (comparison.contender, comparison.base)]
            kinds = [precision[record.subject] for record in pair]
            if [record.kind for record in pair] != [ENGINERY, ENGINERY] or set(kinds) != {
                "int8",
                "fp16",
            }:
                continue
            int8_speedup = comparison.speedup_of(pair[kinds.index("int8")].name)
            if int8_speedup[0] < 1 and comparison.different:
                yield Advice(
                    "INT8 slower than FP16",
                    f"INT8 is slower than FP16 at {_describe(case)}",
                    f"INT8 is {describe_ratio(*int8_speedup)} as fast as FP16",
                    "Use FP16 for these shapes. Memory and kernel launches limit small batches; "
                    "ONNX Runtime's CUDA provider does not fuse Q/DQ: run INT8 in TensorRT.",
                )
                return


def much_padding(result: BenchResult) -> Iterator[Advice]:
    """Advise to batch texts of similar length if a large share of the tokens is padding."""
    worst = max(result.padding, key=lambda padding: padding.in_order, default=None)
    if worst and worst.in_order > _MAX_PADDING:
        yield Advice(
            "padding",
            f"{worst.in_order:.0%} of the tokens are padding",
            f"texts in file order at batch {worst.batch}; sorted by length: {worst.sorted:.0%}",
            "Batch texts of similar length, as load_model, predict and serve do, and build "
            "profiles from the lengths: enginery build --data FILE.",
        )


def too_many_threads(result: BenchResult) -> Iterator[Advice]:
    """Advise at most one thread per core: two threads of a core share its arithmetic units."""
    threads = int(result.options.get("threads", 0))
    cores = int(result.machine.get("physical_cores", 0))
    advice = session.too_many_threads(
        threads,
        cores,
        evidence=f"{threads} threads on {cores} cores",
        remedy=f"Pass --threads {cores}, or 0 for ONNX Runtime's default.",
    )
    if advice:
        yield advice


RULES: tuple[Callable[[BenchResult], Iterator[Advice]], ...] = (
    gpu_slower_than_cpu,
    searching_convolutions,
    more_shapes_than_profiles,
    more_shapes_than_buckets,
    launches_dominate,
    copies_dominate,
    int8_slower_than_fp16,
    much_padding,
    too_many_threads,
)


def _why_slow(result: BenchResult, gpu: ContenderRecord) -> Iterator[str]:
    """Return the reasons in the result for which a GPU may be slow."""
    for rule in (searching_convolutions, launches_dominate, copies_dominate):
        yield from (advice.evidence for advice in rule(result))
    fallen = gpu.placement["fallen"] if gpu.placement else []
    if fallen:
        named = ", ".join(f"{node['name'] or 'unnamed'} ({node['op_type']})" for node in fallen[:3])
        yield f"{len(fallen)} operations run on the CPU instead: {named}"


def _is_gpu(record: ContenderRecord) -> bool:
    return bool(record.providers) and record.providers[0]["name"] in _GPUS


def _on_gpu(result: BenchResult) -> list[ContenderRecord]:
    return [record for record in result.contenders if _is_gpu(record) and record.kind == ENGINERY]


def _has_graph(result: BenchResult) -> bool:
    return bool(result.options.get("cuda_graph", False))


def _facts_of(result: BenchResult, record: ContenderRecord) -> dict[str, Any]:
    """Return a backend's facts; the provider options come from the same model's plain session."""
    facts: dict[str, Any] = {}
    for other in result.contenders:
        if other.subject == record.subject and other.kind in ("onnxruntime", ENGINERY):
            facts |= other.facts
    return facts | record.facts


def _shapes(result: BenchResult) -> int:
    return result.images.shapes if result.images else len(result.cases)


def _first_runs(result: BenchResult, name: str) -> str:
    """Return the times of the first pass and later passes over the images; empty without images."""
    if not result.images or name not in result.images.totals:
        return ""
    first, again = result.images.first_total_ms[name], result.images.totals[name].median_ms
    return f"; the first pass over the images took {first:.0f} ms, later ones {again:.0f} ms"


Point = tuple[BenchCase, Measurement]


def _batches(result: BenchResult, name: str) -> Iterator[tuple[Point, Point]]:
    """Return pairs of a case with one row and a case that differs only in having more rows."""
    points: list[Point] = [
        (case, measurement)
        for case in result.cases
        for measurement in case.measurements
        if measurement.contender == name
    ]
    for single in points:
        for several in points:
            other_sizes = [
                {k: v for k, v in p[0].sizes.items() if k != "batch"} for p in (single, several)
            ]
            if single[0].rows == 1 and several[0].rows > 1 and other_sizes[0] == other_sizes[1]:
                yield single, several


def _describe(case: BenchCase) -> str:
    return ", ".join(f"{name} {size}" for name, size in case.sizes.items()) or "fixed shapes"
