"""Tables of text for people, and numbers as they are written in them.

>>> fact_rows([("task", "embed")])
[{'what': 'task', 'value': 'embed'}]
>>> format_number(0.00123, ".1e"), format_number(float("nan"), ".1e"), human_bytes(90_400_000)
('1.2e-03', '–', '90.4 MB')
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

Row = dict[str, str]
"""Column -> cell. All rows of a table have the same columns."""
NOTHING = "–"
"""A cell without a value."""


@dataclass(frozen=True)
class Table:
    """Rows under a title."""

    title: str
    rows: list[Row]


def fact_rows(facts: Iterable[tuple[str, str]]) -> list[Row]:
    """Return a row for each (name, value). A console leaves out the header of such a table."""
    return [{"what": name, "value": value} for name, value in facts]


def format_number(value: float | None, form: str, nothing: str = NOTHING) -> str:
    """Format a number; return `nothing` if it is unknown or not finite."""
    return format(value, form) if value is not None and math.isfinite(value) else nothing


def human_bytes(size_bytes: float) -> str:
    """Return a size in powers of ten: `90.4 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size_bytes) < 1000:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"
