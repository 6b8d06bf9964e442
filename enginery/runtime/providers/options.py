"""Check the options of execution providers and convert them to ONNX Runtime's strings.

>>> read_options("cuda", {"gpu_mem_limit": "2 GiB", "do_copy_in_default_stream": "true"})
{'gpu_mem_limit': '2147483648', 'do_copy_in_default_stream': '1'}

Options of the CPU, CUDA, TensorRT and TensorRT for RTX are typed and checked here, because ONNX
Runtime only reports invalid ones if the provider's libraries are installed, and then continues
without the provider; the CPU's are options of a session there. Options of other providers are
passed on unchanged. Options that are not given keep ONNX Runtime's defaults.

Names and defaults of CUDA's and TensorRT's options are those of the parsers in onnxruntime-gpu
1.31, which tests verify. Sources of their meaning: onnxruntime.ai/docs/execution-providers, pages
CUDA, TensorRT and TensorRTRTX; `cuda_provider_options.h`; nvidia.github.io/TensorRT-RTX-EP-ABI.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from fractions import Fraction
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from enginery.core.errors import OptionError, nearest
from enginery.runtime.providers.known import (
    CPU,
    CUDA,
    TENSORRT,
    TENSORRT_RTX,
    full_name,
    known_provider,
    short_name,
)

_MAX_INT = (1 << 31) - 1
_MAX_SIZE = (1 << 64) - 1  # the largest size_t: no limit


def _integer(default: int, *, minimum: int, maximum: int = _MAX_INT) -> Any:
    return field(default=default, metadata={"minimum": minimum, "maximum": maximum})


def _size(default: int, *, minimum: int = 0) -> Any:
    """Return a field for a size in bytes, which may be given with a unit."""
    return field(default=default, metadata={"minimum": minimum, "maximum": _MAX_SIZE, "size": True})


def _address() -> Any:
    """Return a field for an address in this process's memory; 0 for none."""
    return _integer(0, minimum=0, maximum=_MAX_SIZE)


@dataclass(frozen=True)
class CpuOptions:
    """Options of CPUExecutionProvider."""

    enable_cpu_mem_arena: bool = True
    """Keep freed memory for later runs; False returns it, and each run allocates again.

    In ONNX Runtime this is an option of the session, which `new_session` sets.
    """


@dataclass(frozen=True)
class CudaOptions:
    """Options of CUDAExecutionProvider. Those that differ from the defaults are passed on."""

    device_id: int = _integer(0, minimum=0)
    """Index of the visible GPU, from 0."""
    gpu_mem_limit: int = _size(_MAX_SIZE, minimum=1)
    """Largest GPU memory of the arena, in bytes; cuDNN and CUDA use additional memory."""
    arena_extend_strategy: Literal["kNextPowerOfTwo", "kSameAsRequested"] = "kNextPowerOfTwo"
    """Growth of the arena: by powers of two, or by the requested size."""
    cudnn_conv_algo_search: Literal["EXHAUSTIVE", "HEURISTIC", "DEFAULT"] = "EXHAUSTIVE"
    """How cuDNN's algorithm for a convolution is selected.

    EXHAUSTIVE times all algorithms, again for each new input shape: with dynamic shapes a GPU can
    be slower than the CPU (onnxruntime issue 13198). HEURISTIC lets cuDNN choose. DEFAULT uses a
    fixed algorithm, which can be much slower (onnxruntime pull request 22705).
    """
    cudnn_conv_use_max_workspace: bool = True
    """Let cuDNN use as much workspace as it needs, up to gigabytes; otherwise 32 MiB."""
    cudnn_conv1d_pad_to_nc1d: bool = False
    """Pad a one-dimensional convolution to [N, C, 1, D] instead of [N, C, D, 1]."""
    do_copy_in_default_stream: bool = True
    """Copy on the compute stream; False may cause races (onnxruntime issue 4829)."""
    enable_cuda_graph: bool = False
    """Capture a run as a CUDA graph and replay it; needs bound inputs and outputs."""
    enable_skip_layer_norm_strict_mode: bool = False
    """Accumulate SkipLayerNormalization in float32: more exact, but slower."""
    enable_cudnn: bool = True
    """Use cuDNN even if it is optional for an operation. The default is an assumption."""
    fuse_conv_bias: bool = False
    """Fuse convolution and bias with cuDNN's graph API, compiled in the first run."""
    prefer_nhwc: bool = False
    """Use the NHWC layout for images, which is faster on tensor cores."""
    sdpa_kernel: int = _integer(0, minimum=0)
    """Allowed attention kernels, as a sum of bits; 0 lets ONNX Runtime choose."""
    tunable_op_enable: bool = False
    """Use TunableOp's kernels."""
    tunable_op_tuning_enable: bool = False
    """Tune TunableOp's kernels while running."""
    tunable_op_max_tuning_duration_ms: int = _integer(0, minimum=0)
    """Largest time for tuning one operation, in milliseconds; 0 for no limit."""
    use_ep_level_unified_stream: bool = False
    """Use one stream for all threads that run the session."""
    use_tf32: bool = True
    """Multiply float32 in TensorFloat-32 (10 instead of 23 bits of mantissa) from Ampere on."""
    has_user_compute_stream: bool = False
    """True if `user_compute_stream` is set."""
    user_compute_stream: int = _address()
    """Address of the caller's cudaStream_t."""
    gpu_external_alloc: int = _address()
    """Address of a function that allocates memory instead of the arena."""
    gpu_external_free: int = _address()
    """Address of the function that frees this memory."""
    gpu_external_empty_cache: int = _address()
    """Address of the function that empties the allocator's cache."""


