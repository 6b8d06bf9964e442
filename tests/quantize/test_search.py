import pytest

from enginery.core.errors import CheckFailedError, OptionError
from enginery.core.reports import Accuracy
from enginery.quantize.config import QuantizeConfig
from enginery.quantize.report import budget_notes
from enginery.quantize.search import Budget, search_mix

HARM = {"calm": 1e-5, "wild": 4e-3, "large": 3e-3, "rough": 1e-3, "mild": 1e-4}
WEIGHTS = {"calm": 0.1, "wild": 0.1, "large": 0.6, "rough": 0.1, "mild": 0.1}


def accuracy(cosine, *, agreement=None, labels=None):
    return Accuracy(10, cosine, cosine, None, agreement, labels)


def search(least, *, harm=HARM, **options):
    """Each quantized layer takes its harm from the cosine."""

    def measure(quantized, part):
        return accuracy(1 - sum(harm[name] for name in quantized))

    budget = Budget("cosine", 1 - least)
    return search_mix(list(WEIGHTS), WEIGHTS, measure, budget, **options)


def test_nothing_is_left_out_where_all_layers_hold_the_budget():
    found = search(0.99)
    assert found.left_out == {}
    assert [point.share for point in found.curve] == [pytest.approx(1)]


@pytest.mark.parametrize("budget", [0.992, 0.995, 0.998, 0.9995])
def test_the_mix_holds_the_budget_and_no_smaller_one_would(budget):
    found = search(budget)
    assert found.accuracy.cosine >= budget
    one_less = list(found.left_out)[:-1]
    left = 1 - sum(harm for name, harm in HARM.items() if name not in one_less)
    assert left < 1 - 0.95 * (1 - budget)


def test_the_most_harmful_for_each_multiply_add_goes_first():
    # `large` harms more than `rough`, but it is six times the work.
    assert list(search(0.995).left_out) == ["wild"]
    assert list(search(0.996).left_out) == ["wild", "rough"]


def test_reasons_have_the_measured_effect():
    assert "4.00e-03" in search(0.995).left_out["wild"]


def test_the_curve_has_every_mix_that_was_measured():
    shares = [point.share for point in search(0.9995).curve]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(1)


def test_a_budget_that_no_mix_holds_is_a_failed_check():
    with pytest.raises(CheckFailedError, match=r"no mix .* mean cosine of at least 1"):
        search(1.0)


def test_a_curve_is_measured_where_nothing_has_to_be_left_out():
    found = search(0.99, curve=True)
    assert found.left_out == {}
    assert [point.left_out for point in found.curve] == [0, 1, 2, 4]
    assert [point.accuracy.cosine for point in found.curve] == sorted(
        point.accuracy.cosine for point in found.curve
    )
    assert found.accuracy == found.curve[0].accuracy


def test_a_curve_does_not_change_the_mix():
    assert search(0.996, curve=True).left_out == search(0.996).left_out


@pytest.mark.parametrize("kind", ["accuracy", "agreement"])
def test_a_budget_in_answers_decides_and_not_the_cosine(kind):
    def measure(quantized, part):
        right = 0.80 if "wild" in quantized else 0.90
        return accuracy(1 - sum(HARM[n] for n in quantized), agreement=right, labels=right)

    found = search_mix(list(WEIGHTS), WEIGHTS, measure, Budget(kind, 0.05, 0.91))
    assert list(found.left_out) == ["wild"]


def test_the_budget_is_about_labels_where_there_are_some():
    config = QuantizeConfig(accuracy_budget="2%")
    assert Budget.of(config, accuracy(1.0, agreement=1.0, labels=0.9)) == Budget(
        "accuracy", 0.02, 0.9
    )
    assert Budget.of(config, accuracy(1.0, agreement=1.0)) == Budget("agreement", 0.02, 1.0)


def test_a_budget_of_just_so_many_answers_holds():
    assert Budget("agreement", 0.01).holds(accuracy(1.0, agreement=0.99))
    assert not Budget("agreement", 0.01).holds(accuracy(1.0, agreement=0.98))


def test_vectors_are_neither_right_nor_wrong():
    with pytest.raises(OptionError, match=r"neither right nor wrong(.|\n)*--min-cosine"):
        Budget.of(QuantizeConfig(accuracy_budget="2%"), accuracy(1.0))


def test_a_budget_finer_than_one_row_is_noted():
    (note,) = budget_notes(Budget("agreement", 0.005), rows=128)
    assert "of 128 held-out rows, one is 0.78%" in note
    assert "not one answer may change" in note
    assert budget_notes(Budget("agreement", 0.01), rows=128) == []
    assert budget_notes(Budget("agreement", 0.01), rows=100), "the search spends 95 % of it"
    assert budget_notes(Budget("cosine", 0.002), rows=8) == []
