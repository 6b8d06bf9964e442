"""Examine this machine: hardware, packages and execution providers, with remedies."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from enginery.core.progress import SILENT, Progress
from enginery.core.versions import installed_version
from enginery.doctor.advice import check_settings
from enginery.doctor.config import DoctorConfig
from enginery.doctor.machine import examine_machine, machine_findings
from enginery.doctor.nvidia import examine_nvidia, nvidia_findings
from enginery.doctor.packages import examine_exporter, examine_packages
from enginery.doctor.report import DoctorReport, Finding, NvidiaStatus, ProviderStatus
from enginery.doctor.subprocess_probe import ProbeResult, run_probe
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


def examine(config: DoctorConfig, *, progress: Progress = SILENT) -> DoctorReport:
    """Examine this machine.

    A required provider that does not run is a finding; `report.require` raises an error for it.

    Raises:
        ProviderError: the required provider is unknown.
    """
    required = full_name(config.require) if config.require else ""
    compiled = run_probe(["compiled"], timeout_seconds=config.timeout_seconds).values.get(
        "providers", []
    )
    names = list(dict.fromkeys([*_ALWAYS, *compiled, *([required] if required else [])]))
    providers = []
    with progress.task("examining", total=len(names) + 2) as advance:
        nvidia = examine_nvidia(timeout_seconds=config.timeout_seconds)
        advance()
        for name in names:
            answer = run_probe(["provider", name], timeout_seconds=config.timeout_seconds)
            providers.append(provider_status(name, answer))
            advance()
        absent = [row.name for row in KNOWN_PROVIDERS if row.name not in names]
        providers += absent_statuses(
            absent, run_probe(["absent", *absent], timeout_seconds=config.timeout_seconds)
        )
        advance()
    machine = examine_machine()
    packages, package_findings = examine_packages()
    exporter, exporter_findings = examine_exporter()
    findings = [
        *package_findings,
        *exporter_findings,
        *nvidia_findings(nvidia),
        *tensorrt_findings(nvidia),
        *provider_findings(providers, nvidia, required),
        *machine_findings(machine),
        *check_settings(os.environ, nvidia, providers),
    ]
    order = ("error", "warning", "note")
    return DoctorReport(
        enginery=installed_version("enginery") or "not installed",
        machine=machine,
        exporter=exporter,
        nvidia=nvidia,
        packages=packages,
        providers=tuple(providers),
        findings=tuple(sorted(findings, key=lambda finding: order.index(finding.severity))),
    )


def provider_status(name: str, answer: ProbeResult) -> ProviderStatus:
    """Convert the result of a probe, or its failure, to a status."""
    values: dict[str, Any] = answer.values
    if not values:
        log = f" ({answer.log})" if answer.log else ""
        return ProviderStatus(
            name,
            compiled=True,
            missing=(),
            registers=False,
            runs=False,
            reason=f"{answer.reason}{log}",
            remedy="Reinstall ONNX Runtime and the provider's libraries.",
        )
    status = ProviderStatus(**{**values, "missing": tuple(values["missing"])})
    if status.runs or status.remedy or not answer.log:
        return status
    # The session was created without the provider; only the log has the reason.
    return ProviderStatus(
        **{**values, "missing": status.missing, "reason": f"{status.reason}: {answer.log}"}
    )


def absent_statuses(names: Sequence[str], answer: ProbeResult) -> list[ProviderStatus]:
    """Convert the result of the probe of all other providers to one status each."""
    by_name = {values["name"]: values for values in answer.values.get("providers", [])}
    return [
        provider_status(name, ProbeResult(by_name[name]) if name in by_name else answer)
        for name in names
    ]


def provider_findings(
    providers: list[ProviderStatus], nvidia: NvidiaStatus, required: str
) -> Iterator[Finding]:
    """Report providers that should run here but do not, and those that run with limitations.

    CUDA is expected only if there is a GPU.
    """
    for status in providers:
        expected = status.name in (CPU, required)
        usable = bool(nvidia.gpus) and not nvidia.problem and status.name in (CUDA, TENSORRT)
        if status.runs:
            if status.reason:
                yield Finding(
                    "warning",
                    f"{short_name(status.name)} runs, but with limitations",
                    status.reason,
                    status.remedy or "Install cuDNN: pip install nvidia-cudnn-cu13",
                )
        elif expected or (usable and status.compiled):
            # TensorRT is an extra, so its absence is not an error.
            optional = status.name == TENSORRT and status.missing and not expected
            yield Finding(
                "note" if optional else "error",
                f"{short_name(status.name)} does not run: {status.state}",
                status.reason,
                status.remedy,
            )
