"""Find out why an execution provider is unavailable on this machine, and what to do about it.

    unavailable_reason("CUDAExecutionProvider")
    # Unavailable(reason='libcudart.so.13 was not found', do="Install it: pip install 'onnx…")

This checks the installed build of ONNX Runtime, the libraries that a provider links, the NVIDIA
driver and its GPUs.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginery.core.errors import ProviderError
from enginery.core.extras import is_installed, require_packages
from enginery.core.onnxruntime_builds import OnnxRuntimeBuild, installed_onnxruntimes
from enginery.runtime.providers import gpus, libraries
from enginery.runtime.providers.known import (
    CPU,
    CUDA,
    TENSORRT,
    TENSORRT_RTX,
    other_system,
    provider_package,
    short_name,
)

# Neither extra installs cuBLAS.
_CUDA_LIBRARIES = "pip install 'onnxruntime-gpu[cuda,cudnn]>=1.31,<1.32' 'nvidia-cublas>=13,<14'"
INSTALL = {
    CUDA: _CUDA_LIBRARIES,
    TENSORRT: f"{_CUDA_LIBRARIES} 'tensorrt-cu13>=10,<11'",  # `tensorrt` alone resolves to 11
    TENSORRT_RTX: "pip install onnxruntime-ep-nv-tensorrt-rtx-cu13",
}
"""Command that installs the libraries of a provider."""

_TESTED = {
    "onnxruntime": ">=1.31,<1.32",
    "onnxruntime-gpu": ">=1.31,<1.32",
    "onnxruntime-openvino": ">=1.24.1,<1.25",
}
"""Versions of ONNX Runtime's builds, as in the extras of pyproject.toml."""

MIN_DRIVER = "580"  # for CUDA 13, docs.nvidia.com/deploy/cuda-compatibility
_RTX_GPUS = "NVIDIA lists compute capability 7.5, 8.6, 8.9, 12.0 and 12.1 for TensorRT for RTX."
_CUDNN = "libcudnn.so.9"
_RTX_MODULE = "onnxruntime_ep_nv_tensorrt_rtx"
_NO_FILES = "most files of the module are missing"
ONNXRUNTIME = "onnxruntime"
"""The module that every build of ONNX Runtime installs."""


@dataclass(frozen=True)
class Unavailable:
    """The reason why a provider is unavailable, and what to do about it."""

    reason: str
    do: str


def unavailable_reason(name: str, options: Mapping[str, str] | None = None) -> Unavailable | None:
    """Return why a provider is unavailable on this machine, or None if no problem was found.

    A session may still fail, which `open_session` reports. Libraries of the provider that are found
    stay loaded.

    Args:
        name: ONNX Runtime's name of the provider.
        options: options of the provider for ONNX Runtime; `device_id` must be that of a GPU.
    """
    if not is_installed(ONNXRUNTIME) and not installed_onnxruntimes():
        return _not_installed()
    if name == CPU:
        return None
    try:
        available = compiled_providers()
    except ImportError as error:
        return _broken(str(error))
    if name not in available:
        problem = _plugin_problem() if name == TENSORRT_RTX else _not_compiled(name)
    elif name not in (CUDA, TENSORRT):
        problem = _library_problem(
            name, "Install the missing library, or a build that includes it."
        )
    elif sys.platform == "linux" and not (library := provider_library(name)).is_file():
        problem = Unavailable(
            f"{library.name} is not in {library.parent}",
            f"The installation is broken. {reinstall('onnxruntime-gpu')}",
        )
    else:
        problem = _driver_problem() or _library_problem(name, f"Install it: {INSTALL[name]}")
    return problem or _device_problem(name, options or {})


def provider_warning(name: str) -> str:
    """Return what will fail under an available provider; empty if nothing will.

    ONNX Runtime 1.31's CUDA provider does not link cuDNN. It loads cuDNN when an operation first
    needs it, and the operation fails without it.
    """
    if name != CUDA:
        return ""
    error = libraries.load_error(_CUDNN, libraries.wheel_directories())
    if not error:
        return ""
    missing = describe_missing({_CUDNN: error})
    return f"convolutions and other cuDNN operations will fail ({missing})"


# The installed build of ONNX Runtime. All functions except `compiled_providers` only read files and
# metadata, so they also work for a broken build.


def compiled_providers() -> list[str]:
    """Return the providers that the installed onnxruntime is built with.

    Raises:
        ImportError: it is not installed, or broken.
    """
    import onnxruntime

    # Uninstalling one of two builds leaves an empty folder that can be imported.
    if not hasattr(onnxruntime, "get_available_providers"):
        raise ImportError(_NO_FILES)
    return list(onnxruntime.get_available_providers())


