"""What stands between this machine and an execution provider, and what to do about it.

>>> find_obstacle("CUDAExecutionProvider")
Obstacle(reason='libcudart.so.13 was not found', do="Install it: pip install 'onnxruntime-gpu…")
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginery.core.errors import ProviderError
from enginery.runtime.providers import libraries
from enginery.runtime.providers.known import known_provider
from enginery.runtime.providers.names import CPU, CUDA, TENSORRT, TENSORRT_RTX
from enginery.runtime.providers.onnxruntime_build import (
    compiled_providers,
    cuda_major,
    installed_onnxruntimes,
    provider_library,
    reinstall,
)

# cuBLAS is in neither extra.
_CUDA_LIBRARIES = "pip install 'onnxruntime-gpu[cuda,cudnn]>=1.31,<1.32' 'nvidia-cublas>=13,<14'"
INSTALL = {
    CUDA: _CUDA_LIBRARIES,
    TENSORRT: f"{_CUDA_LIBRARIES} 'tensorrt-cu13>=10,<11'",  # `tensorrt` alone resolves to 11
    TENSORRT_RTX: "pip install onnxruntime-ep-nv-tensorrt-rtx-cu13",
}
"""The command that brings a provider's libraries."""

MIN_DRIVER = "580"  # for CUDA 13, docs.nvidia.com/deploy/cuda-compatibility
_RTX_GPUS = "TensorRT for RTX runs on compute capability 7.5, 8.0, 8.6, 8.9, 12.0 and 12.1."
_RTX_MODULE = "onnxruntime_ep_nv_tensorrt_rtx"


@dataclass(frozen=True)
class Obstacle:
    """Why a provider cannot be had, and what to do."""

    reason: str
    do: str


def find_obstacle(name: str) -> Obstacle | None:
    """Why the provider cannot be had on this machine, or None where nothing speaks against it.

    Nothing is promised by None: a session may still refuse, and `open_session` notices.
    Libraries of the provider, where found, are left loaded.

    Args:
        name: ONNX Runtime's name.
    """
    if name == CPU:
        return None
    try:
        available = compiled_providers()
    except ImportError as error:
        return Obstacle(f"onnxruntime cannot be imported ({error})", reinstall("onnxruntime-gpu"))
    if name == TENSORRT_RTX and name not in available:
        return _rtx_obstacle()
    if name not in available:
        return _not_compiled(name)
    if name not in (CUDA, TENSORRT):
        return _library_obstacle(name, "Install what it names, or a build that brings it.")
    library = provider_library(name)
    if sys.platform == "linux" and not library.is_file():
        return Obstacle(
            f"{library.name} is not in {library.parent}",
            f"The installation is broken. {reinstall('onnxruntime-gpu')}",
        )
    return _gpu_obstacle() or _library_obstacle(name, f"Install it: {INSTALL[name]}")


def find_device_obstacle(name: str, options: Mapping[str, str]) -> Obstacle | None:
    """Why the GPU that the options name cannot be had; None without a `device_id`.

    Args:
        name: ONNX Runtime's name of a provider for which nothing else stands in the way.
        options: as ONNX Runtime takes them.
    """
    if name not in (CUDA, TENSORRT, TENSORRT_RTX) or "device_id" not in options:
        return None
    driver = libraries.cuda_driver()
    if driver.problem or int(options["device_id"]) < driver.gpus:
        return None
    there = f"{driver.gpus} GPUs, 0 to {driver.gpus - 1}" if driver.gpus > 1 else "one GPU, 0"
    return Obstacle(
        f"device_id is {options['device_id']}, and this process sees {there}",
        "Name one of them, or show the process more: CUDA_VISIBLE_DEVICES, docker run --gpus.",
    )


def find_caveat(name: str) -> str:
    """What will not work under a provider that can be had, or nothing.

    ONNX Runtime 1.31's CUDA provider does not link cuDNN: it loads it when an operation first
    needs it, and the operation fails where it cannot.
    """
    if name == CUDA and (error := libraries.load_error("libcudnn.so.9", _places())):
        return f"convolutions and other cuDNN operations will fail ({error})"
    return ""


def missing_for(name: str) -> dict[str, str]:
    """The libraries that a provider's own library needs and the loader cannot load."""
    library = provider_library(name)
    if not library.is_file():
        return {}
    if name in (CUDA, TENSORRT):
        preload_nvidia()
    return libraries.missing_libraries(library, _places())


def _places() -> list[Path]:
    return libraries.wheel_directories()


