"""Vectors as a client wants them: shortened, of length one.

>>> finish_vectors([np.float32([3, 4, 12])], normalize=True, dimensions=2)[0]
array([0.6, 0.8], dtype=float32)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.runtime.pooling import squared_length
from enginery.serve.reading import FieldError, JsonObject
from enginery.serve.refusals import UnavailableError
from enginery.serve.rooms import HostedModel

Vector = NDArray[np.float32]

_UNIT = 1e-6
"""A squared length this near to 1 is 1 in float32: a model's own normalizing leaves about 1e-7."""


def read_dimensions(body: JsonObject, model: HostedModel) -> int:
    """How many of a vector's numbers are wanted; 0 for all. Raises FieldError."""
    if body.values.get("dimensions") is None:
        return 0
    if model.dim:
        return body.whole("dimensions", 0, least=1, most=model.dim)
    return body.whole("dimensions", 0, least=1)


def finish_vectors(
    values: Sequence[Vector], *, normalize: bool, dimensions: int = 0
) -> list[Vector]:
    """Vectors cut to their first `dimensions` numbers, then scaled to length one.

    A vector of zeros stays as it is. Cutting is for models trained so that the first numbers say
    the most (Matryoshka representations, arXiv:2205.13147).

    Raises:
        FieldError: the vectors have fewer numbers.
        UnavailableError: a vector holds NaN or infinity.
    """
    return [_finished(vector, normalize, dimensions) for vector in values]


def _finished(vector: Any, normalize: bool, dimensions: int) -> Vector:
    if dimensions > len(vector):
        raise FieldError(
            f"dimensions: found {dimensions}, expected {len(vector)} at most.", field="dimensions"
        )
    if dimensions:
        vector = vector[:dimensions]
    squared = squared_length(vector)
    if not math.isfinite(squared):
        raise UnavailableError(
            "the model's vector holds NaN or infinity.",
            do="Its precision cannot hold this text; `enginery validate` says more.",
        )
    if not normalize or squared == 0.0 or abs(squared - 1.0) < _UNIT:
        return np.ascontiguousarray(vector, np.float32)
    return np.ascontiguousarray(vector / np.float64(math.sqrt(squared)), np.float32)