def require_onnxruntime(
    purpose: str, *modules: str, later: Sequence[str] = (), extra: str = ""
) -> None:
    """Check that modules can be found, and if `onnxruntime` is one, that it is not broken.

    Nothing is imported. The arguments are those of `require_packages`.

    Raises:
        MissingPackageError: a module is missing.
        ProviderError: most files of ONNX Runtime are missing.
    """
    if ONNXRUNTIME in modules and sys.modules.get(ONNXRUNTIME) is None:
        spec = importlib.util.find_spec(ONNXRUNTIME)
        is_whole = spec is not None and spec.origin is not None  # else without __init__.py
        if not is_whole and installed_onnxruntimes():
            broken = _broken(_NO_FILES)
            raise ProviderError(f"{broken.reason}.", do=broken.do)
    require_packages(purpose, *modules, later=later, extra=extra)


def _broken(reason: str) -> Unavailable:
    return Unavailable(f"onnxruntime cannot be imported ({reason})", reinstall())


def _not_installed() -> Unavailable:
    return Unavailable(
        "onnxruntime is not installed",
        "Install it: pip install 'enginery[gpu]', or 'enginery[cpu]' on a machine without NVIDIA "
        "GPU.",
    )


def cuda_major() -> int:
    """Return the CUDA major version that onnxruntime is built for; 0 for a CPU build."""
    try:
        # Read the file instead of importing it, because onnxruntime may be broken.
        text = (capi_directory() / "build_and_package_info.py").read_text(encoding="utf-8")
    except OSError:
        return 0
    match = re.search(r"^cuda_version = ['\"](\d+)", text, re.MULTILINE)
    return int(match[1]) if match else 0


def capi_directory() -> Path:
    """Return the folder of ONNX Runtime's shared libraries, without importing it."""
    spec = importlib.util.find_spec("onnxruntime")
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return Path(locations[0] if locations else ".") / "capi"


def provider_library(name: str) -> Path:
    """Return the path of a provider's shared library, which need not exist."""
    stem = short_name(name).replace("-", "_")
    return capi_directory() / f"libonnxruntime_providers_{stem}.so"


def hidden_remedy(build: OnnxRuntimeBuild) -> str:
    """Return how to import a build that another one hides."""
    return f"Put {build.directory} first on PYTHONPATH, or uninstall the other package."


def reinstall(package: str = "") -> str:
    """Return the command that replaces all builds, which overwrite each other, by one.

    Args:
        package: the build to install; empty for the installed one, or onnxruntime-gpu if there are
            several or none.
    """
    names = list(dict.fromkeys(build.name for build in installed_onnxruntimes()))
    package = package or (names[0] if len(names) == 1 else "onnxruntime-gpu")
    install = f"pip install '{package}{_TESTED.get(package, '')}'"
    return f"Run: pip uninstall -y {' '.join(names)} && {install}" if names else f"Run: {install}"


# The libraries of a provider, and plugins.


def missing_for(name: str) -> dict[str, str]:
    """Return the libraries of a provider that cannot be loaded, with the reasons."""
    library = provider_library(name)
    if not library.is_file():
        return {}
    if name in (CUDA, TENSORRT):
        preload_nvidia()
    return libraries.missing_libraries(library, libraries.wheel_directories())


def preload_nvidia() -> None:
    """Load CUDA, cuDNN and TensorRT from NVIDIA's wheels, if they are installed as wheels.

    ONNX Runtime does not find them, because the loader does not search site-packages. Its own
    `preload_dlls` only searches beside its package, and loads the system's libraries otherwise.
    """
    if sys.platform == "win32":
        with (
            contextlib.redirect_stdout(io.StringIO()),  # it prints missing libraries
            contextlib.suppress(ImportError, AttributeError),
        ):
            import onnxruntime

            onnxruntime.preload_dlls()
        return
    directories = libraries.wheel_directories()
    for name in (*_cuda_libraries(cuda_major()), *_tensorrt_libraries()):
        if any((directory / name).is_file() for directory in directories):
            libraries.load_error(name, directories)  # `missing_libraries` reports errors


