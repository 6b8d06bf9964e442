"""The doctor's report as plain values, for tables and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from enginery.core.errors import CheckFailedError
from enginery.core.table import NOTHING, Row, Table, fact_rows
from enginery.runtime.providers.known import (
    AZURE,
    CPU,
    NVIDIA,
    OPENVINO,
    full_name,
    provider_package,
    short_name,
)

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One problem or note."""

    severity: Severity
    problem: str
    evidence: str
    """What was found: versions, file names, a library's message."""
    remedy: str

    def row(self) -> Row:
        """Return the row of the table of findings."""
        return {
            "severity": self.severity,
            "problem": self.problem,
            "evidence": self.evidence,
            "what to do": self.remedy,
        }


@dataclass(frozen=True)
class PackageStatus:
    """Status of a package that enginery requires, or of a GPU package."""

    name: str
    version: str
    """Empty if it is not installed."""
    requirement: str
    """Requirement in enginery's metadata, such as `>=1.31,<1.32`; empty for any version."""
    extra: str
    """Extra that requires it; empty for the bare install."""
    fits: bool
    """True if the installed version satisfies the requirement."""
    replaced_by: str = ""
    """Another build of ONNX Runtime that is installed in place of this one; empty otherwise."""


@dataclass(frozen=True)
class ProviderStatus:
    """Status of one execution provider."""

    name: str
    state: str
    """`runs`, `fails to run`, `unavailable` (something that it needs is missing) or `not built in`
    (ONNX Runtime does not have it, and its plugin is not installed)."""
    reason: str
    """Why it does not run, or what does not work although it runs; empty otherwise."""
    remedy: str

    @property
    def runs(self) -> bool:
        """True if it ran a model of one operation with the correct result."""
        return self.state == "runs"

    @property
    def package(self) -> str:
        """Python package that provides it; empty if it needs a build from source."""
        return provider_package(self.name)


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU."""

    name: str
    compute_capability: str
    """Such as `8.6`."""
    memory_total_bytes: int
    memory_free_bytes: int
    """0 if the driver does not report it."""


@dataclass(frozen=True)
class NvidiaStatus:
    """Status of the NVIDIA driver, GPUs and libraries."""

    driver: str
    """Driver version, such as `580.65.06`; empty without a driver."""
    driver_cuda: str
    """Newest CUDA version that the driver supports, such as `13.0`."""
    problem: str
    """Why no GPU can be used; empty otherwise."""
    gpus: tuple[Gpu, ...]
    libraries: dict[str, str]
    """CUDA runtime, cuDNN, TensorRT, TensorRT for RTX -> version, or `not found`."""
    onnxruntime_cuda: str
    """CUDA major version that onnxruntime is built for; empty for a CPU build."""


@dataclass(frozen=True)
class MachineStatus:
    """Status of the rest of the machine."""

    python: str
    platform: str
    cpu: str
    physical_cores: int
    usable_cpus: int
    """CPUs that this process may use, by affinity and cgroup quota."""
    cpu_features: tuple[str, ...]
    """Features that ONNX Runtime selects kernels by, with Linux's names."""
    memory_total_bytes: int
    """Memory of the machine, or the cgroup's limit if smaller."""
    memory_available_bytes: int
    store: str
    store_free_bytes: int
    temporary: str
    temporary_free_bytes: int


