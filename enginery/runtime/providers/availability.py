"""Why an execution provider cannot be had on this machine, and what to do about it.

    >>> unavailable_reason("CUDAExecutionProvider")
    Unavailable(reason='libcudart.so.13 was not found', do="Install it: pip install 'onnxruntime…")

Looked at are the installed build of ONNX Runtime, the libraries that a provider links, the NVIDIA
driver and its GPUs.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from enginery.core.errors import ProviderError
from enginery.runtime.providers import gpus, libraries
from enginery.runtime.providers.known import (
    CPU,
    CUDA,
    TENSORRT,
    TENSORRT_RTX,
    known_provider,
    short_name,
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
class Unavailable:
    """Why a provider cannot be had, and what to do."""

    reason: str
    do: str


def unavailable_reason(name: str, options: Mapping[str, str] | None = None) -> Unavailable | None:
    """Return why a provider cannot be had on this machine, or None if nothing was found.

    None is no promise: a session may still refuse, and `open_session` notices. Libraries of the
    provider, where found, are left loaded.

    Args:
        name: ONNX Runtime's name.
        options: the provider's, as ONNX Runtime takes them; a `device_id` has to be a GPU's.
    """
    if name == CPU:
        return None
    try:
        available = compiled_providers()
    except ImportError as error:
        return Unavailable(
            f"onnxruntime cannot be imported ({error})", reinstall("onnxruntime-gpu")
        )
    if name not in available:
        found = _plugin_problem() if name == TENSORRT_RTX else _not_compiled(name)
    elif name not in (CUDA, TENSORRT):
        found = _library_problem(name, "Install what it names, or a build that brings it.")
    elif sys.platform == "linux" and not (library := provider_library(name)).is_file():
        found = Unavailable(
            f"{library.name} is not in {library.parent}",
            f"The installation is broken. {reinstall('onnxruntime-gpu')}",
        )
    else:
        found = _driver_problem() or _library_problem(name, f"Install it: {INSTALL[name]}")
    return found or _device_problem(name, options or {})


def provider_warning(name: str) -> str:
    """Return what will not work under a provider that can be had, or nothing.

    ONNX Runtime 1.31's CUDA provider does not link cuDNN: it loads it when an operation first
    needs it, and the operation fails where it cannot.
    """
    if name != CUDA:
        return ""
    error = libraries.load_error("libcudnn.so.9", libraries.wheel_directories())
    return f"convolutions and other cuDNN operations will fail ({error})" if error else ""


# The installed build of ONNX Runtime. All but `compiled_providers` read files and metadata only, so
# they also answer for a broken build.


def compiled_providers() -> list[str]:
    """Return the providers that the installed onnxruntime is built with.

    Raises:
        ImportError: it is not installed, or what is left of it is broken.
    """
    import onnxruntime

    # Uninstalling one of two builds leaves a folder that imports and holds nothing.
    if not hasattr(onnxruntime, "get_available_providers"):
        raise ImportError("the module is there, and most of its files are gone")
    return list(onnxruntime.get_available_providers())


def installed_onnxruntimes() -> dict[str, str]:
    """Return every installed build of ONNX Runtime and its version; more than one is a fault."""
    # These have modules of their own.
    others = ("onnxruntime-ep-", "onnxruntime-extensions", "onnxruntime-genai")
    found = {}
    for dist in metadata.distributions():
        name = (dist.metadata["Name"] or "").lower().replace("_", "-")
        is_build = name == "onnxruntime" or name.startswith("onnxruntime-")
        if is_build and not name.startswith(others):
            found[name] = dist.version
    return dict(sorted(found.items()))


def cuda_major() -> int:
    """Return the CUDA major version that onnxruntime is built for; 0 for a CPU build."""
    try:
        # Read, not imported: onnxruntime may be broken, and the doctor asks all the same.
        text = (capi_directory() / "build_and_package_info.py").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = re.search(r"^cuda_version = ['\"](\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0


def capi_directory() -> Path:
    """Return where ONNX Runtime keeps its shared libraries, found without importing it."""
    spec = importlib.util.find_spec("onnxruntime")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0] if places else ".") / "capi"


def provider_library(name: str) -> Path:
    """Return where a provider's shared library is; for one that is compiled in there is none."""
    stem = short_name(name).replace("-", "_")
    return capi_directory() / f"libonnxruntime_providers_{stem}.so"


def reinstall(package: str) -> str:
    """Return the command that puts one build in place of all others, which share its files."""
    installed = " ".join(installed_onnxruntimes()) or package
    version = ">=1.31,<1.32" if package == "onnxruntime-gpu" else ""
    return f"Run: pip uninstall -y {installed} && pip install '{package}{version}'"