def preload_nvidia() -> None:
    """Loads CUDA, cuDNN and TensorRT from NVIDIA's wheels.

    ONNX Runtime cannot find them there by itself: the loader does not search site-packages.
    """
    # It prints what it misses; the libraries that matter are named by `missing_libraries`.
    # A broken onnxruntime has an obstacle of its own.
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(ImportError, AttributeError),
    ):
        import onnxruntime

        onnxruntime.preload_dlls()
    tensorrt = [d for d in libraries.wheel_directories() if d.name == "tensorrt_libs"]
    for name in libraries.needed_libraries(provider_library(TENSORRT)):
        if any((directory / name).is_file() for directory in tensorrt):
            libraries.load_error(name, tensorrt)


def plugin_installed(name: str) -> bool:
    """Whether a provider comes from a plugin package that is installed."""
    return name == TENSORRT_RTX and importlib.util.find_spec(_RTX_MODULE) is not None


def register_plugin(name: str) -> list[Any]:
    """Registers a plugin provider's library, once a process, and returns the devices it takes.

    A session gets it by `SessionOptions.add_provider_for_devices(devices, options)`.

    Raises:
        ProviderError: its package is not installed, or its library cannot be registered.
    """
    if not plugin_installed(name):
        raise ProviderError(
            f"{name} is a plugin, and its package is not installed.",
            do=f"Install it: {INSTALL[TENSORRT_RTX]}",
        )
    import onnxruntime

    plugin = importlib.import_module(_RTX_MODULE)
    try:
        onnxruntime.register_execution_provider_library(name, plugin.get_library_path())
    except Exception as error:
        # ONNX Runtime raises many unrelated types.
        if "already registered" not in str(error).lower():
            raise ProviderError(
                f"{name} could not be registered: {error}", do="Run: enginery doctor"
            ) from error
    return [device for device in onnxruntime.get_ep_devices() if device.ep_name == name]


def _rtx_obstacle() -> Obstacle | None:
    if not plugin_installed(TENSORRT_RTX):
        return Obstacle(
            f"its plugin package ({_RTX_MODULE.replace('_', '-')}-cu13) is not installed",
            f"Install it: {INSTALL[TENSORRT_RTX]}",
        )
    if obstacle := _gpu_obstacle():
        return obstacle
    try:
        devices = register_plugin(TENSORRT_RTX)
    except ProviderError as error:
        return Obstacle(error.message.rstrip("."), error.do)
    return None if devices else Obstacle("it takes none of this machine's GPUs", _RTX_GPUS)


def _gpu_obstacle() -> Obstacle | None:
    driver = libraries.cuda_driver()
    if driver.problem:
        return Obstacle(
            driver.problem,
            f"Install the NVIDIA driver {MIN_DRIVER} or newer; "
            "in a container, give it the GPUs (docker run --gpus all).",
        )
    wanted = cuda_major()
    if driver.cuda_version[0] < wanted:
        major, minor = driver.cuda_version
        return Obstacle(
            f"the NVIDIA driver runs CUDA up to {major}.{minor}, "
            f"and this onnxruntime is built for CUDA {wanted}",
            f"Install the NVIDIA driver {MIN_DRIVER} or newer.",
        )
    return None


def _library_obstacle(name: str, do: str) -> Obstacle | None:
    missing = missing_for(name)
    return Obstacle(describe_missing(missing), do) if missing else None


def describe_missing(missing: Mapping[str, str]) -> str:
    """`libnvinfer.so.10 was not found (libnvinfer.so.11 is installed)`."""
    places = _places()
    absent = [name for name, error in missing.items() if error.startswith(f"{name}: cannot open")]
    broken = [error for name, error in missing.items() if name not in absent]
    others = [other for name in absent for other in libraries.other_versions(name, places)]
    found = f" ({', '.join(others)} is installed)" if others else ""
    verb = "was" if len(absent) == 1 else "were"
    words = [f"{', '.join(absent)} {verb} not found{found}"] if absent else []
    return "; ".join([*words, *broken])


def _not_compiled(name: str) -> Obstacle:
    builds = installed_onnxruntimes()
    listed = ", ".join(f"{build} {version}" for build, version in builds.items())
    known = known_provider(name)
    package = known.package
    if len(builds) > 1 and package in builds:
        return Obstacle(
            f"{' and '.join(builds)} are installed together and overwrite each other",
            reinstall(package),
        )
    reason = f"the installed onnxruntime ({listed or 'unknown'}) is built without it"
    if elsewhere := known.elsewhere(sys.platform):
        return Obstacle(f"{elsewhere}, and {reason}", "Name a provider for this system.")
    if not package:
        return Obstacle(reason, "ONNX Runtime has to be built from source with it.")
    return Obstacle(reason, reinstall(package))
