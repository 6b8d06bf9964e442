"""Find out which extra of enginery installs a missing package, and say what to type.

    require_packages("Linting a model", "onnx", "onnx_ir")
    # MissingPackageError: Linting a model needs the packages 'onnx' and 'onnx-ir', which are not
    # installed. Install them with: pip install 'enginery[export]'

    with missing_packages_as_errors("Linting a model"):
        import onnx_ir    # raises the same error in place of ModuleNotFoundError

The first is for what is known before any work begins, the second for the rest. Which extra has
which package is read from enginery's own metadata, but only when a package is missing: to import
what reads it would slow the command line's start.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from enginery.core.environment_probe import normalized
from enginery.core.errors import MissingPackageError
from enginery.core.versions import installed_version, other_export_extra

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
"""enginery's requirements in a checkout."""

_ONNXRUNTIME = "onnxruntime"
ONNXRUNTIME_EXTRAS = ("cpu", "gpu", "openvino")
"""Extras of which an environment has one: their builds of ONNX Runtime overwrite each other."""

NOT_FOR_USERS = ("dev", "all")
"""Extras that no message names: development tools, and the combination of all others."""

_PACKAGES = {
    "PIL": "pillow",
    "mlflow": "mlflow-skinny",
    "opentelemetry": "opentelemetry-sdk",
    "opentelemetry.exporter": "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry.instrumentation": "opentelemetry-instrumentation-asgi",
    "optimum.exporters.onnx": "optimum-onnx",
    "optimum.onnxruntime": "optimum-onnx",
    "ruamel": "ruamel-yaml",
    "tensorrt_rtx_bindings": "tensorrt-rtx-cu13-bindings",
    "yaml": "pyyaml",
}
"""Modules that are not named as the package that installs them. No metadata tells this of a package
that is not installed."""


def is_installed(module: str) -> bool:
    """Return True if a top-level module can be found; it is not imported."""
    if sys.modules.get(module) is not None:
        return True
    spec = importlib.util.find_spec(module)
    if spec is None:
        return False
    # A folder without __init__.py: a package that several install, or what was left of one.
    return spec.origin is not None or bool(installed_version(package_name(module)))


def require_packages(
    purpose: str, *modules: str, later: Sequence[str] = (), extra: str = ""
) -> None:
    """Check that modules can be found; none is imported.

    Args:
        purpose: start of the message: `Linting a model`.
        modules: top-level names of the modules.
        later: modules that a later check requires, in words of its own; they are named only beside
            a missing one of `modules`, so that one command installs all.
        extra: the extra to name if several have the packages; empty for the smallest.

    Raises:
        MissingPackageError: a module is missing.
    """
    missing = [module for module in modules if not is_installed(module)]
    if missing:
        missing += [name for name in later if name not in missing and not is_installed(name)]
        raise missing_packages(purpose, missing, extra=extra)


def missing_packages(
    purpose: str, modules: Iterable[str], *, extra: str = ""
) -> MissingPackageError:
    """Return the error for missing modules; the arguments are those of `require_packages`."""
    names = list(dict.fromkeys(package_name(module) for module in modules))
    quoted = [f"'{name}'" for name in names]
    if len(names) == 1:
        listed, verb, pronoun = f"package {quoted[0]}", "is", "it"
    else:
        listed, verb, pronoun = f"packages {', '.join(quoted[:-1])} and {quoted[-1]}", "are", "them"
    return MissingPackageError(
        f"{purpose} needs the {listed}, which {verb} not installed.",
        do=f"Install {pronoun} with: {_install_command(names, extra)}",
    )


@contextmanager
def missing_packages_as_errors(purpose: str) -> Iterator[None]:
    """Raise MissingPackageError for an import in the block that fails for want of a package.

    Every other ImportError stays what it is: one in the user's code, in the code of a model, or of
    a module that no extra has.

    Args:
        purpose: start of the message: `Linting a model`.
    """
    try:
        yield
    except ImportError as error:
        if missing := missing_package(error, purpose):
            raise missing from error
        raise


def missing_package(error: ImportError, purpose: str) -> MissingPackageError | None:
    """Return the error for an import that failed for want of a package; None for any other."""
    module, importer = error.name or "", _importer(error)
    if not module or not (importer.partition(".")[0] == "enginery" or _requirements_of(importer)):
        return None
    required = _requirements_of(module)
    package, top = package_name(module), module.partition(".")[0]
    version = installed_version(package)
    is_part = package != package_name(top)  # of a namespace that several packages install
    if required and (not is_installed(top) or (is_part and not version)):
        return missing_packages(purpose, [module])
    for extra, requirement in required:
        # Another version of a package lacks some of its modules and names.
        is_same = normalized(requirement.name) == package
        if version and is_same and not requirement.specifier.contains(version, prereleases=True):
            return MissingPackageError(
                f"{purpose} needs {requirement.name}{requirement.specifier}, found {version}.",
                do=f"Install it with: pip install '{_with_extras([extra] if extra else [])}'",
            )
    return None


