"""Compare the GPU with the CPU: the time of one phrase, as "Deep Learning in Rust" has it.

The CPU runs the exported FP32 graph as ONNX Runtime has optimized it for this processor, with a
thread per core. The GPU runs the same graph, and FP16 in the fastest ways. Inputs are real tokens.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from benchmarks.gpu_check.inputs import text_feeds
from benchmarks.gpu_check.settings import Point
from benchmarks.gpu_check.variants import Variant, measure, say_medians
from benchmarks.gpu_check.work import Work
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions

CPU, GPU_FP32, GPU_FP16, GPU_GRAPH = "CPU FP32", "GPU FP32", "GPU FP16", "GPU FP16, CUDA graph"


def run(work: Work) -> None:
    """Measure every shape."""
    for point in work.settings.speedup:
        work.case(f"{point[0]}×{point[1]}", partial(_measure, work, point), seconds=5.0)


def _measure(work: Work, point: Point) -> None:
    onnx = work.artifact("onnx")
    feeds = text_feeds(onnx, point)
    with ExitStack() as stack:
        runners = {CPU: stack.enter_context(OrtRunner(onnx, RunnerOptions(keep_optimized=True)))}
        if work.on_gpu:
            fp16 = work.artifact("fp16")
            for name, artifact, graph in (
                (GPU_FP32, onnx, False),
                (GPU_FP16, fp16, False),
                (GPU_GRAPH, fp16, True),
            ):
                runner = OrtRunner(artifact, RunnerOptions(cuda_graph=graph), providers=["cuda"])
                runners[name] = stack.enter_context(runner)
        variants = [Variant(name, "host", partial(run, feeds)) for name, run in runners.items()]
        found = measure(work, variants, {})
    medians = {name: one["median_ms"] for name, one in found["latency"].items()}
    fastest = min(medians, key=lambda name: medians[name])
    speedup = medians[f"{CPU}, host"] / medians[fastest] if work.on_gpu else None
    work.add(
        "speedups",
        {
            "model": work.model,
            "batch": point[0],
            "sequence": point[1],
            "latency": found["latency"],
            "fastest": fastest,
            "speedup": speedup,
        },
    )
    say_medians(work, f"{point[0]}×{point[1]}", found)
