import pytest

from enginery.serve.batching.cost import (
    BatchCost,
    CostEstimator,
    choose_max_tokens,
    fit_cost,
    measure_cost,
)


def test_line_goes_through_the_fastest_runs():
    cost = fit_cost([(8, 0.010), (8, 0.004), (96, 0.9), (96, 0.048)])
    assert cost.seconds_per_token == pytest.approx(0.0005)
    assert cost.fixed_seconds == pytest.approx(0.0)


def test_noise_makes_no_negative_cost():
    cost = fit_cost([(8, 0.01), (96, 0.009)])
    assert cost.seconds_per_token == 0
    assert cost.fixed_seconds == 0.01
    assert cost.fixed_cost_tokens == 0


def test_measured_sizes_respect_the_models_limit():
    asked = []

    def run(tokens):
        asked.append(tokens)
        return 0.001 * tokens

    cost = measure_cost(run, limit=8)
    assert set(asked) == {8}
    assert cost.seconds_per_token == pytest.approx(0.001)


def test_a_large_batch_is_measured_instead_of_a_longer_row():
    asked = []

    def run(tokens):
        asked.append(tokens)
        return 0.0002 + 1e-7 * tokens

    cost = measure_cost(run, limit=512, large=4096)
    assert set(asked) == {8, 4096}
    assert cost.fixed_cost_tokens == pytest.approx(2000)


def test_on_a_gpu_batches_grow_until_their_fixed_cost_is_small():
    tokens, why = choose_max_tokens(BatchCost(0.001, 0.000001), on_cpu=False)
    assert tokens == 9000
    assert "10%" in why
    assert choose_max_tokens(BatchCost(1.0, 1e-9), on_cpu=False)[0] == 16_384
    assert choose_max_tokens(BatchCost(0.0, 0.1), on_cpu=False)[0] == 8192


def test_on_a_cpu_batches_stay_small():
    tokens, why = choose_max_tokens(BatchCost(0.001, 0.000001), on_cpu=True)
    assert tokens == 256
    assert "on a CPU larger batches take longer per token" in why


@pytest.mark.parametrize("on_cpu", [True, False])
def test_explanation_of_a_limit_has_no_cost_that_would_age(on_cpu):
    assert " ms" not in choose_max_tokens(BatchCost(0.001, 0.000001), on_cpu=on_cpu)[1]


def test_estimate_follows_batches_that_run():
    live = CostEstimator(BatchCost(0.002, 0.0002))
    assert live.cost().seconds_per_token == pytest.approx(0.0002)
    for _ in range(600):
        live.add(16, 0.004 + 16 * 0.0005)
        live.add(200, 0.004 + 200 * 0.0005)
    assert live.cost().seconds_per_token == pytest.approx(0.0005, rel=0.02)
    assert live.cost().fixed_seconds == pytest.approx(0.004, rel=0.1)
    assert live.batches == 1200


def test_batches_of_one_size_do_not_determine_the_fixed_cost():
    live = CostEstimator(BatchCost(0.0, 0.0))
    assert live.cost() == BatchCost(0.0, 0.0)
    for _ in range(10):
        live.add(50, 0.01)
    assert live.cost().fixed_seconds == 0
    assert live.cost().seconds_per_token == pytest.approx(0.0002)


def test_batches_of_similar_size_keep_the_fixed_cost_near_the_measured_one():
    live = CostEstimator(BatchCost(0.0012, 0.00015))
    assert live.fixed_cost_tokens() == pytest.approx(8)
    for turn in range(2000):  # the small difference in size is noise in time
        live.add(120 + turn % 2, 0.02 + 0.000001 * (turn % 2))
    assert live.cost().fixed_cost_tokens > 100
    assert live.fixed_cost_tokens() == pytest.approx(32)
    for turn in range(2000):
        live.add(120 + turn % 2, 0.02 + 0.001 * (turn % 2))
    assert live.cost().fixed_cost_tokens == 0
    assert live.fixed_cost_tokens() == pytest.approx(2)
    assert CostEstimator(BatchCost(0.0, 0.0)).fixed_cost_tokens() == 0
