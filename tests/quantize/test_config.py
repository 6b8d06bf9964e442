import pytest

from enginery.core.errors import OptionError
from enginery.core.options import options_from
from enginery.quantize.config import QuantizeConfig, check_options, lost_accuracy


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"scheme": "dynamic"}, "scales are constants of the graph"),
        ({"scheme": "dynamic", "target": "cuda"}, "multiplies no INT8"),
        ({"target": "cuda"}, "multiplies no INT8"),
        ({"target": "cpu"}, "placed here as TensorRT fuses them"),
        ({"scheme": "fp8", "method": "entropy"}, "equal steps"),
        ({"scheme": "fp8", "capabilities": ("8.9", "8.0")}, "has 8.0, a GPU .* no FP8"),
        ({"label_column": "label"}, "without 'accuracy_budget'"),
        ({"ranges": "r.json", "calibration": "c.csv"}, "nothing is measured"),
        ({"ranges": "r.json", "accuracy_budget": "1%"}, "nothing is measured"),
        ({"accuracy_budget": "a lot"}, "expected a percentage"),
        ({"accuracy_budget": "0.5"}, "expected a percentage"),
        ({"accuracy_budget": "120%"}, "expected a percentage"),
        ({"accuracy_budget": "1%", "min_cosine": 0.9}, "one is in place of the other"),
        ({"scheme": "fp8", "capabilities": ("8.9,8.6",)}, "has 8.6, a GPU .* no FP8"),
        ({"symmetric": False}, "zero points of 0 alone"),
        ({"rows": 0}, "expected 1 or more"),
        ({"percentile": 0.5}, "expected 50 to 100"),
        ({"min_cosine": float("nan")}, "expected -1 to 1"),
        ({"smoothing": 1.5}, "expected 0 to 1"),
        ({"seed": -1}, "expected 0 or more"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_with_the_reason(options, reason):
    with pytest.raises(OptionError, match=reason):
        check_options(options_from(QuantizeConfig, "quantize", options))


def test_the_defaults_can_be_used():
    check_options(QuantizeConfig())


def test_smoothing_is_a_number_or_a_word():
    assert options_from(QuantizeConfig, "quantize", {"smoothing": 0.5}).smoothing == 0.5
    with pytest.raises(OptionError, match="smoothing"):
        options_from(QuantizeConfig, "quantize", {"smoothing": "a lot"})


@pytest.mark.parametrize(
    ("budget", "part"), [("0.5%", 0.005), (" 2 % ", 0.02), ("100%", 1.0), ("0%", 0)]
)
def test_an_accuracy_budget_is_a_percentage(budget, part):
    assert lost_accuracy(budget) == pytest.approx(part)
