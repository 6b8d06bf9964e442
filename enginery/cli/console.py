"""What the command line shows: tables, progress and news on a terminal, plain lines in a pipe.

    >>> console = Console(as_json=False, quiet=False, verbose=False)
    >>> console.table("Stages", [{"stage": "export", "time": "5.2 s"}])

Results go to standard output; news and progress go to standard error, so that a pipe gets results
alone. Where the reader of a pipe has gone, as `head` does, the rest is dropped without a word and
the command goes on: its exit status says what it found, not who listened.

What is shown may come from a stranger's file. Control characters are shown by their numbers, so
that a name cannot move the cursor, write to the clipboard or pass for another line of a table.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from enginery.core.errors import printable

if TYPE_CHECKING:
    from rich.console import Console as Rich

    from enginery.core.errors import EngineryError

Row = Mapping[str, Any]

FACTS = ["what", "value"]
"""The columns of a table that is a list of facts; its header says nothing and is left out."""

_SHORT = 14
"""Columns up to this many cells wide are never broken: numbers, verdicts, the heading `max abs`."""
_FOLDED = 12
"""The least that is left to each of the others."""
_STYLES = {
    "ok": "green",
    "passed": "green",
    "runs": "green",
    "failed": "bold red",
    "error": "bold red",
}
_DEL_AND_C1 = re.compile(r"[\x7f-\x9f]")


class Console:
    """The one place that prints. It is a `core.progress.Progress`."""

    def __init__(
        self, *, as_json: bool = False, quiet: bool = False, verbose: bool = False
    ) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose
        self._out = _rich(sys.stdout)
        self._err = _rich(sys.stderr)
        self._tables = 0

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
        from rich.progress import (
            BarColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._err, transient=True) as progress:
            task = progress.add_task(printable(name), total=total or None)
            yield lambda: progress.advance(task)

    def say(self, message: str) -> None:
        """One line of news."""
        if not self.quiet:
            self._err.print(printable(message), style="dim", markup=False)

    def line(self, message: str = "") -> None:
        """One line of the result."""
        if not self.as_json:
            self._out.print(printable(message), markup=False)

    def table(self, title: str, rows: Sequence[Row]) -> None:
        """Rows with the same keys: a table on a terminal, aligned lines in a pipe."""
        if self.as_json or not rows:
            return
        if self._tables:
            self.line()
        self._tables += 1
        self._out.print(_cell(title), style="bold", markup=False)
        rows = [{_cell(name): _cell(value) for name, value in row.items()} for row in rows]
        columns = list(rows[0])
        widths = [_width([column, *(row[column] for row in rows)]) for column in columns]
        needed = sum(width if width <= _SHORT else _FOLDED for width in widths) + 2 * len(widths)
        if not self.is_terminal:
            self._plain(rows, widths)
        elif needed > self._out.width and columns != FACTS:
            self._blocks(rows)
        else:
            self._out.print(_rich_table(rows, widths), soft_wrap=False)

    def json(self, value: Any) -> None:
        """The result for a program: one document."""
        if not self.as_json:
            return
        # JSON's own escapes where the stream cannot hold the character itself.
        escaped = not (sys.stdout.encoding or "").lower().startswith("utf")
        text = json.dumps(value, indent=2, ensure_ascii=escaped) + "\n"
        # JSON escapes C0 alone; DEL and C1 are in strings, where an escape is the same character.
        text = _DEL_AND_C1.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            discard(sys.stdout)
        except OSError:
            discard(sys.stdout)  # or Python would try again when it ends
            raise

    def error(self, error: EngineryError) -> None:
        """An expected failure. A check that said no has printed its JSON already."""
        self._err.print("error:", style="bold red", end=" ")
        self._err.print(printable(str(error)), markup=False)
        if error.exit_code not in (1, 3):  # those come after a result
            kind = type(error).__name__
            self.json({"error": error.message, "do": error.do, "kind": kind})

    def _plain(self, rows: Sequence[Row], widths: Sequence[int]) -> None:
        """Columns padded with blanks, never folded, so that a line stays a line."""
        from rich.cells import set_cell_size

        columns = list(rows[0])
        header = [] if columns == FACTS else [columns]
        for cells in [*header, *([str(row[name]) for name in columns] for row in rows)]:
            padded = [set_cell_size(cell, width) for cell, width in zip(cells, widths, strict=True)]
            self.line("  ".join(padded).rstrip())

    def _blocks(self, rows: Sequence[Row]) -> None:
        """One line a cell, for a terminal too narrow for the table."""
        for row in rows:
            for name, value in row.items():
                self.line(f"{name}: {value}")
            self.line()


def discard(stream: IO[str]) -> None:
    """Sends what is still written to `stream` nowhere; its reader has gone."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def _rich(stream: IO[str]) -> Rich:
    """Rich's console on a stream; colours and boxes only where a person looks at it."""
    # rich costs a third of `enginery --help`: nothing imports it before there is something to show.
    from rich.console import Console as Rich

    class Pipe(Rich):
        """rich ends the process with status 1, which here means that a check said no."""

        def on_broken_pipe(self) -> None:
            discard(stream)

    # Without emoji: a profile's `1:100:512` holds a name of one.
    return Pipe(
        file=stream, force_terminal=stream.isatty(), soft_wrap=True, highlight=False, emoji=False
    )


def _rich_table(rows: Sequence[Row], widths: Sequence[int]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns = list(rows[0])
    facts = columns == FACTS
    table = Table(
        box=None if facts else box.SIMPLE_HEAD,
        show_header=not facts,
        show_edge=False,
        pad_edge=False,
        padding=(0, 2 if facts else 1, 0, 0),
    )
    for name, width in zip(columns, widths, strict=True):
        table.add_column(name, overflow="fold", no_wrap=width <= _SHORT)
    for row in rows:
        cells = [str(row[name]) for name in columns]
        table.add_row(*(Text(cell, style=_STYLES.get(cell.split(" ")[0], "")) for cell in cells))
    return table


def _cell(value: Any) -> str:
    """The text of a cell, in one line: a value cannot begin a row."""
    return printable(str(value)).replace("\n", "\\n").replace("\t", " ")


def _width(cells: Sequence[Any]) -> int:
    from rich.cells import cell_len

    return max(cell_len(str(cell)) for cell in cells)


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
        size_bytes = int(float(digits) * units[unit])
    except (ValueError, KeyError, OverflowError):  # no number, no such unit, infinity
        size_bytes = -1
    if size_bytes < 0:
        raise OptionError(f"size '{text}': expected a number with B, kB, MB, GB or GiB.")
    return size_bytes
