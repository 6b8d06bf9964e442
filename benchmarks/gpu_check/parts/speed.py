"""Measure FP16 of a model at several batch sizes and lengths.

enginery's runner is compared with PyTorch in eager mode, FP16 and FP32, and with ONNX Runtime's own
session on the same graph and on the exported FP32 graph. torch.compile is in the part `compiled`.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import pytorch
from benchmarks.gpu_check.inputs import full_rows
from benchmarks.gpu_check.settings import Point
from benchmarks.gpu_check.variants import (
    BARE_FP16,
    BARE_FP32,
    EAGER,
    EAGER_FP32,
    SDPA,
    bare_variants,
    enginery_variants,
    measure,
    open_runners,
    pytorch_variants,
    say_medians,
)
from benchmarks.gpu_check.work import Work

_PYTORCH = {EAGER: ("eager", "fp16"), SDPA: ("sdpa", "fp16"), EAGER_FP32: ("eager", "fp32")}
_CASE_SECONDS = 10.0


def run(work: Work) -> None:
    """Measure the model at every point, the most important first."""
    pytorch.require_device(work.device)
    models: dict[str, Any] = {}
    for point in work.settings.points:
        name = f"{point[0]}×{point[1]}"
        work.case(name, partial(_measure, work, models, point), seconds=_CASE_SECONDS)


def _measure(work: Work, models: dict[str, Any], point: Point) -> None:
    """Measure all ways at one point; PyTorch's models are loaded by the first."""
    artifact = work.artifact("fp16")
    source = Path(work.results.artifacts(work.model)["source"])
    for side, (attention, precision) in _PYTORCH.items():
        if side not in models:
            models[side] = pytorch.load_text_model(source, attention, precision, work.device)
    feeds = full_rows(artifact, point)
    left_out: dict[str, str] = {}
    bare = {BARE_FP16: artifact, BARE_FP32: work.artifact("onnx")}
    runners = open_runners(work, artifact, left_out)
    with ExitStack() as stack:
        for runner in runners.values():
            stack.enter_context(runner)
        variants = [
            *enginery_variants(runners, feeds, work.device),
            *pytorch_variants(models, feeds, work.device),
            *bare_variants(bare, feeds, work.device),
        ]
        found = measure(work, variants, left_out)
    work.add("points", {"model": work.model, "batch": point[0], "sequence": point[1], **found})
    say_medians(work, f"{point[0]}×{point[1]}", found)
