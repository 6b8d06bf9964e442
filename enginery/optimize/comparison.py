"""Compare the outputs of an optimized graph with those of its FP32 source, in ONNX Runtime.

>>> tolerance = Tolerance.for_precision("fp32")
>>> expected, actual = [{"logits": np.float32([3, 4])}], [{"logits": np.float32([3, 5])}]
>>> [comparison] = compare_outputs(expected, actual, tolerance)
>>> comparison.passed, comparison.max_abs
(False, 1.0)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginery.core.model.feeds import Feeds
from enginery.core.tolerance import Tolerance
from enginery.passes.cast.low_precision import low_precision_type
from enginery.passes.cast.simulation import round_tensor
from enginery.passes.ir.graph_file import read_graph, write_graph
from enginery.passes.ir.op_types import FLOAT
from enginery.runtime.onnxruntime.tracing import GraphTracer

Batches = list[dict[str, NDArray[Any]]]
"""The outputs of each batch, by name."""


@dataclass(frozen=True)
class OutputComparison:
    """The comparison of one output over all batches."""

    output: str
    largest: float
    """The largest magnitude of the reference."""
    max_abs: float
    """The largest absolute error."""
    cosine: float
    """The smallest cosine similarity of a batch."""
    nonfinite: int
    """The number of elements that are finite on one side only."""
    limit: float
    """The largest absolute error that passes."""
    min_cosine: float
    """The smallest cosine similarity that passes."""
    batch: int
    """The index of the batch with the largest error."""

    @property
    def passed(self) -> bool:
        return not self.nonfinite and self.max_abs <= self.limit and self.cosine >= self.min_cosine

    def describe(self) -> str:
        """Return one sentence on the error and its limit."""
        if self.nonfinite:
            return f"{self.output}: {self.nonfinite} elements are NaN or infinite"
        return (
            f"{self.output}: largest error {self.max_abs:.3g} of {self.limit:.3g} allowed, "
            f"cosine {self.cosine:.7f}"
        )


def run_on_batches(path: Path, outputs: Sequence[str], batches: Sequence[Feeds]) -> Batches:
    """Run a graph on every batch; return its float outputs without padding.

    Raises:
        ProviderError: ONNX Runtime cannot load the graph.
        InputError: the graph fails on a batch.
    """
    types = input_types(path)
    results = []
    with GraphTracer(path, outputs) as trace:
        for feeds in batches:
            outputs_by_name = trace(cast_feeds(feeds, types))
            results.append(
                {
                    name: drop_padding(array, feeds)
                    for name, array in outputs_by_name.items()
                    if array.dtype.kind == "f"
                }
            )
    return results


def compare_outputs(
    expected: Batches,
    actual: Batches,
    tolerance: Tolerance,
    *,
    noise: Sequence[Mapping[str, NDArray[Any]]] = (),
    max_error: float | None = None,
) -> list[OutputComparison]:
    """Compare each output over all batches.

    Args:
        expected: the outputs of the reference, see `run_on_batches`.
        actual: the outputs of the graph to check.
        tolerance: the tolerance of its precision.
        noise: the outputs of the reference with weights rounded to the precision. Their error is
            the noise floor that scales the tolerance. Empty for no noise floor.
        max_error: a limit relative to an output's largest magnitude, in place of the tolerance.
            The cosine limit is then 1 - max_error² / 2, the cosine of an angle of max_error.
    """
    agreements = []
    for name in expected[0]:
        reference = [batch[name] for batch in expected]
        floor, noise_cosine = 0.0, 1.0
        for index, batch in enumerate(noise):
            # The size depends on values, so elements cannot be matched.
            if reference[index].shape != batch[name].shape:
                continue
            differs = _difference(reference[index], batch[name])
            floor, noise_cosine = max(floor, differs[0]), min(noise_cosine, differs[1])
        largest = max((_largest(array) for array in reference), default=0.0)
        limit = tolerance.limit(noise_floor=floor, largest=largest)
        cosine_limit = tolerance.cosine_limit(noise_cosine=noise_cosine)
        if max_error is not None:
            # The cosine of a small angle e is 1 - e² / 2.
            limit, cosine_limit = max_error * largest, 1.0 - 0.5 * max_error**2
        agreements.append(
            _compare_output(name, reference, [batch[name] for batch in actual], limit, cosine_limit)
        )
    return agreements


def round_weights(source: Path, out: Path, precision: str) -> None:
    """Write the graph to `out` with every weight rounded to `precision` but stored as FP32."""
    low = low_precision_type(precision)
    model = read_graph(source)
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and value.dtype == FLOAT and len(tensor.shape) > 1:
                value.const_value = round_tensor(tensor, low)
    write_graph(model, out, max_inline_bytes=1 << 20)


def drop_padding(array: NDArray[Any], feeds: Feeds) -> NDArray[Any]:
    """Return the array without the positions that the attention mask of the feeds marks as padding.

    No task reads them, and the result of Softmax over fully masked positions depends on rounding.
    """
    mask = next((feeds[name] for name in feeds if name.endswith("attention_mask")), None)
    if mask is None or mask.ndim != 2 or array.ndim < 2 or array.shape[0] != mask.shape[0]:
        return array
    # (batch, sequence, …), or keys and values, (batch, heads, sequence, …).
    for axis in (1, 2):
        if array.ndim > axis and array.shape[axis] == mask.shape[1]:
            return np.asarray(np.moveaxis(array, axis, 1)[mask.astype(bool)])
    if array.ndim > 2 and array.shape[1] <= mask.shape[1]:
        # The mask covers the past first; its end belongs to the new positions.
        return np.asarray(array[mask[:, mask.shape[1] - array.shape[1] :].astype(bool)])
    return array


def input_types(path: Path) -> dict[str, Any]:
    """Return the numpy types of a graph's inputs by name."""
    return {
        value.name or "": value.dtype.numpy()
        for value in ir.load(path).graph.inputs
        if value.dtype is not None
    }


