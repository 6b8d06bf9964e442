"""Texts with the labels that people gave them, for a budget in accuracy.

>>> read_labelled(Path("reviews.csv"), "text", "label", rows=2, label2id={"calm": 0, "glad": 1})
(['All is well.', 'How fine!'], [0, 1])
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enginery.core.data import read_column, spread
from enginery.core.errors import InputError

_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")


def read_labelled(
    path: Path, column: str, label_column: str, *, rows: int, label2id: Mapping[str, Any]
) -> tuple[list[str], list[int]]:
    """Up to `rows` texts and the indices of their labels, evenly spread over the file.

    Args:
        path: a CSV, TSV, JSONL or Parquet file.
        column: of the texts; rows without a text are left out.
        label_column: names of labels as config.json has them, or their indices.
        rows: how many.
        label2id: config.json's.

    Raises:
        InputError: a column is missing, or a label is not one of the model's.
    """
    suffix = path.suffix.lower()
    if not path.is_file() or suffix not in _TABLES:
        raise InputError(
            f"data '{path}': labels need a file with columns ({', '.join(_TABLES)}).",
        )
    texts, labels = (read_column(path, suffix, name) for name in (column, label_column))
    pairs = [
        (text, label) for text, label in zip(texts, labels, strict=True)
        if isinstance(text, str) and text.strip()
    ]  # fmt: skip
    if not pairs:
        raise InputError(f"data '{path}': column '{column}' holds no text.")
    chosen = spread(pairs, rows)
    known = {str(name): int(index) for name, index in label2id.items()}
    return [text for text, _ in chosen], [_index(path, label, known) for _, label in chosen]


def _index(path: Path, label: Any, known: Mapping[str, int]) -> int:
    if str(label) in known:
        return known[str(label)]
    if str(label).isdigit() and (not known or int(label) in known.values()):
        return int(label)
    raise InputError(
        f"data '{path}': the label {label!r} is not one of the model's.",
        do=f"Its labels: {', '.join(known) or 'indices from 0 on'}.",
    )
