"""The two flavors of TensorRT, and the options of a build. Imports nothing heavy.

    >>> flavor_named("tensorrt-rtx").needs_gpu
    False
    >>> check_options(CLASSIC, BuildOptions(optimization_level=5, timing_cache="timing.cache"))

TensorRT for RTX builds engines ahead of time without a GPU, for the GPUs that are named. Classic
TensorRT 10 tries kernels on the GPU that it runs on, and builds for that one. Precision is in the
graph with both: networks are strongly typed, and no option here makes one narrower.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from enginery.core.errors import OptionError, nearest

FlavorName = Literal["tensorrt-rtx", "tensorrt"]
HardwareCompatibility = Literal["none", "ampere-plus", "same-compute-capability"]


@dataclass(frozen=True)
class Flavor:
    """One of the two libraries that make engines of ONNX graphs."""

    name: FlavorName
    title: str
    """As NVIDIA writes it."""
    module: str
    """The Python module with its bindings."""
    package: str
    """The package that installs the module."""
    extra: str
    """The extra of enginery that brings it; empty where there is none."""
    install: str
    """The command that brings it."""
    provider: str
    """ONNX Runtime's name for the execution provider that loads its engines."""
    needs_gpu: bool
    """Whether it builds only where the GPU is that will run the engine."""
    capabilities: tuple[str, ...]
    """The compute capabilities that it builds for; empty for those of the GPU that is there."""
    major: int
    """The major version whose engines the execution provider loads."""
    library: str
    """The library that the execution provider links."""


RTX = Flavor(
    name="tensorrt-rtx",
    title="TensorRT for RTX",
    module="tensorrt_rtx_bindings",
    package="tensorrt-rtx-cu13-bindings",
    extra="tensorrt-rtx",
    install="pip install 'enginery[tensorrt-rtx]'",
    provider="NvTensorRTRTXExecutionProvider",
    needs_gpu=False,
    capabilities=("7.5", "8.0", "8.6", "8.9", "12.0", "12.1"),
    major=1,
    library="libtensorrt_rtx.so.1",
)
"""Version 1.7: its support matrix and the values of its own `ComputeCapability`."""

CLASSIC = Flavor(
    name="tensorrt",
    title="TensorRT",
    module="tensorrt",
    package="tensorrt-cu13",
    extra="",
    # For CUDA 13 there is 10.13.2 to 10.16.1; `tensorrt` and an open bound resolve to 11.
    install="pip install 'tensorrt-cu13>=10,<11'",
    provider="TensorrtExecutionProvider",
    needs_gpu=True,
    capabilities=(),
    major=10,
    library="libnvinfer.so.10",
)
"""Version 10, because onnxruntime-gpu 1.31 links `libnvinfer.so.10`, and CUDA 13."""

FLAVORS: dict[str, Flavor] = {flavor.name: flavor for flavor in (RTX, CLASSIC)}


def flavor_named(name: str) -> Flavor:
    """The flavor of a name; raises OptionError where there is none."""
    if name in FLAVORS:
        return FLAVORS[name]
    raise OptionError(
        f"unknown flavor '{name}'{nearest(name, FLAVORS)}", do=f"Known: {', '.join(FLAVORS)}."
    )


@dataclass(frozen=True)
class BuildOptions:
    """How an engine is built, besides for which GPUs and shapes.

    All but `workspace_bytes` and `weight_streaming` are of classic TensorRT alone. The defaults
    are TensorRT's own, the workspace apart. Source: NVIDIA's reference of `IBuilderConfig`, 10.16.
    """

    workspace_bytes: int = 8 << 30
    """Device memory in bytes that a layer may use beside its tensors. The plan depends on it, so
    that it is not left to the size of a GPU: TensorRT's own default without one is 64 GiB, more
    than the GPUs have that it builds for."""
    weight_streaming: bool = False
    """Let the engine keep weights in host memory and copy them as they are used, for models
    larger than the GPU's memory; slower."""
    optimization_level: int = 3
    """0 to 5: how long TensorRT searches. 0 takes the first kernel that works, 5 the longest."""
    sparsity: bool = False
    """Let kernels for 2:4 sparse weights (two zeros in every four) be used where weights are."""
    auxiliary_streams: int | Literal["auto"] = "auto"
    """CUDA streams beside the caller's for layers that can run at the same time; more take more
    memory. `auto`: TensorRT decides."""
    hardware_compatibility: HardwareCompatibility = "none"
    """Which other GPUs the engine runs on. `none`: those of the same model. `ampere-plus`: compute
    capability 8.0 and newer. `same-compute-capability`: those of the same one. Slower."""
    version_compatible: bool = False
    """Let newer versions of TensorRT run the engine; slower. Whoever loads it must allow the code
    that it then holds (`engine_host_code_allowed`)."""
    tf32: bool = True
    """Multiply FP32 matrices and convolve on tensor cores, with mantissas of 10 bits in place of
    23; sums are FP32."""
    timing_cache: str = ""
    """A file that remembers how fast kernels were, so that the next build is quicker. It is made
    if absent, and grows with each build. Empty: none."""
    timing_cache_fixed: bool = False
    """Only read the file. What is in it then decides which kernels the engine has."""


_CLASSIC_ONLY = {
    "optimization_level": "the optimization level",
    "sparsity": "sparsity",
    "auxiliary_streams": "the number of auxiliary streams",
    "hardware_compatibility": "hardware compatibility",
    "version_compatible": "version compatibility",
    "tf32": "TF32",
    "timing_cache": "a timing cache",
    "timing_cache_fixed": "a timing cache",
}
_LEVELS = range(6)


def check_options(flavor: Flavor, options: BuildOptions) -> None:
    """Raises OptionError for values that mean nothing, and options that the flavor lacks."""
    defaults = BuildOptions()
    for field in fields(options):
        value = getattr(options, field.name)
        changed = value != getattr(defaults, field.name)
        if flavor is RTX and changed and field.name in _CLASSIC_ONLY:
            raise OptionError(
                f"option '{field.name}' is {value}, and {_CLASSIC_ONLY[field.name]} has no effect "
                f"in {RTX.title}; {CLASSIC.title} has it.",
                do=f"Leave it out, or build with --flavor {CLASSIC.name}.",
                option=field.name,
            )
    _check_number("workspace_bytes", options.workspace_bytes, least=1)
    if options.optimization_level not in _LEVELS:
        raise OptionError(
            f"option 'optimization_level' is {options.optimization_level}, expected 0 to 5.",
            option="optimization_level",
        )
    if options.auxiliary_streams != "auto":
        _check_number("auxiliary_streams", options.auxiliary_streams, least=0)
    if options.timing_cache_fixed and not options.timing_cache:
        raise OptionError(
            "option 'timing_cache_fixed' is set, and no timing cache is named.",
            do="Name its file with option 'timing_cache'.",
            option="timing_cache_fixed",
        )


def _check_number(name: str, value: int, *, least: int) -> None:
    if value < least:
        raise OptionError(f"option '{name}' is {value}, expected {least} or more.", option=name)