def cast_feeds(feeds: Feeds, types: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Cast feeds to the input types of a graph."""
    return {name: array.astype(types[name], copy=False) for name, array in feeds.items()}


def _compare_output(
    name: str,
    expected: Sequence[NDArray[Any]],
    actual: Sequence[NDArray[Any]],
    limit: float,
    cosine_limit: float,
) -> OutputComparison:
    largest = max((_largest(array) for array in expected), default=0.0)
    worst, worst_batch, cosine, nonfinite = 0.0, 0, 1.0, 0
    for index, (reference, output) in enumerate(zip(expected, actual, strict=True)):
        if reference.shape != output.shape:
            # The size depends on values, so elements cannot be matched.
            worst, worst_batch, cosine = math.inf, index, 0.0
            continue
        unequal = int((np.isfinite(reference) != np.isfinite(output)).sum())
        error, similarity = _difference(reference, output)
        if unequal > nonfinite or (not nonfinite and error > worst):
            worst_batch = index
        worst = max(worst, error)
        nonfinite = max(nonfinite, unequal)
        # The direction of a tensor no larger than the allowed error is meaningless.
        if _largest(reference) > limit:
            cosine = min(cosine, similarity)
    return OutputComparison(
        name, largest, worst, cosine, nonfinite, limit, cosine_limit, worst_batch
    )


def _difference(reference: NDArray[Any], output: NDArray[Any]) -> tuple[float, float]:
    """Return the largest absolute difference and the cosine of the elements that are finite."""
    a, b = reference.astype(np.float64).ravel(), output.astype(np.float64).ravel()
    both = np.isfinite(a) & np.isfinite(b)
    a, b = a[both], b[both]
    norms = float(np.sqrt((a @ a) * (b @ b)))
    error = float(np.abs(a - b).max()) if a.size else 0.0
    return error, float(a @ b) / norms if norms else 1.0


def _largest(array: NDArray[Any]) -> float:
    finite = array[np.isfinite(array)]
    return float(np.abs(finite).max()) if finite.size else 0.0
