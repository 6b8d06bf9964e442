"""Read a small safetensors file of float32 tensors with numpy alone.

    read_tensors(Path("2_Dense/model.safetensors"))["linear.weight"].shape    # (512, 768)

The format is eight bytes with the length of the header, the header as JSON, and the tensors' bytes
(https://github.com/huggingface/safetensors). The export writes the weights of the modules of
sentence-transformers so, and what serves a model needs no further package.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import ArtifactError
from enginery.core.json_file import parse_json, read_document

_MAX_BYTES = 2**28


def read_tensors(path: Path) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of a file by name.

    Raises:
        ArtifactError: the file is missing or damaged, has more than 256 MiB, or has a tensor of
            another type.
    """
    try:
        content = read_document(path, max_bytes=_MAX_BYTES)
        size = int.from_bytes(content[:8], "little")
        header = parse_json(content[8 : 8 + size])
        return {
            name: _tensor(content[8 + size :], name, entry)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{path} is no safetensors file of float32 tensors: {error}.",
            do="Export the model again.",
        ) from error


def _tensor(data: bytes, name: str, entry: dict[str, object]) -> NDArray[np.float32]:
    """Return one tensor; raise ValueError if the header contradicts itself or the data."""
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = [*shape, *offsets]  # type: ignore[misc]  # TypeError if they are no lists
    if dtype != "F32" or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{name} is {dtype} {shape} at {offsets}")
    begin, end = numbers[-2:]
    if end - begin != 4 * math.prod(numbers[:-2]) or end > len(data):
        raise ValueError(f"{name} of the shape {shape} has the bytes {begin} to {end}")
    return np.frombuffer(data[begin:end], "<f4").astype(np.float32).reshape(numbers[:-2])
