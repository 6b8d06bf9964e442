"""Rows that Python hands over as mappings: a Hugging Face Dataset, a streamed one, a list of dicts.

    >>> rows = read_rows(dataset, "text", "label", rows=512, images=False)
    >>> rows.items[0], rows.labels[0], rows.label_names
    ('Great value.', 1, ('bad', 'good'))

A source whose rows can be had by number gives rows evenly spread over it; any other is read from
its start, no further than needed. The package `datasets` itself is not imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from enginery.core.datasets.samples import is_text, spread
from enginery.core.errors import InputError, nearest


@dataclass(frozen=True)
class Rows:
    """One column of the rows that have a value there."""

    items: Sequence[Any]
    """Texts or images."""
    labels: list[Any]
    """As they stand in the label column; empty where none was asked for."""
    label_names: tuple[str, ...]
    """What labels that are numbers stand for, where the source says it."""
    left_out: int
    """Rows that were read and have no text, or no image."""


class Images(Sequence[Any]):
    """A column of images that are read anew when they are asked for: decoded, they are large."""

    def __init__(self, source: Any, places: Sequence[int], column: str) -> None:
        self._source = source
        self._places = places
        self._column = column

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Images(self._source, self._places[index], self._column)
        return self._source[self._places[index]][self._column]


def iterate(given: Iterable[Any], count: int) -> Iterator[Any]:
    """Up to `count` items, evenly spread where they can be had by number; else all in order."""
    places = _places(given, count)
    return iter(given) if places is None else (given[place] for place in places)  # type: ignore[index]


def narrowed(given: Any, columns: Sequence[str]) -> Any:
    """A Dataset without its other columns, so that images among them are never decoded."""
    names = getattr(given, "column_names", None)
    if isinstance(names, list) and hasattr(given, "select_columns") and {*columns} <= {*names}:
        return given.select_columns(list(dict.fromkeys(columns)))
    return given


def read_rows(
    given: Any, stream: Iterable[Any], column: str, label_column: str, *, rows: int, images: bool
) -> Rows:
    """The texts or images of up to `rows` rows; those without one are left out.

    Args:
        given: what Python handed over.
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
            _require_columns(row, [column, label_column] if label_column else [column])
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
        found = "nothing but empty values"
        if other is not None and not isinstance(other, str):
            found = type(other).__name__
        raise InputError(f"calibration column '{column}' holds no {what} (found {found}).")
    items = tuple(kept) if places is None else Images(given, kept, column)
    return Rows(items, labels, _label_names(given, label_column), seen - len(kept))


def _places(given: Any, count: int) -> list[int] | None:
    """Numbers of the rows to take, or None where rows cannot be had by number."""
    numbered = isinstance(given, Sequence) or (
        hasattr(given, "select_columns") and hasattr(given, "__len__")  # datasets.Dataset
    )
    return spread(range(len(given)), count) if numbered else None


def _require_columns(row: Mapping[Any, Any], columns: Sequence[str]) -> None:
    names = [str(name) for name in row]
    for column in columns:
        if column not in row:
            raise InputError(
                f"calibration rows have no column '{column}'{nearest(column, names)}",
                do=f"Their columns: {', '.join(names) or 'none'}.",
            )


def _label_names(given: Any, label_column: str) -> tuple[str, ...]:
    """The names of a Dataset's ClassLabel."""
    features = getattr(given, "features", None)
    feature = features.get(label_column) if isinstance(features, Mapping) else None
    return tuple(str(name) for name in getattr(feature, "names", None) or ())
