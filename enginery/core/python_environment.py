"""Find out what another Python environment has, to export and to run PyTorch in it.

    environment = PythonEnvironment.find(config.python)
    environment.require("Exporting a model", "torch", "transformers")
    environment.family, environment.version_of("transformers")

A machine can have Optimum with transformers 4.57 in one environment and transformers 5 in another.
`--python` names the interpreter of the other one. Children that it runs get enginery from here, see
`core/module_runner.py`, and everything else from there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from enginery.core import environment_probe
from enginery.core.artifact.fingerprint import stage_tools
from enginery.core.errors import MissingPackageError, OptionError
from enginery.core.extras import missing_packages, own_requirements, package_name
from enginery.core.subprocess import child_environment, interpreter_command
from enginery.core.versions import (
    Family,
    export_extra,
    installed_version,
    transformers_family,
)

VARIABLE = "ENGINERY_EXPORT_PYTHON"
"""The environment variable with the interpreter for commands whose options name none."""

OLDEST_PYTHON = (3, 11)

_EXAMPLE = "--python ~/transformers5/bin/python"
_SECONDS = 60
_LIBRARIES = ("pydantic", "psutil", "platformdirs", "PIL")
"""What enginery's own code imports there, beside what transformers brings along."""
_FRAMEWORKS = ("torch", "transformers", "optimum-onnx")
"""Packages whose oldest version is checked."""


@dataclass(frozen=True)
class PythonEnvironment:
    """A Python environment: this process's own, or one that an option names."""

    python: str = ""
    """The path of its interpreter; empty for this environment."""
    version: str = ""
    """Its version of Python."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Name -> version of its packages; empty for this environment."""
    runtimes: Mapping[str, str] = field(default_factory=dict)
    """Name -> version of its builds of ONNX Runtime; empty for this environment."""

    @classmethod
    def find(cls, python: str = "") -> PythonEnvironment:
        """Return the environment of an interpreter: the option's, the variable's or this process's.

        Raises:
            OptionError: there is no such interpreter, or it is too old.
        """
        named = python or os.environ.get(VARIABLE, "").strip()
        if not named:
            return cls()
        name = f"option 'python' is {python}" if python else f"{VARIABLE} is {named}"
        path = shutil.which(Path(named).expanduser())
        if path is None:
            place = Path(named).expanduser()
            state = "is a folder" if place.is_dir() else "cannot be run"
            raise OptionError(
                f"{name}, which {state if place.exists() else 'does not exist'}.",
                do=f"Name the interpreter of an environment with PyTorch and transformers: "
                f"{_EXAMPLE}",
                option="python",
            )
        # The path stays as it is: where a link lies decides which packages the interpreter has.
        described = _describe(os.path.abspath(path), name)  # noqa: PTH100
        if described.pop("prefix") == sys.prefix:
            return cls()
        return cls(**described)

    @property
    def is_own(self) -> bool:
        """True for the environment of this process."""
        return not self.python

    @cached_property
    def family(self) -> Family:
        """The family of packages that it exports with."""
        return transformers_family(self.version_of)

    def version_of(self, package: str) -> str:
        """Return the version of a package, or an empty text."""
        if self.is_own:
            return installed_version(package)
        return self.packages.get(package_name(package), "")

    def versions(self, packages: Iterable[str]) -> dict[str, str]:
        """Return the version of each package; `none` if it is not installed."""
        return {package: self.version_of(package) or "none" for package in packages}

    def tools(self, packages: Iterable[str]) -> dict[str, str]:
        """Return the versions of what a stage works with there; see `stage_tools`."""
        if self.is_own:
            return stage_tools(packages)
        return {**(self.runtimes or {"onnxruntime": "none"}), **self.versions(packages)}

    def describe(self) -> str:
        """Describe another environment in a note: Python's version, and those of the frameworks."""
        versions = [f"{name} {self.version_of(name)}" for name in _FRAMEWORKS]
        return ", ".join([f"Python {self.version}", *(v for v in versions if not v.endswith(" "))])

    def require(self, purpose: str, modules: Iterable[str]) -> None:
        """Check that another environment has modules, and no older frameworks than enginery needs.

        Args:
            purpose: start of the message: `Exporting a model`.
            modules: top-level names of the modules, beside those that enginery's own code needs.

        Raises:
            MissingPackageError: a package is missing, or too old.
        """
        extra = export_extra(self.family)
        extras = extra if self.runtimes else f"cpu,{extra}"
        install = f"{self.python} -m pip install 'enginery[{extras}]'"
        names = dict.fromkeys(package_name(module) for module in (*modules, *_LIBRARIES))
        missing = [name for name in names if not self._has(name)]
        if missing:
            message = missing_packages(purpose, missing).message
            raise MissingPackageError(
                f"{message.removesuffix('.')} in the environment of {self.python}.",
                do=f"Install what it needs: {install}",
            )
        for requirement in _oldest_versions(extra):
            version = self.version_of(requirement[0])
            if version and _is_older(version, requirement[1]):
                raise MissingPackageError(
                    f"{purpose} needs {requirement[0]}>={requirement[1]}, found {version} in the "
                    f"environment of {self.python}.",
                    do=f"Install what it needs: {install}",
                )

    def _has(self, package: str) -> bool:
        return bool(self.runtimes) if package == "onnxruntime" else package in self.packages


