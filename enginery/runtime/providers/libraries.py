"""Shared libraries and the NVIDIA driver: what the dynamic loader finds, and what it misses.

Takes a path of a shared object or a library's name; leaves the libraries that were found loaded in
this process, because that is the only check that is true.

    >>> missing_libraries(capi / "libonnxruntime_providers_cuda.so")
    {'libcudart.so.13': 'libcudart.so.13: cannot open shared object file: No such file …'}
"""

from __future__ import annotations

import ctypes
import re
import struct
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_NEEDED, _DT_STRTAB = 0, 1, 5
_NOT_FOUND = re.compile(r"^(\S+): cannot open shared object file")
DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def needed_libraries(path: Path) -> list[str]:
    """The libraries that a 64-bit little-endian ELF file names as needed (DT_NEEDED), in order.

    Any other file (a DLL, a Mach-O library, a truncated file) gives none. Read from the file, as
    loading a provider's library outside ONNX Runtime runs its static constructors without their
    host. Layout: System V ABI, chapters 4 and 5.
    """
    try:
        with path.open("rb") as stream:
            header = stream.read(64)
            if header[:6] != b"\x7fELF\x02\x01":
                return []
            table, entry_size, entries = (
                *struct.unpack_from("<Q", header, 32),
                *struct.unpack_from("<HH", header, 54),
            )
            stream.seek(table)
            raw = stream.read(entry_size * entries)
            # Each program header: type, flags, offset, virtual address, physical, file size, …
            segments = [struct.unpack_from("<IIQQQQ", raw, i * entry_size) for i in range(entries)]
            dynamic = next(s for s in segments if s[0] == _PT_DYNAMIC)
            stream.seek(dynamic[2])
            pairs = list(struct.iter_unpack("<qQ", stream.read(dynamic[5] // 16 * 16)))
            end = next((i for i, pair in enumerate(pairs) if pair[0] == _DT_NULL), len(pairs))
            address = next(value for tag, value in pairs[:end] if tag == _DT_STRTAB)
            load = next(s for s in segments if s[0] == _PT_LOAD and s[3] <= address < s[3] + s[5])
            strings = address - load[3] + load[2]
            return [
                _string_at(path, strings + value) for tag, value in pairs[:end] if tag == _DT_NEEDED
            ]
    except (OSError, struct.error, StopIteration, UnicodeDecodeError):
        return []


def missing_libraries(path: Path, directories: Iterable[Path] = ()) -> dict[str, str]:
    """What `path` needs and the loader cannot load: the missing library's name and the reason.

    Each needed library is looked for beside `path`, in `directories`, then as the loader does.
    A library that is there but lacks one itself is reported under the one it lacks.
    """
    places = [path.parent, *directories]
    missing = {}
    for name in needed_libraries(path):
        if error := load_error(name, places):
            absent = _NOT_FOUND.match(error)
            missing[absent[1] if absent else name] = error
    return missing


def load_error(name: str, directories: Iterable[Path] = ()) -> str:
    """Loads a library by name; empty on success, else the loader's words.

    Once loaded from a full path, it also satisfies every later library that needs its name.
    """
    beside = next((d / name for d in directories if (d / name).is_file()), None)
    try:
        ctypes.CDLL(str(beside or name))
    except OSError as error:
        return str(error)
    return ""


def wheel_directories() -> list[Path]:
    """Where NVIDIA's wheels put libraries: `nvidia/*/lib` and `tensorrt_libs` of site-packages."""
    roots = dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
    found = [d for root in roots for d in sorted((root / "nvidia").glob("*/lib"))]
    return found + [root / "tensorrt_libs" for root in roots if (root / "tensorrt_libs").is_dir()]


def other_versions(name: str, directories: Iterable[Path]) -> list[str]:
    """Files of the same library in another major version: `libnvinfer.so.11` for `….so.10`."""
    stem, _, version = name.rpartition(".so.")
    if not stem or not version:
        return []
    found = (file.name for d in directories for file in d.glob(f"{stem}.so.*"))
    return sorted({other for other in found if re.fullmatch(r"\.so\.\d+", other[len(stem) :])})


@dataclass(frozen=True)
class CudaDriver:
    """What the NVIDIA driver says of itself."""

    cuda_version: tuple[int, int] = (0, 0)
    """The newest CUDA that it can run; (0, 0) where it could not be asked."""
    gpus: int = 0
    problem: str = ""
    """Why no GPU can be used; empty when one can."""


def cuda_driver() -> CudaDriver:
    """Asks libcuda for its CUDA version and the number of visible GPUs."""
    try:
        cuda = ctypes.CDLL(DRIVER)
    except OSError as error:
        absent = _NOT_FOUND.match(str(error))
        detail = f"{DRIVER} was not found" if absent or sys.platform == "win32" else str(error)
        return CudaDriver(problem=f"there is no NVIDIA driver: {detail}")
    version = ctypes.c_int()
    count = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    # The driver gives thousands for the major version: 13010 is CUDA 13.1.
    cuda_version = (version.value // 1000, version.value % 1000 // 10)
    if code := cuda.cuInit(0):
        return CudaDriver(cuda_version, problem=f"the NVIDIA driver refused: {_words(cuda, code)}")
    if code := cuda.cuDeviceGetCount(ctypes.byref(count)):
        return CudaDriver(cuda_version, problem=f"the NVIDIA driver refused: {_words(cuda, code)}")
    problem = "" if count.value else "the NVIDIA driver sees no GPU"
    return CudaDriver(cuda_version, count.value, problem)


def _words(cuda: ctypes.CDLL, code: int) -> str:
    """`CUDA_ERROR_NO_DEVICE (100)`."""
    name = ctypes.c_char_p()
    cuda.cuGetErrorName(code, ctypes.byref(name))
    return f"{name.value.decode() if name.value else 'error'} ({code})"


def _string_at(path: Path, offset: int) -> str:
    with path.open("rb") as stream:
        stream.seek(offset)
        return stream.read(4096).split(b"\0", 1)[0].decode("ascii")
