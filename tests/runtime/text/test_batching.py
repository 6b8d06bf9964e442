"""Inputs of different lengths are grouped into batches."""

import itertools
import sys

import numpy as np
import pytest

from enginery.runtime.text.batching import Rungs, plan_batches


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


ROW_RUNGS, TOKEN_RUNGS = (1, 2, 4, 8), (16, 32, 64)
RUNGS = Rungs(ROW_RUNGS, TOKEN_RUNGS)


def padded(lengths, batch):
    """Return the padded tokens of a batch on the rungs."""
    longest = max(lengths[index] for index in batch)
    rows = next(rows for rows in ROW_RUNGS if rows >= len(batch))
    return rows * next((tokens for tokens in TOKEN_RUNGS if tokens >= longest), longest)


def test_batches_are_cut_where_the_rungs_are():
    lengths = [30] * 9
    limits = {"max_rows": 8, "max_tokens": 1000, "rungs": RUNGS}
    assert list(map(len, plan_batches(lengths, **limits))) == [8, 1]
    # Three rows cost as much as four, so the fourth is a shorter one.
    lengths = [60, 60, 60, 10, 9, 8]
    planned = plan_batches(lengths, **limits, batch_cost=40)
    assert planned[0] == [0, 1, 2, 3]
    # With a high cost of a batch, one that is filled up with empty rows is cheaper than two.
    assert list(map(len, plan_batches([30] * 5, **limits, batch_cost=1))) == [4, 1]
    assert list(map(len, plan_batches([30] * 5, **limits, batch_cost=500))) == [5]
    assert plan_batches([7], **limits) == [[0]]
    assert plan_batches([], **limits) == []


def test_the_limits_hold_on_the_rungs():
    lengths = [60] * 3 + [20] * 7
    planned = plan_batches(
        lengths, max_rows=lambda tokens: 8 if tokens < 64 else 2, max_tokens=130, rungs=RUNGS
    )
    assert list(map(len, planned)) == [2, 1, 4, 2, 1]
    assert all(padded(lengths, batch) <= 130 for batch in planned)
    assert sorted(itertools.chain(*planned)) == list(range(10))
    # An input beyond the rungs, and beyond the limit, is alone and has its own length.
    assert plan_batches([900, 3], max_rows=8, max_tokens=256, rungs=RUNGS) == [[0], [1]]


@pytest.mark.parametrize("batch_cost", [0, 1, 40, 1000])
def test_batches_on_rungs_cost_the_least_of_all_that_are_possible(batch_cost):
    generator = np.random.default_rng(1)
    for count in (2, 3, 5, 8, 9, 9):
        lengths = sorted(generator.integers(1, 65, count).tolist(), reverse=True)
        costs = []
        for cuts in itertools.product([False, True], repeat=count - 1):
            batches = split(list(range(count)), cuts)
            if all(len(batch) <= 8 for batch in batches):
                costs.append(sum(padded(lengths, batch) + batch_cost for batch in batches))
        planned = plan_batches(
            lengths, max_rows=8, max_tokens=sys.maxsize, batch_cost=batch_cost, rungs=RUNGS
        )
        assert sum(padded(lengths, batch) + batch_cost for batch in planned) == min(costs)