@dataclass(frozen=True)
class TensorrtOptions:
    """Options of TensorrtExecutionProvider. An engine of `enginery build` needs none."""

    device_id: int = _integer(0, minimum=0)
    """Index of the visible GPU, from 0."""
    trt_max_workspace_size: int = _size(0)
    """Largest workspace of an engine, in bytes; 0 for all of the GPU's memory."""
    trt_max_partition_iterations: int = _integer(1000, minimum=1)
    """Number of attempts to partition the graph before other providers run all of it."""
    trt_min_subgraph_size: int = _integer(1, minimum=1)
    """Smaller subgraphs run on other providers."""
    trt_fp16_enable: bool = False
    """Let TensorRT choose FP16 by itself; up to TensorRT 10, and not for a typed graph."""
    trt_bf16_enable: bool = False
    """Let TensorRT choose BF16 by itself; up to TensorRT 10."""
    trt_int8_enable: bool = False
    """Let TensorRT choose INT8 by itself; up to TensorRT 10."""
    trt_int8_calibration_table_name: str = ""
    """File with calibrated ranges, for a graph without Q/DQ."""
    trt_int8_use_native_calibration_table: bool = False
    """True if the table has TensorRT's format, not ONNX Runtime's."""
    trt_dla_enable: bool = False
    """Use the deep learning accelerator, if there is one."""
    trt_dla_core: int = _integer(0, minimum=0)
    """Index of the accelerator's core."""
    trt_engine_cache_enable: bool = False
    """Cache engines. ONNX Runtime's cache key is the model's file name, not its weights."""
    trt_engine_cache_path: str = ""
    """Directory for engines; empty for the working directory."""
    trt_engine_cache_prefix: str = ""
    """Prefix of the engines' file names."""
    trt_timing_cache_enable: bool = False
    """Cache the timings of kernels, which makes the next build faster."""
    trt_timing_cache_path: str = ""
    """Directory for the timing cache."""
    trt_force_timing_cache: bool = False
    """Use timings from another GPU."""
    trt_dump_subgraphs: bool = False
    """Write each subgraph that becomes an engine as ONNX to the working directory."""
    trt_force_sequential_engine_build: bool = False
    """Build one engine at a time on several GPUs."""
    trt_context_memory_sharing_enable: bool = False
    """Share the memory of execution contexts between subgraphs."""
    trt_layer_norm_fp32_fallback: bool = False
    """Keep Pow and ReduceMean of layer normalization in FP32."""
    trt_detailed_build_log: bool = False
    """Log each step of a build with its time."""
    trt_build_heuristics_enable: bool = False
    """Choose kernels by heuristics: a faster build."""
    trt_sparsity_enable: bool = False
    """Use sparse kernels for weights in the 2:4 pattern."""
    trt_builder_optimization_level: int = _integer(3, minimum=0, maximum=5)
    """0 to 5; below 3, builds are faster and engines slower."""
    trt_auxiliary_streams: int = _integer(-1, minimum=-1)
    """Number of additional streams; -1 lets TensorRT choose, 0 uses the least memory."""
    trt_tactic_sources: str = ""
    """Libraries to take kernels from: `-CUDNN,+CUBLAS`."""
    trt_extra_plugin_lib_paths: str = ""
    """Libraries of plugins, separated by `;`."""
    trt_profile_min_shapes: str = ""
    """Minimum shapes, `input_ids:1x8,attention_mask:1x8`; set all three or none."""
    trt_profile_opt_shapes: str = ""
    """Optimum shapes, in the same notation."""
    trt_profile_max_shapes: str = ""
    """Maximum shapes, in the same notation."""
    trt_cuda_graph_enable: bool = False
    """Capture a run as a CUDA graph and replay it."""
    trt_preview_features: str = ""
    """Preview features of the builder, separated by commas."""
    trt_op_types_to_exclude: str = ""
    """Op types to run on other providers, separated by commas."""
    trt_dump_ep_context_model: bool = False
    """Write the ONNX model that wraps the engine."""
    trt_ep_context_file_path: str = ""
    """Path of this ONNX model."""
    trt_ep_context_embed_mode: int = _integer(0, minimum=0, maximum=1)
    """0: the ONNX model has the engine's file name; 1: it contains the engine."""
    trt_weight_stripped_engine_enable: bool = False
    """Store engines without weights, and refit them when they are loaded."""
    trt_onnx_model_folder_path: str = ""
    """Directory of the ONNX file with the weights, for refitting."""
    trt_engine_hw_compatible: bool = False
    """Build engines that run on any GPU from Ampere on."""
    trt_engine_decryption_enable: bool = False
    """True if cached engines are encrypted."""
    trt_engine_decryption_lib_path: str = ""
    """Library that decrypts engines."""
    user_compute_stream: int = _address()
    """Address of the caller's cudaStream_t."""


