"""Take samples of real inputs: texts or images from a file, a Dataset or a Python iterable.

    read_texts(Path("reviews.csv"), "text", rows=64)    # ['Great value.', …]
    sample = sample_rows(dataset, iterate(dataset, 512), "text", "label", rows=512)
    sample.items[0]        # 'Great value.'
    sample.labels[0]       # 1
    sample.label_names     # ('bad', 'good')

A file is read twice, to count its texts and to take some of them, and is never in memory as a
whole. From an indexable Python source, rows are taken at even intervals; any other is read from its
start, no further than needed. The package `datasets` is not imported.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from enginery.core.datasets.batches import DatasetReader, Item, Values
from enginery.core.datasets.folders import take_evenly
from enginery.core.datasets.reader import detect_format, open_dataset
from enginery.core.errors import InputError, nearest, os_errors_as

ARRAY_SUFFIXES = (".npz", ".npy")
_ARRAY_BYTES = 2 << 30
"""Largest size in bytes of the arrays in an .npz file, and in a folder. An .npy file is
memory-mapped."""
_MAX_LABEL_VALUES = 10_000
"""Different labels of a column that are kept; more are a column of something else."""


@dataclass(frozen=True)
class Sample:
    """Values of one column, without empty ones, and the labels of the same rows."""

    items: Sequence[Any]
    """Texts or images."""
    labels: list[Any]
    """Values of the label column; empty if no labels were requested."""
    left_out: int
    """Number of rows without a text or image, among the rows that were read."""
    label_names: tuple[str, ...] = ()
    """Names of numeric labels, if the source has them."""
    label_values: tuple[Any, ...] = ()
    """Different labels of the whole column, also of rows that are not in the sample."""


class DatasetImages(Sequence[Any]):
    """A column of images, which are decoded at each access because they are large."""

    def __init__(self, source: Any, indices: Sequence[int], column: str) -> None:
        self._source = source
        self._indices = indices
        self._column = column

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return DatasetImages(self._source, self._indices[index], self._column)
        return self._source[self._indices[index]][self._column]


def read_texts(path: Path, column: str, *, rows: int) -> list[str]:
    """Return up to `rows` non-empty texts, at even intervals from the file.

    Raises:
        InputError: the file or the column is missing, cannot be read, or has no text.
    """
    return list(read_text_rows(path, column, rows=rows).items)


def read_text_rows(path: Path, column: str, *, rows: int, label_column: str = "") -> Sample:
    """Return up to `rows` texts like `read_texts`, with the labels of their rows.

    Raises:
        InputError: the file or a column is missing, cannot be read, or has no text.
    """
    reader, source = _open_texts(path, column, label_column)
    count, left_out, rejected = 0, 0, None
    values: dict[str, Any] = {}
    for text, *beside in _values(reader, path):
        if is_text(text):
            count += 1
            if len(values) < _MAX_LABEL_VALUES:
                values.update({str(label): label for label in beside})
        else:
            left_out += 1
            rejected = text if rejected is None else rejected
    if not count:
        description = _found(rejected) if left_out else "no rows"
        raise InputError(f"{source} has no text (found {description}).")
    with_text = (row for row in _values(reader, path) if is_text(row[0]))
    chosen = list(_take_at(with_text, take_evenly(range(count), rows)))
    labels = [label for _, *beside in chosen for label in beside]
    texts = [text for text, *_ in chosen]
    return Sample(texts, labels, left_out, label_values=tuple(values.values()))


def require_texts(path: Path, column: str, *, label_column: str = "") -> None:
    """Check that a file has a text, reading it up to the first one.

    Raises:
        InputError: the file or a column is missing, cannot be read, or has no text.
    """
    reader, source = _open_texts(path, column, label_column)
    if not any(is_text(text) for text, *_ in _values(reader, path)):
        raise InputError(f"{source} has no text.")


def _open_texts(path: Path, column: str, label_column: str) -> tuple[DatasetReader, str]:
    """Open a file with texts; return its reader and a description for messages."""
    kind = detect_format(path)
    if kind in ("images", "audio"):
        content = {"images": "a folder or an image", "audio": "audio"}[kind]
        raise InputError(f"data '{path}' is {content}, expected a file with texts.")
    if kind == "text" and label_column:
        raise InputError(f"data '{path}': labels need a file with columns, such as CSV or Parquet.")
    reader = open_dataset(path, [column, label_column] if label_column else [column])
    return reader, f"data '{path}'" if kind == "text" else f"data '{path}': column '{column}'"


def is_text(value: Any) -> bool:
    """Return True if a value is a text with a character other than white space."""
    return isinstance(value, str) and bool(value.strip())


def sample_rows(
    dataset: Any,
    stream: Iterable[Any],
    column: str,
    label_column: str,
    *,
    rows: int,
    images: bool = False,
) -> Sample:
    """Return the texts or images of up to `rows` rows; rows without one are left out.

    Args:
        dataset: a Dataset, a streamed Dataset or an iterable of mappings.
        stream: its rows, from `iterate`.
        column: column of the texts or images.
        label_column: column of the labels; empty for none.
        rows: largest number of rows.
        images: True if the column has images: Pillow images, uint8 arrays or paths.

    Raises:
        InputError: the first row lacks a column, a row is not a mapping, or no row has a value.
    """
    # Images of an indexable source are not held in memory, because they can be read again.
    indices = _row_indices(dataset, rows) if images else None
    selected: list[Any] = []
    labels: list[Any] = []
    rows_read, rejected = 0, None
    for rows_read, row in enumerate(stream, start=1):
        if not isinstance(row, Mapping):
            raise InputError(
                f"calibration row {rows_read - 1} is a {type(row).__name__}, expected a mapping "
                "like the rows before it."
            )
        if rows_read == 1:
            _require_keys(row, [column, label_column] if label_column else [column])
        value = row.get(column)
        if not (value is not None if images else is_text(value)):
            rejected = value if rejected is None else rejected
            continue
        selected.append(value if indices is None else indices[rows_read - 1])
        if label_column:
            labels.append(row.get(label_column))
        if len(selected) == rows:
            break
    if not selected:
        item = "image" if images else "text"
        raise InputError(f"calibration column '{column}' has no {item} (found {_found(rejected)}).")
    items = tuple(selected) if indices is None else DatasetImages(dataset, selected, column)
    return Sample(items, labels, rows_read - len(selected), _label_names(dataset, label_column))


def iterate(dataset: Iterable[Any], count: int) -> Iterator[Any]:
    """Yield up to `count` items at even intervals of an indexable source; all items of others."""
    indices = _row_indices(dataset, count)
    return iter(dataset) if indices is None else (dataset[position] for position in indices)  # type: ignore[index]


def select_columns(dataset: Any, columns: Sequence[str]) -> Any:
    """Return a Dataset without its other columns, so that images in them are not decoded."""
    names = getattr(dataset, "column_names", None)
    if isinstance(names, list) and hasattr(dataset, "select_columns") and {*columns} <= {*names}:
        return dataset.select_columns(list(dict.fromkeys(columns)))
    return dataset


def holds_arrays(path: Path) -> bool:
    """Return True for the name of an .npz or .npy file, and for a folder with .npz files."""
    return path.suffix.lower() in ARRAY_SUFFIXES or bool(path.is_dir() and _npz_files(path))


def _npz_files(folder: Path) -> list[Path]:
    with os_errors_as(InputError, f"data '{folder}' cannot be read"):
        files = sorted(folder.iterdir())
    return [path for path in files if path.suffix == ".npz" and not path.name.startswith(".")]


def array_files(path: Path) -> list[Path]:
    """Return the files with arrays: the .npz files of a folder, sorted, or the file itself."""
    return _npz_files(path) if path.is_dir() else [path]


def read_arrays(path: Path, names: Sequence[str], *, rows: int) -> list[dict[str, Any]]:
    """Return inputs of a graph from arrays: up to `rows` rows, at even intervals.

    Args:
        path: .npz file with an array for each input, .npy file for the only input, or a folder of
            .npz files, whose arrays may have other sizes in each file.
        names: names of the graph's inputs.
        rows: largest number of rows.

    Returns:
        A dict for each row, of arrays with shape (1, …).

    Raises:
        InputError: a file cannot be read, has Python objects or other names, or its arrays have
            different numbers of rows.
    """
    inputs: list[dict[str, Any]] = []
    size_bytes = 0
    for file in array_files(path):
        arrays = load_arrays(file, names)
        counts = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
        if len(set(counts.values())) != 1 or not min(counts.values()):
            shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            raise InputError(
                f"data '{file}': found arrays of shape {shapes}; expected the same number of rows "
                "in each, at least one."
            )
        size_bytes += sum(array.nbytes for array in arrays.values())
        if path.is_dir() and size_bytes > _ARRAY_BYTES:
            raise InputError(
                f"data '{path}': its arrays have more than {_ARRAY_BYTES:,} bytes.",
                do="Save fewer rows.",
            )
        inputs += [
            {name: array[position : position + 1] for name, array in arrays.items()}
            for position in range(min(counts.values()))
        ]
    return take_evenly(inputs, rows)


def load_arrays(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return the arrays of a file: .npz with an array for each input, or .npy for the only one.

    Raises:
        InputError: the file cannot be read, or has Python objects or other names.
    """
    if not path.is_file():
        problem = "it is not a file" if path.exists() else "no such file or folder"
        raise InputError(f"data '{path}': expected arrays, .npz or .npy; {problem}.")
    try:
        arrays = _load_arrays(path, names)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise InputError(f"data '{path}' cannot be read: {reason}.") from error
    if set(arrays) != set(names):
        raise InputError(
            f"data '{path}' has the arrays {', '.join(sorted(arrays)) or '(none)'}; expected the "
            f"graph's inputs {', '.join(names)}.",
            do="Save one array for each input: numpy.savez(path, name=array, …).",
        )
    return arrays


