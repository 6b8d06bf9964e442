"""What a plan depends on besides the content of its ONNX file, as fields of a cache key.

    >>> key_fields(RTX, BuildOptions(), ("8.9",), ["batch=1:8:32,sequence=8:128:512"])
    {'flavor': 'tensorrt-rtx', 'tensorrt': '1.7.1.116', 'capabilities': '8.9', …}

What was found to change a plan of TensorRT for RTX 1.7: its version and build, the profiles and
their order, the set of capabilities, the workspace, the verbosity, weight streaming. Classic
TensorRT picks kernels by trying them, so that the GPU, its driver and how it searches count, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from enginery.core.artifact.fingerprint import sha256_of
from enginery.core.errors import OptionError
from enginery.core.shapes import Profile
from enginery.runtime.providers import gpus
from enginery.runtime.providers.gpus import driver_version
from enginery.runtime.tensorrt.capabilities import current_gpu
from enginery.runtime.tensorrt.library import require_tensorrt, tensorrt_version
from enginery.runtime.tensorrt.options import RTX, BuildOptions, Flavor, check_options

_VERBOSITY = "detailed"  # as `build.py` asks for
_IN_BOTH = ("workspace_bytes", "weight_streaming")
_TIMING = ("timing_cache", "timing_cache_fixed")


def key_fields(
    flavor: Flavor,
    options: BuildOptions,
    capabilities: Sequence[str],
    profiles: Sequence[Profile | str],
) -> dict[str, str]:
    """The fields, in words that a person can compare.

    A timing cache that grows is no field: every build changes it, so that no engine would be found
    again. One that is fixed counts by its content.

    Args:
        flavor: who builds.
        options: of the build.
        capabilities: as `resolve_capabilities` gives them.
        profiles: in the order in which the engine has them.

    Raises:
        MissingPackageError, ProviderError: the flavor is not installed or unfit; classic TensorRT
            finds no GPU.
        OptionError: the options do not fit the flavor, or the fixed timing cache is missing.
    """
    require_tensorrt("An engine's cache key", flavor)
    check_options(flavor, options)
    found = {
        "flavor": flavor.name,
        "tensorrt": tensorrt_version(flavor),
        "capabilities": ",".join(capabilities) or "portable",
        "profiles": "; ".join(str(profile) for profile in profiles) or "none",
        "verbosity": _VERBOSITY,
    }
    found |= {name: str(getattr(options, name)) for name in _IN_BOTH}
    if flavor is RTX:
        return found
    found |= {"gpu": current_gpu(flavor).name, "driver": _driver(), "timing_cache": "none"}
    found |= {
        field.name: str(getattr(options, field.name))
        for field in fields(options)
        if field.name not in (*_IN_BOTH, *_TIMING)
    }
    if options.timing_cache_fixed:
        path = Path(options.timing_cache)
        if not path.is_file():
            raise OptionError(f"option 'timing_cache': {path} is fixed, and is missing.")
        found["timing_cache"] = sha256_of(path)
    return found


def _driver() -> str:
    """The driver's version, or the newest CUDA that it runs where the kernel does not tell."""
    major, minor = gpus.cuda_driver().cuda_version
    return driver_version() or f"CUDA {major}.{minor}"
