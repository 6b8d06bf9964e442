import random

import pytest

from enginery.serve.batches import CROWD, BatchRules, choose_batch

RULES = BatchRules(max_tokens=256, max_rows=64, max_padding=0.1)


def batch(lengths, oldest, *, most=64, rules=RULES):
    low, high = choose_batch(lengths, oldest=oldest, most=most, rules=rules)
    assert low <= oldest < high
    return lengths[low:high]


def padding_of(lengths):
    return max(lengths) * len(lengths) - sum(lengths)


def test_the_oldest_goes_with_its_nearest_neighbours_in_length():
    assert batch([8, 9, 9, 60, 62, 64], 4) == [60, 62, 64]


def test_neighbours_of_other_length_stay_where_padding_would_be_over_the_bound():
    assert batch([8, 40, 100], 1) == [40]


def test_a_batch_keeps_to_the_budget_of_tokens():
    assert batch([64] * 10, 0) == [64] * 4


def test_one_input_over_the_budget_runs_alone():
    assert batch([500, 500], 0) == [500]


def test_a_batch_keeps_to_the_number_that_it_may_have():
    assert batch([4] * 20, 7, most=5) == [4] * 5
    assert batch([4] * 20, 7, rules=BatchRules(256, 3, 0.1)) == [4] * 3


def test_lengths_that_cannot_be_padded_are_never_mixed():
    rules = BatchRules(256, 64, 0.1, equal_lengths=True)
    assert batch([19, 20, 20, 21], 1, rules=rules) == [20, 20]


def test_the_rows_that_an_engine_takes_bound_a_batch():
    rules = BatchRules(256, 64, 0.1, rows_at=lambda length: 2 if length > 8 else 64)
    assert batch([16] * 5, 0, rules=rules) == [16, 16]
    assert batch([8] * 5, 0, rules=rules) == [8] * 5


def test_in_a_crowd_padding_that_costs_less_than_a_batch_is_taken():
    lengths = sorted([10, 14] + [200] * CROWD)
    assert batch(lengths, 0) == [10]
    rules = BatchRules(256, 64, 0.1, worth_tokens=8)
    assert batch(lengths, 0, rules=rules) == [10, 14]
    assert batch([10, 14], 0, rules=rules) == [10]


@pytest.mark.parametrize("seed", range(20))
def test_every_batch_keeps_every_bound(seed):
    chance = random.Random(seed)
    lengths = sorted(chance.randint(1, 128) for _ in range(chance.randint(1, 60)))
    for oldest in range(len(lengths)):
        most = chance.randint(1, 20)
        found = batch(lengths, oldest, most=most)
        assert len(found) <= most
        if len(found) > 1:
            tokens = max(found) * len(found)
            assert tokens <= RULES.max_tokens
            assert padding_of(found) <= RULES.max_padding * tokens
