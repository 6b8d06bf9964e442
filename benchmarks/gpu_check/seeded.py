"""Carry models with random weights to another machine without their weights.

    $ python -m benchmarks.gpu_check.seeded pack build/gpu-models build/carried gpt2 llama
    $ python -m benchmarks.gpu_check.seeded unpack build/carried build/gpu-models

Random weights do not compress, and a model of half a billion parameters has a gigabyte of them.
The weights made here come from a seed (`fill_weights`), so `pack` keeps a file of weights as the
names of the parameters in it and the few bytes between them, and `unpack` computes them again. A
graph has its parameters transposed, joined and cast: `pack` finds out how. All bytes are the same
afterwards, which `unpack` checks by their hash.

A weight is `mean + std * √3 * u`, with u uniform in (-1, 1), in 16 bits of PCG64's output, and is
rounded to FP16. This arithmetic is exact in IEEE 754, so every machine gets the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PARAMETERS = "parameters.json"
"""Beside a source's weights: how each of its parameters is computed."""
_RECIPE = "recipe.json"
_REST = "rest"
_MIN_BYTES = 4096
"""Smaller tensors are carried as they are."""
_KEY = 8
"""Elements at the beginning of a tensor by which its parameter is looked up."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Parameter:
    """How the values of a parameter are computed."""

    index: int
    """Number of the parameter in its model; seeds its generator."""
    shape: tuple[int, ...]
    mean: float
    std: float

    def values(self, seed: int) -> NDArray[np.float16]:
        """Return the values: float16 of this shape."""
        size = math.prod(self.shape)
        bits = np.random.PCG64(np.random.SeedSequence([seed, self.index])).random_raw(-(-size // 4))
        uniform = bits.view(np.uint16)[:size].astype(np.float32)
        uniform -= np.float32(32767.5)
        uniform *= np.float32(self.std * math.sqrt(3) / 32768)
        uniform += np.float32(self.mean)
        return uniform.astype(np.float16).reshape(self.shape)


def fill_weights(model: Any, directory: Path, *, seed: int, gain: float) -> None:
    """Replace a PyTorch model's weights by seeded ones, and save it in FP16.

    Matrices get the deviation of the model's own initialization, those of the layers times `gain`:
    with a gain of 1 a random decoder repeats one token. Vectors, which are biases and scales, keep
    their mean.

    Args:
        model: a transformers model, freshly initialized.
        directory: directory for the model; it also gets `parameters.json`.
        seed: seed of all parameters.
        gain: factor of the deviation of the layers' matrices.
    """
    import torch

    parameters: dict[str, Parameter] = {}
    ends = [
        layer for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer
    ]
    embeddings = {id(layer.weight) for layer in ends}
    with torch.no_grad():
        for index, (name, tensor) in enumerate(model.named_parameters()):
            factor = 1.0 if id(tensor) in embeddings else gain
            deviation = float(tensor.std()) * factor if tensor.dim() > 1 else 0.0
            spec = Parameter(
                index,
                tuple(tensor.shape),
                round(float(tensor.mean()), 3) if tensor.dim() == 1 else 0.0,
                float(f"{deviation:.2g}"),
            )
            parameters[name] = spec
            tensor.copy_(torch.from_numpy(spec.values(seed).astype(np.float32)))
    model.half().save_pretrained(directory)
    document = {"seed": seed, "parameters": {n: asdict(p) for n, p in parameters.items()}}
    (directory / PARAMETERS).write_text(json.dumps(document))


def read_parameters(directory: Path) -> tuple[int, dict[str, Parameter]]:
    """Return the seed and the parameters of a source with seeded weights."""
    document = json.loads((directory / PARAMETERS).read_bytes())
    return int(document["seed"]), {
        name: Parameter(**{**spec, "shape": tuple(spec["shape"])})
        for name, spec in document["parameters"].items()
    }


# Finding parameters in files


@dataclass(frozen=True)
class Block:
    """A piece of a tensor: columns of a parameter, or of its transpose."""

    name: str
    transposed: bool
    first: int = 0
    count: int = 0
    """Columns; 0 for all."""

    def of(self, values: Mapping[str, Array]) -> Array:
        """Return the piece."""
        array = values[self.name]
        array = array.T if self.transposed else array
        return array[..., self.first : self.first + self.count] if self.count else array


class Finder:
    """Recognizes tensors that are made of parameters."""

    def __init__(self, values: Mapping[str, NDArray[np.float16]]) -> None:
        self._values = values
        self._starts: dict[bytes, tuple[str, bool]] = {}
        for name, array in values.items():
            if array.size * 2 < _MIN_BYTES or (array == array.flat[0]).all():
                continue
            self._starts.setdefault(array.reshape(-1)[:_KEY].tobytes(), (name, False))
            if array.ndim == 2:
                self._starts.setdefault(array.T.reshape(-1)[:_KEY].tobytes(), (name, True))

    def find(self, tensor: Array) -> list[Block] | None:
        """Return the pieces that joined along the last axis are the tensor; None if it has others.

        A single piece may have another shape than the tensor.
        """
        narrow = tensor.astype(np.float16)
        if not np.array_equal(narrow.astype(tensor.dtype), tensor):
            return None
        if whole := self._starts.get(narrow.reshape(-1)[:_KEY].tobytes()):
            block = Block(*whole)
            found = block.of(self._values)
            if found.size == narrow.size and np.array_equal(found.reshape(narrow.shape), narrow):
                return [block]
        if narrow.ndim != 2:
            return None
        blocks: list[Block] = []
        column = 0
        while column < narrow.shape[1]:
            block_here = self._columns(narrow, column)
            if block_here is None:
                return None
            blocks.append(block_here)
            column += block_here.count
        return blocks

    def _columns(self, tensor: Array, column: int) -> Block | None:
        """Return the piece that begins at a column: a whole parameter, or columns of one."""
        rows, width = tensor.shape
        for name, array in self._values.items():
            if array.ndim != 2 or array.size * 2 < _MIN_BYTES:
                continue
            for transposed in (False, True):
                view = array.T if transposed else array
                if view.shape[0] != rows:
                    continue
                (starts,) = np.nonzero(view[0] == tensor[0, column])
                for first in starts:
                    count = min(view.shape[1] - int(first), width - column)
                    same = (
                        view[:, first : first + count] == tensor[:, column : column + count]
                    ).all(axis=0)
                    count = count if same.all() else int(same.argmin())
                    if count * rows * 2 >= _MIN_BYTES:
                        return Block(name, transposed, int(first), count)
        return None


def tensors_of_file(path: Path) -> Iterator[tuple[int, Array]]:
    """Return the tensors of a safetensors file, of an ONNX file or of its external data.

    Returns:
        Each tensor with the offset of its bytes in the file.
    """
    if path.suffix == ".safetensors":
        yield from _safetensors(path)
    elif path.suffix == ".onnx":
        yield from _inline_tensors(path)
    else:
        yield from _external_tensors(path)


def _safetensors(path: Path) -> Iterator[tuple[int, Array]]:
    dtypes = {"F16": np.float16, "F32": np.float32}
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] not in dtypes:
            continue
        begin, end = entry["data_offsets"]
        dtype = np.dtype(dtypes[entry["dtype"]])
        count = (end - begin) // dtype.itemsize
        array = np.fromfile(path, dtype, count, offset=8 + size + begin)
        yield 8 + size + begin, array.reshape(entry["shape"])


def _initializers(path: Path) -> Iterator[Any]:
    import onnx

    yield from onnx.load(path, load_external_data=False).graph.initializer


def _inline_tensors(path: Path) -> Iterator[tuple[int, Array]]:
    from onnx import numpy_helper

    content = path.read_bytes()
    position = 0
    for tensor in _initializers(path):
        raw = tensor.raw_data
        if len(raw) < _MIN_BYTES:
            continue
        offset = content.find(raw, position)
        if offset < 0:
            offset = content.find(raw)
        if offset >= 0:
            position = offset + len(raw)
            yield offset, numpy_helper.to_array(tensor)


def _external_tensors(path: Path) -> Iterator[tuple[int, Array]]:
    from onnx import helper

    seen: set[int] = set()
    for graph in sorted(path.parent.glob("*.onnx")):
        for tensor in _initializers(graph):
            entries = {entry.key: entry.value for entry in tensor.external_data}
            offset = int(entries.get("offset", 0))
            if entries.get("location") != path.name or offset in seen:
                continue
            seen.add(offset)
            dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
            count = math.prod(tensor.dims)
            yield offset, np.fromfile(path, dtype, count, offset=offset).reshape(tuple(tensor.dims))


# Packing


def pack(models: Path, out: Path, names: list[str]) -> None:
    """Write what `unpack` needs for these models: all their directories in `models`.

    Raises:
        ValueError: a model has no source with seeded weights.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        directories = sorted(p for p in models.glob(f"{name}-*") if p.is_dir())
        sources = [p for p in directories if p.name.endswith("-source")]
        if len(sources) != 1 or not (sources[0] / PARAMETERS).is_file():
            raise ValueError(
                f"{models} has {len(sources)} sources of {name} with {PARAMETERS}, expected one."
            )
        seed, parameters = read_parameters(sources[0])
        values = {key: spec.values(seed) for key, spec in parameters.items()}
        finder = Finder(values)
        for directory in directories:
            if directory.name.endswith("-onnx"):
                continue  # the FP32 graph, from which the other was made
            _pack_directory(directory, out / directory.name, finder, sources[0])
            before, after = _size(directory), _size(out / directory.name)
            print(
                f"{directory.name}: {before / 1e6:.1f} MB, packed {after / 1e6:.2f} MB", flush=True
            )


