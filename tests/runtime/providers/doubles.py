"""Helpers of the provider tests: ELF files with dependencies, expected errors."""

import struct

import pytest

from enginery.core.errors import ProviderError
from enginery.runtime.providers.selection import choose_providers


def write_library(path, needed, *, soname=""):
    """Return a 64-bit ELF file with only a list of needed libraries, mapped at 0x10000.

    With a soname, the loader can load it if it finds the needed libraries.
    """
    base, dynamic_at = 0x10000, 64 + 2 * 56
    names = [*needed, *([soname] if soname else [])]
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in names)
    offsets = [strings.index(b"\0" + name.encode() + b"\0") + 1 for name in names]
    tags = [1] * len(needed) + [14] * bool(soname)  # DT_NEEDED, DT_SONAME
    entries = list(zip(tags, offsets, strict=True))
    strings_at = dynamic_at + (len(entries) + 3) * 16
    # DT_STRTAB, and DT_SYMTAB, which the loader requires; there are no symbols.
    entries += [(5, base + strings_at), (6, base + strings_at), (0, 0)]
    dynamic = b"".join(struct.pack("<qQ", *entry) for entry in entries)
    size = strings_at + len(strings)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0
    )
    load = struct.pack("<IIQQQQQQ", 1, 4, 0, base, base, size, size, 4096)
    dyn = struct.pack(
        "<IIQQQQQQ", 2, 4, dynamic_at, base + dynamic_at, 0, len(dynamic), len(dynamic), 8
    )
    path.write_bytes(header + load + dyn + dynamic + strings)
    return path


def refusal(*spec, **options):
    with pytest.raises(ProviderError) as caught:
        choose_providers(spec, **options)
    return caught.value
