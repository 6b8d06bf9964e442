"""What the command line shows: tables, progress and news on a terminal, plain lines in a pipe.

    >>> console = Console(json=False, quiet=False, verbose=0)
    >>> console.table("Validation", rows)

Results go to standard output; news and progress go to standard error, so that a pipe gets results
alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


class Console:
    """The one place that prints. It is a `core.progress.Progress`."""

    def __init__(
        self, *, as_json: bool = False, quiet: bool = False, verbose: bool = False
    ) -> None:
        # rich costs a third of `enginery --help`; nothing imports it before there is something
        # to show.
        from rich.console import Console as Rich

        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose
        self._out = Rich(soft_wrap=True, highlight=False)
        self._err = Rich(stderr=True, soft_wrap=True, highlight=False)

    @property
    def is_terminal(self) -> bool:
        """Whether results go to a person's terminal."""
        return bool(self._out.is_terminal)

    @contextmanager
    def task(self, name: str, total: int = 0) -> Iterator[Callable[[], None]]:
        """A progress bar on a terminal; nothing in a pipe."""
        if self.quiet or not self._err.is_terminal:
            yield lambda: None
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._err, transient=True) as progress:
            task = progress.add_task(name, total=total or None)
            yield lambda: progress.advance(task)

    def say(self, message: str) -> None:
        """One line of news."""
        if not self.quiet:
            self._err.print(message, style="dim", markup=False)

    def detail(self, message: str) -> None:
        """News that only `-v` asks for."""
        if self.verbose:
            self.say(message)

    def line(self, message: str = "") -> None:
        """One line of the result."""
        if not self.as_json:
            self._out.print(message, markup=False)

    def table(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows with the same keys: a table on a terminal, tab-separated lines in a pipe."""
        if self.as_json or not rows:
            return
        columns = list(rows[0])
        if not self.is_terminal:
            self._out.print("\t".join(columns), markup=False)
            for row in rows:
                self._out.print("\t".join(str(row[name]) for name in columns), markup=False)
            return
        from rich import box
        from rich.table import Table

        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for name in columns:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*(_cell(row[name]) for name in columns))
        self._out.print(table)

    def json(self, value: Any) -> None:
        """The result for a program."""
        if self.as_json:
            sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def error(self, message: str) -> None:
        """An expected failure."""
        if self.as_json:
            sys.stdout.write(json.dumps({"error": message}, ensure_ascii=False) + "\n")
        self._err.print("error:", style="bold red", end=" ")
        self._err.print(message, markup=False)


def _cell(value: Any) -> Any:
    from rich.text import Text

    text = str(value)
    styles = {"ok": "green", "passed": "green", "failed": "bold red"}
    return Text(text, style=styles.get(text, ""))


def human_bytes(size_bytes: float) -> str:
    """`90.4 MB`, in powers of ten as disks and downloads count."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size_bytes) < 1000:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def parse_bytes(text: str) -> int:
    """`20GB`, `512 MiB` or a plain number of bytes.

    Raises:
        OptionError: it is none of these.
    """
    from enginery.core.errors import OptionError

    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", start=1):
        units[f"{letter}B"] = 1000**power
        units[f"{letter}IB"] = units[letter] = 1024**power
    digits = text.strip().rstrip("BKMGTIbkmgti ")
    unit = text.strip()[len(digits) :].strip().upper()
    try:
        return int(float(digits) * units[unit])
    except (ValueError, KeyError) as error:
        raise OptionError(f"size '{text}': expected a number with B, kB, MB, GB or GiB.") from error
