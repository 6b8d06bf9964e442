"""Check installed packages: versions that enginery requires, conflicts, and common mistakes.

Only metadata is read. Nothing is imported, so a broken package cannot break the doctor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from itertools import groupby
from pathlib import Path

from enginery.core.errors import MissingPackageError, OptionError
from enginery.core.extras import (
    NOT_FOR_USERS,
    ONNXRUNTIME_EXTRAS,
    own_requirements,
    requirements,
)
from enginery.core.onnxruntime_builds import installed_onnxruntimes
from enginery.core.python_environment import OWN_ENVIRONMENT, VARIABLE, PythonEnvironment
from enginery.core.versions import installed_version, other_export_extra
from enginery.doctor.report import Finding, PackageStatus, absent_extras
from enginery.runtime.providers.availability import cuda_major, reinstall
from enginery.runtime.tensorrt.options import CLASSIC

_GPU_PACKAGE = re.compile(r"^(onnxruntime|tensorrt|nvidia-(cuda-runtime|cudnn|cublas))(-|$)")
_FOR_CUDA = re.compile(r"^(tensorrt|nvidia-cudnn)-cu(\d+)(-bindings|-libs)?$")


def examine_packages() -> tuple[tuple[PackageStatus, ...], tuple[Finding, ...]]:
    """Check every package that enginery requires, and the packages for GPUs."""
    try:
        statuses = [*_own_packages(), *_gpu_packages()]
    except ImportError:
        finding = Finding(
            "error",
            "versions cannot be compared",
            "the package 'packaging' is not installed",
            "Install it: pip install packaging",
        )
        return (), (finding,)
    findings = [
        *_missing_or_unfit(statuses),
        *_broken_pins(statuses),
        *_conflicting_onnxruntimes(),
        *_wrong_cuda_packages(statuses),
    ]
    return tuple(statuses), tuple(findings)


def examine_exporter() -> tuple[str, tuple[Finding, ...]]:
    """Describe what models are exported with: this environment's packages, or another's."""
    own = _family(OWN_ENVIRONMENT)
    try:
        environment = PythonEnvironment.find()
        if environment.is_own:
            return own, ()
        described = f"{_family(environment)} in the environment of {environment.python}"
        environment.require("Exporting a model", ("torch", "transformers", "onnx", "onnx_ir"))
    except OptionError as error:
        return own, (Finding("error", f"{VARIABLE} cannot be used", error.message, error.do),)
    except MissingPackageError as error:
        finding = Finding(
            "error", f"{VARIABLE} names an incomplete environment", error.message, error.do
        )
        return described, (finding,)
    return described, ()


def _family(environment: PythonEnvironment) -> str:
    """Name the packages of an environment that export models."""
    transformers = f"transformers {environment.version_of('transformers')}"
    match environment.family:
        case "optimum":
            return f"Optimum {environment.version_of('optimum')} and {transformers}"
        case "transformers5":
            return transformers
    return "nothing: neither the extra [export] nor [transformers5] is installed"


def torch_cuda() -> str:
    """Return the CUDA version of the installed torch; empty for a CPU build or without torch.

    It is read from torch/version.py, because importing torch takes seconds.
    """
    try:
        path = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
        text = path.read_text(encoding="utf-8")
    except (metadata.PackageNotFoundError, OSError):
        return ""
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else ""


def _own_packages() -> list[PackageStatus]:
    statuses = []
    builds = installed_onnxruntimes()
    imported = [build.name for build in builds if build.directory == builds[0].directory]
    left_out = (*NOT_FOR_USERS, other_export_extra())
    for extra, requirement in own_requirements():
        if extra in left_out or requirement.name == "enginery":
            continue
        version = installed_version(requirement.name)
        fits = bool(version) and requirement.specifier.contains(version, prereleases=True)
        specifier = str(requirement.specifier)
        # A build that another directory hides is not used, whatever its version.
        is_replaced = extra in ONNXRUNTIME_EXTRAS and builds and requirement.name not in imported
        replaced_by = imported[0] if is_replaced else ""
        statuses.append(
            PackageStatus(requirement.name, version, specifier, extra, fits, replaced_by)
        )
    return statuses


def _gpu_packages() -> list[PackageStatus]:
    """Return the installed GPU packages that are not among enginery's requirements."""
    own_names = {requirement.name for _, requirement in own_requirements()}
    statuses = {}
    for dist in metadata.distributions():
        name = (dist.metadata["Name"] or "").lower().replace("_", "-")
        if _GPU_PACKAGE.match(name) and name not in own_names:
            statuses[name] = PackageStatus(name, dist.version, "", "", fits=True)
    return [statuses[name] for name in sorted(statuses)]


