"""Examine this machine: hardware, packages and providers, with a remedy for each fault."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from enginery.core.errors import EngineryError, ProviderError
from enginery.core.home import enginery_home
from enginery.core.progress import SILENT, Progress
from enginery.core.versions import installed_version
from enginery.doctor.config import DoctorConfig
from enginery.doctor.packages import examine_exporter, examine_packages
from enginery.doctor.probe import run_probe
from enginery.doctor.report import (
    DoctorReport,
    Finding,
    Gpu,
    MachineStatus,
    NvidiaStatus,
    ProviderStatus,
)
from enginery.runtime.machine import memory_bytes, physical_cores, read_cpuinfo, usable_cpus
from enginery.runtime.providers.availability import MIN_DRIVER
from enginery.runtime.providers.gpus import CudaGpu
from enginery.runtime.providers.known import (
    CPU,
    CUDA,
    NVIDIA,
    SHORT_NAMES,
    TENSORRT,
    full_name,
    short_name,
)
from enginery.runtime.providers.specification import ENVIRONMENT, ProviderSpec, parse_providers
from enginery.runtime.tensorrt.capabilities import unsupported_gpu
from enginery.runtime.tensorrt.library import has_tensorrt
from enginery.runtime.tensorrt.options import CLASSIC, RTX

_LITTLE_DISK_BYTES = 5 << 30
_LITTLE_MEMORY_BYTES = 2 << 30
_OLDEST_GPU = (7, 5)  # CUDA 13 supports Turing and later (release notes)


def examine(config: DoctorConfig, *, progress: Progress = SILENT) -> DoctorReport:
    """Examine this machine.

    A required provider that does not run is a finding; `report.require` raises an error for it.

    Raises:
        ProviderError: the required provider is unknown.
    """
    required = full_name(config.require) if config.require else ""
    machine = examine_machine()
    exporter, exporter_findings = examine_exporter()
    packages, package_findings = examine_packages()
    with progress.task("examining", total=1 + len(SHORT_NAMES)) as advance:
        nvidia, unavailable = _examine_gpus(config.timeout_seconds)
        advance()
        providers = []
        for name in SHORT_NAMES.values():
            status = unavailable.get(name) or _probe(name, config.timeout_seconds)
            providers.append(ProviderStatus(name, **status))
            advance()
    findings = [
        *package_findings,
        *exporter_findings,
        *gpu_findings(nvidia, cpu_runs=any(s.runs for s in providers if s.name == CPU)),
        *provider_findings(providers, nvidia, required, os.environ),
        *machine_findings(machine),
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


def _examine_gpus(timeout_seconds: float) -> tuple[NvidiaStatus, dict[str, dict[str, str]]]:
    """Return the status of the GPUs, and the status of each provider that is unavailable."""
    try:
        answer = run_probe("machine", timeout_seconds=timeout_seconds)
    except ProviderError as error:
        return NvidiaStatus("", "", error.message, (), {}, ""), {}
    nvidia: dict[str, Any] = answer["nvidia"]
    gpus = tuple(Gpu(**gpu) for gpu in nvidia["gpus"])
    return NvidiaStatus(**{**nvidia, "gpus": gpus}), answer["unavailable"]


def _probe(name: str, timeout_seconds: float) -> dict[str, str]:
    try:
        return run_probe("provider", name, timeout_seconds=timeout_seconds)
    except ProviderError as error:
        remedy = "Reinstall ONNX Runtime and the provider's libraries."
        return {"state": "fails to run", "reason": error.message, "remedy": remedy}


def examine_machine() -> MachineStatus:
    """Read the status of the machine. Values that cannot be read are 0 or empty."""
    model, features = read_cpuinfo()
    total, available = memory_bytes()
    store = enginery_home()
    temporary = Path(tempfile.gettempdir())
    return MachineStatus(
        python=f"{platform.python_version()} ({sys.executable})",
        platform=platform.platform(),
        cpu=model or platform.processor() or platform.machine(),
        physical_cores=physical_cores(),
        usable_cpus=usable_cpus(),
        cpu_features=features,
        memory_total_bytes=total,
        memory_available_bytes=available,
        store=str(store),
        store_free_bytes=free_bytes(store),
        temporary=str(temporary),
        temporary_free_bytes=free_bytes(temporary),
    )


def _existing(path: Path) -> Path:
    """Return the nearest directory that exists."""
    return next((parent for parent in (path, *path.absolute().parents) if parent.exists()), path)


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk where `path` is or will be."""
    return shutil.disk_usage(_existing(path)).free


