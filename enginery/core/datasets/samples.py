"""Samples of real inputs: some texts or images of a file, of a Dataset or of what Python iterates.

    >>> read_texts(Path("reviews.csv"), "text", rows=64)
    ['Great value.', …]
    >>> sample = sample_rows(dataset, iterate(dataset, 512), "text", "label", rows=512)
    >>> sample.items[0], sample.labels[0], sample.label_names
    ('Great value.', 1, ('bad', 'good'))

A file is read twice, once to count its texts and once to take some of them, and is never in memory
as a whole. A source of Python whose rows can be had by number gives rows evenly spread over it; any
other is read from its start, no further than needed. The package `datasets` is not imported.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from enginery.core.datasets.batches import DatasetReader, Item, Values
from enginery.core.datasets.images import spread
from enginery.core.datasets.reader import detect_format, open_dataset
from enginery.core.errors import InputError, nearest

ARRAY_SUFFIXES = (".npz", ".npy")
_ARRAY_BYTES = 2 << 30
"""Of the arrays of one .npz, which are decompressed as a whole; an .npy is mapped."""


@dataclass(frozen=True)
class Sample:
    """One column of the rows that have a value there, and what another column holds beside it."""

    items: Sequence[Any]
    """Texts or images."""
    labels: list[Any]
    """As they stand in the label column; empty where none was requested."""
    left_out: int
    """Rows that have no text, or no image: of a whole file, of what was read of other sources."""
    label_names: tuple[str, ...] = ()
    """What labels that are numbers stand for, where the source says it."""


class DatasetImages(Sequence[Any]):
    """A column of images that are read anew when they are asked for: decoded, they are large."""

    def __init__(self, source: Any, places: Sequence[int], column: str) -> None:
        self._source = source
        self._places = places
        self._column = column

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return DatasetImages(self._source, self._places[index], self._column)
        return self._source[self._places[index]][self._column]


def read_texts(path: Path, column: str, *, rows: int) -> list[str]:
    """Return up to `rows` texts, evenly spread over the file, in its order, without empty ones.

    Raises:
        InputError: the file or the column is missing, cannot be read, or holds no text.
    """
    return list(read_text_rows(path, column, rows=rows).items)


def read_text_rows(path: Path, column: str, *, rows: int, label_column: str = "") -> Sample:
    """Return up to `rows` texts as `read_texts` takes them, and the labels beside them.

    Raises:
        InputError: the file or a column is missing, cannot be read, or holds no text.
    """
    reader, where = _open_texts(path, column, label_column)
    count, left_out, other = 0, 0, None
    for text, *_ in _values(reader, path):
        if is_text(text):
            count += 1
        else:
            left_out += 1
            other = text if other is None else other
    if not count:
        found = _found(other) if left_out else "no rows"
        raise InputError(f"{where} holds no text (found {found}).")
    with_text = (row for row in _values(reader, path) if is_text(row[0]))
    chosen = list(_taken(with_text, spread(range(count), rows)))
    labels = [label for _, *beside in chosen for label in beside]
    return Sample([text for text, *_ in chosen], labels, left_out)


def require_texts(path: Path, column: str, *, label_column: str = "") -> None:
    """Read a file up to its first text.

    Raises:
        InputError: the file or a column is missing, cannot be read, or holds no text.
    """
    reader, where = _open_texts(path, column, label_column)
    if not any(is_text(text) for text, *_ in _values(reader, path)):
        raise InputError(f"{where} holds no text.")


def _open_texts(path: Path, column: str, label_column: str) -> tuple[DatasetReader, str]:
    """Open a file with texts; return its reader, and what holds them in words."""
    kind = detect_format(path)
    if kind == "images":
        raise InputError(f"data '{path}' is a folder or an image, expected a file with texts.")
    if kind == "text" and label_column:
        raise InputError(f"data '{path}': labels need a file with columns, as CSV or Parquet.")
    reader = open_dataset(path, [column, label_column] if label_column else [column])
    return reader, f"data '{path}'" if kind == "text" else f"data '{path}': column '{column}'"


def is_text(value: Any) -> bool:
    """Return whether a value is a text with something in it."""
    return isinstance(value, str) and bool(value.strip())


def sample_rows(
    given: Any,
    stream: Iterable[Any],
    column: str,
    label_column: str,
    *,
    rows: int,
    images: bool = False,
) -> Sample:
    """Return the texts or images of up to `rows` rows; those without one are left out.

    Args:
        given: what Python handed over: a Dataset, a streamed one, an iterable of mappings.
        stream: its rows, as `iterate` gives them.
        column: of the texts or images.
        label_column: of the labels; empty for none.
        rows: how many are kept.
        images: whether the column holds images: Pillow's, uint8 arrays or paths.

    Raises:
        InputError: the first row lacks a column, a row is no mapping, or no row has a value.
    """
    # Only what can be had again by its number need not be held.
    places = _places(given, rows) if images else None
    kept: list[Any] = []
    labels: list[Any] = []
    seen, other = 0, None
    for seen, row in enumerate(stream, start=1):
        if not isinstance(row, Mapping):
            raise InputError(
                f"calibration row {seen - 1} is a {type(row).__name__}, expected a mapping, as the "
                "rows before it are."
            )
        if seen == 1:
            _require_keys(row, [column, label_column] if label_column else [column])
        value = row.get(column)
        if not (value is not None if images else is_text(value)):
            other = value if other is None else other
            continue
        kept.append(value if places is None else places[seen - 1])
        if label_column:
            labels.append(row.get(label_column))
        if len(kept) == rows:
            break
    if not kept:
        what = "image" if images else "text"
        raise InputError(f"calibration column '{column}' holds no {what} (found {_found(other)}).")
    items = tuple(kept) if places is None else DatasetImages(given, kept, column)
    return Sample(items, labels, seen - len(kept), _label_names(given, label_column))


def iterate(given: Iterable[Any], count: int) -> Iterator[Any]:
    """Yield up to `count` items, evenly spread where they can be had by number; else all."""
    places = _places(given, count)
    return iter(given) if places is None else (given[place] for place in places)  # type: ignore[index]


def select_columns(given: Any, columns: Sequence[str]) -> Any:
    """Return a Dataset without its other columns, so that images among them are never decoded."""
    names = getattr(given, "column_names", None)
    if isinstance(names, list) and hasattr(given, "select_columns") and {*columns} <= {*names}:
        return given.select_columns(list(dict.fromkeys(columns)))
    return given


def read_arrays(path: Path, names: Sequence[str], *, rows: int) -> list[dict[str, Any]]:
    """Return inputs of a graph from arrays: up to `rows` rows, evenly spread over the first axis.

    Args:
        path: an .npz with an array for each input, or an .npy for the one input that there is.
        names: of the graph's inputs.
        rows: how many are taken.

    Returns:
        A dict for each row; its arrays keep the first axis, of length 1.

    Raises:
        InputError: the file cannot be read, holds Python objects or other names, or its arrays
            have different numbers of rows.
    """
    if not path.is_file():
        found = "it is no file" if path.exists() else "there is nothing of that name"
        raise InputError(f"data '{path}': expected arrays, .npz or .npy; {found}.")
    try:
        arrays = _load_arrays(path, names)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        first = str(error).partition("\n")[0].rstrip(".")
        raise InputError(f"data '{path}' cannot be read: {first}.") from error
    if set(arrays) != set(names):
        raise InputError(
            f"data '{path}' holds {', '.join(sorted(arrays)) or 'no array'}; the graph takes "
            f"{', '.join(names)}.",
            do="Save an array for each input: numpy.savez(path, name=array, …).",
        )
    counts = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    if len(set(counts.values())) != 1 or not min(counts.values()):
        found = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise InputError(
            f"data '{path}': found arrays of shape {found}; expected the same number of rows, one "
            "or more, in each."
        )
    places = spread(range(min(counts.values())), rows)
    return [{name: array[place : place + 1] for name, array in arrays.items()} for place in places]


def _load_arrays(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return the arrays of a file; objects, which would be unpickled, are a ValueError."""
    if path.suffix.lower() == ".npy":
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        return {names[0] if len(names) == 1 else path.stem: array}
    with zipfile.ZipFile(path) as archive:
        size = sum(member.file_size for member in archive.infolist())
    if size > _ARRAY_BYTES:
        raise ValueError(
            f"its arrays have {size:,} bytes, expected at most {_ARRAY_BYTES:,}; take fewer rows"
        )
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _values(reader: DatasetReader, path: Path) -> Iterator[Values]:
    """Yield the values of each row; raise InputError for one that cannot be used."""
    for batch in reader.read(0):
        if batch.errors:
            row, problem = min(batch.errors.items())
            raise InputError(
                f"data '{path}' cannot be read: row {batch.first + row + 1}: {problem}."
            )
        yield from batch.values


