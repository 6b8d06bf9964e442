"""Which elements of an output belong to real tokens; the rest is padding and is not compared.

Fused kernels may leave anything at padded positions, and nobody reads it.

    >>> kept = kept_positions(logits_spec, graph.inputs, feeds)
    >>> [row.shape for row in rows_of(logits, kept)]
    [(24, 3), (19, 3), (13, 3), (8, 3)]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.feeds import Feeds, is_padding_mask
from enginery.core.shapes import TensorSpec, dim_terms


@dataclass(frozen=True)
class Kept:
    """The positions of one output's axis that are no padding, row by row."""

    mask: NDArray[np.bool_]
    """(batch, positions)."""
    axis: int
    """Which axis of the output the positions are; axis 0 is the batch."""


def kept_positions(output: TensorSpec, inputs: Sequence[TensorSpec], feeds: Feeds) -> Kept | None:
    """What of an output is compared; None for all of it.

    An output has padding where it shares the batch's and the sequence's dims with a mask. Names
    are compared, not sizes: three labels at a sequence of three are no positions. A mask over
    `past_sequence + sequence` ends with the positions of `sequence`.
    """
    for spec in inputs:
        if not is_padding_mask(spec) or spec.name not in feeds or len(output.dims) < 2:
            continue
        batch, positions = spec.dims
        if output.dims[0] != batch:
            continue
        mask = np.asarray(feeds[spec.name] != 0)
        for axis, dim in enumerate(output.dims[1:], start=1):
            if dim == positions and (isinstance(dim, str) or axis == 1):
                return Kept(mask, axis)
        ids = next((s for s in inputs if s.name.endswith("input_ids")), None)
        if ids is not None and len(ids.dims) == 2:
            dim = ids.dims[1]
            if output.dims[1] == dim and dim in dim_terms(positions):
                width = feeds[ids.name].shape[1]
                return Kept(mask[:, mask.shape[1] - width :], 1)
    return None


def rows_of(array: NDArray[Any], kept: Kept | None) -> Iterator[NDArray[Any]]:
    """The output row by row, without padding: one row of the batch at a time is in memory.

    An output without a batch is one row; a mask that does not fit the array is not applied.
    """
    if array.ndim == 0:
        yield array.reshape(1)
        return
    fits = (
        kept is not None
        and array.ndim > kept.axis
        and kept.mask.shape
        == (
            array.shape[0],
            array.shape[kept.axis],
        )
    )
    for index in range(array.shape[0]):
        row = array[index]
        if kept is not None and fits:
            row = np.compress(kept.mask[index], row, axis=kept.axis - 1)
        yield np.asarray(row)
