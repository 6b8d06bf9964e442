"""Real inputs from files: a column of texts, or a folder of images.

    >>> read_texts(Path("reviews.csv"), "text", rows=64)
    ['Great value.', …]

CSV, TSV, JSONL and Parquet are read through pyarrow; any other suffix is text, one input a line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from enginery.core.errors import InputError, nearest

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


def read_texts(path: Path, column: str, *, rows: int) -> list[str]:
    """Up to `rows` texts, evenly spread over the file, in its order.

    Raises:
        InputError: the file or the column is missing, or holds no text.
    """
    if not path.is_file():
        raise InputError(f"data '{path}': there is no such file.")
    values = _column(path, column)
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    if not texts:
        found = type(values[0]).__name__ if values else "no rows"
        raise InputError(f"data '{path}': column '{column}' holds no text (found {found}).")
    return spread(texts, rows)


def list_images(path: Path, *, rows: int) -> list[Path]:
    """Up to `rows` image files of a folder, evenly spread over their sorted names.

    Raises:
        InputError: there is no such folder, or no image in it.
    """
    if not path.is_dir():
        raise InputError(f"data '{path}': expected a folder of images.")
    found = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
    if not found:
        raise InputError(
            f"data '{path}': no images in it; known suffixes: {', '.join(IMAGE_SUFFIXES)}."
        )
    return spread(found, rows)


def spread(items: list[Any], count: int) -> list[Any]:
    """`count` items evenly spread over a list, or all of a shorter one."""
    if len(items) <= count:
        return items
    return [items[index * len(items) // count] for index in range(count)]


def _column(path: Path, column: str) -> list[Any]:
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet"):
        try:
            return path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise InputError(f"data '{path}' is not UTF-8 text: {error}.") from error
    import pyarrow as pa

    try:
        table = _table(path, suffix)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"data '{path}' cannot be read: {error}") from error
    if column not in table.column_names:
        raise InputError(
            f"data '{path}' has no column '{column}'{nearest(column, table.column_names)}",
            do=f"Its columns: {', '.join(table.column_names)}.",
        )
    values: list[Any] = table.column(column).to_pylist()
    return values


def _table(path: Path, suffix: str) -> Any:
    if suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path)
    if suffix in (".jsonl", ".ndjson"):
        import pyarrow.json

        return pyarrow.json.read_json(path)
    import pyarrow.csv

    # Reviews hold line breaks inside quotes.
    parsing = pyarrow.csv.ParseOptions(
        delimiter="\t" if suffix == ".tsv" else ",", newlines_in_values=True
    )
    return pyarrow.csv.read_csv(path, parse_options=parsing)
