"""What the values inside a graph look like on real inputs: how large, how small, how long a sum.

Takes an ONNX file and feeds; leaves one `TensorRange` a float tensor.

    >>> ranges = measure_ranges(Path("model.onnx"), tensors, batches, mask_floor=-3.3e38)
    >>> ranges["/layer.3/Add_output_0"].largest
    71236.0

Inner tensors are fetched in groups of a bounded size, and only numbers of fixed size stay of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginery.passes.op_types import FLOAT
from enginery.runtime.tracing import GraphTracer

Feeds = Mapping[str, NDArray[Any]]

GROUP_BYTES = 256 << 20
"""Inner tensors that are fetched in one run."""
_SMALL_QUANTILE = 0.01
_SAMPLE = 1 << 16
_UNKNOWN_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class TensorRange:
    """One tensor over all feeds. Numbers that a mask put there do not count."""

    largest: float
    """The largest magnitude."""
    smallest: float
    """The 1 % quantile of the magnitudes above zero; 0 where all are zero."""
    row_variance: float
    """The largest variance of one row along the last axis, as a normalisation computes it."""
    elements: int
    """Of the largest feed."""
    nonfinite: bool = False
    """It has NaN or an infinity that is no mask."""

    def widest(self, other: TensorRange) -> TensorRange:
        """Over two feeds."""
        smalls = [value for value in (self.smallest, other.smallest) if value > 0]
        return TensorRange(
            max(self.largest, other.largest),
            min(smalls, default=0.0),
            max(self.row_variance, other.row_variance),
            max(self.elements, other.elements),
            self.nonfinite or other.nonfinite,
        )


def measure_ranges(
    path: Path,
    tensors: Sequence[ir.Value],
    batches: Sequence[Feeds],
    *,
    mask_floor: float = -math.inf,
    group_bytes: int = GROUP_BYTES,
) -> dict[str, TensorRange]:
    """Runs the graph on every batch and records each tensor's range.

    Args:
        path: the FP32 graph.
        tensors: values of the graph, see `float_tensors`.
        batches: feeds; the largest sets the size of a group.
        mask_floor: numbers at and below it were put there by an attention mask.
        group_bytes: the most that is fetched in one run; one larger tensor is a group of its own.

    Raises:
        InputError: the graph fails on a batch.
        ProviderError: the graph cannot be loaded.
    """
    ranges: dict[str, TensorRange] = {}
    for group in _groups(tensors, batches, group_bytes):
        with GraphTracer(path, group) as trace:
            for feeds in batches:
                for name, values in trace(feeds).items():
                    found = range_of(values, mask_floor=mask_floor)
                    ranges[name] = ranges[name].widest(found) if name in ranges else found
    return ranges


def float_tensors(graph: ir.Graph) -> list[ir.Value]:
    """The float32 outputs of the graph's nodes, and its float inputs, in topological order.

    What is inside a subgraph cannot be fetched from outside.
    """
    inner = [value for node in graph for value in node.outputs if value.name]
    return [value for value in (*graph.inputs, *inner) if value.dtype == FLOAT]


def range_of(values: NDArray[Any], *, mask_floor: float = -math.inf) -> TensorRange:
    """The range of one array."""
    array = np.asarray(values, np.float32)
    if array.size == 0:
        return TensorRange(0.0, 0.0, 0.0, 0)
    # With a floor of -inf, -inf itself is a mask: Softmax makes zero of it.
    masked = array <= np.float32(mask_floor)
    counted = np.where(masked, np.float32(0), array) if masked.any() else array
    nonfinite = not bool(np.isfinite(counted).all())
    if nonfinite:
        counted = np.nan_to_num(counted, nan=0.0, posinf=3.4e38, neginf=-3.4e38)
    magnitudes = np.abs(counted)
    step = max(1, magnitudes.size // _SAMPLE)
    sample = magnitudes.ravel()[::step]
    sample = sample[sample > 0]
    rows = counted.reshape(-1, counted.shape[-1]) if counted.ndim else counted.reshape(1, 1)
    with np.errstate(over="ignore"):
        variance = float(rows.var(axis=1, dtype=np.float64).max())
    return TensorRange(
        largest=float(magnitudes.max()),
        smallest=float(np.quantile(sample, _SMALL_QUANTILE)) if sample.size else 0.0,
        row_variance=variance,
        elements=int(array.size),
        nonfinite=nonfinite,
    )


def _groups(
    tensors: Iterable[ir.Value], batches: Sequence[Feeds], group_bytes: int
) -> Iterator[list[str]]:
    """Names in groups of about `group_bytes`, by the shapes that the graph states."""
    shapes = [
        (
            max((array.shape[0] for array in feeds.values() if array.ndim), default=1),
            max((int(n) for array in feeds.values() for n in array.shape), default=1),
        )
        for feeds in batches
    ]
    group: list[str] = []
    total = 0
    for value in tensors:
        size = 4 * max((_elements(value, *shape) for shape in shapes), default=1)
        if group and total + size > group_bytes:
            yield group
            group, total = [], 0
        group.append(value.name or "")
        total += size
    if group:
        yield group


def _elements(value: ir.Value, rows: int, longest: int) -> int:
    """About how many elements: a dim without a number is the batch if first, else the longest."""
    if value.shape is None:
        return _UNKNOWN_ELEMENTS
    count = 1
    for axis, dim in enumerate(value.shape):
        count *= dim if isinstance(dim, int) else (rows if axis == 0 else longest)
    return count
