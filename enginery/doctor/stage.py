"""The examination: machine, NVIDIA, packages and execution providers, and what to do about each.

Takes options, leaves nothing on disk.

    >>> report = examine(DoctorConfig())
    >>> report.require("cpu")
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from enginery.core.progress import SILENT, Progress
from enginery.doctor.advice import advise
from enginery.doctor.asking import Answer, ask
from enginery.doctor.config import DoctorConfig
from enginery.doctor.machine import examine_machine
from enginery.doctor.nvidia import examine_nvidia, nvidia_findings
from enginery.doctor.packages import examine_packages, installed_version
from enginery.doctor.report import Finding, MachineStatus, NvidiaStatus, ProviderStatus, Report
from enginery.doctor.tensorrt import tensorrt_findings
from enginery.runtime.providers.known import (
    CPU,
    CUDA,
    KNOWN_PROVIDERS,
    TENSORRT,
    TENSORRT_RTX,
    full_name,
    short_name,
)

_ALWAYS = (CPU, CUDA, TENSORRT, TENSORRT_RTX)
_LITTLE_DISK_BYTES = 5 << 30
_LITTLE_MEMORY_BYTES = 2 << 30


def examine(config: DoctorConfig, *, progress: Progress = SILENT) -> Report:
    """Examines this machine.

    A required provider that does not run is a finding; `report.require` makes it an error.

    Raises:
        ProviderError: the required provider is unknown.
    """
    required = full_name(config.require) if config.require else ""
    compiled = ask(["compiled"], timeout_seconds=config.timeout_seconds).values.get("providers", [])
    names = list(dict.fromkeys([*_ALWAYS, *compiled, *([required] if required else [])]))
    providers = []
    with progress.task("examining", total=len(names) + 2) as advance:
        nvidia = examine_nvidia(timeout_seconds=config.timeout_seconds)
        advance()
        for name in names:
            answer = ask(["provider", name], timeout_seconds=config.timeout_seconds)
            providers.append(provider_status(name, answer))
            advance()
        absent = [row.name for row in KNOWN_PROVIDERS if row.name not in names]
        providers += absent_statuses(
            absent, ask(["absent", *absent], timeout_seconds=config.timeout_seconds)
        )
        advance()
    machine = examine_machine()
    packages, package_findings = examine_packages()
    findings = [
        *package_findings,
        *nvidia_findings(nvidia),
        *tensorrt_findings(nvidia),
        *provider_findings(providers, nvidia, required),
        *machine_findings(machine),
        *advise(os.environ, machine, nvidia, providers),
    ]
    order = ("error", "warning", "note")
    return Report(
        enginery=installed_version("enginery") or "not installed",
        machine=machine,
        nvidia=nvidia,
        packages=packages,
        providers=tuple(providers),
        findings=tuple(sorted(findings, key=lambda finding: order.index(finding.severity))),
    )


def provider_status(name: str, answer: Answer) -> ProviderStatus:
    """The child's answer, or its death, as a status."""
    values: dict[str, Any] = answer.values
    if not values:
        said = f" ({answer.log})" if answer.log else ""
        return ProviderStatus(
            name, compiled=True, missing=(), registers=False, runs=False,
            reason=f"{answer.reason}{said}",
            remedy="Install ONNX Runtime and the provider's libraries anew.",
        )  # fmt: skip
    status = ProviderStatus(**{**values, "missing": tuple(values["missing"])})
    if status.runs or status.remedy or not answer.log:
        return status
    # The session was made without the provider; only the log says why.
    return ProviderStatus(**{**values, "missing": status.missing,
                             "reason": f"{status.reason}: {answer.log}"})  # fmt: skip


def absent_statuses(names: Sequence[str], answer: Answer) -> list[ProviderStatus]:
    """The rest of ONNX Runtime's table: what each lacks here, asked of one child together."""
    told = {values["name"]: values for values in answer.values.get("providers", [])}
    return [provider_status(name, Answer(told[name]) if name in told else answer) for name in names]


def provider_findings(
    providers: list[ProviderStatus], nvidia: NvidiaStatus, required: str
) -> Iterator[Finding]:
    """Providers that ought to run here and do not, and those that run with a reservation.

    Without a GPU nobody expects CUDA; with one, its absence is an error.
    """
    for status in providers:
        expected = status.name in (CPU, required)
        usable = bool(nvidia.gpus) and not nvidia.problem and status.name in (CUDA, TENSORRT)
        if status.runs:
            if status.reason:
                yield Finding(
                    "warning", f"{short_name(status.name)} runs, but not everything",
                    status.reason, status.remedy or "Install cuDNN: pip install nvidia-cudnn-cu13",
                )  # fmt: skip
        elif expected or (usable and status.compiled):
            # TensorRT is an extra: a GPU without it is no fault.
            optional = status.name == TENSORRT and status.missing and not expected
            yield Finding(
                "note" if optional else "error",
                f"{short_name(status.name)} does not run: {status.state}",
                status.reason,
                status.remedy,
            )


def machine_findings(machine: MachineStatus) -> Iterator[Finding]:
    """Too little disk or memory, and a store that cannot be written."""
    store = Path(machine.store)
    existing = next((p for p in (store, *store.parents) if p.exists()), store)
    if not os.access(existing, os.W_OK):
        yield Finding(
            "error", "the store cannot be written", f"no write permission on {existing}",
            "Set ENGINERY_HOME to a directory of your own.",
        )  # fmt: skip
    for place, free_bytes, remedy in (
        (
            machine.store,
            machine.store_free_bytes,
            "Run: enginery store prune --max-size 20GB, or set ENGINERY_HOME.",
        ),
        (machine.temporary, machine.temporary_free_bytes, "Set TMPDIR to a larger disk."),
    ):
        if free_bytes < _LITTLE_DISK_BYTES:
            yield Finding(
                "warning", f"little disk space at {place}",
                f"{free_bytes / (1 << 30):.1f} GiB free; a model takes several times its size",
                remedy,
            )  # fmt: skip
    if 0 < machine.memory_available_bytes < _LITTLE_MEMORY_BYTES:
        yield Finding(
            "warning", "little memory",
            f"{machine.memory_available_bytes / (1 << 30):.1f} GiB available; "
            "an export holds the model about three times",
            "Give the machine or the container more memory.",
        )  # fmt: skip
