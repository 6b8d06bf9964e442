from types import SimpleNamespace

import pytest

from enginery.core.accuracy import AccuracyMetrics
from enginery.core.errors import CheckFailedError, OptionError
from enginery.core.shapes import TensorSpec
from enginery.quantize.accuracy import AccuracyBudget
from enginery.quantize.config import QuantizeConfig
from enginery.quantize.search import search_mixed_precision

HARM = {"calm": 1e-5, "wild": 4e-3, "large": 3e-3, "rough": 1e-3, "mild": 1e-4}
WEIGHTS = {"calm": 0.1, "wild": 0.1, "large": 0.6, "rough": 0.1, "mild": 0.1}


def accuracy(cosine, *, agreement=None, labels=None):
    return AccuracyMetrics(10, cosine, cosine, None, agreement, labels)


def search(least, *, harm=HARM, **options):
    """Measure a made-up model: each quantized layer lowers the cosine by its harm."""

    def measure(quantized, part):
        return accuracy(1 - sum(harm[name] for name in quantized))

    budget = AccuracyBudget("cosine", 1 - least)
    return search_mixed_precision(WEIGHTS, measure, budget, **options)


def test_no_layer_is_left_out_if_the_budget_is_met():
    found = search(0.99)
    assert found.left_out == {}
    assert [point.share for point in found.curve] == [pytest.approx(1)]


@pytest.mark.parametrize("budget", [0.992, 0.995, 0.998, 0.9995])
def test_result_meets_the_budget_with_the_fewest_layers_left_out(budget):
    found = search(budget)
    assert found.accuracy.cosine >= budget
    one_less = list(found.left_out)[:-1]
    left = 1 - sum(harm for name, harm in HARM.items() if name not in one_less)
    assert left < 1 - 0.95 * (1 - budget)


def test_layers_are_left_out_by_harm_per_multiply_add():
    # `large` harms more than `rough`, but it is six times the work.
    assert list(search(0.995).left_out) == ["wild"]
    assert list(search(0.996).left_out) == ["wild", "rough"]


def test_reason_names_the_measured_effect():
    assert "4.00e-03" in search(0.995).left_out["wild"]


def test_layers_whose_errors_hide_one_another_are_measured_by_themselves():
    """With `wild` and `rough` quantized, nothing else makes the cosine worse."""

    def measure(quantized, part):
        far_off = len({"wild", "rough"} & set(quantized))
        worst = 0.3 * (far_off > 0) + 0.01 * (far_off == 2 and "large" not in quantized)
        return accuracy(1 - max(worst, sum(HARM[n] for n in quantized if n != "large")))

    budget = AccuracyBudget("cosine", 0.01)
    found = search_mixed_precision(WEIGHTS, measure, budget)
    assert set(found.left_out) == {"wild", "rough"}
    assert "by itself" in found.left_out["wild"]


@pytest.mark.parametrize("hidden", [0.0, 2e-3, 6e-3])
def test_the_graph_itself_meets_the_budget(hidden):
    """It loses more than its simulation, for each layer that is quantized."""

    def confirm(quantized):
        harm = sum(HARM[name] for name in quantized)
        return accuracy(1 - harm - hidden * len(quantized) / 5)

    found = search(0.995, confirm=confirm)
    quantized = set(WEIGHTS) - set(found.left_out)
    assert confirm(quantized).cosine >= 0.995
    assert quantized
    assert len(found.left_out) > 1 or not hidden


def test_a_graph_that_always_misses_the_budget_is_a_failed_check():
    with pytest.raises(CheckFailedError, match="no combination"):
        search(0.995, confirm=lambda quantized: accuracy(0.9))


def test_curve_has_every_measured_combination():
    shares = [point.share for point in search(0.9995).curve]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(1)


def test_budget_that_cannot_be_met_is_a_failed_check():
    with pytest.raises(CheckFailedError, match=r"no combination .* mean cosine of at least 1"):
        search(1.0)


def test_curve_is_measured_even_if_no_layer_is_left_out():
    found = search(0.99, curve=True)
    assert found.left_out == {}
    assert [point.left_out for point in found.curve] == [0, 1, 2, 4]
    assert [point.accuracy.cosine for point in found.curve] == sorted(
        point.accuracy.cosine for point in found.curve
    )
    assert found.accuracy == found.curve[0].accuracy


def test_curve_does_not_change_the_result():
    assert search(0.996, curve=True).left_out == search(0.996).left_out


@pytest.mark.parametrize("kind", ["accuracy", "agreement"])
def test_accuracy_budget_ignores_the_cosine(kind):
    def measure(quantized, part):
        right = 0.80 if "wild" in quantized else 0.90
        return accuracy(1 - sum(HARM[n] for n in quantized), agreement=right, labels=right)

    found = search_mixed_precision(WEIGHTS, measure, AccuracyBudget(kind, 0.05, 0.91))
    assert list(found.left_out) == ["wild"]


def test_labels_make_the_budget_one_of_accuracy():
    config = QuantizeConfig(accuracy_budget="2%")
    assert AccuracyBudget.of(config, accuracy(1.0, agreement=1.0, labels=0.9)) == AccuracyBudget(
        "accuracy", 0.02, 0.9
    )
    assert AccuracyBudget.of(config, accuracy(1.0, agreement=1.0)) == AccuracyBudget(
        "agreement", 0.02, 1.0
    )


def test_budget_of_exactly_the_lost_answers_is_met():
    assert AccuracyBudget("agreement", 0.01).is_met_by(accuracy(1.0, agreement=0.99))
    assert not AccuracyBudget("agreement", 0.01).is_met_by(accuracy(1.0, agreement=0.98))


def test_accuracy_budget_needs_logits():
    with pytest.raises(OptionError, match=r"no output 'logits'(.|\n)*--min-cosine"):
        AccuracyBudget.of(QuantizeConfig(accuracy_budget="2%"), accuracy(1.0))


def test_budget_smaller_than_one_row_is_noted():
    def notes(budget, rows, dims=("batch", 3)):
        logits = TensorSpec("logits", "float32", dims)
        graph = SimpleNamespace(outputs=[logits])
        return AccuracyBudget.notes(QuantizeConfig(accuracy_budget=budget), graph, rows)

    (note,) = notes("0.5%", rows=128)
    assert "of 128 held-out rows, one is 0.78%" in note
    assert "no answer may change" in note
    assert notes("1%", rows=128) == []
    assert notes("1%", rows=100), "the search spends 95 % of it"
    assert notes("", rows=8) == notes("", rows=1) == []
    assert notes("0%", rows=128) == [], "no answer may change anyway"
    assert notes("0.5%", rows=128, dims=("batch", "sequence", 3)) == [], "rows have many answers"
