"""The machine that was measured on, as the result says it.

>>> describe_machine()["cpu"]
'AMD EPYC 7763 64-Core Processor'
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from typing import cast

from enginery.core.artifact.fingerprint import runtime_version, tool_versions
from enginery.core.artifact.reports import GpuName, Machine
from enginery.core.errors import ProviderError
from enginery.runtime.machine import memory_bytes, physical_cores, read_cpuinfo, usable_cpus
from enginery.runtime.providers.gpus import driver_version, visible_gpus

_TOOLS = ("enginery", "numpy", "torch", "transformers", "optimum-onnx")


def describe_machine() -> Machine:
    """Processor, memory, system, GPUs and versions; what cannot be read is empty or 0.

    `load` is the number of processes that wanted to run over the last minute, before anything was
    measured: above 0.5 a core, others used the machine, and times say less.
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
