"""The table of known providers."""

import pytest

from enginery.core.errors import ProviderError
from enginery.runtime.providers.known import SHORT_NAMES
from enginery.runtime.providers.specification import parse_providers


@pytest.mark.parametrize(
    ("text", "near"), [("cudda", "cuda"), ("CUDAExecutionProvidr", "CUDAExecutionProvider")]
)
def test_an_unknown_name_is_an_error_with_the_nearest(text, near):
    with pytest.raises(ProviderError, match=f"unknown execution provider '{text}'.*'{near}'"):
        parse_providers(text)


def test_every_provider_that_onnxruntime_knows_has_a_short_name():
    import onnxruntime

    assert set(onnxruntime.get_all_providers()) <= set(SHORT_NAMES.values())
