"""The NVIDIA driver, GPUs and libraries, and problems that keep ONNX Runtime from using them.

The samples of nvidia-smi in the tests follow its documented CSV output.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Iterator

from enginery.core.onnxruntime_builds import installed_onnxruntimes
from enginery.doctor.report import Finding, Gpu, NvidiaStatus
from enginery.doctor.subprocess_probe import run_probe
from enginery.runtime.providers.availability import (
    MIN_DRIVER,
    reinstall,
)
from enginery.runtime.providers.gpus import driver_version

_QUERY = ("name", "driver_version", "memory.total", "memory.free", "compute_cap")
_MIB = 1 << 20
_OLDEST_GPU = (7, 5)  # CUDA 13 supports Turing and later (release notes)


def examine_nvidia(*, timeout_seconds: float) -> NvidiaStatus:
    """Query libcuda in a subprocess, and nvidia-smi if it is installed.

    nvidia-smi lists all GPUs of the machine, libcuda those that CUDA_VISIBLE_DEVICES permits.
    """
    answer = run_probe(["nvidia"], timeout_seconds=timeout_seconds)
    values = answer.values
    problem = str(values.get("problem", "")) if values else f"{answer.reason}; {answer.log}"
    driver, gpus = _query_nvidia_smi(timeout_seconds)
    if not gpus:
        gpus = tuple(Gpu(**gpu) for gpu in values.get("gpus", ()))
    return NvidiaStatus(
        driver=driver or driver_version(),
        driver_cuda=str(values.get("driver_cuda", "")),
        problem=problem.rstrip("; "),
        gpus=gpus,
        libraries=dict(values.get("libraries", {})),
        onnxruntime_cuda=str(values.get("onnxruntime_cuda", "")),
    )


def gpus_from_smi(text: str) -> tuple[str, tuple[Gpu, ...]]:
    """Parse nvidia-smi's CSV, without header and units, into driver version and GPUs.

    Raises:
        ValueError: a line does not have the requested columns.
    """
    driver = ""
    gpus = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if not row:
            continue
        if len(row) != len(_QUERY):
            raise ValueError(f"nvidia-smi: found {', '.join(row)}, expected {', '.join(_QUERY)}.")
        name, driver, total, free, capability = (cell.strip() for cell in row)
        capability = capability if capability.replace(".", "").isdigit() else ""
        gpus.append(Gpu(name, capability, _parse_mib(total), _parse_mib(free)))
    return driver, tuple(gpus)


def nvidia_findings(status: NvidiaStatus) -> Iterator[Finding]:
    """Report problems of the driver, the GPUs and their match with onnxruntime."""
    if status.problem and not status.gpus:
        yield Finding(
            "note",
            "no GPU can be used" + ("; models run on the CPU" if installed_onnxruntimes() else ""),
            status.problem,
            f"On a machine with an NVIDIA GPU, install driver {MIN_DRIVER} or newer; in a "
            "container, give it the GPUs (docker run --gpus all).",
        )
    elif status.problem:
        yield Finding(
            "error",
            "there is a GPU, but CUDA cannot use it",
            status.problem,
            "Check CUDA_VISIBLE_DEVICES, and whether the container has access to the GPU.",
        )
    if not status.onnxruntime_cuda and status.gpus and installed_onnxruntimes():
        yield Finding(
            "error",
            "there is a GPU, but the installed onnxruntime is a CPU build",
            status.gpus[0].name,
            reinstall("onnxruntime-gpu"),
        )
    cuda_major = int(status.onnxruntime_cuda or 0)
    if cuda_major and status.driver_cuda and int(status.driver_cuda.split(".")[0]) < cuda_major:
        yield Finding(
            "error",
            f"the NVIDIA driver is too old for CUDA {cuda_major}",
            f"driver {status.driver or 'of unknown version'} runs CUDA up to {status.driver_cuda}",
            f"Install driver {MIN_DRIVER} or newer.",
        )
    for gpu in status.gpus:
        if (
            cuda_major >= 13
            and gpu.compute_capability
            and _parse_version(gpu.compute_capability) < _OLDEST_GPU
        ):
            yield Finding(
                "error",
                f"{gpu.name} is not supported by CUDA {cuda_major}",
                f"compute capability {gpu.compute_capability}, expected 7.5 (Turing) or newer",
                "Use a newer GPU, or an onnxruntime-gpu for CUDA 12.",
            )


def _query_nvidia_smi(timeout_seconds: float) -> tuple[str, tuple[Gpu, ...]]:
    program = shutil.which("nvidia-smi")
    if not program:
        return "", ()
    query = [program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        process = subprocess.run(
            query, capture_output=True, text=True, timeout=timeout_seconds, check=True
        )
        return gpus_from_smi(process.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        # It also fails without a driver; libcuda's message is better in that case.
        return "", ()


def _parse_mib(cell: str) -> int:
    """Convert MiB to bytes; `[N/A]`, as for integrated GPUs, is 0."""
    return int(float(cell) * _MIB) if cell.replace(".", "", 1).isdigit() else 0


def _parse_version(version: str) -> tuple[int, int]:
    major, _, minor = version.partition(".")
    return int(major), int(minor or 0)
