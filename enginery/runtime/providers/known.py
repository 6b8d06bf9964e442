"""Every execution provider that ONNX Runtime documents: its names, its package, its platforms.

>>> full_name("CUDA"), short_name("CUDAExecutionProvider")
('CUDAExecutionProvider', 'cuda')
>>> known_provider("openvino").package, known_provider("coreml").platforms
('onnxruntime-openvino', ('darwin', 'ios'))

Sources: onnxruntime.ai/docs/execution-providers and onnxruntime.ai/docs/install, for 1.31. See
`availability` for what is compiled into the installed build and what is missing on this machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from enginery.core.errors import ProviderError, nearest

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
TENSORRT_RTX = "NvTensorRTRTXExecutionProvider"
NVIDIA = frozenset({CUDA, TENSORRT, TENSORRT_RTX})
OPENVINO = "OpenVINOExecutionProvider"
AZURE = "AzureExecutionProvider"

_SYSTEMS = {
    "linux": "Linux",
    "darwin": "macOS",
    "win32": "Windows",
    "android": "Android",
    "ios": "iOS",
    "browser": "the browser",
}


@dataclass(frozen=True)
class KnownProvider:
    """One execution provider of ONNX Runtime."""

    short_names: tuple[str, ...]
    """Names for the command line; messages use the first."""
    name: str
    """ONNX Runtime's name."""
    title: str
    """Hardware that it runs on, and its library."""
    package: str
    """Python package that includes it; empty if ONNX Runtime must be built with it."""
    platforms: tuple[str, ...]
    """Values of `sys.platform`, or `android`, `ios`, `browser`."""
    options: tuple[str, ...] = ()
    """Documented options of a provider whose options are not typed in `options.py`."""

    def wrong_platform(self, platform: str) -> str:
        """Return `it is only for Windows` for another platform; empty for a supported one."""
        if platform in self.platforms:
            return ""
        return f"it is only for {' and '.join(_SYSTEMS[name] for name in self.platforms)}"


def _row(
    short_names: str, name: str, title: str, package: str, platforms: str, options: str = ""
) -> KnownProvider:
    """Make a row; several names, platforms or options are separated by spaces."""
    return KnownProvider(
        tuple(short_names.split()),
        f"{name}ExecutionProvider",
        title,
        package,
        tuple(platforms.split()),
        tuple(options.split()),
    )


_FROM_SOURCE = ""
_DESKTOP = "linux darwin win32"
_ANYWHERE = " ".join(_SYSTEMS)

