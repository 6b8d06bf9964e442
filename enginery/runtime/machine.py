"""Processor and memory of this machine, within the limits of this process.

    read_cpuinfo()    # ('AMD EPYC 7763 64-Core Processor', ('avx2',))

Values that cannot be read are 0 or empty. The limits are the process's affinity and its cgroups.
"""

from __future__ import annotations

import os
from pathlib import Path

_FEATURES = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),  # Arm
)
_SYSTEM = Path("/")


def read_cpuinfo(root: Path = _SYSTEM) -> tuple[str, tuple[str, ...]]:
    """Return (model, features) of the first processor in /proc/cpuinfo."""
    text = _read(root / "proc/cpuinfo")
    lines = (line.partition(":") for line in text.splitlines())
    fields: dict[str, str] = {}
    for key, _, value in lines:
        fields.setdefault(key.strip(), value.strip())
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return fields.get("model name", ""), tuple(name for name in _FEATURES if name in flags)


def memory_bytes(root: Path = _SYSTEM) -> tuple[int, int]:
    """Return (total, available) memory in bytes, within the limits of this process's cgroups."""
    try:
        import psutil
    except ImportError:  # the doctor must also work with a damaged installation
        return 0, 0
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    # The limits of parents bind as well, so the lowest one counts.
    for limit, used in _cgroup_memory(root):
        if limit < total:
            total, available = limit, min(available, max(0, limit - used))
    return total, available


def usable_cpus(root: Path = _SYSTEM) -> int:
    """Return the number of CPUs in this process's affinity, or in its cgroup's quota if lower."""
    total = os.cpu_count() or 1
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    for directory in _cgroup_directories(root, "cpu"):
        quota, _, period = _read(directory / "cpu.max").partition(" ")
        if not quota:
            quota = _read(directory / "cpu.cfs_quota_us")
            period = _read(directory / "cpu.cfs_period_us")
        # Without a quota there is `max` in version 2, and -1 in version 1.
        if quota.isdigit() and period.isdigit() and int(period):
            count = min(count, max(1, int(quota) // int(period)))
    return count


def physical_cores() -> int:
    """Return the number of physical cores; 0 if unknown."""
    try:
        import psutil
    except ImportError:
        return 0
    return psutil.cpu_count(logical=False) or 0


def usable_cores() -> int:
    """Return the number of physical cores that this process may use, at least one.

    Two threads of a core share its arithmetic units, so more threads than cores are not faster.
    """
    cpus = usable_cpus()
    return max(1, min(physical_cores() or cpus, cpus))


def _cgroup_memory(root: Path) -> list[tuple[int, int]]:
    """Return (limit, usage) in bytes of each cgroup of this process that has a limit.

    Cached file pages that the kernel drops first (inactive_file) do not count as used.
    """
    limits = []
    for directory in _cgroup_directories(root, "memory"):
        for limit_file, used_file, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _read(directory / limit_file)
            used = _read(directory / used_file)
            # Without a limit version 2 has `max`; version 1 has a number above any memory.
            if limit.isdigit() and used.isdigit():
                stat = dict(
                    line.split(" ", 1)
                    for line in _read(directory / "memory.stat").splitlines()
                    if " " in line
                )
                limits.append((int(limit), max(0, int(used) - int(stat.get(cached, "0")))))
    return limits


def _cgroup_directories(root: Path, controller: str) -> list[Path]:
    """Return the cgroup of this process and its parents, version 2 first, then version 1.

    In a container the path in /proc/self/cgroup may be the host's; then only the mount's own
    directory exists.
    """
    directories = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Version 2 has one hierarchy for all controllers, whose line names none: `0::/path`.
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        leaf = mount / path.strip("/")
        inside = [leaf, *(p for p in leaf.parents if p.is_relative_to(mount))]
        directories += [directory for directory in inside if directory.is_dir()]
    return directories


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
