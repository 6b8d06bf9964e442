"""The machine that was measured on, as the result says it.

>>> describe_machine()["cpu"]
'AMD EPYC 7763 64-Core Processor'
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from enginery.core.errors import ProviderError
from enginery.core.fingerprint import runtime_version, tool_versions
from enginery.runtime.gpus import driver_version, visible_gpus

_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile",
          "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2")  # fmt: skip
_TOOLS = ("enginery", "numpy", "torch", "transformers", "optimum-onnx")


def describe_machine() -> dict[str, Any]:
    """Processor, memory, system, GPUs and versions; what cannot be read is empty or 0.

    `load` is the number of processes that wanted to run over the last minute, before anything was
    measured: above 0.5 a core, others used the machine, and times say less.
    """
    import psutil

    model, flags = _cpuinfo()
    try:
        gpus, without = [asdict(gpu) for gpu in visible_gpus()], ""
    except ProviderError as error:
        gpus, without = [], error.message
    return {
        "cpu": model or platform.processor() or platform.machine(),
        "physical_cores": psutil.cpu_count(logical=False) or 0,
        "usable_cpus": _usable_cpus(),
        "cpu_flags": flags,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "memory_bytes": int(psutil.virtual_memory().total),
        "system": platform.platform(),
        "python": platform.python_version(),
        "gpus": gpus,
        "no_gpu": without,
        "driver": driver_version(),
        "tools": {**runtime_version(), **tool_versions(_TOOLS)},
    }


def _cpuinfo(path: Path = Path("/proc/cpuinfo")) -> tuple[str, list[str]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", []
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    found = set((fields.get("flags") or fields.get("Features") or "").split())
    return fields.get("model name", ""), [flag for flag in _FLAGS if flag in found]


def _usable_cpus() -> int:
    count = os.cpu_count() or 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else count
