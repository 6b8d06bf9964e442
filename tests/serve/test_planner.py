import itertools
import random

import pytest

from enginery.serve.batching.planner import (
    MAX_PARTITIONED_ROWS,
    BatchRules,
    choose_batch,
    partition_rows,
)

RULES = BatchRules(max_tokens=256, max_rows=64, max_padding=0.1)


def batch(lengths, oldest, *, most=64, rules=RULES):
    low, high = choose_batch(lengths, oldest=oldest, max_rows=most, rules=rules)
    assert low <= oldest < high
    return lengths[low:high]


def padding_of(lengths):
    return max(lengths) * len(lengths) - sum(lengths)


def test_oldest_row_is_batched_with_nearest_lengths():
    assert batch([8, 9, 9, 60, 62, 64], 4) == [60, 62, 64]


def test_neighbours_that_need_too_much_padding_are_left_out():
    assert batch([8, 40, 100], 1) == [40]


def test_batch_respects_max_tokens():
    assert batch([64] * 10, 0) == [64] * 4


def test_row_over_the_token_limit_runs_alone():
    assert batch([500, 500], 0) == [500]


def test_batch_respects_max_rows():
    assert batch([4] * 20, 7, most=5) == [4] * 5
    assert batch([4] * 20, 7, rules=BatchRules(256, 3, 0.1)) == [4] * 3


def test_equal_lengths_rule_is_respected():
    rules = BatchRules(256, 64, 0.1, equal_lengths=True)
    assert batch([19, 20, 20, 21], 1, rules=rules) == [20, 20]


def test_batch_respects_the_engines_rows():
    rules = BatchRules(256, 64, 0.1, max_rows_for_length=lambda length: 2 if length > 8 else 64)
    assert batch([16] * 5, 0, rules=rules) == [16, 16]
    assert batch([8] * 5, 0, rules=rules) == [8] * 5


def test_padding_cheaper_than_a_batch_is_accepted():
    assert batch([10, 14], 0) == [10]
    rules = BatchRules(256, 64, 0.1, fixed_cost_tokens=8)
    assert batch([10, 14], 0, rules=rules) == [10, 14]
    assert batch([10, 19], 0, rules=rules) == [10]


def test_long_text_does_not_pull_short_ones_from_their_batch():
    # As on a GPU, where a batch costs as much as 2000 tokens before its first.
    rules = BatchRules(16_384, 64, 0.1, fixed_cost_tokens=2000)
    assert batch([20] * 40 + [128], 40, rules=rules) == [128]
    assert batch([20] * 200 + [128], 200, rules=rules) == [128]
    assert batch([20, 128], 1, rules=rules) == [20, 128]


def test_row_leaves_a_neighbour_that_is_cheaper_with_others():
    # 16 goes with 18 and 19: with 10 it would cost as much padding as all three together.
    rules = BatchRules(256, 64, 0.1, fixed_cost_tokens=7)
    assert batch([10, 16, 18, 19], 1, rules=rules) == [16, 18, 19]
    assert batch([10, 16, 18, 19], 0, rules=rules) == [10]


def test_many_rows_are_not_partitioned():
    rules = BatchRules(256, 64, 0.1, fixed_cost_tokens=5)
    few = [10, 12] + [14] * 6
    # Padding of 6 is more than a batch is worth, but less than a tenth.
    assert batch(few, 0, rules=rules) == few
    assert batch(few + [200] * MAX_PARTITIONED_ROWS, 0, rules=rules) == [10, 12]


GPU = BatchRules(16_384, 64, 0.1, fixed_cost_tokens=2000, takes_waiting=True)


def test_on_a_gpu_all_that_waits_is_taken():
    assert batch([9, 16, 16, 128], 0, rules=GPU) == [9, 16, 16, 128]
    assert batch([20] * 37, 5, rules=GPU) == [20] * 37
    assert batch([10] * 50, 0, most=50, rules=GPU) == [10] * 50


