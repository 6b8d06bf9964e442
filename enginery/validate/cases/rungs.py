"""Run a graph as the runtime does on a GPU: batches padded to a rung of the ladder.

run = run_on_rungs(runner, limits, pad_left=False)
outputs = run(feeds)    # those of the rows and positions of the feeds
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.model.feeds import FeedLimits, Feeds
from enginery.core.shapes import TensorSpec, canonical_dim
from enginery.runtime.engines.padding import dim_sizes
from enginery.runtime.onnxruntime.ladder import BATCH, SEQUENCE, Ladder
from enginery.runtime.onnxruntime.runner import OrtRunner

Outputs = dict[str, NDArray[Any]]


def run_on_rungs(
    runner: OrtRunner, limits: FeedLimits, *, pad_left: bool
) -> Callable[[Feeds], Outputs]:
    """Return what runs a graph; the runner itself without a ladder.

    Args:
        runner: the graph.
        limits: limits of the model, with its padding token.
        pad_left: True if the model's texts are padded on the left.
    """
    if runner.ladder is None:
        return runner
    return _RungRun(runner, runner.ladder, limits.pad_token_id, pad_left)


@dataclass(frozen=True)
class _RungRun:
    runner: OrtRunner
    ladder: Ladder
    pad_token_id: int
    pad_left: bool

    def __call__(self, feeds: Feeds) -> Outputs:
        record = self.runner.record
        sizes = dim_sizes(record.inputs, feeds)
        rung = self.ladder.round_up(sizes)
        if rung == sizes:
            return self.runner(feeds)
        padded = {
            spec.name: self._padded(spec, feeds[spec.name], sizes, rung) for spec in record.inputs
        }
        outputs = self.runner(padded)
        return {
            spec.name: self._cut(spec, outputs[spec.name], sizes, rung) for spec in record.outputs
        }

    def _padded(
        self,
        spec: TensorSpec,
        array: NDArray[Any],
        sizes: Mapping[str, int],
        rung: Mapping[str, int],
    ) -> NDArray[Any]:
        """Pad the positions with the padding token, and fill the batch with its last row."""
        for axis, dim in enumerate(map(_name, spec.dims)):
            missing = rung.get(dim, 0) - sizes.get(dim, 0)
            if dim == SEQUENCE and missing:
                widths = [(0, 0)] * array.ndim
                widths[axis] = (missing, 0) if self.pad_left else (0, missing)
                # A 0 in the mask excludes the position; ids get the token that the model pads with.
                value = self.pad_token_id if spec.name.endswith("input_ids") else 0
                array = np.pad(array, widths, constant_values=value)
            elif dim == BATCH and missing:
                last = array.take([-1], axis=axis)
                array = np.concatenate([array, last.repeat(missing, axis=axis)], axis=axis)
        return array

    def _cut(
        self,
        spec: TensorSpec,
        array: NDArray[Any],
        sizes: Mapping[str, int],
        rung: Mapping[str, int],
    ) -> NDArray[Any]:
        """Return an output without the added rows and positions."""
        for axis, dim in enumerate(map(_name, spec.dims)):
            size = sizes.get(dim, 0)
            if dim not in (BATCH, SEQUENCE) or axis >= array.ndim or array.shape[axis] == size:
                continue
            if array.shape[axis] == rung[dim]:
                start = rung[dim] - size if dim == SEQUENCE and self.pad_left else 0
                array = array.take(range(start, start + size), axis=axis)
        return array


def _name(dim: int | str) -> str:
    return "" if isinstance(dim, int) else canonical_dim(dim)
