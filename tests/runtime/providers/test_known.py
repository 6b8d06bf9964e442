"""The table of known providers."""

import pytest

from enginery.core.errors import ProviderError
from enginery.runtime.providers.known import (
    CPU,
    CUDA,
    KNOWN_PROVIDERS,
    SHORT_NAMES,
    TENSORRT,
    TENSORRT_RTX,
    known_provider,
)
from enginery.runtime.providers.options import is_typed, option_names
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


def test_every_provider_has_one_row_and_what_is_typed_is_listed():
    assert len({row.name for row in KNOWN_PROVIDERS}) == len(KNOWN_PROVIDERS)
    assert len(SHORT_NAMES) == sum(len(row.short_names) for row in KNOWN_PROVIDERS)
    names = [row.name for row in KNOWN_PROVIDERS if is_typed(row.name)]
    assert names == [CPU, CUDA, TENSORRT, TENSORRT_RTX]
    assert option_names("cuda")[:2] == ("device_id", "gpu_mem_limit")
    assert option_names("xnnpack") == ("intra_op_num_threads",)


def test_provider_for_another_system_names_it():
    assert known_provider("directml").wrong_platform("linux") == "it is only for Windows"
    assert known_provider("dml").wrong_platform("win32") == ""
