"""Compare the outputs on the GPU with PyTorch in FP32 on the same GPU.

The tolerances are those of `enginery validate`: they follow from PyTorch's own error at the same
precision. ONNX Runtime multiplies FP32 in TensorFloat-32 by default, so FP32 is checked with TF32
off, and again with TF32 on and FP16's tolerance, which has as many mantissa bits.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_check import pytorch
from benchmarks.gpu_check.settings import PRECISIONS, TEXT_MODELS
from benchmarks.gpu_check.work import Work
from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import InputError
from enginery.core.model.feeds import FeedLimits, Feeds, make_feeds
from enginery.core.tolerance import Tolerance
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.providers.specification import ProviderSpec, parse_providers
from enginery.validate.cases.padding import find_padding_mask
from enginery.validate.metrics.outputs import NoiseFloor, compare_output, noise_floor

_NOISE = {"fp32": "fp64", "fp16": "fp16", "bf16": "bf16"}


def run(work: Work) -> None:
    """Compare every precision of each model, then the ways of running FP16."""
    pytorch.require_device(work.device)
    work.found["agreements"] = []
    for model in TEXT_MODELS:
        with work.step(f"agreement of {model}"):
            _compare_model(work, model)


def _compare_model(work: Work, model: str) -> None:
    artifacts = {
        precision: found for precision in PRECISIONS if (found := work.artifact(model, precision))
    }
    if not artifacts:
        return
    source = Path(work.artifacts[model]["source"])
    cases = [
        feeds_at(next(iter(artifacts.values())), point, seed=7) for point in work.settings.agreement
    ]
    expected = _answers(source, "fp32", work.device, cases)
    for precision, artifact in artifacts.items():
        if precision == "bf16" and not work.on_gpu:
            work.note(f"{model} in bf16: left out, ONNX Runtime's CPU has no BF16 kernels")
            continue
        with work.step(f"{model} in {precision} agrees with PyTorch FP32"):
            noise = _answers(source, _NOISE[precision], work.device, cases)
            exact = work.on_gpu and precision == "fp32"
            specs = parse_providers(work.provider, ["cuda.use_tf32=false"] if exact else [])
            _judge(work, model, precision, artifact, cases, expected, noise, specs, precision)
            if exact:
                narrow = _answers(source, "fp16", work.device, cases)
                _judge(
                    work,
                    model,
                    "fp32 by TF32",
                    artifact,
                    cases,
                    expected,
                    narrow,
                    parse_providers(work.provider),
                    "fp16",
                )
    if "fp16" in artifacts:
        _compare_ways(work, model, artifacts["fp16"])


def _judge(
    work: Work,
    model: str,
    label: str,
    artifact: Artifact,
    cases: list[Feeds],
    expected: list[dict[str, Any]],
    noise: list[dict[str, Any]],
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
                    spec.name,
                    runner(feeds)[spec.name],
                    wide[spec.name],
                    dtype=spec.dtype,
                    noise=floor,
                    tolerance=Tolerance.for_precision(precision),
                    padding=find_padding_mask(spec, record.inputs, feeds),
                )
                worst.append(
                    {
                        "model": model,
                        "precision": label,
                        "batch": point[0],
                        "sequence": point[1],
                        "limit_ratio": found.limit_ratio,
                        **asdict(found),
                    }
                )
    work.found["agreements"] += worst
    one = max(worst, key=lambda row: row["limit_ratio"])
    work.check(
        f"{model} in {label} agrees with PyTorch FP32",
        passed=not any(row["problem"] for row in worst),
        found=one["problem"]
        or f"largest error {one['max_abs']:.3g} of {one['limit']:.3g} "
        f"allowed, cosine {min(row['cosine'] for row in worst):.7f}",
    )


def _compare_ways(work: Work, model: str, artifact: Artifact) -> None:
    """Check that all ways of running FP16 give the same outputs, also after other inputs."""
    point = work.settings.agreement[-1]
    first, second = feeds_at(artifact, point, seed=1), feeds_at(artifact, point, seed=2)
    with OrtRunner(artifact, providers=[work.provider], io_binding=False) as runner:
        expected = [runner(feeds) for feeds in (first, second)]
    ways: dict[str, dict[str, Any]] = {"IOBinding": {}}
    if work.on_gpu:
        ways["CUDA graph"] = {"cuda_graph": True}
    for way, options in ways.items():
        for places in ("host", "device", "host and device by turns"):
            name = f"{model}: {way}, {places}"
            with (
                work.step(name),
                OrtRunner(artifact, providers=[work.provider], **options) as runner,
            ):
                same = 0.0
                # Twice the first, so that a graph is captured; then inputs that it was not
                # captured with, after others in the same buffers or in tensors of their own.
                for turn, feeds in enumerate((first, first, second, first, second)):
                    on_device = places == "device" or (places != "host" and turn % 2 == 1)
                    found = _ask(runner, feeds, work.device, on_device=on_device)
                    wanted = expected[0 if feeds is first else 1]
                    same = max(same, _largest_difference(wanted, found))
                work.check(
                    name,
                    passed=same <= 0.01,
                    found="the largest difference from plain "
                    f"runs is {same:.2g} of the largest value",
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


def _answers(source: Path, precision: str, device: str, cases: list[Feeds]) -> list[dict[str, Any]]:
    model = pytorch.load_text_model(source, "eager", precision, device)
    return [pytorch.answer(model, feeds, device) for feeds in cases]


def feeds_at(artifact: Artifact, point: tuple[int, int], *, seed: int) -> Feeds:
    """Return random inputs with different padding in each row."""
    record = artifact.manifest.graphs[0]
    limits = FeedLimits.from_artifact(artifact)
    sizes = dict(zip(("batch", "sequence"), point, strict=True))
    found = make_feeds(record.inputs, sizes, limits, seed=seed, ragged=True)
    if not found:
        raise InputError(f"{artifact.path} has no inputs.")
    return found