@dataclass(frozen=True)
class TensorrtRtxOptions:
    """Options of NvTensorRTRTXExecutionProvider."""

    device_id: int = _integer(0, minimum=0)
    """Index of the visible GPU, from 0."""
    nv_max_workspace_size: int = _size(0)
    """Largest workspace of an engine, in bytes; 0 lets TensorRT choose."""
    nv_max_shared_mem_size: int = _size(0)
    """Largest shared memory of a kernel, in bytes; 0 lets TensorRT choose."""
    nv_dump_subgraphs: bool = False
    """Write each subgraph that becomes an engine as ONNX to the working directory."""
    nv_detailed_build_log: bool = False
    """Log each step of a build."""
    enable_cuda_graph: bool = False
    """Capture a run as a CUDA graph and replay it."""
    nv_profile_min_shapes: str = ""
    """Minimum shapes, `input_ids:1x8,attention_mask:1x8`; repeat inputs for each profile."""
    nv_profile_opt_shapes: str = ""
    """Optimum shapes, in the same notation."""
    nv_profile_max_shapes: str = ""
    """Maximum shapes, in the same notation."""
    nv_multi_profile_enable: bool = False
    """True if the shapes are those of several profiles."""
    nv_use_external_data_initializer: bool = False
    """Pass external weights without copying them into the graph."""
    nv_runtime_cache_path: str = ""
    """Directory for kernels that are compiled when an engine is loaded; empty for none."""
    has_user_compute_stream: bool = False
    """True if `user_compute_stream` is set."""
    user_compute_stream: int = _address()
    """Address of the caller's cudaStream_t."""
    user_aux_stream_array: int = _address()
    """Address of an array of the caller's cudaStream_t, for auxiliary streams."""


ProviderOptions: TypeAlias = CpuOptions | CudaOptions | TensorrtOptions | TensorrtRtxOptions
"""Typed options of a provider."""

_TYPES: dict[str, type[ProviderOptions]] = {
    CPU: CpuOptions,
    CUDA: CudaOptions,
    TENSORRT: TensorrtOptions,
    TENSORRT_RTX: TensorrtRtxOptions,
}
_BOOLEANS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


def option_names(provider: str) -> tuple[str, ...]:
    """Return the names of a provider's typed or documented options."""
    kind = _TYPES.get(full_name(provider))
    return tuple(f.name for f in fields(kind)) if kind else known_provider(provider).options


def is_typed(provider: str) -> bool:
    """Return True if a provider's options are typed and checked."""
    return full_name(provider) in _TYPES


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
    kind = _TYPES.get(name)
    # Options of other providers are passed on unchecked.
    if kind is None:
        return {key: _untyped(short, key, value) for key, value in values.items()}
    options = {f.name: f for f in fields(kind)}
    hints = get_type_hints(kind)
    texts = {}
    for key, value in values.items():
        if key not in options:
            raise OptionError(
                f"unknown option '{key}' for {short}{nearest(key, options)}",
                do=f"Known options: {', '.join(options)}.",
            )
        typed = _typed(f"option '{key}' for {short}", hints[key], options[key], value)
        if isinstance(typed, bool) and name != TENSORRT:
            typed = int(typed)  # TensorRT's parser takes only words, the others take 0 and 1
        texts[key] = str(typed)
    return texts