OWN_ENVIRONMENT = PythonEnvironment()

_Stamps = dict[str, int]
_described: dict[str, tuple[dict[str, Any], _Stamps]] = {}
"""Interpreter -> what it printed, and the times of the folders with its packages at that time."""


def _describe(python: str, name: str) -> dict[str, Any]:
    """Return the fields of a `PythonEnvironment`, and `prefix`; they are kept until they change."""
    if python in _described:
        described, stamps = _described[python]
        if stamps == _stamps(stamps):
            return dict(described)
    values = _ask(python, name)
    stamps = _stamps(values.pop("folders"))
    values = {"python": python, **values}
    _described[python] = values, stamps
    return dict(values)


def _stamps(folders: Iterable[str]) -> _Stamps:
    """Return the modification time of each folder, which installing a package changes."""
    return {name: Path(name).stat().st_mtime_ns for name in folders if Path(name).exists()}


def _ask(python: str, name: str) -> dict[str, Any]:
    """Have an interpreter describe its environment.

    Raises:
        OptionError: it is no Python, or too old.
    """
    version = _run(
        [python, "-c", "import sys; sys.stdout.write('%d.%d.%d' % sys.version_info[:3])"], name
    )
    if not all(part.isdecimal() for part in version.split(".")):
        raise _not_python(name, version)
    oldest = ".".join(map(str, OLDEST_PYTHON))
    if tuple(map(int, version.split(".")[:2])) < OLDEST_PYTHON:
        raise OptionError(
            f"{name}, which is Python {version}, expected {oldest} or newer.",
            do=f"Name the interpreter of another environment: {_EXAMPLE}",
            option="python",
        )
    answer = _run(interpreter_command(python, environment_probe.__name__), name)
    try:
        values: dict[str, Any] = json.loads(answer)
    except ValueError:
        raise _not_python(name, answer) from None
    return values


def _run(command: list[str], name: str) -> str:
    """Run an interpreter in the folder of its executable; return the last line that it prints."""
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            env=child_environment(command[0]),
            stdin=subprocess.DEVNULL,
            # With `-c` the working directory, which may be a model's, is on the import path.
            cwd=Path(command[0]).parent,
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError) as error:
        raise _not_python(name, str(error)) from None
    lines = (process.stdout if process.returncode == 0 else process.stderr).strip().splitlines()
    last = lines[-1] if lines else ""
    if process.returncode != 0:
        raise _not_python(name, last or f"it ended with status {process.returncode}")
    return last


def _not_python(name: str, answer: str) -> OptionError:
    reason = answer[:200].rstrip(".") or "it printed nothing"
    return OptionError(
        f"{name}, which does not run as Python: {reason}.",
        do=f"Name the interpreter of an environment: {_EXAMPLE}",
        option="python",
    )


def _oldest_versions(extra: str) -> Iterable[tuple[str, str]]:
    """Yield the frameworks of an extra, each with its oldest version."""
    for name, requirement in own_requirements():
        if name == extra and requirement.name in _FRAMEWORKS:
            for bound in requirement.specifier:
                if bound.operator in (">=", "=="):
                    yield requirement.name, bound.version


def _is_older(version: str, oldest: str) -> bool:
    from packaging.version import Version

    return Version(version) < Version(oldest)
