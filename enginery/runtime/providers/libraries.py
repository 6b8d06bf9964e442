"""Check which shared libraries the dynamic loader finds.

    missing_libraries(capi / "libonnxruntime_providers_cuda.so")
    # {'libcudart.so.13': 'libcudart.so.13: cannot open shared object file: No such file …'}

Loading a library is the only reliable check, so libraries that are found stay loaded.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_NEEDED, _DT_STRTAB = 0, 1, 5
_NOT_FOUND = re.compile(r"^(\S+): cannot open shared object file")


def needed_libraries(path: Path) -> list[str]:
    """Return the libraries that a 64-bit little-endian ELF file needs (DT_NEEDED), in order.

    Other files (a DLL, a Mach-O library, a truncated file) give none. The file is parsed, because
    loading a provider's library outside of ONNX Runtime would run its static constructors. Source
    of the layout: System V ABI, chapters 4 and 5.
    """
    try:
        with path.open("rb") as stream:
            header = stream.read(64)
            # An ELF file of 64 bits, little-endian.
            if header[:6] != b"\x7fELF\x02\x01":
                return []
            # e_phoff; e_phentsize and e_phnum.
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
            # The dynamic section consists of pairs (tag, value) of 16 bytes, up to DT_NULL.
            pairs = list(struct.iter_unpack("<qQ", stream.read(dynamic[5] // 16 * 16)))
            end = next((i for i, pair in enumerate(pairs) if pair[0] == _DT_NULL), len(pairs))
            # The string table is given by its virtual address. The segment that is loaded there
            # tells its place in the file.
            address = next(value for tag, value in pairs[:end] if tag == _DT_STRTAB)
            load = next(s for s in segments if s[0] == _PT_LOAD and s[3] <= address < s[3] + s[5])
            strings = address - load[3] + load[2]
            return [
                _string_at(path, strings + value) for tag, value in pairs[:end] if tag == _DT_NEEDED
            ]
    except (OSError, struct.error, StopIteration, UnicodeDecodeError):
        return []


def missing_libraries(path: Path, directories: Iterable[Path] = ()) -> dict[str, str]:
    """Return the libraries that `path` needs but the loader cannot load: name -> reason.

    Each library is searched in the directory of `path`, in `directories`, then by the loader. If a
    library is found but lacks another one, the other one is reported.
    """
    searched = [path.parent, *directories]
    missing = {}
    for name in needed_libraries(path):
        if error := load_error(name, searched):
            match = _NOT_FOUND.match(error)
            missing[match[1] if match else name] = error
    return missing


def load_error(name: str, directories: Iterable[Path] = ()) -> str:
    """Load a library by name; return the loader's error, or an empty text on success.

    A copy that this process has loaded already, such as torch's, is used; a second one would have
    a CUDA runtime of its own. A library that was loaded from a full path is also found by later
    libraries that need it.
    """
    if _is_loaded(name):
        return ""
    beside = next((d / name for d in directories if (d / name).is_file()), None)
    try:
        ctypes.CDLL(str(beside or name))
    except OSError as error:
        return str(error)
    return ""


def _is_loaded(name: str) -> bool:
    """Return True if this process has loaded a library with this soname."""
    if sys.platform == "win32":
        return False
    try:
        # With RTLD_NOLOAD this opens only what is loaded already.
        ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return True


def wheel_directories() -> list[Path]:
    """Return the folders with libraries of NVIDIA's wheels: `nvidia/*/lib`, `tensorrt_libs`.

    They are searched on the whole import path, because `pip install --target` and PYTHONPATH put
    wheels outside of site-packages.
    """
    roots = dict.fromkeys(Path(entry) for entry in sys.path if entry)
    directories = [
        directory for root in roots for directory in sorted((root / "nvidia").glob("*/lib"))
    ]
    return directories + [
        root / "tensorrt_libs" for root in roots if (root / "tensorrt_libs").is_dir()
    ]


def other_versions(name: str, directories: Iterable[Path]) -> list[str]:
    """Return other major versions of a library: `libnvinfer.so.11` for `libnvinfer.so.10`."""
    stem, _, version = name.rpartition(".so.")
    if not stem or not version:
        return []
    names = (file.name for directory in directories for file in directory.glob(f"{stem}.so.*"))
    return sorted({name for name in names if re.fullmatch(r"\.so\.\d+", name[len(stem) :])})


def _string_at(path: Path, offset: int) -> str:
    with path.open("rb") as stream:
        stream.seek(offset)
        return stream.read(4096).split(b"\0", 1)[0].decode("ascii")