def own_requirements() -> Iterator[tuple[str, Requirement]]:
    """Yield enginery's requirements that apply to this system, each with its extra.

    They are read from its metadata, or from the checkout if it is not installed.
    """
    import tomllib

    from packaging.requirements import Requirement

    if installed_version("enginery"):
        yield from requirements("enginery")
        return
    if not PYPROJECT.is_file():
        return
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8")).get("project", {})
    if project.get("name") != "enginery":
        return
    extras = {"": project["dependencies"], **project["optional-dependencies"]}

    def listed(extra: str) -> Iterator[Requirement]:
        for requirement in map(Requirement, extras.get(extra, ())):
            if requirement.name == "enginery":  # other extras that this one includes
                for name in sorted(requirement.extras):
                    yield from listed(name)
            elif requirement.marker is None or requirement.marker.evaluate():
                yield requirement

    for extra in extras:
        yield from ((extra, requirement) for requirement in listed(extra))


def requirements(package: str) -> Iterator[tuple[str, Requirement]]:
    """Yield the requirements of an installed package that apply here, each with its extra."""
    from importlib import metadata

    from packaging.requirements import InvalidRequirement, Requirement

    try:
        dist = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return
    extras = ["", *(dist.metadata.get_all("Provides-Extra") or [])]
    for text in dist.requires or []:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # older than PEP 508; pip would reject it, too
        for extra in extras:
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                yield extra, requirement
                break


def package_name(module: str) -> str:
    """Return the name of the package that installs a module: `onnx-ir` for `onnx_ir.passes`."""
    parts = module.split(".")
    for count in range(len(parts), 0, -1):
        if name := _PACKAGES.get(".".join(parts[:count])):
            return name
    return normalized(parts[0])


def _requirements_of(module: str) -> list[tuple[str, Requirement]]:
    """Return the requirements that install a module, each with its extra; none for a foreign one.

    Any build installs the module `onnxruntime`.
    """
    name = package_name(module)
    return [
        (extra, requirement)
        for extra, requirement in own_requirements()
        if extra not in (*NOT_FOR_USERS, other_export_extra())
        and (
            normalized(requirement.name) == name
            or (name == _ONNXRUNTIME and extra in ONNXRUNTIME_EXTRAS)
        )
    ]


def _importer(error: ImportError) -> str:
    """Return the name of the module whose import failed, as Python knows it."""
    name = ""
    trace = error.__traceback__
    while trace is not None:
        values = trace.tb_frame.f_globals
        spec = values.get("__spec__")  # has the name of a module that runs as __main__
        current = str(spec.name if spec else values.get("__name__", ""))
        if current.partition(".")[0] not in ("importlib", "_frozen_importlib"):
            name = current
        trace = trace.tb_next
    return name


def _install_command(packages: Sequence[str], extra: str) -> str:
    """Return what to type to install packages: the fewest and smallest extras that have them."""
    by_extra: dict[str, set[str]] = {}
    for name, requirement in own_requirements():
        if name not in (*NOT_FOR_USERS, other_export_extra()):
            by_extra.setdefault(name, set()).add(normalized(requirement.name))
    builds = [name for name in ONNXRUNTIME_EXTRAS if name in by_extra]
    needed = set(packages) - by_extra.get("", set())
    needs_build = _ONNXRUNTIME in needed and bool(builds)
    needed -= {_ONNXRUNTIME} if needs_build else set()
    fitting = {
        name: members & needed
        for name, members in by_extra.items()
        if name and name not in ONNXRUNTIME_EXTRAS and members & needed
    }
    if needed - set().union(*fitting.values()):
        return f"pip install {' '.join(packages)}"  # no extra has it
    covers = (
        names
        for count in range(len(fitting) + 1)
        for names in combinations(fitting, count)
        if needed <= set().union(*(fitting[name] for name in names))
    )
    sizes = {name: len(by_extra[name]) for name in fitting}
    chosen = min(
        covers, key=lambda names: (len(names), extra not in names, sum(sizes[n] for n in names))
    )
    if not needs_build:
        return f"pip install '{_with_extras(chosen)}'"
    # The order in which the documentation has them: most machines of users have an NVIDIA GPU.
    return (
        f"pip install '{_with_extras(['gpu', *chosen])}', or '{_with_extras(['cpu', *chosen])}' "
        "on a machine without NVIDIA GPU."
    )


def _with_extras(names: Sequence[str]) -> str:
    return f"enginery[{','.join(names)}]" if names else "enginery"