def _missing_or_unfit(statuses: list[PackageStatus]) -> Iterator[Finding]:
    if not any(status.requirement for status in statuses):
        yield Finding(
            "warning",
            "enginery is not installed, so its pins cannot be checked",
            "no metadata of the package 'enginery' was found",
            "Install it: pip install -e .",
        )
    for status in statuses:
        if status.extra or status.fits:
            continue
        evidence = f"found {status.version}" if status.version else "it is not installed"
        yield Finding(
            "error",
            f"enginery needs {status.name}{status.requirement}",
            evidence,
            f"Install it: pip install '{status.name}{status.requirement}'",
        )
    absent = absent_extras(statuses)
    for extra in dict.fromkeys(status.extra for status in statuses if status.extra):
        if extra in absent:
            continue  # nobody asked for it
        required = [s for s in statuses if s.extra == extra and not s.replaced_by]
        missing = [status.name for status in required if not status.version]
        unfit = [s for s in required if s.version and not s.fits]
        if not missing and not unfit:
            continue
        problems = [f"{', '.join(missing)} not installed"] if missing else []
        problems += [f"{s.name} {s.version} does not satisfy {s.requirement}" for s in unfit]
        yield Finding(
            # With missing packages, the extra was not installed, so other versions are fine.
            "note" if missing else "error",
            f"the extra [{extra}] is {'incomplete' if missing else 'broken'}",
            "; ".join(problems),
            f"To use it: pip install 'enginery[{extra}]'",
        )


def _broken_pins(statuses: list[PackageStatus]) -> Iterator[Finding]:
    """Report packages whose own requirements are not met, as transformers' of huggingface-hub."""
    for status in statuses:
        if not status.version:
            continue
        for extra, requirement in requirements(status.name):
            version = installed_version(requirement.name)
            if extra or not version:
                continue
            if not requirement.specifier.contains(version, prereleases=True):
                unmet = f"{requirement.name}{requirement.specifier}"
                yield Finding(
                    "error",
                    f"{status.name} {status.version} needs {unmet}",
                    f"found {requirement.name} {version}",
                    f"Install it: pip install '{unmet}'",
                )


def _conflicting_onnxruntimes() -> Iterator[Finding]:
    for _, group in groupby(installed_onnxruntimes(), key=lambda build: build.directory):
        builds = tuple(group)
        names = [build.name for build in builds]
        if len(names) > 1:
            yield Finding(
                "error",
                f"{' and '.join(names)} are installed together",
                "all of them install the module 'onnxruntime': the last one overwrites the "
                "others, and removing any of them breaks the rest "
                f"({', '.join(map(str, builds))})",
                reinstall("onnxruntime-gpu" if "onnxruntime-gpu" in names else names[0]),
            )


def _wrong_cuda_packages(statuses: list[PackageStatus]) -> Iterator[Finding]:
    """Report packages for another CUDA major version than onnxruntime's."""
    major = cuda_major()
    if not major:
        return
    torch = torch_cuda()
    if torch and int(torch.partition(".")[0]) != major:
        yield Finding(
            "warning",
            f"torch is built for CUDA {torch}, onnxruntime for CUDA {major}",
            f"torch {installed_version('torch')}; both load libcudnn.so.9, and both use the one "
            "that is loaded first",
            f"Install torch for CUDA {major} from PyTorch's own index, or for the CPU.",
        )
    for status in statuses:
        match = _FOR_CUDA.match(status.name)
        if not match or int(match[2]) == major:
            continue
        right = f"{match[1]}-cu{major}"
        if match[1] == "nvidia-cudnn" and not installed_version(right):
            continue  # that of a torch for this CUDA
        install = CLASSIC.install if match[1] == "tensorrt" else f"pip install {right}"
        yield Finding(
            "error",
            f"{status.name} {status.version} is for CUDA {match[2]}, onnxruntime for CUDA {major}",
            "its libraries have the names of those that ONNX Runtime loads; libraries for two "
            "versions of CUDA in one process share neither memory nor streams",
            f"Run: pip uninstall -y {status.name} {right} && {install}",
        )
