"""The fields of an engine's cache key, besides the content of the ONNX file.

    key_fields(RTX, BuildOptions(), ("8.9",), ["batch=1:8:32,sequence=8:128:512"])
    # {'flavor': 'tensorrt-rtx', 'tensorrt': '1.7.1.116', 'capabilities': '8.9', …}

The key has everything that a plan depends on.
"""

from __future__ import annotations

from collections.abc import Sequence

from enginery.core.artifact.fingerprint import option_fields
from enginery.core.shapes import Profile
from enginery.runtime.providers import gpus
from enginery.runtime.providers.gpus import driver_version
from enginery.runtime.tensorrt.capabilities import current_gpu
from enginery.runtime.tensorrt.library import require_tensorrt, tensorrt_version
from enginery.runtime.tensorrt.options import CLASSIC_ONLY, RTX, BuildOptions, Flavor, check_options

_VERBOSITY = "detailed"  # set in build.py


def key_fields(
    flavor: Flavor,
    options: BuildOptions,
    capabilities: Sequence[str],
    profiles: Sequence[Profile | str],
) -> dict[str, str]:
    """Return the fields of the key, in readable form.

    Args:
        flavor: the TensorRT flavor.
        options: options of the build.
        capabilities: result of `resolve_capabilities`.
        profiles: profiles in the order of the engine.

    Raises:
        MissingPackageError, ProviderError: the flavor is not installed or has an unsupported
            version, or classic TensorRT finds no GPU.
        OptionError: an option is not available in the flavor.
    """
    require_tensorrt("An engine's cache key", flavor)
    check_options(flavor, options)
    fields = {
        "flavor": flavor.name,
        "tensorrt": tensorrt_version(flavor),
        "capabilities": ",".join(capabilities) or "portable",
        "profiles": "; ".join(str(profile) for profile in profiles) or "none",
        "verbosity": _VERBOSITY,
    }
    counted = option_fields(options)
    # A plan of TensorRT for RTX 1.7 depends on the version and build, the profiles and their order,
    # the set of capabilities, the workspace and the verbosity.
    if flavor is RTX:
        return fields | {n: value for n, value in counted.items() if n not in CLASSIC_ONLY}
    # Classic TensorRT selects kernels by timing them, so the GPU, its driver and the options of the
    # search matter as well.
    return fields | counted | {"gpu": current_gpu(flavor).name, "driver": _driver()}


def _driver() -> str:
    """Return the driver's version, or if unknown, the newest CUDA version that it supports."""
    major, minor = gpus.cuda_driver().cuda_version
    return driver_version() or f"CUDA {major}.{minor}"
