"""Find the installed builds of ONNX Runtime: onnxruntime, -gpu, -openvino, -directml and others.

    [str(build) for build in installed_onnxruntimes()]    # ['onnxruntime-gpu 1.31.1']

Only metadata is read, so this also works for a broken build.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_MODULE = "onnxruntime"
_OTHERS = ("onnxruntime-ep-", "onnxruntime-extensions", "onnxruntime-genai")
"""Packages that have other modules."""
_NAME = re.compile(r"^Name:\s*(\S+)", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class OnnxRuntimeBuild:
    """An installed package that has the module `onnxruntime`."""

    name: str
    version: str
    directory: Path
    """Directory that it is installed in; builds in one directory overwrite each other."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def installed_onnxruntimes() -> tuple[OnnxRuntimeBuild, ...]:
    """Return every installed build of ONNX Runtime, by directory in the order of the import path.

    Only the builds in the first directory can be imported.
    """
    by_directory: dict[Path, dict[str, OnnxRuntimeBuild]] = {}
    for dist in metadata.distributions():
        name = _build_name(dist)
        if name:
            directory = Path(str(dist.locate_file(""))).resolve()
            builds = by_directory.setdefault(directory, {})
            builds[name] = OnnxRuntimeBuild(name, dist.version, directory)
    return tuple(b for builds in by_directory.values() for _, b in sorted(builds.items()))


def _build_name(dist: metadata.Distribution) -> str:
    """Return the name of a distribution that has the module onnxruntime; empty for others.

    `metadata.packages_distributions` takes a hundred times as long: it reads the list of files of
    every distribution. Builds of ONNX Runtime have a `top_level.txt`, under whatever name; one
    without it is known by its name.
    """
    modules = dist.read_text("top_level.txt")
    if modules is not None and _MODULE not in modules.split():
        return ""
    match = _NAME.search(dist.read_text("METADATA") or dist.read_text("PKG-INFO") or "")
    name = match[1].lower().replace("_", "-") if match else ""
    if modules is not None:
        return name
    is_build = name == _MODULE or name.startswith(f"{_MODULE}-")
    return name if is_build and not name.startswith(_OTHERS) else ""
