"""What the doctor found, as plain values: for a table, for JSON, for a test.

>>> report.runs("cuda"), [finding.remedy for finding in report.findings]
(False, ["Run: pip uninstall -y onnxruntime onnxruntime-gpu && pip install …"])
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from enginery.core.errors import CheckFailedError
from enginery.runtime.providers.known import full_name, known_provider, short_name
from enginery.runtime.providers.options import is_typed, option_names

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing."""

    severity: Severity
    problem: str
    evidence: str
    """What was seen: versions, file names, a library's own words."""
    remedy: str


@dataclass(frozen=True)
class PackageStatus:
    """One package that enginery asks for, or that decides what a GPU can do."""

    name: str
    version: str
    """Empty when it is not installed."""
    requirement: str
    """What enginery's metadata asks for, `>=1.31,<1.32`; empty for any version."""
    extra: str
    """The extra that asks for it; empty for the bare install."""
    fits: bool


@dataclass(frozen=True)
class ProviderStatus:
    """How far one execution provider gets."""

    name: str
    compiled: bool
    """ONNX Runtime was built with it, or its plugin is installed."""
    missing: tuple[str, ...]
    """Libraries that it needs and the loader cannot load."""
    registers: bool
    runs: bool
    """It ran a model of one operation itself, with the right answer."""
    reason: str
    """Why it does not run, or what will not work though it runs; empty when all is well."""
    remedy: str

    @property
    def state(self) -> str:
        """The furthest point it reached, in one word or two."""
        if self.runs:
            return "runs"
        if not self.compiled:
            return "not built in"
        if self.missing:
            return "libraries missing"
        return "fails to run" if self.registers else "cannot register"

    @property
    def package(self) -> str:
        """The Python package that brings it; empty where ONNX Runtime is built with it."""
        return known_provider(self.name).package

    @property
    def options(self) -> tuple[str, ...]:
        """The names of its options that are known."""
        return option_names(self.name)


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU."""

    name: str
    compute_capability: str
    """`8.6`; empty where the driver does not say."""
    memory_total_bytes: int
    memory_free_bytes: int


@dataclass(frozen=True)
class NvidiaStatus:
    """The NVIDIA driver, its GPUs, and the libraries above it."""

    driver: str
    """`580.65.06`; empty where there is none."""
    driver_cuda: str
    """The newest CUDA that the driver runs, `13.0`."""
    problem: str
    """Why no GPU can be used; empty when one can."""
    gpus: tuple[Gpu, ...]
    libraries: dict[str, str]
    """Version of each library that loads: CUDA runtime, cuDNN, TensorRT."""
    onnxruntime_cuda: str
    """The CUDA major version that onnxruntime is built for; empty for a CPU build."""


@dataclass(frozen=True)
class MachineStatus:
    """The rest of the machine."""

    python: str
    platform: str
    cpu: str
    physical_cores: int
    usable_cpus: int
    """CPUs that this process may use: its affinity and its cgroup's quota."""
    cpu_features: tuple[str, ...]
    """Those that ONNX Runtime's kernels choose by, as the kernel names them."""
    memory_total_bytes: int
    """The machine's, or the cgroup's limit where that is smaller."""
    memory_available_bytes: int
    store: str
    store_free_bytes: int
    temporary: str
    temporary_free_bytes: int


@dataclass(frozen=True)
class Table:
    """One part of the report, ready to be drawn."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Report:
    """Everything the doctor found."""

    enginery: str
    machine: MachineStatus
    nvidia: NvidiaStatus
    packages: tuple[PackageStatus, ...]
    providers: tuple[ProviderStatus, ...]
    findings: tuple[Finding, ...]

    def runs(self, provider: str) -> bool:
        """Whether a provider, by its short or full name, ran the model of one operation.

        Raises:
            ProviderError: there is no provider of that name.
        """
        name = full_name(provider)
        return any(status.runs for status in self.providers if status.name == name)

    def require(self, provider: str) -> None:
        """Raises CheckFailedError, exit status 1, unless the provider runs on this machine."""
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
        """Plain JSON values; sizes are in bytes."""
        plain = asdict(self)
        for values, status in zip(plain["providers"], self.providers, strict=True):
            values["state"] = status.state
            values["short_name"] = short_name(status.name)
            values["package"] = status.package
            values["options"] = list(status.options)
        return plain

    def tables(self) -> tuple[Table, ...]:
        """The report for people: machine, NVIDIA, packages, providers, findings."""
        return (
            Table("Machine", ("what", "value"), _machine_rows(self.enginery, self.machine)),
            Table("NVIDIA", ("what", "value"), _nvidia_rows(self.nvidia)),
            Table(
                "Packages",
                ("package", "version", "asked for", "extra", "fits"),
                tuple(
                    (p.name, p.version or "–", p.requirement, p.extra, "yes" if p.fits else "no")
                    for p in self.packages
                ),
            ),
            Table(
                "Execution providers",
                ("provider", "state", "package", "options", "reason"),
                tuple(_provider_row(p) for p in self.providers),
            ),
            Table(
                "Findings",
                ("severity", "problem", "evidence", "what to do"),
                tuple((f.severity, f.problem, f.evidence, f.remedy) for f in self.findings),
            ),
        )


def _provider_row(status: ProviderStatus) -> tuple[str, ...]:
    known = known_provider(status.name)
    options = f"{len(status.options)} {'checked' if is_typed(status.name) else 'known'}"
    return (
        f"{short_name(status.name)} ({known.title})",
        status.state,
        status.package or "build from source",
        options if status.options else "–",
        status.reason,
    )


def _machine_rows(version: str, machine: MachineStatus) -> tuple[tuple[str, str], ...]:
    memory = f"{_gib(machine.memory_available_bytes)} of {_gib(machine.memory_total_bytes)} free"
    if not machine.memory_total_bytes:
        memory = "unknown, psutil is not installed"
    return (
        ("enginery", version),
        ("Python", machine.python),
        ("platform", machine.platform),
        ("CPU", machine.cpu),
        ("cores", f"{machine.physical_cores} physical, {machine.usable_cpus} CPUs usable"),
        ("CPU features", " ".join(machine.cpu_features) or "–"),
        ("memory", memory),
        ("store", f"{machine.store}, {_gib(machine.store_free_bytes)} free"),
        ("temporary", f"{machine.temporary}, {_gib(machine.temporary_free_bytes)} free"),
    )


def _nvidia_rows(nvidia: NvidiaStatus) -> tuple[tuple[str, str], ...]:
    rows = [("driver", nvidia.driver or nvidia.problem or "version unknown")]
    if nvidia.driver_cuda:
        rows.append(("CUDA of the driver", nvidia.driver_cuda))
    if nvidia.driver and nvidia.problem:
        rows.append(("problem", nvidia.problem))
    for gpu in nvidia.gpus:
        memory = f"{_gib(gpu.memory_free_bytes)} of {_gib(gpu.memory_total_bytes)} free"
        rows.append(
            ("GPU", f"{gpu.name}, compute capability {gpu.compute_capability or '?'}, {memory}")
        )
    rows += list(nvidia.libraries.items())
    rows.append(("onnxruntime's CUDA", nvidia.onnxruntime_cuda or "none: a CPU build"))
    return tuple(rows)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"