def _load_arrays(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return the arrays of a file; raise ValueError for Python objects, which are pickled."""
    if path.suffix.lower() == ".npy":
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        return {names[0] if len(names) == 1 else path.stem: array}
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        size = sum(member.file_size for member in members)
    if size > _ARRAY_BYTES:
        raise ValueError(
            f"its arrays have {size:,} bytes, expected at most {_ARRAY_BYTES:,}; save fewer rows"
        )
    with zipfile.ZipFile(path) as archive:
        for member in members:
            with archive.open(member) as stream:
                _check_array_size(member, stream)
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _check_array_size(member: zipfile.ZipInfo, stream: IO[bytes]) -> None:
    """Raise ValueError if an array's header says more bytes than the member has.

    numpy allocates what the header says before it reads.
    """
    if not member.filename.endswith(".npy"):
        return
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    elif version == (2, 0):
        shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
    else:
        raise ValueError(f"{member.filename} has the version {version}, expected 1.0 or 2.0")
    needed, left = math.prod(shape) * dtype.itemsize, member.file_size - stream.tell()
    if needed > left and not dtype.hasobject:
        raise ValueError(
            f"{member.filename} has the shape {shape} of {dtype}, which needs {needed} bytes; "
            f"found {left}"
        )


def _values(reader: DatasetReader, path: Path) -> Iterator[Values]:
    """Yield the values of each row; raise InputError for one that cannot be used."""
    for batch in reader.read(0):
        if batch.errors:
            row, problem = min(batch.errors.items())
            raise InputError(
                f"data '{path}' cannot be read: row {batch.first + row + 1}: {problem}."
            )
        yield from batch.values


def _take_at(stream: Iterator[Item], indices: Sequence[int]) -> Iterator[Item]:
    """Yield the items at ascending indices; read the stream no further than the last one."""
    positions = iter(indices)
    position = next(positions, None)
    for index, item in enumerate(stream):
        if index == position:
            yield item
            position = next(positions, None)
            if position is None:
                return


def _found(other: Any) -> str:
    """Describe the values of a column without texts, given one of them."""
    if other is not None and not isinstance(other, str):
        return type(other).__name__
    return "only empty values"


def _row_indices(dataset: Any, count: int) -> list[int] | None:
    """Return the indices of the rows to take; None if the source cannot be indexed."""
    numbered = isinstance(dataset, Sequence) or (
        hasattr(dataset, "select_columns") and hasattr(dataset, "__len__")  # datasets.Dataset
    )
    return take_evenly(range(len(dataset)), count) if numbered else None


def _require_keys(row: Mapping[Any, Any], columns: Sequence[str]) -> None:
    names = [str(name) for name in row]
    for column in columns:
        if column not in row:
            raise InputError(
                f"calibration rows have no column '{column}'{nearest(column, names)}",
                do=f"Their columns: {', '.join(names) or 'none'}.",
            )


def _label_names(dataset: Any, label_column: str) -> tuple[str, ...]:
    """Return the names of a Dataset's ClassLabel."""
    features = getattr(dataset, "features", None)
    feature = features.get(label_column) if isinstance(features, Mapping) else None
    return tuple(str(name) for name in getattr(feature, "names", None) or ())
