"""Needed and missing shared libraries."""

import shutil
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
