"""Processor, memory and disk of this machine, as far as this process may use them.

>>> examine_machine().cpu_features
('avx2', 'avx512f', 'avx512_vnni')
"""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
from pathlib import Path

from enginery.core.home import enginery_home
from enginery.doctor.report import MachineStatus
from enginery.runtime.machine import memory_bytes, physical_cores, read_cpuinfo, usable_cpus


def examine_machine() -> MachineStatus:
    """Reads it all; what cannot be read is 0 or empty."""
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


def free_bytes(path: Path) -> int:
    """Free space where `path` is or will be."""
    existing = next((p for p in (path, *path.absolute().parents) if p.exists()), None)
    return shutil.disk_usage(existing).free if existing else 0
