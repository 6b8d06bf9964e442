"""Every execution provider that ONNX Runtime documents: what brings it, where it runs, its options.

    >>> known_provider("openvino").package, known_provider("coreml").platforms
    ('onnxruntime-openvino', ('darwin',))

From onnxruntime.ai/docs/execution-providers and onnxruntime.ai/docs/install, read for 1.31. What is
compiled into the build that is installed, and what is missing here, is for `availability` and the
doctor to say.
"""

from __future__ import annotations

from dataclasses import dataclass

from enginery.runtime.providers.names import (
    CPU,
    CUDA,
    TENSORRT,
    TENSORRT_RTX,
    full_name,
    short_name,
)
from enginery.runtime.providers.options import typed_names

_SOURCE = ""
_ANYWHERE = ("linux", "darwin", "win32", "android", "ios", "browser")
_NAMES = {
    "linux": "Linux", "darwin": "macOS", "win32": "Windows", "android": "Android", "ios": "iOS",
    "browser": "the browser",
}  # fmt: skip


@dataclass(frozen=True)
class KnownProvider:
    """One row of ONNX Runtime's table."""

    name: str
    """ONNX Runtime's name."""
    title: str
    """Whose library it is, and what it runs on."""
    package: str
    """The Python package that brings it; empty where ONNX Runtime has to be built with it."""
    platforms: tuple[str, ...]
    """`sys.platform` of where it runs, `android` and `browser` among them."""
    options: tuple[str, ...] = ()
    """The options that are known by name."""

    @property
    def short_name(self) -> str:
        return short_name(self.name)

    @property
    def typed(self) -> bool:
        """Its options are checked before ONNX Runtime sees them."""
        return bool(typed_names(self.name))

    def elsewhere(self, platform: str) -> str:
        """`it is made for Windows alone`, for a platform that it is not made for; else empty."""
        if platform in self.platforms:
            return ""
        return f"it is made for {' and '.join(_NAMES[name] for name in self.platforms)} alone"


def _nvidia(name: str, title: str, package: str) -> KnownProvider:
    return KnownProvider(name, title, package, ("linux", "win32"), typed_names(name))


TABLE = (
    KnownProvider(CPU, "any processor", "onnxruntime", _ANYWHERE),
    _nvidia(CUDA, "NVIDIA GPUs", "onnxruntime-gpu"),
    _nvidia(TENSORRT, "NVIDIA GPUs, through TensorRT 10", "onnxruntime-gpu"),
    _nvidia(
        TENSORRT_RTX, "NVIDIA RTX GPUs, through TensorRT for RTX",
        "onnxruntime-ep-nv-tensorrt-rtx-cu13",
    ),
    KnownProvider(
        "OpenVINOExecutionProvider", "Intel CPUs, GPUs and NPUs", "onnxruntime-openvino",
        ("linux", "win32"),
        ("device_type", "precision", "num_of_threads", "num_streams", "cache_dir", "load_config",
         "enable_qdq_optimizer", "disable_dynamic_shapes", "model_priority", "reshape_input",
         "layout"),
    ),
    KnownProvider(
        "DnnlExecutionProvider", "Intel CPUs, through oneDNN", _SOURCE,
        ("linux", "darwin", "win32"), ("use_arena",),
    ),
    KnownProvider(
        "XnnpackExecutionProvider", "Arm and x86 CPUs, through XNNPACK", _SOURCE, _ANYWHERE,
        ("intra_op_num_threads",),
    ),
    KnownProvider(
        "DmlExecutionProvider", "GPUs under DirectX 12", "onnxruntime-directml", ("win32",),
        ("device_id", "performance_preference", "device_filter", "disable_metacommands",
         "enable_graph_capture"),
    ),
    KnownProvider(
        "CoreMLExecutionProvider", "Apple CPUs, GPUs and Neural Engine", "onnxruntime",
        ("darwin", "ios"),
        ("ModelFormat", "MLComputeUnits", "RequireStaticInputShapes", "EnableOnSubgraphs",
         "SpecializationStrategy", "ProfileComputePlan", "AllowLowPrecisionAccumulationOnGPU",
         "ModelCacheDirectory"),
    ),
    KnownProvider(
        "ROCMExecutionProvider", "AMD GPUs; removed from ONNX Runtime after 1.22", _SOURCE,
        ("linux",), ("device_id", "gpu_mem_limit", "arena_extend_strategy", "tunable_op_enable"),
    ),
    KnownProvider(
        "MIGraphXExecutionProvider", "AMD GPUs, through MIGraphX", "onnxruntime-migraphx",
        ("linux", "win32"),
        ("device_id", "migraphx_fp16_enable", "migraphx_bf16_enable", "migraphx_fp8_enable",
         "migraphx_int8_enable", "migraphx_exhaustive_tune", "migraphx_model_cache_dir"),
    ),
    KnownProvider(
        "QNNExecutionProvider", "Qualcomm NPUs, GPUs and CPUs", "onnxruntime-qnn",
        ("win32", "linux", "android"),
        ("backend_path", "backend_type", "htp_performance_mode",
         "htp_graph_finalization_optimization_mode",
         "soc_model", "htp_arch", "device_id", "enable_htp_fp16_precision", "profiling_level",
         "qnn_context_priority", "offload_graph_io_quantization", "vtcm_mb"),
    ),
    KnownProvider(
        "VitisAIExecutionProvider", "AMD Ryzen AI NPUs and Xilinx FPGAs", _SOURCE,
        ("linux", "win32"), ("config_file", "cache_dir", "cache_key", "target", "xclbin"),
    ),
    KnownProvider(
        "CANNExecutionProvider", "Huawei Ascend NPUs", "onnxruntime-cann", ("linux",),
        ("device_id", "npu_mem_limit", "arena_extend_strategy", "enable_cann_graph",
         "dump_graphs", "dump_om_model", "precision_mode", "op_select_impl_mode",
         "optypelist_for_implmode"),
    ),
    KnownProvider("NnapiExecutionProvider", "Android's accelerators", _SOURCE, ("android",)),
    KnownProvider(
        "ACLExecutionProvider", "Arm CPUs, through the Compute Library", _SOURCE,
        ("linux", "android"), ("enable_fast_math",),
    ),
    KnownProvider(
        "ArmNNExecutionProvider", "Arm CPUs and GPUs, through Arm NN", _SOURCE, ("linux",)
    ),
    KnownProvider("RknpuExecutionProvider", "Rockchip NPUs", _SOURCE, ("linux",)),
    KnownProvider("VSINPUExecutionProvider", "VeriSilicon NPUs", _SOURCE, ("linux",)),
    KnownProvider(
        "WebGpuExecutionProvider", "GPUs, through WebGPU", "onnxruntime-webgpu",
        ("linux", "darwin", "win32", "browser"),
        ("preferredLayout", "enableGraphCapture", "validationMode", "deviceId"),
    ),
    KnownProvider("WebNNExecutionProvider", "accelerators of the browser", _SOURCE, ("browser",)),
    KnownProvider("JsExecutionProvider", "WebGPU through JavaScript", _SOURCE, ("browser",)),
    KnownProvider("AzureExecutionProvider", "models behind an Azure endpoint", "onnxruntime",
                  ("linux", "darwin", "win32")),
)  # fmt: skip
"""ONNX Runtime's table of execution providers, and those of its source that are not in it."""

_BY_NAME = {row.name: row for row in TABLE}


def known_provider(name: str) -> KnownProvider:
    """The row of a provider by its short or full name.

    Raises:
        ProviderError: there is no such provider.
    """
    return _BY_NAME[full_name(name)]