def changed_options(options: ProviderOptions) -> tuple[str, dict[str, Any]]:
    """Return (ONNX Runtime's name of the provider, options that differ from the defaults)."""
    provider = next(name for name, kind in _TYPES.items() if isinstance(options, kind))
    values = {f.name: getattr(options, f.name) for f in fields(options)}
    return provider, {
        f.name: values[f.name] for f in fields(options) if values[f.name] != f.default
    }


def _untyped(short: str, key: str, value: Any) -> str:
    if value is None or isinstance(value, Mapping | list | tuple):
        description = "no value" if value is None else f"a {type(value).__name__}"
        raise OptionError(f"option '{key}' for {short}: found {description}, expected one value.")
    return str(value)


def _typed(subject: str, hint: Any, option: Field[Any], value: Any) -> bool | int | str:
    if value is None:
        raise OptionError(f"{subject} has no value.", do="Leave it out for the default.")
    if hint is int:
        return _in_range(subject, option.metadata, value)
    if hint is bool:
        switch = _BOOLEANS.get(str(value).strip().lower())
        if switch is None:
            raise OptionError(f"{subject}: found '{value}', expected true or false.")
        return switch
    if get_origin(hint) is Literal and value not in get_args(hint):
        *choices, last = get_args(hint)
        raise OptionError(f"{subject}: found '{value}', expected {', '.join(choices)} or {last}.")
    return str(value)


def _in_range(subject: str, limits: Mapping[str, Any], value: Any) -> int:
    minimum, maximum, is_size = limits["minimum"], limits["maximum"], limits.get("size", False)
    try:
        number = parse_size(str(value)) if is_size else parse_integer(str(value))
    except ValueError:
        expected = "a size such as 2GiB or 2147483648" if is_size else "a whole number"
        raise OptionError(f"{subject}: found '{value}', expected {expected}.") from None
    if not minimum <= number <= maximum:
        unbounded = maximum >= _MAX_INT  # only the limit of the type
        span = f"{minimum} or more, below {maximum + 1}" if unbounded else f"{minimum} to {maximum}"
        raise OptionError(f"{subject}: found {number}, expected {span}.")
    return number


_UNITS: dict[str, int] = {
    **{unit: 1 << (10 * n) for n, unit in enumerate(("b", "kib", "mib", "gib", "tib"))},
    **{unit: 1000**n for n, unit in enumerate(("kb", "mb", "gb", "tb"), 1)},
}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?i?b)", re.IGNORECASE)
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.LShift: operator.lshift,
    ast.Pow: operator.pow,
}
_MAX_CHARACTERS = 100
_MAX_EXPONENT = 64


def parse_size(text: str) -> int:
    """Return the bytes of `2GiB`, `2 GiB`, `500 MB`, `2147483648` or `2 * 1024 * 1024 * 1024`.

    Units of 1024 end in `iB` (IEC 80000-13), units of 1000 in `B`.

    Raises:
        ValueError: the notation is invalid, or gives no whole number of bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        return parse_integer(text)
    size = Fraction(match["number"]) * _UNITS[match["unit"].lower()]
    if size.denominator != 1:
        raise ValueError(text)
    return size.numerator


def parse_integer(text: str) -> int:
    """Return an integer from digits, or from an expression with `+ - * // << **` and parentheses.

    RapidOCR's configuration files have such expressions. They are not evaluated as Python.

    Raises:
        ValueError: the text is neither, or a number exceeds 64 bits.
    """
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(text[:_MAX_CHARACTERS])
    try:
        return _calculate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError(text) from error


def _calculate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            pass
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = -_calculate(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            first, second = _calculate(left), _calculate(right)
            # A huge power would use all memory before its size could be checked.
            if isinstance(sign, ast.Pow | ast.LShift) and not 0 <= second <= _MAX_EXPONENT:
                raise ValueError(second)
            number = _OPERATORS[type(sign)](first, second)
        case _:
            raise ValueError(ast.dump(node))
    if abs(number) > _MAX_SIZE:
        raise ValueError(number)
    return number