KNOWN_PROVIDERS = (
    _row("cpu", "CPU", "any processor", "onnxruntime", _ANYWHERE),
    _row("cuda", "CUDA", "NVIDIA GPUs", "onnxruntime-gpu", "linux win32"),
    _row(
        "tensorrt", "Tensorrt", "NVIDIA GPUs, through TensorRT 10", "onnxruntime-gpu", "linux win32"
    ),
    _row(
        "tensorrt-rtx",
        "NvTensorRTRTX",
        "NVIDIA RTX GPUs, through TensorRT for RTX",
        "onnxruntime-ep-nv-tensorrt-rtx-cu13",
        "linux win32",
    ),
    _row(
        "openvino",
        "OpenVINO",
        "Intel CPUs, GPUs and NPUs",
        "onnxruntime-openvino",
        "linux win32",
        "device_type precision num_of_threads num_streams cache_dir load_config "
        "enable_qdq_optimizer disable_dynamic_shapes model_priority reshape_input layout",
    ),
    _row("dnnl onednn", "Dnnl", "Intel CPUs, through oneDNN", _FROM_SOURCE, _DESKTOP, "use_arena"),
    _row(
        "xnnpack",
        "Xnnpack",
        "Arm and x86 CPUs, through XNNPACK",
        _FROM_SOURCE,
        _ANYWHERE,
        "intra_op_num_threads",
    ),
    _row(
        "directml dml",
        "Dml",
        "GPUs under DirectX 12",
        "onnxruntime-directml",
        "win32",
        "device_id performance_preference device_filter disable_metacommands enable_graph_capture",
    ),
    _row(
        "coreml",
        "CoreML",
        "Apple CPUs, GPUs and Neural Engine",
        "onnxruntime",
        "darwin ios",
        "ModelFormat MLComputeUnits RequireStaticInputShapes EnableOnSubgraphs "
        "SpecializationStrategy ProfileComputePlan AllowLowPrecisionAccumulationOnGPU "
        "ModelCacheDirectory",
    ),
    _row(
        "rocm",
        "ROCM",
        "AMD GPUs; removed from ONNX Runtime after 1.22",
        _FROM_SOURCE,
        "linux",
        "device_id gpu_mem_limit arena_extend_strategy tunable_op_enable",
    ),
    _row(
        "migraphx",
        "MIGraphX",
        "AMD GPUs, through MIGraphX",
        "onnxruntime-migraphx",
        "linux win32",
        "device_id migraphx_fp16_enable migraphx_bf16_enable migraphx_fp8_enable "
        "migraphx_int8_enable migraphx_exhaustive_tune migraphx_model_cache_dir",
    ),
    _row(
        "qnn",
        "QNN",
        "Qualcomm NPUs, GPUs and CPUs",
        "onnxruntime-qnn",
        "win32 linux android",
        "backend_path backend_type htp_performance_mode htp_graph_finalization_optimization_mode "
        "soc_model htp_arch device_id enable_htp_fp16_precision profiling_level "
        "qnn_context_priority offload_graph_io_quantization vtcm_mb",
    ),
    _row(
        "vitisai",
        "VitisAI",
        "AMD Ryzen AI NPUs and Xilinx FPGAs",
        _FROM_SOURCE,
        "linux win32",
        "config_file cache_dir cache_key target xclbin",
    ),
    _row(
        "cann",
        "CANN",
        "Huawei Ascend NPUs",
        "onnxruntime-cann",
        "linux",
        "device_id npu_mem_limit arena_extend_strategy enable_cann_graph dump_graphs dump_om_model "
        "precision_mode op_select_impl_mode optypelist_for_implmode",
    ),
    _row("nnapi", "Nnapi", "Android's accelerators", _FROM_SOURCE, "android"),
    _row(
        "acl",
        "ACL",
        "Arm CPUs, through the Compute Library",
        _FROM_SOURCE,
        "linux android",
        "enable_fast_math",
    ),
    _row("armnn", "ArmNN", "Arm CPUs and GPUs, through Arm NN", _FROM_SOURCE, "linux"),
    _row("rknpu", "Rknpu", "Rockchip NPUs", _FROM_SOURCE, "linux"),
    _row("vsinpu", "VSINPU", "VeriSilicon NPUs", _FROM_SOURCE, "linux"),
    _row(
        "webgpu",
        "WebGpu",
        "GPUs, through WebGPU",
        "onnxruntime-webgpu",
        f"{_DESKTOP} browser",
        "preferredLayout enableGraphCapture validationMode deviceId",
    ),
    _row("webnn", "WebNN", "accelerators of the browser", _FROM_SOURCE, "browser"),
    _row("js", "Js", "WebGPU through JavaScript", _FROM_SOURCE, "browser"),
    _row("azure", "Azure", "models behind an Azure endpoint", "onnxruntime", _DESKTOP),
)
"""The documented execution providers of ONNX Runtime, and others in its source."""

SHORT_NAMES = {short: row.name for row in KNOWN_PROVIDERS for short in row.short_names}
"""Short name -> ONNX Runtime's name."""
_BY_NAME = {row.name: row for row in KNOWN_PROVIDERS}


def known_provider(name: str) -> KnownProvider:
    """Return the row of a provider by its short or full name.

    Raises:
        ProviderError: there is no such provider.
    """
    return _BY_NAME[full_name(name)]


def short_name(name: str) -> str:
    """Return `cuda` for `CUDAExecutionProvider`; an unknown name is returned unchanged."""
    row = _BY_NAME.get(name)
    return row.short_names[0] if row else name


def full_name(name: str) -> str:
    """Return ONNX Runtime's name for a short or full name; case is ignored.

    Raises:
        ProviderError: there is no such provider.
    """
    lowered = name.strip().lower()
    for short, full in SHORT_NAMES.items():
        if lowered in (short, full.lower()):
            return full
    suggestion = nearest(name.strip(), [*SHORT_NAMES, *_BY_NAME]) or nearest(lowered, SHORT_NAMES)
    raise ProviderError(
        f"unknown execution provider '{name.strip()}'{suggestion}",
        do=f"Known: {', '.join(SHORT_NAMES)}.",
    )
