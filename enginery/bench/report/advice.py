"""What a measurement suggests: each rule looks at the result, and says what it saw and what to do.

>>> [advice.rule for advice in advise(result)]
['threads', 'padding']

A rule is a function of the result alone, so that it can be asked again of any `benchmark.json`.
Where two times have to differ for it, they must differ beyond the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from enginery.bench.config import OURS
from enginery.core.artifact.reports import (
    Advice,
    BenchCase,
    BenchResult,
    ContenderRecord,
    Measurement,
)
from enginery.runtime.onnxruntime import session
from enginery.runtime.onnxruntime.binding import BUCKETS
from enginery.runtime.providers.known import CUDA, TENSORRT, TENSORRT_RTX, full_name

_GPUS = (
    CUDA,
    TENSORRT,
    TENSORRT_RTX,
    *map(full_name, ("directml", "rocm", "migraphx", "webgpu")),
)
"""Providers of GPUs alone; OpenVINO, for one, runs on CPUs too."""
_MUCH_PADDING = 0.3
_MUCH_COPYING = 0.25
_READ_LESS = "and copy back only what is read: the pooled output instead of every token's."
_FLAT = 1.3
"""A batch several times as large that takes up to so many times as long was not computing."""


def advise(result: BenchResult) -> list[Advice]:
    """Every rule's findings, in the order of the rules."""
    return [advice for rule in RULES for advice in rule(result)]


def searching_convolutions(result: BenchResult) -> Iterator[Advice]:
    """Each new shape makes cuDNN search for its convolutions' kernels again."""
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
    """An engine is tuned for the optimum of each profile, and for nothing else."""
    shapes = _shapes(result)
    for record in result.contenders:
        profiles = record.facts.get("profiles", [])
        if record.kind == OURS and profiles and shapes > len(profiles):
            yield Advice(
                "shapes and profiles",
                "there are more shapes than profiles",
                f"{shapes} shapes ran in {len(profiles)} profiles: {'; '.join(profiles)}",
                "Pad to the profiles' own sizes, or build profiles from the data: "
                "enginery build --profiles-from FILE --count N.",
            )


def more_shapes_than_buckets(result: BenchResult) -> Iterator[Advice]:
    """A shape beyond the buckets allocates its outputs anew, and has no CUDA graph."""
    shapes = _shapes(result)
    if shapes <= BUCKETS or not result.options.get("io_binding", True):
        return
    for record in _on_gpu(result):
        if record.facts.get("profiles"):
            continue
        without = (
            "run without a CUDA graph" if _has_graph(result) else "allocate their outputs anew"
        )
        yield Advice(
            "shapes and buckets",
            "there are more shapes than buckets of buffers on the GPU",
            f"{record.name} ran {shapes} shapes; unless it is told otherwise a runner keeps "
            f"{BUCKETS}, and others {without}",
            f"Pad to at most {BUCKETS} sizes, or keep more, for more of the GPU's memory: "
            f"OrtRunner(…, buckets={shapes}).",
        )


def launches_dominate(result: BenchResult) -> Iterator[Advice]:
    """A GPU that takes as long for one input as for several waits for its launches."""
    for record in _on_gpu(result):
        if record.kind != OURS:
            continue
        for one, several in _batches(result, record.name):
            ratio = several[1].latency.median_ms / one[1].latency.median_ms
            if several[0].rows >= 4 and ratio < _FLAT:
                recorded = _has_graph(result) and not one[1].notes
                yield Advice(
                    "launches",
                    "at batch 1 the GPU is not busy, with its CUDA graph"
                    if recorded
                    else "at batch 1 the GPU waits for kernel launches",
                    f"{record.name}: {one[1].latency.median_ms:.2f} ms for 1 input, "
                    f"{several[1].latency.median_ms:.2f} ms for {several[0].rows}",
                    "Batch requests together."
                    if recorded
                    else "Record a CUDA graph (--cuda-graph; each shape has its own), or batch "
                    "requests together.",
                )
                break


def copies_dominate(result: BenchResult) -> Iterator[Advice]:
    """Inputs and outputs go through the host's memory although nobody needs them there."""
    for case in result.cases:
        for found in case.measurements:
            if found.copies and found.copies["share"] > _MUCH_COPYING:
                copies = found.copies
                bare = result.contender(found.contender).kind == "onnxruntime"
                whose = ", a session without binding," if bare else ""
                yield Advice(
                    "host copies",
                    "copies between host and GPU take a large part of the time",
                    f"{found.contender}{whose} at {_named(case)}: {copies['in_ms']:.2f} ms in, "
                    f"{copies['out_ms']:.2f} ms out, {copies['device_ms']:.2f} ms on the GPU",
                    "Inputs and outputs of our runner are bound already. Keep tensors on the GPU "
                    f"from one model to the next (OrtRunner.run_on_device), {_READ_LESS}"
                    if result.options.get("io_binding", True)
                    else "Bind inputs and outputs to the GPU (IOBinding: leave --no-io-binding "
                    f"out), {_READ_LESS}",
                )
                return


