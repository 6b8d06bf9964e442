"""Processor, memory and CPUs, from recorded files of other machines and from this one."""

from types import SimpleNamespace

import psutil
import pytest

from enginery.runtime import machine
from enginery.runtime.machine import (
    memory_bytes,
    physical_cores,
    read_cpuinfo,
    usable_cores,
    usable_cpus,
)

GIB = 1 << 30


@pytest.fixture
def memory(monkeypatch):
    """A machine with 64 GiB, of which 50 are available."""
    values = SimpleNamespace(total=64 * GIB, available=50 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: values)


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def test_cpu_model_and_features_are_read_from_an_x86_machine(tmp_path):
    text = (
        "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) Platinum 8480C\n"
        "flags\t\t: fpu sse2 avx2 avx512f avx512_vnni amx_tile amx_int8\n"
        "processor\t: 1\nmodel name\t: other\nflags\t\t: fpu\n"
    )
    assert read_cpuinfo(write(tmp_path, {"proc/cpuinfo": text})) == (
        "Intel(R) Xeon(R) Platinum 8480C",
        ("avx2", "avx512f", "avx512_vnni", "amx_tile", "amx_int8"),
    )


def test_cpu_features_are_read_from_an_arm_machine(tmp_path):
    text = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm bf16\nCPU part\t: 0xd4f\n"
    assert read_cpuinfo(write(tmp_path, {"proc/cpuinfo": text}))[1] == (
        *("asimd", "asimddp", "i8mm", "bf16"),
    )


def test_memory_without_a_limit_is_the_machines(memory, tmp_path):
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max"}
    assert memory_bytes(write(tmp_path, files)) == (64 * GIB, 50 * GIB)


def test_memory_limit_of_cgroup_2_counts_cache_as_available(memory, tmp_path):
    group = "sys/fs/cgroup/kube/pod"
    files = {
        "proc/self/cgroup": "0::/kube/pod",
        f"{group}/memory.max": 8 * GIB,
        f"{group}/memory.current": 6 * GIB,
        f"{group}/memory.stat": f"anon 1\ninactive_file {2 * GIB}",
        "sys/fs/cgroup/kube/memory.max": "max",
    }
    assert memory_bytes(write(tmp_path, files)) == (8 * GIB, 4 * GIB)


def test_memory_limit_of_an_outer_cgroup_holds(memory, tmp_path):
    files = {
        "proc/self/cgroup": "0::/kube/pod",
        "sys/fs/cgroup/kube/pod/memory.max": "max",
        "sys/fs/cgroup/kube/memory.max": 4 * GIB,
        "sys/fs/cgroup/kube/memory.current": GIB,
    }
    assert memory_bytes(write(tmp_path, files)) == (4 * GIB, 3 * GIB)


def test_memory_limit_of_cgroup_1_in_a_container_is_at_the_mount(memory, tmp_path):
    mount = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "5:memory:/docker/4f\n3:cpu,cpuacct:/docker/4f\n0::/",
        f"{mount}/memory.limit_in_bytes": 2 * GIB,
        f"{mount}/memory.usage_in_bytes": GIB,
        f"{mount}/memory.stat": "total_inactive_file 0",
    }
    assert memory_bytes(write(tmp_path, files)) == (2 * GIB, GIB)


def test_the_unlimited_value_of_cgroup_1_is_no_limit(memory, tmp_path):
    mount = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "5:memory:/",
        f"{mount}/memory.limit_in_bytes": 0x7FFFFFFFFFFFF000,
        f"{mount}/memory.usage_in_bytes": GIB,
    }
    assert memory_bytes(write(tmp_path, files)) == (64 * GIB, 50 * GIB)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, 16),
        (
            {
                "proc/self/cgroup": "1:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            16,
        ),
    ],
)
def test_cpu_quota_limits_the_affinity(monkeypatch, tmp_path, files, expected):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert usable_cpus(write(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("physical", "affinity", "expected"), [(8, 16, 8), (8, 3, 3), (None, 16, 16), (8, 8, 8)]
)
def test_cores_worth_a_thread_are_physical_and_within_the_affinity(
    monkeypatch, physical, affinity, expected
):
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: physical)
    allowed = set(range(affinity))
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: allowed, raising=False)
    monkeypatch.setattr(machine, "_cgroup_directories", lambda root, controller: [])
    assert physical_cores() == (physical or 0)
    assert usable_cores() == expected


def test_cores_worth_a_thread_are_within_the_quota(monkeypatch, tmp_path):
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8)
    monkeypatch.setattr(machine, "usable_cpus", lambda: 2)
    assert usable_cores() == 2
