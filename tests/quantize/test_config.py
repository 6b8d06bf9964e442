import pytest

from enginery.core.errors import OptionError
from enginery.core.options import options_from
from enginery.quantize.config import QuantizeConfig, check_options, parse_accuracy_budget


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"scheme": "dynamic"}, "scales that are constants of the graph"),
        ({"scheme": "dynamic", "target": "cuda"}, "no INT8 matrix products"),
        ({"target": "cuda"}, "no INT8 matrix products"),
        ({"target": "cpu", "scheme": "fp8"}, "no FP8 matrix products on the CPU"),
        ({"target": "cpu", "residual": "fp16"}, "no FP16 kernels on most CPUs"),
        ({"scheme": "fp8", "method": "entropy"}, "unequal steps"),
        ({"scheme": "fp8", "capability": ("8.9", "8.0")}, "compute capability 8.0 have no FP8"),
        ({"label_column": "label"}, "without 'accuracy_budget'"),
        ({"accuracy_budget": "a lot"}, "expected a percentage"),
        ({"accuracy_budget": "0.5"}, "expected a percentage"),
        ({"accuracy_budget": "120%"}, "expected a percentage"),
        ({"accuracy_budget": "1%", "min_cosine": 0.9}, "expected one of them"),
        ({"scheme": "fp8", "capability": ("8.9,8.6",)}, "compute capability 8.6 have no FP8"),
        ({"rows": 0}, "expected 1 or more"),
        ({"percentile": 0.5}, "expected 50 to 100"),
        ({"min_cosine": float("nan")}, "expected -1 to 1"),
        ({"smoothing": 1.5}, "expected 0 to 1"),
        ({"seed": -1}, "expected 0 or more"),
    ],
)
def test_invalid_options_are_rejected_with_a_reason(options, reason):
    with pytest.raises(OptionError, match=reason):
        check_options(options_from(QuantizeConfig, "quantize", options))


def test_defaults_are_valid():
    check_options(QuantizeConfig())


def test_smoothing_takes_a_number_or_a_keyword():
    assert options_from(QuantizeConfig, "quantize", {"smoothing": 0.5}).smoothing == 0.5
    with pytest.raises(OptionError, match="smoothing"):
        options_from(QuantizeConfig, "quantize", {"smoothing": "a lot"})


@pytest.mark.parametrize(
    ("budget", "part"), [("0.5%", 0.005), (" 2 % ", 0.02), ("100%", 1.0), ("0%", 0)]
)
def test_an_accuracy_budget_is_a_percentage(budget, part):
    assert parse_accuracy_budget(budget) == pytest.approx(part)
