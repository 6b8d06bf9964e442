"""Description of the machine, for the result."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from typing import cast

from enginery.core.artifact.fingerprint import runtime_version, tool_versions
from enginery.core.errors import ProviderError
from enginery.reports.benchmark import GpuName, Machine
from enginery.runtime.machine import memory_bytes, physical_cores, read_cpuinfo, usable_cpus
from enginery.runtime.providers.gpus import driver_version, visible_gpus

_TOOLS = ("enginery", "numpy", "torch", "transformers", "optimum-onnx")


def describe_machine() -> Machine:
    """Return processor, memory, system, GPUs and versions; values that cannot be read are empty.

    `load` is the load average of the last minute before the measurement. Above 0.5 per CPU, other
    processes were using the machine, and the times are less reliable.
    """
    model, flags = read_cpuinfo()
    memory, _ = memory_bytes()
    try:
        gpus, without = [cast("GpuName", asdict(gpu)) for gpu in visible_gpus()], ""
    except ProviderError as error:
        gpus, without = [], error.message
    return {
        "cpu": model or platform.processor() or platform.machine(),
        "physical_cores": physical_cores(),
        "usable_cpus": usable_cpus(),
        "cpu_flags": list(flags),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "memory_bytes": memory,
        "system": platform.platform(),
        "python": platform.python_version(),
        "gpus": gpus,
        "no_gpu": without,
        "driver": driver_version(),
        "tools": {**runtime_version(), **tool_versions(_TOOLS)},
    }
