"""Needed and missing shared libraries."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from enginery.runtime.providers import libraries
from enginery.runtime.providers.availability import cuda_major, provider_library
from enginery.runtime.providers.known import CUDA
from tests.runtime.providers.doubles import write_library


def test_needed_libraries_are_read_in_order(tmp_path):
    needed = ["libnvinfer.so.10", "libcudart.so.13", "libc.so.6"]
    assert libraries.needed_libraries(write_library(tmp_path / "x.so", needed)) == needed


@pytest.mark.parametrize("content", [b"", b"MZ", b"\x7fELF\x02\x01" + b"\0" * 100])
def test_files_that_are_not_elf_libraries_need_nothing(tmp_path, content):
    (tmp_path / "x.so").write_bytes(content)
    assert libraries.needed_libraries(tmp_path / "x.so") == []


@pytest.mark.skipif(sys.platform != "linux", reason="the libraries are ELF files on Linux")
def test_onnxruntimes_own_library_is_read():
    needed = libraries.needed_libraries(provider_library(CUDA))
    assert f"libcudart.so.{cuda_major()}" in needed
    assert "libc.so.6" in needed


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_library_in_the_providers_directory_is_found(tmp_path):
    # A copy under a name that the loader knows nowhere: only the directory can find it.
    maps = Path("/proc/self/maps").read_text().splitlines()
    source = next(line.split()[-1] for line in maps if line.endswith("libm.so.6"))
    shutil.copy(source, tmp_path / "libbeside.so.1")
    library = write_library(tmp_path / "x.so", ["libbeside.so.1", "libgone.so.1"])
    assert list(libraries.missing_libraries(library)) == ["libgone.so.1"]


PRELOAD = """
import ctypes, sys
from enginery.runtime.providers import availability
availability.cuda_major = lambda: 13
availability.provider_library = lambda name: __import__("pathlib").Path("absent.so")
for path in sys.argv[1:]:
    ctypes.CDLL(path)
availability.preload_nvidia()
for name in ("libcudart.so.13", "libcufft.so.12", "libcudnn.so.9"):
    ctypes.CDLL(name)  # as ONNX Runtime does
print(*sorted({line.split()[-1] for line in open("/proc/self/maps") if ".so." in line}))
"""


def preloaded(tmp_path, *before):
    """Return the libraries mapped after preloading in a process with wheels outside site-packages.

    The system has the same libraries, and those in `before` are loaded first.
    """
    site = tmp_path / "site"
    wheels = {
        "libcudart.so.13": site / "nvidia" / "cu13" / "lib",
        "libcufft.so.12": site / "nvidia" / "cu13" / "lib",
        "libcudnn.so.9": site / "nvidia" / "cudnn" / "lib",
    }
    for name, directory in wheels.items():
        for place in (directory, tmp_path / "system", tmp_path / "torch"):
            place.mkdir(parents=True, exist_ok=True)
            write_library(place / name, [], soname=name)
    done = subprocess.run(
        [sys.executable, "-c", PRELOAD, *(str(tmp_path / path) for path in before)],
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(tmp_path / "system"),
            "PYTHONPATH": os.pathsep.join([str(site), *sys.path]),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for path in done.stdout.split() if path.startswith(str(tmp_path))]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_wheels_precede_the_systems_libraries_wherever_they_are_installed(tmp_path):
    cuda, cudnn = (tmp_path / "site" / "nvidia" / name / "lib" for name in ("cu13", "cudnn"))
    assert preloaded(tmp_path) == [
        str(cuda / "libcudart.so.13"),
        str(cuda / "libcufft.so.12"),
        str(cudnn / "libcudnn.so.9"),
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_second_copy_of_a_loaded_library_is_loaded(tmp_path):
    found = preloaded(tmp_path, "torch/libcudart.so.13")
    assert [path for path in found if "cudart" in path] == [
        str(tmp_path / "torch" / "libcudart.so.13")
    ]
