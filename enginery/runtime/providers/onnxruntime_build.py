"""The installed build of ONNX Runtime: which one, with what, for which CUDA, and where.

    >>> installed_onnxruntimes(), cuda_major()
    ({'onnxruntime-gpu': '1.31.1'}, 13)

All but `compiled_providers` read files and metadata only, so they also answer for a broken build.
"""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata
from pathlib import Path

from enginery.runtime.providers.names import short_name


def compiled_providers() -> list[str]:
    """The providers that the installed onnxruntime is built with.

    Raises:
        ImportError: it is not installed, or what is left of it is broken.
    """
    import onnxruntime

    # Uninstalling one of two builds leaves a folder that imports and holds nothing.
    if not hasattr(onnxruntime, "get_available_providers"):
        raise ImportError("the module is there, and most of its files are gone")
    return list(onnxruntime.get_available_providers())


def installed_onnxruntimes() -> dict[str, str]:
    """Every installed build of ONNX Runtime and its version; more than one is a fault."""
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
    """The CUDA major version that the installed onnxruntime is built for; 0 for a CPU build."""
    try:
        # Read, not imported: onnxruntime may be broken, and the doctor asks all the same.
        text = (capi_directory() / "build_and_package_info.py").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = re.search(r"^cuda_version = ['\"](\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0


def capi_directory() -> Path:
    """Where ONNX Runtime keeps its shared libraries, found without importing it."""
    spec = importlib.util.find_spec("onnxruntime")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0] if places else ".") / "capi"


def provider_library(name: str) -> Path:
    """Where a provider's shared library is; it does not exist for one that is compiled in."""
    stem = short_name(name).replace("-", "_")
    return capi_directory() / f"libonnxruntime_providers_{stem}.so"


def reinstall(package: str) -> str:
    """One build replaces all others: they share their files, so removing one breaks the next."""
    installed = " ".join(installed_onnxruntimes()) or package
    version = ">=1.31,<1.32" if package == "onnxruntime-gpu" else ""
    return f"Run: pip uninstall -y {installed} && pip install '{package}{version}'"
