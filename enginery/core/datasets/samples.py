"""Real inputs from files: a column of texts, or a folder of images.

    >>> read_texts(Path("reviews.csv"), "text", rows=64)
    ['Great value.', …]

A file is read twice, once to count its texts and once to take some of them, and is never in memory
as a whole. A text file holds one input a line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from enginery.core.datasets.tables import TABLES, Row, stream_columns
from enginery.core.errors import InputError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_LINES = (".txt", ".text", "")

Item = TypeVar("Item")


@dataclass(frozen=True)
class TextRows:
    """Texts of a file, and what stands beside them."""

    texts: list[str]
    labels: list[Any]
    """What the label column holds in the same rows; empty where none was asked for."""
    left_out: int
    """How many rows of the whole file have no text."""


def read_texts(path: Path, column: str, *, rows: int) -> list[str]:
    """Up to `rows` texts, evenly spread over the file, in its order; empty ones do not count.

    Raises:
        InputError: the file or the column is missing, cannot be read, or holds no text.
    """
    return read_text_rows(path, column, rows=rows).texts


def read_text_rows(path: Path, column: str, *, rows: int, label_column: str = "") -> TextRows:
    """Up to `rows` texts as `read_texts` takes them, and another column's values beside them.

    Raises:
        InputError: the file or a column is missing, cannot be read, or holds no text.
    """
    where = _require_readable(path, column, label_column)
    count, left_out, other = 0, 0, None
    for text, *_ in _stream(path, column, label_column):
        if is_text(text):
            count += 1
        else:
            left_out += 1
            other = text if other is None else other
    if not count:
        found = "nothing but empty values" if left_out else "no rows"
        if other is not None and not isinstance(other, str):
            found = type(other).__name__
        raise InputError(f"{where} holds no text (found {found}).")
    with_text = (row for row in _stream(path, column, label_column) if is_text(row[0]))
    chosen = list(_taken(with_text, spread(range(count), rows)))
    labels = [label for _, *beside in chosen for label in beside]
    return TextRows([text for text, *_ in chosen], labels, left_out)


def is_text(value: Any) -> bool:
    """Whether a value is a text with something in it."""
    return isinstance(value, str) and bool(value.strip())


def list_images(path: Path, *, rows: int) -> list[Path]:
    """Up to `rows` image files of a folder, evenly spread over their sorted names.

    A single image file is taken as well.

    Raises:
        InputError: there is no such folder, or no image in it.
    """
    if path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES:
        return [path]
    if not path.is_dir():
        found = "it is a file" if path.exists() else "there is nothing of that name"
        raise InputError(f"data '{path}': expected a folder of images; {found}.")
    # Other systems leave hidden `._photo.jpg` files that are no images.
    images = (p for p in path.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
    found_images = sorted(p for p in images if not p.name.startswith("."))
    if not found_images:
        raise InputError(
            f"data '{path}': no images in it; known suffixes: {', '.join(IMAGE_SUFFIXES)}."
        )
    return spread(found_images, rows)


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """`count` items evenly spread over a list, or all of a shorter one."""
    if len(items) <= count:
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


def _require_readable(path: Path, column: str, label_column: str) -> str:
    """What a message calls the texts; raises InputError for what is no file of texts."""
    if not path.is_file():
        found = "it is a folder" if path.is_dir() else "there is no such file"
        raise InputError(
            f"data '{path}': expected a file with texts ({', '.join(TABLES)} or .txt); {found}."
        )
    suffix = path.suffix.lower()
    if suffix in TABLES:
        return f"data '{path}': column '{column}'"
    if label_column:
        raise InputError(f"data '{path}': labels need a file with columns ({', '.join(TABLES)}).")
    if suffix not in _LINES:
        raise InputError(
            f"data '{path}': found a {suffix} file, expected {', '.join(TABLES)} or .txt.",
            do="Write one JSON object a line, as .jsonl." if suffix == ".json" else "",
        )
    return f"data '{path}'"


def _stream(path: Path, column: str, label_column: str) -> Iterator[Row]:
    """(text,) or (text, label) of each row."""
    if path.suffix.lower() in _LINES:
        return _lines(path)
    return stream_columns(path, [column, label_column] if label_column else [column])


def _lines(path: Path) -> Iterator[Row]:
    try:
        # A file's lines, not those of splitlines(): a text may hold U+2028 and the like.
        with path.open(encoding="utf-8-sig") as lines:
            for line in lines:
                yield (line.removesuffix("\n"),)
    except UnicodeDecodeError as error:
        raise InputError(f"data '{path}' is not UTF-8 text: {error}.") from error
    except OSError as error:
        raise InputError(f"data '{path}' cannot be read: {error.strerror}.") from error


def _taken(stream: Iterator[Item], places: Sequence[int]) -> Iterator[Item]:
    """The items at some places, which ascend; the stream is read no further than the last."""
    wanted = iter(places)
    place = next(wanted, None)
    for index, item in enumerate(stream):
        if index == place:
            yield item
            place = next(wanted, None)
            if place is None:
                return