@dataclass(frozen=True)
class DoctorReport:
    """The complete report."""

    enginery: str
    machine: MachineStatus
    exporter: str
    """What models are exported with, and where."""
    nvidia: NvidiaStatus
    packages: tuple[PackageStatus, ...]
    providers: tuple[ProviderStatus, ...]
    findings: tuple[Finding, ...]

    def runs(self, provider: str) -> bool:
        """Return True if the provider, by short or full name, ran the model of one operation.

        Raises:
            ProviderError: the name is unknown.
        """
        name = full_name(provider)
        return any(status.runs for status in self.providers if status.name == name)

    def require(self, provider: str) -> None:
        """Require that a provider runs on this machine.

        Raises:
            CheckFailedError: it does not; the CLI exits with status 1.
            ProviderError: the name is unknown.
        """
        if self.runs(provider):
            return
        name = full_name(provider)
        status = next((status for status in self.providers if status.name == name), None)
        reason = status.reason if status else "it was not examined"
        raise CheckFailedError(
            f"{short_name(name)} does not run on this machine: {reason}.",
            do=status.remedy if status else f"Run: enginery doctor --require {short_name(name)}",
        )

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values. Sizes are in bytes."""
        plain = asdict(self)
        for values, status in zip(plain["providers"], self.providers, strict=True):
            values["runs"] = status.runs
            values["short_name"] = short_name(status.name)
            values["package"] = status.package
        return plain

    def tables(self) -> list[Table]:
        """Return the report as tables: machine, NVIDIA, packages, providers, findings."""
        return [
            Table("Machine", _machine_rows(self.enginery, self.machine, self.exporter)),
            Table("NVIDIA", _nvidia_rows(self.nvidia, self.packages)),
            Table("Packages", _package_rows(self.packages)),
            Table("Execution providers", _provider_rows(self.providers)),
            Table("Findings", [finding.row() for finding in self.findings]),
        ]


def absent_extras(packages: Iterable[PackageStatus]) -> list[str]:
    """Return the extras of which nothing is installed.

    Packages that the bare install or a complete extra has do not count for another extra.
    """
    by_extra: dict[str, list[PackageStatus]] = {"": []}
    for package in packages:
        by_extra.setdefault(package.extra, []).append(package)
    complete = {extra for extra, members in by_extra.items() if all(p.version for p in members)} | {
        ""
    }
    explained = {package.name for extra in complete for package in by_extra[extra]}
    return [
        extra
        for extra, members in by_extra.items()
        if extra not in complete
        and not any(p.replaced_by or (p.version and p.name not in explained) for p in members)
    ]


def _package_rows(packages: Sequence[PackageStatus]) -> list[Row]:
    """Return a row for each package, and one row for all extras of which nothing is installed."""
    absent = absent_extras(packages)
    rows = [
        (p.name, p.version or NOTHING, p.requirement, p.extra, _fits(p))
        for p in packages
        if p.extra not in absent
    ]
    if absent:
        rows.append(("extras without packages", NOTHING, "", ", ".join(absent), "not installed"))
    columns = ("package", "version", "required", "extra", "fits")
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _fits(package: PackageStatus) -> str:
    if package.fits:
        return "yes"
    if package.replaced_by:
        return f"not needed beside {package.replaced_by}"
    return "no" if package.version else "not installed"


def _provider_rows(providers: Sequence[ProviderStatus]) -> list[Row]:
    """Return a row for each provider that may be used here, and one for the number of others."""
    usable = [status for status in providers if _has_row(status)]
    rows = [_provider_row(status) for status in usable]
    if hidden := len(providers) - len(usable):
        reason = "in other builds of ONNX Runtime; --json lists them"
        rows.append((f"and {hidden} more", "not built in", NOTHING, reason))
    columns = ("provider", "state", "package", "reason")
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _has_row(status: ProviderStatus) -> bool:
    """Return True if a provider is built in, or is one of those that have been tested."""
    if status.name == AZURE:  # calls an endpoint; runs no operations of a graph
        return status.runs
    return status.state != "not built in" or status.name in (CPU, OPENVINO, *NVIDIA)


def _provider_row(status: ProviderStatus) -> tuple[str, ...]:
    package = status.package or "build from source"
    return short_name(status.name), status.state, package, status.reason


def _machine_rows(version: str, machine: MachineStatus, exporter: str) -> list[Row]:
    memory = f"{_gib(machine.memory_available_bytes)} of {_gib(machine.memory_total_bytes)} free"
    if not machine.memory_total_bytes:
        memory = "unknown, psutil is not installed"
    facts = {
        "enginery": version,
        "Python": machine.python,
        "exports with": exporter,
        "platform": machine.platform,
        "CPU": machine.cpu,
        "cores": f"{machine.physical_cores} physical, {machine.usable_cpus} CPUs usable",
        "CPU features": " ".join(machine.cpu_features) or NOTHING,
        "memory": memory,
        "store": f"{machine.store}, {_gib(machine.store_free_bytes)} free",
        "temporary": f"{machine.temporary}, {_gib(machine.temporary_free_bytes)} free",
    }
    return fact_rows(facts.items())


def _nvidia_rows(nvidia: NvidiaStatus, packages: Sequence[PackageStatus]) -> list[Row]:
    facts = [("driver", nvidia.driver or nvidia.problem or "version unknown")]
    if nvidia.driver_cuda:
        facts.append(("CUDA of the driver", nvidia.driver_cuda))
    if nvidia.driver and nvidia.problem:
        facts.append(("problem", nvidia.problem))
    for gpu in nvidia.gpus:
        memory = f"{_gib(gpu.memory_free_bytes)} of {_gib(gpu.memory_total_bytes)} free"
        facts.append(("GPU", f"{gpu.name}, compute capability {gpu.compute_capability}, {memory}"))
    facts += list(nvidia.libraries.items())
    has_build = any(p.version for p in packages if p.name.startswith("onnxruntime"))
    none = "none: a CPU build" if has_build else "none: onnxruntime is not installed"
    facts.append(("onnxruntime's CUDA", nvidia.onnxruntime_cuda or none))
    return fact_rows(facts)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"
