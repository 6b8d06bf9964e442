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
from html import escape

Row = dict[str, str]
"""Column -> cell. All rows of a table have the same columns."""
NOTHING = "–"
"""A cell without a value."""


@dataclass(frozen=True)
class Table:
    """Rows under a title."""

    title: str
    rows: list[Row]


def html_of(parts: Iterable[Table | str]) -> str:
    """Return tables and lines of text as HTML, escaped, for a notebook."""
    blocks = []
    for part in parts:
        if isinstance(part, str):
            blocks.append(f"<p>{escape(part)}</p>")
            continue
        columns = list(part.rows[0]) if part.rows else []
        lines = [[row.get(column, NOTHING) for column in columns] for row in part.rows]
        head, *rows = (
            f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
            for tag, cells in [("th", columns), *(("td", line) for line in lines)]
        )
        caption, body = f"<caption>{escape(part.title)}</caption>", "".join(rows)
        blocks.append(f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody></table>")
    return "\n".join(blocks)


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
