"""Processor, memory and disk of this machine, as far as this process may use them."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from enginery.core.home import enginery_home
from enginery.doctor.report import Finding, MachineStatus
from enginery.runtime.machine import memory_bytes, physical_cores, read_cpuinfo, usable_cpus

_LITTLE_DISK_BYTES = 5 << 30
_LITTLE_MEMORY_BYTES = 2 << 30


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


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk where `path` is or will be."""
    existing = next((p for p in (path, *path.absolute().parents) if p.exists()), None)
    return shutil.disk_usage(existing).free if existing else 0


def machine_findings(machine: MachineStatus) -> Iterator[Finding]:
    """Report too little disk space or memory, and a store that is not writable."""
    store = Path(machine.store)
    existing = next((p for p in (store, *store.parents) if p.exists()), store)
    if not os.access(existing, os.W_OK):
        yield Finding(
            "error",
            "the store is not writable",
            f"no write permission on {existing}",
            "Set ENGINERY_HOME to a directory that you can write to.",
        )
    for directory, free_bytes, remedy in (
        (
            machine.store,
            machine.store_free_bytes,
            "Run: enginery store prune --max-size 20GB, or set ENGINERY_HOME.",
        ),
        (machine.temporary, machine.temporary_free_bytes, "Set TMPDIR to a larger disk."),
    ):
        if free_bytes < _LITTLE_DISK_BYTES:
            yield Finding(
                "warning",
                f"little disk space at {directory}",
                f"{free_bytes / (1 << 30):.1f} GiB free; a model takes several times its size",
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