def _cuda_libraries(major: int) -> list[str]:
    """Return the libraries that the CUDA provider links or opens, in the order of their needs.

    Source of the names: `_get_nvidia_dll_paths` of onnxruntime 1.31.
    """
    if not major:
        return []
    cufft = 12 if major >= 13 else 11
    return [
        f"libcudart.so.{major}",
        f"libcublasLt.so.{major}",
        f"libcublas.so.{major}",
        f"libnvrtc.so.{major}",
        "libcurand.so.10",
        f"libcufft.so.{cufft}",
        _CUDNN,
    ]


def _tensorrt_libraries() -> list[str]:
    needed = libraries.needed_libraries(provider_library(TENSORRT))
    return [name for name in needed if name.startswith("libnv")]


def plugin_installed(name: str) -> bool:
    """Return True if a provider comes from an installed plugin package."""
    return name == TENSORRT_RTX and importlib.util.find_spec(_RTX_MODULE) is not None


def register_plugin(name: str) -> list[Any]:
    """Register the library of a plugin provider, once per process, and return its devices.

    Pass them to `SessionOptions.add_provider_for_devices(devices, options)`.

    Raises:
        ProviderError: the package is not installed, or the library cannot be registered.
    """
    if not plugin_installed(name):
        raise ProviderError(
            f"{name} is a plugin, but its package is not installed.",
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
    return None if devices else Unavailable("it supports none of this machine's GPUs", _RTX_GPUS)


def _driver_problem() -> Unavailable | None:
    driver = gpus.cuda_driver()
    if driver.problem:
        return Unavailable(
            driver.problem,
            f"Install the NVIDIA driver {MIN_DRIVER} or newer; "
            "in a container, give it the GPUs (docker run --gpus all).",
        )
    required = cuda_major()
    if driver.cuda_version[0] < required:
        major, minor = driver.cuda_version
        return Unavailable(
            f"the NVIDIA driver supports CUDA up to {major}.{minor}, "
            f"but this onnxruntime is built for CUDA {required}",
            f"Install the NVIDIA driver {MIN_DRIVER} or newer.",
        )
    return None


def _device_problem(name: str, options: Mapping[str, str]) -> Unavailable | None:
    if name not in (CUDA, TENSORRT, TENSORRT_RTX) or "device_id" not in options:
        return None
    driver = gpus.cuda_driver()
    if driver.problem or int(options["device_id"]) < driver.gpus:
        return None
    visible = f"{driver.gpus} GPUs, 0 to {driver.gpus - 1}" if driver.gpus > 1 else "one GPU, 0"
    return Unavailable(
        f"device_id is {options['device_id']}, but this process sees {visible}",
        "Choose one of them, or make more visible: CUDA_VISIBLE_DEVICES, docker run --gpus.",
    )


def _library_problem(name: str, do: str) -> Unavailable | None:
    missing = missing_for(name)
    return Unavailable(describe_missing(missing), do) if missing else None


def describe_missing(missing: Mapping[str, str]) -> str:
    """Describe missing libraries: `libnvinfer.so.10 was not found (….so.11 is installed)`."""
    directories = libraries.wheel_directories()
    absent = [name for name, error in missing.items() if error.startswith(f"{name}: cannot open")]
    broken = [error for name, error in missing.items() if name not in absent]
    versions = [
        version for name in absent for version in libraries.other_versions(name, directories)
    ]
    installed = f" ({', '.join(versions)} is installed)" if versions else ""
    verb = "was" if len(absent) == 1 else "were"
    words = [f"{', '.join(absent)} {verb} not found{installed}"] if absent else []
    return "; ".join([*words, *broken])


def _not_compiled(name: str) -> Unavailable:
    if system := other_system(name):
        return Unavailable(f"it runs on {system} only", "Name another provider.")
    builds = installed_onnxruntimes()
    package = provider_package(name)
    # The builds in the first folder of the import path are the ones that are imported. If there are
    # several, each has overwritten files of the others.
    imported = [build for build in builds if build.directory == builds[0].directory]
    listed = ", ".join(map(str, imported))
    if len(imported) > 1 and package in [build.name for build in imported]:
        return Unavailable(
            f"{' and '.join(build.name for build in imported)} are installed together and "
            "overwrite each other",
            reinstall(package),
        )
    hidden = next((b for b in builds if b.name == package and b not in imported), None)
    if hidden:
        return Unavailable(
            f"{listed} in {imported[0].directory} hides {hidden} in {hidden.directory}",
            hidden_remedy(hidden),
        )
    reason = f"the installed onnxruntime ({listed or 'unknown'}) is built without it"
    if not package:
        return Unavailable(reason, "Build ONNX Runtime from source with this provider.")
    return Unavailable(reason, reinstall(package))
