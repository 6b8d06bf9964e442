"""Real inputs from files: a column of texts, or a folder of images.

    >>> read_texts(Path("reviews.csv"), "text", rows=64)
    ['Great value.', …]

CSV, TSV, JSONL and Parquet are read through pyarrow, the one column only; a text file holds one
input a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from enginery.core.errors import InputError, nearest

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_LINES = (".txt", ".text", "")
_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")

# pyarrow reads in blocks that must hold a whole row; a row can be a whole book.
_BLOCK_BYTES = 64 << 20

Item = TypeVar("Item")


def read_texts(path: Path, column: str, *, rows: int) -> list[str]:
    """Up to `rows` texts, evenly spread over the file, in its order; empty ones do not count.

    Raises:
        InputError: the file or the column is missing, cannot be read, or holds no text.
    """
    if not path.is_file():
        found = "it is a folder" if path.is_dir() else "there is no such file"
        raise InputError(
            f"data '{path}': expected a file with texts ({', '.join(_TABLES)} or .txt); {found}."
        )
    suffix = path.suffix.lower()
    if suffix in _LINES:
        where, values = f"data '{path}'", _lines(path)
    elif suffix in _TABLES:
        where, values = f"data '{path}': column '{column}'", read_column(path, suffix, column)
    else:
        raise InputError(
            f"data '{path}': found a {suffix} file, expected {', '.join(_TABLES)} or .txt.",
            do="Write one JSON object a line, as .jsonl." if suffix == ".json" else "",
        )
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    if not texts:
        other = next((value for value in values if value is not None), None)
        found = "no rows" if not values else "nothing but empty values"
        if other is not None and not isinstance(other, str):
            found = type(other).__name__
        raise InputError(f"{where} holds no text (found {found}).")
    return spread(texts, rows)


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


def _lines(path: Path) -> list[Any]:
    try:
        # Not splitlines(): a line of text may hold U+2028 and the like.
        return path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"data '{path}' is not UTF-8 text: {error}.") from error
    except OSError as error:
        raise InputError(f"data '{path}' cannot be read: {error.strerror}.") from error


def read_column(path: Path, suffix: str, column: str) -> list[Any]:
    """All values of one column of a CSV, TSV, JSONL or Parquet file, by its suffix.

    Raises:
        InputError: the file cannot be read, or has no such column.
    """
    import pyarrow as pa

    read = {".parquet": _parquet, ".jsonl": _jsonl, ".ndjson": _jsonl}.get(suffix, _csv)
    try:
        names, values = read(path, column)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        first = str(error).partition("\n")[0].rstrip(".")
        raise InputError(f"data '{path}' cannot be read: {first}.") from error
    if values is None:
        raise InputError(
            f"data '{path}' has no column '{column}'{nearest(column, names)}",
            do=f"Its columns: {', '.join(names) or 'none'}.{_delimiter_hint(names, suffix)}",
        )
    return values


def _delimiter_hint(names: Sequence[str], suffix: str) -> str:
    """A header that was not cut, and what it seems to be cut by."""
    if len(names) != 1 or suffix not in (".csv", ".tsv"):
        return ""
    for mark, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars"), (",", "commas")):
        if mark in names[0]:
            expected = "tabs" if suffix == ".tsv" else "commas"
            return f" It seems to be separated by {name}; a {suffix} file is by {expected}."
    return ""


def _parquet(path: Path, column: str) -> tuple[list[str], list[Any] | None]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        names = list(file.schema_arrow.names)
        if column not in names:
            return names, None
        return names, file.read(columns=[column]).column(0).to_pylist()


def _jsonl(path: Path, column: str) -> tuple[list[str], list[Any] | None]:
    import pyarrow.json

    options = pyarrow.json.ReadOptions(block_size=_BLOCK_BYTES)
    table = pyarrow.json.read_json(path, read_options=options)
    names = list(table.column_names)
    return names, table.column(column).to_pylist() if column in names else None


def _csv(path: Path, column: str) -> tuple[list[str], list[Any] | None]:
    import pyarrow as pa
    import pyarrow.csv

    reading = pyarrow.csv.ReadOptions(block_size=_BLOCK_BYTES)
    # Reviews hold line breaks inside quotes.
    parsing = pyarrow.csv.ParseOptions(
        delimiter="\t" if path.suffix.lower() == ".tsv" else ",", newlines_in_values=True
    )
    # Read as text whatever it looks like: "5" is a review as well.
    as_text = {column: pa.string()}
    converting = pyarrow.csv.ConvertOptions(column_types=as_text)
    with pyarrow.csv.open_csv(
        path, read_options=reading, parse_options=parsing, convert_options=converting
    ) as reader:
        names = list(reader.schema.names)
    if column not in names:
        return names, None
    converting = pyarrow.csv.ConvertOptions(column_types=as_text, include_columns=[column])
    table = pyarrow.csv.read_csv(
        path, read_options=reading, parse_options=parsing, convert_options=converting
    )
    return names, table.column(0).to_pylist()