def _taken(stream: Iterator[Item], places: Sequence[int]) -> Iterator[Item]:
    """Yield the items at some places, which ascend; read the stream no further than the last."""
    wanted = iter(places)
    place = next(wanted, None)
    for index, item in enumerate(stream):
        if index == place:
            yield item
            place = next(wanted, None)
            if place is None:
                return


def _found(other: Any) -> str:
    """Say what a column without texts holds, given one of its values."""
    if other is not None and not isinstance(other, str):
        return type(other).__name__
    return "nothing but empty values"


def _places(given: Any, count: int) -> list[int] | None:
    """Return numbers of the rows to take, or None where rows cannot be had by number."""
    numbered = isinstance(given, Sequence) or (
        hasattr(given, "select_columns") and hasattr(given, "__len__")  # datasets.Dataset
    )
    return spread(range(len(given)), count) if numbered else None


def _require_keys(row: Mapping[Any, Any], columns: Sequence[str]) -> None:
    names = [str(name) for name in row]
    for column in columns:
        if column not in row:
            raise InputError(
                f"calibration rows have no column '{column}'{nearest(column, names)}",
                do=f"Their columns: {', '.join(names) or 'none'}.",
            )


def _label_names(given: Any, label_column: str) -> tuple[str, ...]:
    """Return the names of a Dataset's ClassLabel."""
    features = getattr(given, "features", None)
    feature = features.get(label_column) if isinstance(features, Mapping) else None
    return tuple(str(name) for name in getattr(feature, "names", None) or ())