def machine_findings(machine: MachineStatus) -> Iterator[Finding]:
    """Report too little disk space or memory, and a store that is not writable."""
    store = _existing(Path(machine.store))
    if not os.access(store, os.W_OK):
        yield Finding(
            "error",
            "the store is not writable",
            f"no write permission on {store}",
            "Set ENGINERY_HOME to a directory that you can write to.",
        )
    prune = "Run: enginery store prune --max-size 20GB, or set ENGINERY_HOME."
    for directory, free, remedy in (
        (machine.store, machine.store_free_bytes, prune),
        (machine.temporary, machine.temporary_free_bytes, "Set TMPDIR to a larger disk."),
    ):
        if free < _LITTLE_DISK_BYTES:
            yield Finding(
                "warning",
                f"little disk space at {directory}",
                f"{free / (1 << 30):.1f} GiB free; a model takes several times its size",
                remedy,
            )
    if 0 < machine.memory_available_bytes < _LITTLE_MEMORY_BYTES:
        yield Finding(
            "warning",
            "little memory",
            f"{machine.memory_available_bytes / (1 << 30):.1f} GiB available; "
            "an export holds the model about three times",
            "Give the machine or the container more memory.",
        )


def gpu_findings(nvidia: NvidiaStatus, *, cpu_runs: bool) -> Iterator[Finding]:
    """Report a driver or GPUs that cannot be used."""
    if nvidia.problem and nvidia.driver:
        yield Finding(
            "error",
            "there is an NVIDIA driver, but CUDA cannot use a GPU",
            nvidia.problem,
            "Check CUDA_VISIBLE_DEVICES, and whether the container has access to the GPU "
            "(docker run --gpus all).",
        )
    elif nvidia.problem:
        words = "no GPU can be used" + ("; models run on the CPU" if cpu_runs else "")
        yield Finding(
            "note",
            words,
            nvidia.problem,
            f"On a machine with an NVIDIA GPU, install driver {MIN_DRIVER} or newer; in a "
            "container, give it the GPUs (docker run --gpus all).",
        )
    for gpu in nvidia.gpus:
        # An unknown compute capability is no finding.
        version = tuple(map(int, gpu.compute_capability.split(".")))
        if int(nvidia.onnxruntime_cuda or 0) >= 13 and version < _OLDEST_GPU:
            yield Finding(
                "error",
                f"{gpu.name} is not supported by CUDA {nvidia.onnxruntime_cuda}",
                f"compute capability {gpu.compute_capability}, expected 7.5 (Turing) or newer",
                "Use a newer GPU, or an onnxruntime-gpu for CUDA 12.",
            )
        elif has_tensorrt(RTX) and not RTX.supports(gpu.compute_capability):
            cuda_gpu = CudaGpu(gpu.name, gpu.compute_capability, gpu.memory_total_bytes)
            yield Finding(
                "note",
                f"{RTX.title} does not run on {gpu.name}",
                unsupported_gpu(RTX, cuda_gpu),
                f"Build for it with --flavor {CLASSIC.name} ({CLASSIC.install}), or run models "
                "with --providers cuda.",
            )


def provider_findings(
    providers: Sequence[ProviderStatus],
    nvidia: NvidiaStatus,
    required: str,
    environment: Mapping[str, str],
) -> Iterator[Finding]:
    """Report providers that should run here but do not, and those that run with limitations.

    The CPU is expected, and what is required or what ENGINERY_PROVIDERS names first; with a GPU,
    CUDA, too.
    """
    specs: tuple[ProviderSpec, ...] = ()
    if text := environment.get(ENVIRONMENT, "").strip():
        try:
            specs = parse_providers(text)
        except EngineryError as error:
            remedy = error.do or f"Correct it, or unset {ENVIRONMENT}."
            yield Finding("error", f"{ENVIRONMENT} cannot be used", error.message, remedy)
    first = specs[0].full_name if specs else CPU
    for status in providers:
        name = short_name(status.name)
        if status.runs and status.reason:
            yield Finding(
                "warning",
                f"{name} runs, but with limitations",
                status.reason,
                "Install cuDNN: pip install nvidia-cudnn-cu13",
            )
        elif not status.runs and status.name in (CPU, CUDA, TENSORRT, required, first):
            is_named = status.name in (required, first)
            # TensorRT is an extra, so its absence is not an error.
            is_optional = status.name == TENSORRT and not is_named
            if not is_named and status.name != CPU and not nvidia.gpus:
                continue
            if is_optional and status.state == "not built in":
                continue
            named = f"; {ENVIRONMENT} names it" if specs and status.name == first else ""
            yield Finding(
                "note" if is_optional else "error",
                f"{name} does not run: {status.state}{named}",
                status.reason,
                status.remedy or f"Use another provider, and unset {ENVIRONMENT} if it names it.",
            )
    running = [short_name(s.name) for s in providers if s.runs and s.name in NVIDIA]
    if nvidia.gpus and running and first == CPU:
        state = f"is {text}" if specs else "is not set"
        yield Finding(
            "note",
            "there is a GPU, but models run on the CPU unless a command names it",
            f"{nvidia.gpus[0].name}, which {' and '.join(running)} can use; {ENVIRONMENT} {state}",
            f"Set {ENVIRONMENT}={running[0]}, or pass --providers {running[0]}.",
        )
