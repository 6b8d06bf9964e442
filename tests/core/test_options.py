import pytest

from enginery.core.errors import OptionError
from enginery.core.options import option_names, options_dict, options_from
from enginery.export.config import ExportConfig
from enginery.validate.config import ValidateConfig


def test_options_come_in_order_and_default_to_the_dataclass():
    assert option_names(ExportConfig)[:3] == ["task", "revision", "opset"]
    assert options_from(ExportConfig, "export", {}) == ExportConfig()


def test_values_are_converted_to_the_fields_types():
    built = options_from(ExportConfig, "export", {"opset": "17", "allow_pickle": "yes"})
    assert built == ExportConfig(opset=17, allow_pickle=True)
    built = options_from(ValidateConfig, "validate", {"profile": ["a", "b"], "min_cosine": "1e-3"})
    assert built == ValidateConfig(profile=("a", "b"), min_cosine=1e-3)


def test_unknown_option_names_the_nearest_and_lists_all():
    with pytest.raises(OptionError) as caught:
        options_from(ExportConfig, "export", {"opsets": 20})
    assert caught.value.message == "unknown option 'opsets' for export; did you mean 'opset'?"
    assert caught.value.do.startswith("Known options: task, revision, opset,")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"opset": "new"}, r"'opset' for export: input should be a valid integer.*found 'new'"),
        ({"opset": 1.5}, r"found 1\.5"),
        ({"dtype": "FP8"}, r"input should be 'fp32', 'fp16' or 'bf16', found 'FP8'"),
        ({"task": 3}, r"'task' for export: input should be a valid string, found 3"),
        ({"trust_remote_code": "maybe"}, r"valid boolean.*found 'maybe'"),
    ],
)
def test_invalid_value_names_expected_and_found(values, message):
    with pytest.raises(OptionError, match=message):
        options_from(ExportConfig, "export", values)


def test_option_that_takes_a_number_or_a_word_names_both():
    with pytest.raises(
        OptionError, match=r"valid number.* or input should be 'noise-floor', found"
    ):
        options_from(ValidateConfig, "validate", {"max_abs_error": "small"})


def test_options_dict_is_plain_json_and_builds_the_same_options():
    options = ValidateConfig(profile=("batch=1",), max_abs_error=0.5)
    plain = options_dict(options)
    assert plain["profile"] == ["batch=1"]
    assert options_from(ValidateConfig, "validate", plain) == options
