"""Inputs of different lengths are grouped into batches."""

import itertools

import numpy as np
import pytest

from enginery.runtime.text.batching import plan_batches


def test_batches_hold_every_input_once_within_bounds():
    lengths = [3, 400, 5, 390, 1, 1, 5000, 0]
    batches = plan_batches(lengths, max_rows=3, max_tokens=1000)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert batches[0] == [6]  # longer than the budget: alone
    for batch in batches[1:]:
        assert len(batch) <= 3
        assert len(batch) * max(lengths[index] for index in batch) <= 1000
    assert plan_batches([]) == []


def test_without_a_cost_each_batch_takes_what_fits():
    limits = {"max_rows": 3, "max_tokens": 20}
    assert plan_batches([9, 6, 4, 4, 1], **limits) == [[0, 1], [2, 3, 4]]
    assert plan_batches([9, 6, 4, 4, 1], **limits, batch_cost=1) == [[0], [1], [2, 3], [4]]


@pytest.mark.parametrize("equal_lengths", [False, True])
@pytest.mark.parametrize("batch_cost", [1, 20, 4096])
def test_batches_cost_the_least_of_all_that_are_possible(batch_cost, equal_lengths):
    def cost(batches):
        return sum(len(batch) * batch[0] + batch_cost for batch in batches)

    def fits(batch):
        equal = not equal_lengths or batch[0] == batch[-1]
        return equal and len(batch) <= 5 and (len(batch) == 1 or len(batch) * batch[0] <= 100)

    generator = np.random.default_rng(0)
    for count in (1, 2, 5, 9, 9, 9):
        lengths = sorted(generator.integers(1, 60, count).tolist(), reverse=True)
        least = min(
            cost(batches)
            for cuts in itertools.product([False, True], repeat=count - 1)
            if all(map(fits, batches := split(lengths, cuts)))
        )
        order = generator.permutation(count)
        mixed = [lengths[place] for place in order]
        planned = plan_batches(
            mixed, max_rows=5, max_tokens=100, equal_lengths=equal_lengths, batch_cost=batch_cost
        )
        found = [[mixed[index] for index in batch] for batch in planned]
        assert sorted(itertools.chain(*planned)) == list(range(count))
        assert all(map(fits, found))
        assert cost(found) == least


def split(values, cuts):
    """Split a list behind each value whose cut is True."""
    parts = [[values[0]]]
    for value, cut in zip(values[1:], cuts, strict=True):
        if cut:
            parts.append([value])
        else:
            parts[-1].append(value)
    return parts


def test_only_equal_lengths_share_a_batch():
    batches = plan_batches([2, 3, 2, 3], equal_lengths=True)
    assert sorted(map(sorted, batches)) == [[0, 2], [1, 3]]
