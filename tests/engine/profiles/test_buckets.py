import itertools

import numpy as np
import pytest

from enginery.core.errors import InputError, OptionError
from enginery.engine.profiles.buckets import Bucket, bucket_lengths


def test_a_split_has_its_numbers():
    buckets = bucket_lengths(np.array([30, 5, 120, 6, 31, 7]), 3, most=512)
    assert buckets.buckets == (
        Bucket(shortest=1, longest=8, rows=3, tokens=18),
        Bucket(shortest=9, longest=32, rows=2, tokens=61),
        Bucket(shortest=33, longest=120, rows=1, tokens=120),
    )
    assert (buckets.rows, buckets.tokens) == (6, 199)
    assert (buckets.padded, buckets.padded_by_one) == (3 * 8 + 2 * 32 + 120, 6 * 120)
    assert buckets.padding == pytest.approx(1 - 199 / 208)
    assert buckets.ratio == pytest.approx(208 / 720)
    assert [bucket.padding for bucket in buckets.buckets] == pytest.approx([0.25, 3 / 64, 0])
    assert (buckets.lengths, buckets.counts) == ((5, 6, 7, 30, 31, 120), (1,) * 6)
    assert str(buckets) == (
        "6 rows of 5 to 120 tokens; 3 buckets up to 8, 32, 120: 4% padding, 29% of the tokens of "
        "a single bucket"
    )


def test_no_split_is_cheaper():
    """Against every split there is, on small random data."""
    generator = np.random.default_rng(0)

    def cost(ends, rounded):
        return sum(min(end for end in ends if end >= length) for length in rounded)

    for _ in range(200):
        most = int(generator.integers(5, 90))
        lengths = generator.integers(0, 100, generator.integers(1, 40))
        count = int(generator.integers(1, 6))
        found = bucket_lengths(lengths, count, most=most)
        up = -(-np.clip(lengths, 1, most) // 8) * 8
        rounded = np.minimum(up, most)
        *inner, last = np.unique(rounded).tolist()
        best = min(
            cost([*ends, last], rounded)
            for used in range(min(count, len(inner) + 1))
            for ends in itertools.combinations(inner, used)
        )
        ends = [bucket.longest for bucket in found.buckets]
        assert found.padded == cost(ends, rounded) == best
        assert len(ends) == min(count, len(inner) + 1)
        assert sum(bucket.rows for bucket in found.buckets) == found.rows == len(lengths)
        assert found.tokens == np.minimum(lengths, most).sum()


def test_buckets_leave_no_gap():
    generator = np.random.default_rng(1)
    buckets = bucket_lengths(generator.integers(1, 500, 1000), 5, most=512).buckets
    assert buckets[0].shortest == 1
    for before, after in itertools.pairwise(buckets):
        assert after.shortest == before.longest + 1


def test_of_equal_splits_the_same_one_comes_every_time():
    """8 | 16, 24 and 8, 16 | 24 pad as much."""
    lengths = np.array([8, 16, 24])
    found = [bucket_lengths(np.roll(lengths, shift), 2, most=64) for shift in range(3)]
    assert len({tuple(b.longest for b in buckets.buckets) for buckets in found}) == 1
    assert found[0].padded == 56


def test_one_distinct_length_is_one_bucket():
    buckets = bucket_lengths(np.full(5, 17), 3, most=512)
    assert buckets.buckets == (Bucket(1, 24, 5, 85),)
    assert buckets.ratio == 1
    assert "1 bucket up to 24" in str(buckets)


def test_fewer_distinct_lengths_than_buckets_give_fewer_buckets():
    """Three lengths, two after rounding."""
    ends = [b.longest for b in bucket_lengths(np.array([3, 7, 30]), 5, most=512).buckets]
    assert ends == [8, 32]


def test_rows_above_the_maximum_are_truncated_and_counted():
    buckets = bucket_lengths(np.array([10, 100, 101, 5000]), 2, most=100)
    assert [bucket.longest for bucket in buckets.buckets] == [16, 100]
    assert (buckets.truncated, buckets.tokens, buckets.lengths[-1]) == (2, 310, 100)
    assert "4 rows of 10 to 100 tokens, 2 of them truncated at 100;" in str(buckets)


def test_a_boundary_is_no_multiple_where_the_model_ends_before_it():
    assert bucket_lengths(np.array([509]), 1, most=510).buckets[0].longest == 510


def test_an_empty_text_takes_one_position():
    buckets = bucket_lengths(np.array([0, 0]), 1, most=1)
    assert buckets.buckets == (Bucket(1, 1, 2, 0),)
    assert buckets.padding == 1


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (np.array([], dtype=np.int64), "there are no token lengths to split into buckets."),
        (np.array([[1, 2]]), "there are no token lengths to split into buckets."),
        (np.array([3, -1]), "token lengths are int64 from -1 on, expected integers of 0 or more."),
        (np.array([1.5]), "token lengths are float64 from 1.5 on, expected integers of 0 or more."),
    ],
)
def test_invalid_lengths_are_rejected(lengths, message):
    with pytest.raises(InputError) as error:
        bucket_lengths(lengths, 2, most=8)
    assert str(error.value) == message


def test_no_bucket_is_an_error():
    with pytest.raises(OptionError, match="option 'count' is 0, expected 1 or more"):
        bucket_lengths(np.array([1]), 0, most=8)
