"""Vectors in fewer bytes."""

import numpy as np
import pytest

from enginery.core.errors import InputError
from enginery.runtime.tasks.embed import VectorOptions, finish_vectors
from enginery.runtime.text.vector_dtypes import to_dtype

VECTORS = np.random.default_rng(7).normal(size=(50, 20)).astype(np.float32)


def test_int8_keeps_the_cosines():
    units = VECTORS / np.linalg.norm(VECTORS, axis=1, keepdims=True)
    stored = to_dtype(VECTORS, "int8")
    assert stored.dtype == np.int8
    # Rounding moves a number by half of a step at most.
    assert abs(stored / 127 - units).max() <= 0.5001 / 127
    np.testing.assert_array_equal(stored, to_dtype(100 * VECTORS, "int8"))


def test_bits_are_packed_as_by_numpy():
    bits = np.packbits(VECTORS > 0, axis=1)  # as sentence-transformers does
    np.testing.assert_array_equal(to_dtype(VECTORS, "ubinary"), bits)
    signed = to_dtype(VECTORS, "binary")
    assert signed.dtype == np.int8
    np.testing.assert_array_equal(signed.astype(int) + 128, bits)
    assert bits.shape == (50, 3)  # 20 bits and 4 zeros


def test_float16_is_rounded_and_float32_stays():
    np.testing.assert_array_equal(to_dtype(VECTORS, "float16"), VECTORS.astype(np.float16))
    assert to_dtype(VECTORS, "float32") is VECTORS
    assert np.isinf(to_dtype(np.float32([[1e30]]), "float16")).all()


@pytest.mark.parametrize("dtype", ["int8", "binary", "ubinary"])
def test_whole_numbers_hold_no_nan(dtype):
    with pytest.raises(InputError, match=f"NaN or infinity, which {dtype} cannot hold"):
        to_dtype(np.float32([[1, np.nan]]), dtype)
    assert to_dtype(np.zeros((1, 8), np.float32), dtype).shape[0] == 1  # of no length


def test_dimensions_are_cut_before_the_bits_are_packed():
    options = VectorOptions(dimensions=9, dtype="ubinary")
    found = finish_vectors(VECTORS, options, model_normalizes=False)
    np.testing.assert_array_equal(found, np.packbits(VECTORS[:, :9] > 0, axis=1))
    empty = finish_vectors([], VectorOptions(dtype="binary"), dim=20, model_normalizes=False)
    assert (empty.shape, empty.dtype) == ((0, 3), np.int8)
