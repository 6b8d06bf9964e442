"""The two flavors of TensorRT, and the options of a build. Imports nothing heavy.

>>> get_flavor("tensorrt-rtx").needs_gpu
False
>>> check_options(CLASSIC, BuildOptions(optimization_level=5))

TensorRT for RTX builds engines ahead of time without a GPU, for the given compute capabilities.
Classic TensorRT 10 times kernels on the GPU that it runs on, and builds for that GPU. With both,
the precision is in the graph: networks are strongly typed, and no option lowers the precision.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Literal

from enginery.core.errors import OptionError, nearest

FlavorName = Literal["tensorrt-rtx", "tensorrt"]
HardwareCompatibility = Literal["none", "ampere-plus", "same-compute-capability"]


@dataclass(frozen=True)
class Flavor:
    """One of the two TensorRT libraries."""

    name: FlavorName
    title: str
    """Name in messages."""
    module: str
    """Python module with the bindings."""
    package: str
    """Package that installs the module."""
    extra: str
    """Extra of enginery that installs it; empty if there is none."""
    install: str
    """Command that installs it."""
    provider: str
    """ONNX Runtime's name of the execution provider that loads its engines."""
    needs_gpu: bool
    """True if it can build only on the GPU that will run the engine."""
    capabilities: tuple[str, ...]
    """Compute capabilities that it builds for; empty for that of the current GPU."""
    major: int
    """Major version whose engines the execution provider can load."""
    library: str
    """Library that the execution provider links."""

    def supports(self, capability: str) -> bool:
        """Return True if engines of this flavor run on GPUs of a compute capability.

        >>> RTX.supports("9.0"), CLASSIC.supports("9.0")
        (False, True)
        """
        return not self.capabilities or capability in self.capabilities


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
"""Version 1.7. Source of the capabilities: its support matrix and its `ComputeCapability`."""

RTX_NOT_LISTED = "8.0"
"""The capability, that of A100 and A30, which TensorRT for RTX builds for, but which NVIDIA's
support matrix does not list among those that it runs on."""

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


def capability_name(text: str) -> str:
    """Return a compute capability as `8.9`, also for `89`, `sm_89` and `sm89`; others stay.

    >>> capability_name("sm_120")
    '12.0'
    """
    match = re.fullmatch(r"(?:sm_?)?(\d+)(\d)", text.lower())
    return f"{match[1]}.{match[2]}" if match else text


def get_flavor(name: str) -> Flavor:
    """Return the flavor of this name; raise OptionError if there is none."""
    if name in FLAVORS:
        return FLAVORS[name]
    raise OptionError(
        f"unknown flavor '{name}'{nearest(name, FLAVORS)}", do=f"Known: {', '.join(FLAVORS)}."
    )


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build, besides GPUs and shapes.

    All except `workspace_bytes` are for classic TensorRT only. The defaults are TensorRT's, except
    for the workspace. Source: NVIDIA's reference of `IBuilderConfig`, 10.16.
    """

    workspace_bytes: int = 8 << 30
    """Device memory that a layer may use besides its tensors, in bytes. The plan depends on it, so
    the default does not depend on the GPU. TensorRT's default without a GPU, 64 GiB, is more than
    its GPUs have."""
    optimization_level: int = 3
    """0 to 5: how thoroughly TensorRT searches. 0 uses the first kernel that works."""
    hardware_compatibility: HardwareCompatibility = "none"
    """Other GPUs that the engine runs on; slower. `none`: the same GPU model. `ampere-plus`:
    compute capability 8.0 and newer. `same-compute-capability`: the same compute capability."""
    tf32: bool = True
    """Compute FP32 matrix products and convolutions on tensor cores, with mantissas of 10 instead
    of 23 bits; sums are FP32."""


CLASSIC_ONLY = {
    "optimization_level": "the optimization level",
    "hardware_compatibility": "hardware compatibility",
    "tf32": "TF32",
}
"""Options that TensorRT for RTX does not have -> what they set."""
_LEVELS = range(6)


def check_options(flavor: Flavor, options: BuildOptions) -> None:
    """Raise OptionError for invalid values, and for options that the flavor does not have."""
    defaults = BuildOptions()
    for field in fields(options):
        value = getattr(options, field.name)
        changed = value != getattr(defaults, field.name)
        # Nobody asked for the defaults, so only other values are refused.
        if flavor is RTX and changed and field.name in CLASSIC_ONLY:
            raise OptionError(
                f"option '{field.name}' is {value}, but {CLASSIC_ONLY[field.name]} has no effect "
                f"in {RTX.title}; {CLASSIC.title} has it.",
                do=f"Leave it out, or build with --flavor {CLASSIC.name}.",
                option=field.name,
            )
    if options.workspace_bytes < 1:
        raise OptionError(
            f"option 'workspace_bytes' is {options.workspace_bytes}, expected 1 or more.",
            option="workspace_bytes",
        )
    if options.optimization_level not in _LEVELS:
        raise OptionError(
            f"option 'optimization_level' is {options.optimization_level}, expected 0 to 5.",
            option="optimization_level",
        )
