"""Compare the outputs on the GPU with PyTorch in FP32 on the same GPU, on real sentences.

The tolerances are those of `enginery validate`: they follow from PyTorch's own error at the same
precision. ONNX Runtime multiplies FP32 in TensorFloat-32 by default, so FP32 is checked with TF32
off, and again with TF32 on and FP16's tolerance, which has as many mantissa bits.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu_check import pytorch
from benchmarks.gpu_check.inputs import text_feeds
from benchmarks.gpu_check.settings import PRECISIONS
from benchmarks.gpu_check.work import Work
from enginery.core.artifact.artifact import Artifact
from enginery.core.model.feeds import Feeds
from enginery.core.tolerance import Tolerance
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions
from enginery.runtime.providers.specification import ProviderSpec, parse_providers
from enginery.runtime.tasks.embed import SENTENCE_OUTPUT
from enginery.validate.cases.padding import find_padding_mask
from enginery.validate.metrics.outputs import (
    NoiseFloor,
    OutputLimits,
    compare_output,
    noise_floor,
)
from enginery.validate.reference import LastStep

Outputs = dict[str, NDArray[Any]]
_NOISE = {"fp32": "fp64", "fp16": "fp16", "bf16": "bf16"}


def run(work: Work) -> None:
    """Compare every precision of the model, then the ways of running FP16."""
    pytorch.require_device(work.device)
    for precision in PRECISIONS:
        if precision == "bf16" and not work.on_gpu:
            work.case("bf16", lambda: work.note("left out: ONNX Runtime's CPU has no BF16 kernels"))
        else:
            work.case(precision, partial(_compare, work, precision))
    if work.on_gpu:
        work.case("fp32 by TF32", partial(_compare, work, "fp32", tf32=True))
    for way, options in (("IOBinding", {}), ("CUDA graph", {"cuda_graph": True})):
        if work.on_gpu or way == "IOBinding":
            for places in ("host", "device", "host and device by turns"):
                compare = partial(_compare_ways, work, f"{way}, {places}", places, options)
                work.case(f"{way}, {places}", compare)


def _compare(work: Work, precision: str, *, tf32: bool = False) -> None:
    """Compare a precision at every shape; FP32 without TF32, or with it as if it were FP16."""
    artifact = work.artifact(precision)
    cases = [text_feeds(artifact, point) for point in work.settings.agreement]
    expected = _answers(work, artifact, "fp32", cases)
    as_precision = "fp16" if tf32 else precision
    noise = _answers(work, artifact, _NOISE[as_precision], cases)
    exact = work.on_gpu and precision == "fp32" and not tf32
    specs = parse_providers(work.provider, ["cuda.use_tf32=false"] if exact else [])
    label = "fp32 by TF32" if tf32 else precision
    _judge(work, label, artifact, cases, expected, noise, specs, as_precision)


def _judge(
    work: Work,
    label: str,
    artifact: Artifact,
    cases: list[Feeds],
    expected: list[Outputs],
    noise: list[Outputs],
    specs: tuple[ProviderSpec, ...],
    precision: str,
) -> None:
    """Compare a runner with the reference on all cases; the noise floor is the largest of them."""
    record = artifact.manifest.graphs[0]
    worst: list[dict[str, Any]] = []
    with OrtRunner(artifact, providers=specs) as runner:
        for spec in record.outputs:
            floors = [
                noise_floor(
                    other[spec.name], wide[spec.name], find_padding_mask(spec, record.inputs, feeds)
                )
                for feeds, wide, other in zip(cases, expected, noise, strict=True)
            ]
            floor = NoiseFloor(max(f.max_abs for f in floors), min(f.cosine for f in floors))
            for point, feeds, wide in zip(work.settings.agreement, cases, expected, strict=True):
                found = compare_output(
                    spec,
                    runner(feeds)[spec.name],
                    wide[spec.name],
                    OutputLimits(floor, Tolerance.for_precision(precision)),
                    padding=find_padding_mask(spec, record.inputs, feeds),
                )
                worst.append(
                    {
                        "model": work.model,
                        "precision": label,
                        "batch": point[0],
                        "sequence": point[1],
                        "limit_ratio": found.limit_ratio,
                        **asdict(found),
                    }
                )
    for row in worst:
        work.add("agreements", row)
    one = max(worst, key=lambda row: row["limit_ratio"])
    work.check(
        f"{work.model} in {label} agrees with PyTorch FP32",
        passed=not any(row["problem"] for row in worst),
        found=one["problem"]
        or f"largest error {one['max_abs']:.3g} of {one['limit']:.3g} "
        f"allowed, cosine {min(row['cosine'] for row in worst):.7f}",
    )


def _compare_ways(work: Work, way: str, places: str, options: dict[str, Any]) -> None:
    """Check that a way of running FP16 gives the outputs of a plain run, also after other inputs.

    Args:
        work: the unit.
        way: name of the way.
        places: where inputs and outputs are.
        options: options of the runner.
    """
    artifact = work.artifact("fp16")
    point = work.settings.agreement[-1]
    first, second = text_feeds(artifact, point), text_feeds(artifact, point, first=50)
    with OrtRunner(artifact, RunnerOptions(io_binding=False), providers=[work.provider]) as runner:
        expected = [runner(feeds) for feeds in (first, second)]
    same = 0.0
    with OrtRunner(artifact, RunnerOptions(**options), providers=[work.provider]) as runner:
        # Twice the first, so that a graph is captured; then inputs that it was not captured with,
        # after others in the same buffers or in tensors of their own.
        for turn, feeds in enumerate((first, first, second, first, second)):
            on_device = places == "device" or (places != "host" and turn % 2 == 1)
            found = _ask(runner, feeds, work.device, on_device=on_device)
            wanted = expected[0 if feeds is first else 1]
            same = max(same, _largest_difference(wanted, found))
    work.check(
        f"{work.model}: {way}",
        passed=same <= 0.01,
        found=f"the largest difference from plain runs is {same:.2g} of the largest value",
    )


def _ask(runner: OrtRunner, feeds: Feeds, device: str, *, on_device: bool) -> dict[str, Any]:
    if not on_device:
        return runner(feeds)
    found = runner.run_on_device(pytorch.tensors_of(feeds, device))
    return {name: torch.from_dlpack(value).cpu().numpy() for name, value in found.items()}


def _largest_difference(expected: dict[str, Any], found: dict[str, Any]) -> float:
    """Return the difference relative to each output's largest magnitude; infinite for NaN."""
    differences = []
    for name, wide in expected.items():
        apart = np.abs(found[name].astype(np.float64) - wide.astype(np.float64)).max()
        differences.append(float(apart / np.abs(wide).max()))
    return max(differences) if np.isfinite(differences).all() else float("inf")


def _answers(work: Work, artifact: Artifact, precision: str, cases: list[Feeds]) -> list[Outputs]:
    """Return PyTorch's outputs for each case, pooled as well if the graph pools."""
    source = Path(work.results.artifacts(work.model)["source"])
    model = pytorch.load_text_model(source, "eager", precision, work.device)
    pooling = LastStep.of(artifact, artifact.manifest.graphs[0]).pooling
    answers = []
    for feeds in cases:
        outputs = pytorch.answer(model, feeds, work.device)
        if pooling:
            tokens = outputs["last_hidden_state"]
            outputs[SENTENCE_OUTPUT] = pooling(tokens, feeds["attention_mask"])
        answers.append(outputs)
    return answers