def _pack_directory(directory: Path, out: Path, finder: Finder, source: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    recipe: dict[str, Any] = {"source": source.name, "files": {}}
    for file in sorted(p for p in directory.rglob("*") if p.is_file()):
        name = str(file.relative_to(directory))
        copy = out / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if file.stat().st_size < 1 << 20 or file.suffix == ".json":
            shutil.copy(file, copy)
            continue
        pieces = []
        for offset, tensor in tensors_of_file(file):
            if tensor.nbytes < _MIN_BYTES or tensor.dtype not in (np.float16, np.float32):
                continue
            if blocks := finder.find(tensor):
                described = [asdict(block) for block in blocks]
                pieces.append([offset, tensor.nbytes, tensor.dtype.name, described])
        pieces.sort()
        recipe["files"][name] = {
            "bytes": file.stat().st_size,
            "sha256": _sha256(file),
            "pieces": pieces,
        }
        _write_rest(file, copy.with_name(f"{copy.name}.{_REST}"), pieces)
    (out / _RECIPE).write_text(json.dumps(recipe))


def _write_rest(file: Path, rest: Path, pieces: list[list[Any]]) -> None:
    """Write the bytes of a file that lie between the pieces."""
    with file.open("rb") as stream, rest.open("wb") as output:
        position = 0
        for offset, size, *_ in [*pieces, [file.stat().st_size, 0]]:
            stream.seek(position)
            output.write(stream.read(offset - position))
            position = offset + size


# Unpacking


def unpack(packed: Path, models: Path) -> None:
    """Write the directories of packed models into `models`.

    Raises:
        ValueError: a file does not have the bytes that were packed.
    """
    recipes = {
        d: json.loads((d / _RECIPE).read_bytes()) for d in sorted(packed.iterdir()) if d.is_dir()
    }
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for source in dict.fromkeys(recipe["source"] for recipe in recipes.values()):
            seed, parameters = read_parameters(packed / source)
            names = list(parameters)
            arrays = pool.map(lambda name: parameters[name].values(seed), names)  # noqa: B023
            values = dict(zip(names, arrays, strict=True))
            for directory, recipe in recipes.items():
                if recipe["source"] == source:
                    _unpack_directory(directory, models / directory.name, recipe, values, pool)
                    print(
                        f"{directory.name}: {_size(models / directory.name) / 1e6:.1f} MB",
                        flush=True,
                    )


def _unpack_directory(
    packed: Path,
    out: Path,
    recipe: Mapping[str, Any],
    values: Mapping[str, Array],
    pool: ThreadPoolExecutor,
) -> None:
    beside = out.with_name(f"{out.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    ignored = shutil.ignore_patterns(_RECIPE, f"*.{_REST}")
    shutil.copytree(packed, beside, ignore=ignored)
    for name, file in recipe["files"].items():
        content = np.empty(file["bytes"], np.uint8)
        rest = np.fromfile(packed / f"{name}.{_REST}", np.uint8)
        used = position = 0
        for offset, size, *_ in [*file["pieces"], [file["bytes"], 0]]:
            gap = offset - position
            content[position:offset] = rest[used : used + gap]
            used, position = used + gap, offset + size

        def write(piece: list[Any], content: Array = content) -> None:
            offset, size, dtype, blocks = piece
            arrays = [Block(**block).of(values) for block in blocks]
            joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1)
            target = content[offset : offset + size]
            target[:] = (
                np.ascontiguousarray(joined).astype(dtype, copy=False).reshape(-1).view(np.uint8)
            )

        list(pool.map(write, file["pieces"]))
        if (digest := hashlib.sha256(content).hexdigest()) != file["sha256"]:
            raise ValueError(f"{out.name}/{name} has the hash {digest}, expected {file['sha256']}.")
        content.tofile(beside / name)
    shutil.rmtree(out, ignore_errors=True)
    beside.rename(out)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["pack", models_directory, packed_directory, *model_names] if model_names:
            pack(Path(models_directory), Path(packed_directory), model_names)
        case ["unpack", packed_directory, models_directory]:
            unpack(Path(packed_directory), Path(models_directory))
        case _:
            sys.exit(f"{__doc__}")