# The libraries of a provider, and the plugin that brings one.


def missing_for(name: str) -> dict[str, str]:
    """Return the libraries that a provider's library needs and the loader cannot load, and why."""
    library = provider_library(name)
    if not library.is_file():
        return {}
    if name in (CUDA, TENSORRT):
        preload_nvidia()
    return libraries.missing_libraries(library, libraries.wheel_directories())


def preload_nvidia() -> None:
    """Load CUDA, cuDNN and TensorRT from NVIDIA's wheels.

    ONNX Runtime cannot find them there by itself: the loader does not search site-packages.
    """
    # It prints what it misses; the libraries that matter are named by `missing_libraries`.
    # A broken onnxruntime is reported by `unavailable_reason`.
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
    """Tell whether a provider comes from a plugin package that is installed."""
    return name == TENSORRT_RTX and importlib.util.find_spec(_RTX_MODULE) is not None


def register_plugin(name: str) -> list[Any]:
    """Register a plugin provider's library, once a process, and return the devices it takes.

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


def _plugin_problem() -> Unavailable | None:
    if not plugin_installed(TENSORRT_RTX):
        return Unavailable(
            f"its plugin package ({_RTX_MODULE.replace('_', '-')}-cu13) is not installed",
            f"Install it: {INSTALL[TENSORRT_RTX]}",
        )
    if problem := _driver_problem():
        return problem
    try:
        devices = register_plugin(TENSORRT_RTX)
    except ProviderError as error:
        return Unavailable(error.message.rstrip("."), error.do)
    return None if devices else Unavailable("it takes none of this machine's GPUs", _RTX_GPUS)


def _driver_problem() -> Unavailable | None:
    driver = gpus.cuda_driver()
    if driver.problem:
        return Unavailable(
            driver.problem,
            f"Install the NVIDIA driver {MIN_DRIVER} or newer; "
            "in a container, give it the GPUs (docker run --gpus all).",
        )
    wanted = cuda_major()
    if driver.cuda_version[0] < wanted:
        major, minor = driver.cuda_version
        return Unavailable(
            f"the NVIDIA driver runs CUDA up to {major}.{minor}, "
            f"and this onnxruntime is built for CUDA {wanted}",
            f"Install the NVIDIA driver {MIN_DRIVER} or newer.",
        )
    return None


def _device_problem(name: str, options: Mapping[str, str]) -> Unavailable | None:
    if name not in (CUDA, TENSORRT, TENSORRT_RTX) or "device_id" not in options:
        return None
    driver = gpus.cuda_driver()
    if driver.problem or int(options["device_id"]) < driver.gpus:
        return None
    seen = f"{driver.gpus} GPUs, 0 to {driver.gpus - 1}" if driver.gpus > 1 else "one GPU, 0"
    return Unavailable(
        f"device_id is {options['device_id']}, and this process sees {seen}",
        "Name one of them, or show the process more: CUDA_VISIBLE_DEVICES, docker run --gpus.",
    )


def _library_problem(name: str, do: str) -> Unavailable | None:
    missing = missing_for(name)
    return Unavailable(describe_missing(missing), do) if missing else None


def describe_missing(missing: Mapping[str, str]) -> str:
    """Return `libnvinfer.so.10 was not found (libnvinfer.so.11 is installed)`."""
    places = libraries.wheel_directories()
    absent = [name for name, error in missing.items() if error.startswith(f"{name}: cannot open")]
    broken = [error for name, error in missing.items() if name not in absent]
    others = [other for name in absent for other in libraries.other_versions(name, places)]
    found = f" ({', '.join(others)} is installed)" if others else ""
    verb = "was" if len(absent) == 1 else "were"
    words = [f"{', '.join(absent)} {verb} not found{found}"] if absent else []
    return "; ".join([*words, *broken])


def _not_compiled(name: str) -> Unavailable:
    builds = installed_onnxruntimes()
    listed = ", ".join(f"{build} {version}" for build, version in builds.items())
    known = known_provider(name)
    package = known.package
    if len(builds) > 1 and package in builds:
        return Unavailable(
            f"{' and '.join(builds)} are installed together and overwrite each other",
            reinstall(package),
        )
    reason = f"the installed onnxruntime ({listed or 'unknown'}) is built without it"
    if wrong_platform := known.wrong_platform(sys.platform):
        return Unavailable(f"{wrong_platform}, and {reason}", "Name a provider for this system.")
    if not package:
        return Unavailable(reason, "ONNX Runtime has to be built from source with it.")
    return Unavailable(reason, reinstall(package))