def test_on_a_gpu_a_part_of_what_waits_is_a_power_of_two():
    assert batch([380] * 256, 0, rules=GPU) == [380] * 32  # 43 would be padded to 64
    assert batch([20] * 200, 199, rules=GPU) == [20] * 64
    assert batch([16] * 40 + [512] * 3, 0, rules=GPU) == [16] * 32
    assert batch([16] * 40 + [512] * 3, 41, rules=GPU) == [16, 16, 512, 512]


def test_on_a_gpu_every_batch_respects_every_limit():
    chance = random.Random(0)
    for _ in range(300):
        lengths = sorted(chance.choice([8, 20, 128, 500]) for _ in range(chance.randint(1, 150)))
        most = chance.randint(1, 64)
        found = batch(lengths, chance.randrange(len(lengths)), most=most, rules=GPU)
        tokens = max(found) * len(found)
        assert len(found) <= most
        assert len(found) == len(lengths) or len(found).bit_count() == 1
        assert len(found) == 1 or tokens <= GPU.max_tokens
        assert padding_of(found) <= max(GPU.max_padding * tokens, GPU.fixed_cost_tokens)


def costs(lengths, places, worth):
    parts = [lengths[low:high] for low, high in itertools.pairwise(places)]
    return sum(worth + max(part) * len(part) for part in parts)


def allowed(part, most, rules):
    tokens = max(part) * len(part)
    padding = tokens - sum(part)
    return len(part) == 1 or (
        len(part) <= most
        and tokens <= rules.max_tokens
        and (not rules.max_rows_for_length or len(part) <= rules.max_rows_for_length(max(part)))
        and (not padding or not rules.equal_lengths)
        and padding <= max(rules.max_padding * tokens, rules.fixed_cost_tokens)
    )


@pytest.mark.parametrize("seed", range(40))
def test_no_partition_is_cheaper(seed):
    chance = random.Random(seed)
    lengths = sorted(chance.randint(3, 40) for _ in range(chance.randint(1, 10)))
    most = chance.randint(1, 10)
    rules = BatchRules(
        max_tokens=chance.choice([40, 100, 256]),
        max_rows=64,
        max_padding=chance.choice([0.0, 0.1, 0.3]),
        fixed_cost_tokens=chance.choice([0.5, 4.0, 8.0, 30]),
        equal_lengths=chance.random() < 0.2,
        max_rows_for_length=chance.choice([None, lambda length: 1 + 30 // length]),
    )
    found = partition_rows(lengths, most, rules)
    assert found[0] == 0
    assert found[-1] == len(lengths)
    inner = range(1, len(lengths))
    ways = (
        [0, *cuts, len(lengths)]
        for count in range(len(lengths))
        for cuts in itertools.combinations(inner, count)
    )
    least = min(
        costs(lengths, places, rules.fixed_cost_tokens)
        for places in ways
        if all(allowed(lengths[a:b], most, rules) for a, b in itertools.pairwise(places))
    )
    assert costs(lengths, found, rules.fixed_cost_tokens) == pytest.approx(least)
    assert all(allowed(lengths[a:b], most, rules) for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("worth", [0.0, 4.0])
@pytest.mark.parametrize("seed", range(20))
def test_every_batch_respects_every_limit(seed, worth):
    rules = BatchRules(256, 64, 0.1, fixed_cost_tokens=worth)
    chance = random.Random(seed)
    lengths = sorted(chance.randint(1, 128) for _ in range(chance.randint(1, 60)))
    for oldest in range(len(lengths)):
        most = chance.randint(1, 20)
        found = batch(lengths, oldest, most=most, rules=rules)
        assert len(found) <= most
        if len(found) > 1:
            tokens = max(found) * len(found)
            assert tokens <= rules.max_tokens
            assert padding_of(found) <= max(rules.max_padding * tokens, worth)
