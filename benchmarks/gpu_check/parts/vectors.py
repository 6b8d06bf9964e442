"""Measure FP16 from token ids to a sentence's vector, at one shape at a time.

enginery runs as `load_model` does: pad, run, split. PyTorch's SDPA has the mean and the
normalization on the device, so both copy a vector for each row and nothing else. On the device,
both leave their outputs there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_check import pytorch
from benchmarks.gpu_check.inputs import text_feeds
from benchmarks.gpu_check.settings import Point
from benchmarks.gpu_check.variants import (
    GRAPH,
    LOADED,
    SDPA,
    Variant,
    measure,
    say_medians,
)
from benchmarks.gpu_check.work import Work
from enginery.core.model.feeds import Feeds
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions
from enginery.runtime.tasks import require_task
from enginery.runtime.tasks.batch_runner import BatchRunner

_MIN_COSINE = 0.999


def run(work: Work) -> None:
    """Measure the model at every shape, those with goals first."""
    pytorch.require_device(work.device)
    source = Path(work.results.artifacts(work.model)["source"])
    model = pytorch.load_text_model(source, "sdpa", "fp16", work.device)
    for point in work.settings.pooled:
        name = f"{point[0]}×{point[1]}"
        work.case(name, partial(_measure, work, model, point), seconds=8.0)


def _measure(work: Work, model: Any, point: Point) -> None:
    artifact = work.artifact("fp16")
    batch, length = point
    feeds = text_feeds(artifact, (1, length))
    feeds = {name: np.repeat(array, batch, axis=0) for name, array in feeds.items()}
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        runner = OrtRunner(artifact, RunnerOptions(ladder=True), providers=[work.provider])
        stack.enter_context(runner)
        task = require_task(artifact.manifest, runner.record).open(artifact, runner.record)
        rows = task.preprocess([_text(length)] * batch, task.Options())
        batches = BatchRunner(task, runner)
        loaded = Variant(LOADED, "host", partial(batches.run, rows.rows))
        pooled = partial(pool, model, feeds, work.device)
        variants = [loaded, Variant(SDPA, "host", lambda: pooled().cpu().numpy())]
        if work.on_gpu:
            graph = stack.enter_context(
                OrtRunner(artifact, RunnerOptions(cuda_graph=True), providers=["cuda"])
            )
            tensors = pytorch.tensors_of(feeds, work.device)
            variants.append(Variant(GRAPH, "device", partial(graph.run_on_device, tensors)))
        variants.append(Variant(SDPA, "device", _waiting(pooled, work.device)))
        lengths = {row.tokens for row in rows.rows}
        if lengths != {length}:
            work.note(f"the text has {lengths} tokens, not {length}")
        vectors = task.postprocess(rows, batches.run(rows.rows), task.Options())
        expected = _normal(pool(model, _ids(rows.rows), work.device).float().cpu().numpy())
        cosine = float((_normal(vectors) * expected).sum(axis=1).min())
        work.check(
            f"vectors of {work.model} at {batch}×{length} are PyTorch's",
            passed=cosine >= _MIN_COSINE,
            found=f"cosine {cosine:.6f}, expected at least {_MIN_COSINE}",
        )
        found = measure(work, variants, left_out)
    work.add("pooled", {"model": work.model, "batch": batch, "sequence": length, **found})
    say_medians(work, f"{batch}×{length}", found)


def pool(model: Any, feeds: Feeds, device: str) -> torch.Tensor:
    """Return the normalized mean of the token vectors, FP32 on the device: (batch, dim)."""
    with torch.inference_mode():
        tensors = pytorch.tensors_of(feeds, device)
        hidden = model(**tensors).last_hidden_state.float()
        mask = tensors["attention_mask"][..., None].float()
        mean = (hidden * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean, dim=1)


def _waiting(action: Callable[[], object], device: str) -> Callable[[], object]:
    def run_and_wait() -> object:
        found = action()
        pytorch.wait(device)
        return found

    return run_and_wait


def _text(length: int) -> str:
    """Return a text with this number of tokens, the two special ones included."""
    return " ".join(["the"] * (length - 2))


def _ids(rows: Any) -> Feeds:
    ids = np.asarray([row.content.ids for row in rows], np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def _normal(vectors: Any) -> Any:
    wide = np.asarray(vectors, np.float64)
    return wide / np.linalg.norm(wide, axis=1, keepdims=True)