def gpu_slower_than_cpu(result: BenchResult) -> Iterator[Advice]:
    """The CPU beats the GPU, and what of the result may be why."""
    comparisons = [(_named(case), c) for case in result.cases for c in case.comparisons]
    if result.images:
        comparisons += [("all images", c) for c in result.images.comparisons]
    for where, found in comparisons:
        pair = [result.contender(name) for name in (found.contender, found.base)]
        if len({record.subject for record in pair}) > 1:
            continue
        gpu = next((r for r in pair if r.kind == OURS and _is_gpu(r)), None)
        cpu = next((r for r in pair if r.kind == "enginery-cpu"), None)
        gpu_is_faster = (found.speedup > 1) == (gpu is pair[0])
        if gpu is None or cpu is None or not found.different or gpu_is_faster:
            continue
        times = found.speedup if cpu is pair[0] else 1 / found.speedup
        yield Advice(
            "GPU slower than CPU",
            f"the GPU is slower than the CPU at {where}",
            f"the CPU is {times:.2f} times as fast; "
            + ("; ".join(_why_slow(result, gpu)) or "nothing in the result says why"),
            "Mend what is named; else run batches, or keep this model on the CPU.",
        )
        return


def int8_slower_than_fp16(result: BenchResult) -> Iterator[Advice]:
    """INT8 is for speed; where it brings none, it only costs accuracy."""
    precision = {subject["name"]: subject["precision"] for subject in result.subjects}
    for case in result.cases:
        for found in case.comparisons:
            pair = [result.contender(name) for name in (found.contender, found.base)]
            kinds = [precision[record.subject] for record in pair]
            if [record.kind for record in pair] != [OURS, OURS] or set(kinds) != {"int8", "fp16"}:
                continue
            int8_speedup = found.speedup if kinds[0] == "int8" else 1 / found.speedup
            if int8_speedup < 1 and found.different:
                yield Advice(
                    "INT8 slower than FP16",
                    f"INT8 is slower than FP16 at {_named(case)}",
                    f"INT8 is {int8_speedup:.2f} times as fast as FP16",
                    "Ship FP16 for these shapes. Small batches are bound by memory and launches; "
                    "on ONNX Runtime's CUDA provider, Q/DQ is not fused: run INT8 in TensorRT.",
                )
                return


def much_padding(result: BenchResult) -> Iterator[Advice]:
    """Padding is computed like anything else."""
    worst = max(result.padding, key=lambda found: found.in_order, default=None)
    if worst and worst.in_order > _MUCH_PADDING:
        yield Advice(
            "padding",
            f"{worst.in_order:.0%} of the tokens are padding",
            f"texts in the file's order at batch {worst.batch}; sorted by length it is "
            f"{worst.sorted:.0%}",
            "Batch texts of like length (the package's own text models do), and build profiles "
            "from the lengths: enginery build --profiles-from FILE.",
        )


def too_many_threads(result: BenchResult) -> Iterator[Advice]:
    """Two threads of one core share its arithmetic units."""
    threads = int(result.options.get("threads", 0))
    cores = int(result.machine.get("physical_cores", 0))
    found = session.too_many_threads(
        threads,
        cores,
        evidence=f"{threads} threads on {cores} cores",
        remedy=f"Pass --threads {cores}, or 0 for ONNX Runtime's own choice.",
    )
    if found:
        yield found


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
    """What of the result slows a GPU."""
    for rule in (searching_convolutions, launches_dominate, copies_dominate):
        yield from (advice.evidence for advice in rule(result))
    fallen = gpu.placement["fallen"] if gpu.placement else []
    if fallen:
        named = ", ".join(f"{node['name'] or 'unnamed'} ({node['op_type']})" for node in fallen[:3])
        yield f"{len(fallen)} operations run on the CPU under it: {named}"


def _is_gpu(record: ContenderRecord) -> bool:
    return bool(record.providers) and record.providers[0]["name"] in _GPUS


def _on_gpu(result: BenchResult) -> list[ContenderRecord]:
    return [record for record in result.contenders if _is_gpu(record) and record.kind == OURS]


def _has_graph(result: BenchResult) -> bool:
    return bool(result.options.get("cuda_graph", False))


def _facts_of(result: BenchResult, record: ContenderRecord) -> dict[str, Any]:
    """What is known of a record's session; the bare one of the same model tells its options."""
    found: dict[str, Any] = {}
    for other in result.contenders:
        if other.subject == record.subject and other.kind in ("onnxruntime", OURS):
            found |= other.facts
    return found | record.facts


def _shapes(result: BenchResult) -> int:
    return result.images.shapes if result.images else len(result.cases)


def _first_runs(result: BenchResult, name: str) -> str:
    """Where images were run: how much longer the first pass took."""
    if not result.images or name not in result.images.totals:
        return ""
    first, again = result.images.first_total_ms[name], result.images.totals[name].median_ms
    return f"; the first pass over the images took {first:.0f} ms, later ones {again:.0f} ms"


Point = tuple[BenchCase, Measurement]


def _batches(result: BenchResult, name: str) -> Iterator[tuple[Point, Point]]:
    """A case of one row and one of several that is the same else."""
    points: list[Point] = [
        (case, found)
        for case in result.cases
        for found in case.measurements
        if found.contender == name
    ]
    for one in points:
        for several in points:
            others = [{k: v for k, v in p[0].sizes.items() if k != "batch"} for p in (one, several)]
            if one[0].rows == 1 and several[0].rows > 1 and others[0] == others[1]:
                yield one, several


def _named(case: BenchCase) -> str:
    return ", ".join(f"{name} {size}" for name, size in case.sizes.items()) or "fixed shapes"
