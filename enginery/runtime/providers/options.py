"""Check the options of execution providers and convert them to ONNX Runtime's strings.

>>> read_options("cuda", {"gpu_mem_limit": "2 GiB", "do_copy_in_default_stream": "true"})
{'gpu_mem_limit': '2147483648', 'do_copy_in_default_stream': '1'}

Options of the CPU, CUDA, TensorRT and TensorRT for RTX are checked here, because ONNX Runtime only
reports invalid ones if the provider's libraries are installed, and then continues without the
provider; the CPU's are options of a session there. Options of other providers are passed on
unchanged. Options that are not given keep ONNX Runtime's defaults.

Names and ranges of CUDA's and TensorRT's options are those of the parsers in onnxruntime-gpu 1.31,
which tests verify. For their meaning see onnxruntime.ai/docs/execution-providers (pages CUDA,
TensorRT and TensorRTRTX), `cuda_provider_options.h` and nvidia.github.io/TensorRT-RTX-EP-ABI.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

from enginery.core.errors import OptionError, nearest
from enginery.runtime.providers.known import (
    CPU,
    CUDA,
    TENSORRT,
    TENSORRT_RTX,
    full_name,
    short_name,
)

_MAX_INT = (1 << 31) - 1
_MAX_SIZE = (1 << 64) - 1  # the largest size_t: no limit


@dataclass(frozen=True)
class Number:
    """The range of an option that is a whole number."""

    minimum: int = 0
    maximum: int = _MAX_INT
    is_size: bool = False
    """True for bytes, which may be given with a unit."""


OptionKind: TypeAlias = type[bool] | type[str] | Number | tuple[str, ...]
"""What an option takes: true or false, a text, a number, or one of several words."""

_SIZE = Number(maximum=_MAX_SIZE, is_size=True)
_ADDRESS = Number(maximum=_MAX_SIZE)  # in this process's memory; 0 for none

CHECKED_OPTIONS: dict[str, dict[str, OptionKind]] = {
    CPU: {
        "enable_cpu_mem_arena": bool,
    },
    CUDA: {
        "device_id": Number(),
        "gpu_mem_limit": Number(1, _MAX_SIZE, is_size=True),
        "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
        "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
        "cudnn_conv_use_max_workspace": bool,
        "cudnn_conv1d_pad_to_nc1d": bool,
        "do_copy_in_default_stream": bool,
        "enable_cuda_graph": bool,
        "enable_skip_layer_norm_strict_mode": bool,
        "enable_cudnn": bool,
        "fuse_conv_bias": bool,
        "prefer_nhwc": bool,
        "sdpa_kernel": Number(),
        "tunable_op_enable": bool,
        "tunable_op_tuning_enable": bool,
        "tunable_op_max_tuning_duration_ms": Number(),
        "use_ep_level_unified_stream": bool,
        "use_tf32": bool,
        "has_user_compute_stream": bool,
        "user_compute_stream": _ADDRESS,
        "gpu_external_alloc": _ADDRESS,
        "gpu_external_free": _ADDRESS,
        "gpu_external_empty_cache": _ADDRESS,
    },
    TENSORRT: {
        "device_id": Number(),
        "trt_max_workspace_size": _SIZE,
        "trt_max_partition_iterations": Number(1),
        "trt_min_subgraph_size": Number(1),
        "trt_fp16_enable": bool,
        "trt_bf16_enable": bool,
        "trt_int8_enable": bool,
        "trt_int8_calibration_table_name": str,
        "trt_int8_use_native_calibration_table": bool,
        "trt_dla_enable": bool,
        "trt_dla_core": Number(),
        "trt_engine_cache_enable": bool,
        "trt_engine_cache_path": str,
        "trt_engine_cache_prefix": str,
        "trt_timing_cache_enable": bool,
        "trt_timing_cache_path": str,
        "trt_force_timing_cache": bool,
        "trt_dump_subgraphs": bool,
        "trt_force_sequential_engine_build": bool,
        "trt_context_memory_sharing_enable": bool,
        "trt_layer_norm_fp32_fallback": bool,
        "trt_detailed_build_log": bool,
        "trt_build_heuristics_enable": bool,
        "trt_sparsity_enable": bool,
        "trt_builder_optimization_level": Number(0, 5),
        "trt_auxiliary_streams": Number(-1),
        "trt_tactic_sources": str,
        "trt_extra_plugin_lib_paths": str,
        "trt_profile_min_shapes": str,
        "trt_profile_opt_shapes": str,
        "trt_profile_max_shapes": str,
        "trt_cuda_graph_enable": bool,
        "trt_preview_features": str,
        "trt_op_types_to_exclude": str,
        "trt_dump_ep_context_model": bool,
        "trt_ep_context_file_path": str,
        "trt_ep_context_embed_mode": Number(0, 1),
        "trt_weight_stripped_engine_enable": bool,
        "trt_onnx_model_folder_path": str,
        "trt_engine_hw_compatible": bool,
        "trt_engine_decryption_enable": bool,
        "trt_engine_decryption_lib_path": str,
        "user_compute_stream": _ADDRESS,
    },
    TENSORRT_RTX: {
        "device_id": Number(),
        "nv_max_workspace_size": _SIZE,
        "nv_max_shared_mem_size": _SIZE,
        "nv_dump_subgraphs": bool,
        "nv_detailed_build_log": bool,
        "enable_cuda_graph": bool,
        "nv_profile_min_shapes": str,
        "nv_profile_opt_shapes": str,
        "nv_profile_max_shapes": str,
        "nv_multi_profile_enable": bool,
        "nv_use_external_data_initializer": bool,
        "nv_runtime_cache_path": str,
        "has_user_compute_stream": bool,
        "user_compute_stream": _ADDRESS,
        "user_aux_stream_array": _ADDRESS,
    },
}
"""Provider -> its options."""

_BOOLEANS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


def read_options(provider: str, values: Mapping[str, Any]) -> dict[str, str]:
    """Check a provider's options and return them as ONNX Runtime's strings.

    Args:
        provider: short or full name of the provider.
        values: values as text, or of the option's type.

    Raises:
        OptionError: for the CPU, CUDA and TensorRT, an option is unknown or a value is invalid.
        ProviderError: the provider is unknown.
    """
    name = full_name(provider)
    short = short_name(name)
    options = CHECKED_OPTIONS.get(name)
    texts = {}
    for key, value in values.items():
        subject = f"option '{key}' for {short}"
        if value is None or isinstance(value, Mapping | list | tuple):
            description = "no value" if value is None else f"a {type(value).__name__}"
            raise OptionError(
                f"{subject}: found {description}, expected one value.",
                do="Leave it out for the default.",
            )
        if options is None:
            texts[key] = str(value)
            continue
        if key not in options:
            raise OptionError(
                f"unknown option '{key}' for {short}{nearest(key, options)}",
                do=f"Known options: {', '.join(options)}.",
            )
        checked = _check(subject, options[key], value)
        if isinstance(checked, bool) and name != TENSORRT:
            checked = int(checked)  # TensorRT's parser takes only words, the others take 0 and 1
        texts[key] = str(checked)
    return texts


def _check(subject: str, kind: OptionKind, value: Any) -> bool | int | str:
    if isinstance(kind, Number):
        return _in_range(subject, kind, value)
    if kind is bool:
        switch = _BOOLEANS.get(str(value).strip().lower())
        if switch is None:
            raise OptionError(f"{subject}: found '{value}', expected true or false.")
        return switch
    if isinstance(kind, tuple) and value not in kind:
        *choices, last = kind
        raise OptionError(f"{subject}: found '{value}', expected {', '.join(choices)} or {last}.")
    return str(value)


def _in_range(subject: str, limits: Number, value: Any) -> int:
    try:
        number = parse_size(str(value)) if limits.is_size else int(str(value))
    except ValueError:
        expected = "a size such as 2GiB or 2147483648" if limits.is_size else "a whole number"
        raise OptionError(f"{subject}: found '{value}', expected {expected}.") from None
    minimum, maximum = limits.minimum, limits.maximum
    if not minimum <= number <= maximum:
        unbounded = maximum >= _MAX_INT  # only the limit of the type
        span = f"{minimum} or more, below {maximum + 1}" if unbounded else f"{minimum} to {maximum}"
        raise OptionError(f"{subject}: found {number}, expected {span}.")
    return number


_UNITS: dict[str, int] = {
    **{unit: 1 << (10 * n) for n, unit in enumerate(("b", "kib", "mib", "gib", "tib"))},
    **{unit: 1000**n for n, unit in enumerate(("kb", "mb", "gb", "tb"), 1)},
}
_NUMBER_AND_UNIT = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?i?b)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes of `2GiB`, `2 GiB`, `500 MB` or `2147483648`.

    Units of 1024 end in `iB` (IEC 80000-13), units of 1000 in `B`.

    Raises:
        ValueError: the notation is invalid, or gives no whole number of bytes.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if not match:
        return int(text)
    size = Fraction(match["number"]) * _UNITS[match["unit"].lower()]
    if size.denominator != 1:
        raise ValueError(text)
    return size.numerator
