"""Run the main path once: load a model, run it in each way, and beside torch.

The cases are small, so that the first run on a new GPU shows quickly what works.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu_check import pytorch
from benchmarks.gpu_check.inputs import sentences, text_feeds
from benchmarks.gpu_check.work import Work
from enginery import load_model
from enginery.core.errors import InputError
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions
from enginery.runtime.providers.specification import parse_providers

_POINT = (4, 16)
_CLOSE = 0.01
"""Largest difference, relative to the largest value, from the FP32 graph on the CPU."""
_THREADS = 4


def run(work: Work) -> None:
    """Run every case."""
    work.case("session, FP32", partial(_run, work, "onnx", io_binding=False))
    work.case("session, FP16", partial(_run, work, "fp16", io_binding=False))
    work.case("IOBinding", partial(_run, work, "fp16"))
    if work.on_gpu:
        work.case("CUDA graph", partial(_run, work, "fp16", cuda_graph=True))
        work.case("arena that shrinks", partial(_run, work, "fp16", shrink_arena=True))
        work.case("arena of 1 GiB", partial(_run, work, "fp16", limit="1 GiB"))
    work.case("load_model", partial(_load, work))
    work.case("threads", partial(_threads, work))
    work.case("beside torch", partial(_beside_torch, work))


def _run(work: Work, precision: str, *, limit: str = "", **options: Any) -> None:
    """Run a graph three times, and compare with FP32 on the CPU."""
    artifact = work.artifact(precision)
    feeds = text_feeds(artifact, _POINT)
    given = [f"cuda.gpu_mem_limit={limit}"] if limit else []
    with OrtRunner(
        artifact, RunnerOptions(**options), providers=parse_providers(work.provider, given)
    ) as runner:
        found = [runner(feeds) for _ in range(3)]
    _check(work, "three runs", feeds, found)


def _load(work: Work) -> None:
    """Embed sentences through the public API."""
    with load_model(work.artifact("fp16"), providers=work.provider) as model:
        vectors = model(list(sentences()[:8]))
    norms = np.linalg.norm(np.asarray(vectors, np.float64), axis=-1)
    work.check(
        "embeddings of eight sentences",
        passed=bool(np.isfinite(norms).all() and (norms > 0).all()),
        found=f"shape {np.shape(vectors)}, norms {norms.min():.3f} to {norms.max():.3f}",
    )


def _threads(work: Work) -> None:
    """Run one runner in several threads; with CUDA graphs each thread records its own."""
    artifact = work.artifact("fp16")
    feeds = text_feeds(artifact, _POINT)
    found: list[dict[str, Any]] = []
    errors: list[str] = []

    def ask(runner: OrtRunner) -> None:
        try:
            found.extend(runner(feeds) for _ in range(3))
        except InputError as error:
            errors.append(error.message)

    with (
        OrtRunner(
            artifact, RunnerOptions(cuda_graph=work.on_gpu), providers=[work.provider]
        ) as captured,
        OrtRunner(artifact, providers=[work.provider]) as plain,
    ):
        runners = [captured, plain] * (_THREADS // 2)
        threads = [threading.Thread(target=ask, args=(runner,)) for runner in runners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise InputError(errors[0])
    _check(work, f"{_THREADS} threads", feeds, found)


def _beside_torch(work: Work) -> None:
    """Take tensors of torch on the device, and give outputs back to torch there."""
    import torch

    pytorch.require_device(work.device)
    artifact = work.artifact("fp16")
    feeds = text_feeds(artifact, _POINT)
    product = torch.ones(64, 64, device=work.device) @ torch.ones(64, 64, device=work.device)
    with OrtRunner(artifact, providers=[work.provider]) as runner:
        values = runner.run_on_device(pytorch.tensors_of(feeds, work.device))
        tensors = {name: torch.from_dlpack(value) for name, value in values.items()}
        found = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
        devices = {tensor.device.type for tensor in tensors.values()}
    work.check(
        "torch computes on the same device",
        passed=float(product.sum()) == 64.0**3 and devices == {work.device},
        found=f"outputs on {', '.join(devices)}",
    )
    _check(work, "tensors of torch", feeds, [found])


def _check(work: Work, name: str, feeds: Any, found: list[dict[str, Any]]) -> None:
    """Compare outputs with the FP32 graph on the CPU."""
    with OrtRunner(work.artifact("onnx")) as runner:
        expected = runner(feeds)
    kept = feeds["attention_mask"].astype(bool)
    largest = 0.0
    for outputs in found:
        for output, wide in expected.items():
            apart = np.abs(outputs[output][kept].astype(np.float64) - wide[kept]).max()
            largest = max(largest, float(apart / np.abs(wide[kept]).max()))
            if not np.isfinite(outputs[output][kept]).all():
                largest = float("inf")
    work.check(
        name,
        passed=bool(found) and largest <= _CLOSE,
        found=f"largest difference from FP32 on the CPU {largest:.2g} of the largest value, "
        f"expected at most {_CLOSE}",
    )
