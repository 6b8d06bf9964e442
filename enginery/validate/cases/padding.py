"""Exclude padded positions from the comparison.

Fused kernels may leave any value at padded positions, and nobody reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.model.feeds import Feeds, is_padding_mask
from enginery.core.shapes import TensorSpec, dim_terms


@dataclass(frozen=True)
class PaddingMask:
    """Mask of the positions of one output axis that are real tokens."""

    mask: NDArray[np.bool_]
    """bool (batch, positions), True for real tokens."""
    axis: int
    """Axis of the positions in the output; axis 0 is the batch."""


def find_padding_mask(
    output: TensorSpec, inputs: Sequence[TensorSpec], feeds: Feeds
) -> PaddingMask | None:
    """Return the padding mask of an output; None if it has no padding.

    An output has padding if it shares the batch and sequence dims with an attention mask, by name.
    """
    for spec in inputs:
        if not is_padding_mask(spec) or spec.name not in feeds or len(output.dims) < 2:
            continue
        batch, positions = spec.dims
        if output.dims[0] != batch:
            continue
        mask = np.asarray(feeds[spec.name] != 0)
        for axis, dim in enumerate(output.dims[1:], start=1):
            # Numbers may be equal by chance: three labels are not a sequence of three positions.
            if dim == positions and (isinstance(dim, str) or axis == 1):
                return PaddingMask(mask, axis)
        ids = next((s for s in inputs if s.name.endswith("input_ids")), None)
        if ids is not None and len(ids.dims) == 2:
            dim = ids.dims[1]
            if output.dims[1] == dim and dim in dim_terms(positions):
                # The mask covers the past first; its end belongs to the new positions.
                width = feeds[ids.name].shape[1]
                return PaddingMask(mask[:, mask.shape[1] - width :], 1)
    return None


def iterate_rows(array: NDArray[Any], padding: PaddingMask | None) -> Iterator[NDArray[Any]]:
    """Yield the output row by row, without padded positions.

    A scalar is one row. A mask that does not fit the array is not applied.
    """
    if array.ndim == 0:
        yield array.reshape(1)
        return
    fits = (
        padding is not None
        and array.ndim > padding.axis
        and padding.mask.shape
        == (
            array.shape[0],
            array.shape[padding.axis],
        )
    )
    for index in range(array.shape[0]):
        row = array[index]
        if padding is not None and fits:
            row = np.compress(padding.mask[index], row, axis=padding.axis - 1)
        yield np.asarray(row)
