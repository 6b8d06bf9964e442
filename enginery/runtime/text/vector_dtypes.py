"""Store vectors in fewer bytes: as float16, int8, or one bit a dimension.

>>> to_dtype(np.array([[0.6, -0.8]], np.float32), "int8")
array([[  76, -102]], dtype=int8)
>>> to_dtype(np.array([[0.6, -0.8]], np.float32), "ubinary")
array([[128]], dtype=uint8)
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import InputError

VectorDtype = Literal["float32", "float16", "int8", "binary", "ubinary"]
"""`binary` and `ubinary` have the bits of 8 dimensions in each int8 or uint8."""

INT8_SCALE = 127
"""What the numbers of a vector of length 1 are multiplied by, to become int8."""
ARRAY_DTYPES: dict[VectorDtype, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "int8": np.int8,
    "binary": np.int8,
    "ubinary": np.uint8,
}
"""The type of the array."""


def to_dtype(vectors: NDArray[np.float32], dtype: VectorDtype) -> NDArray[Any]:
    """Return vectors (n, dim) in another type.

    int8 is of vectors scaled to length 1, times 127, rounded. So it needs no ranges from other
    vectors, and a vector has the same bytes in every file; sentence-transformers' int8 has a range
    for each dimension, of the vectors that it is called with. The bits of `binary` and `ubinary`
    are those of sentence-transformers' `quantize_embeddings`: 1 for a number above 0, the first
    dimension in the highest bit, and zeros behind the last; `binary` is 128 less.

    Raises:
        InputError: a number is NaN or infinite, which whole numbers cannot hold.
    """
    if dtype == "float32":
        return vectors
    if dtype == "float16":
        with np.errstate(over="ignore"):  # infinity, which callers see
            return vectors.astype(np.float16)
    if not np.isfinite(vectors).all():
        raise InputError(f"the model returned NaN or infinity, which {dtype} cannot hold.")
    if dtype == "int8":
        # In float64, because squares of numbers above 1e19 overflow float32.
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
        scaled = vectors * (INT8_SCALE / np.where(lengths == 0, 1.0, lengths))
        return np.rint(scaled).clip(-INT8_SCALE, INT8_SCALE).astype(np.int8)
    bits = np.packbits(vectors > 0, axis=1)
    return bits if dtype == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
