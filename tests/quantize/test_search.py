import pytest

from enginery.core.errors import CheckFailedError
from enginery.quantize.accuracy import Accuracy
from enginery.quantize.search import Budget, search_mix

HARM = {"calm": 1e-5, "wild": 4e-3, "large": 3e-3, "rough": 1e-3, "mild": 1e-4}
WEIGHTS = {"calm": 0.1, "wild": 0.1, "large": 0.6, "rough": 0.1, "mild": 0.1}


def accuracy(cosine, label_accuracy=None):
    return Accuracy(10, cosine, cosine, None, None, label_accuracy)


def search(budget, *, harm=HARM):
    """Each layer in INT8 takes its harm from the cosine."""

    def measure(int8, part):
        return accuracy(1 - sum(harm[name] for name in int8))

    return search_mix(list(WEIGHTS), WEIGHTS, measure, Budget(budget, 0.0, None))


def test_nothing_is_left_out_where_all_of_int8_holds_the_budget():
    found = search(0.99)
    assert found.left_out == {}
    assert [point.int8_share for point in found.curve] == [pytest.approx(1)]


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
    shares = [point.int8_share for point in search(0.9995).curve]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(1)


def test_a_budget_that_no_mix_holds_is_a_failed_check():
    with pytest.raises(CheckFailedError, match=r"no mix .* mean cosine of at least 1\.0"):
        search(1.0)


def test_with_labels_accuracy_decides_and_not_the_cosine():
    def measure(int8, part):
        return accuracy(1 - sum(HARM[n] for n in int8), 0.80 if "wild" in int8 else 0.90)

    found = search_mix(list(WEIGHTS), WEIGHTS, measure, Budget(0.99999, 0.05, 0.91))
    assert list(found.left_out) == ["wild"]
