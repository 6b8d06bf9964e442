"""Print tables, progress and messages on a terminal, plain lines in a pipe.

>>> Console().table("Stages", [{"stage": "export", "time": "5.2 s"}])
Stages
stage   time
export  5.2 s

Results go to standard output; messages and progress go to standard error, so that a pipe gets only
results. If the reader of a pipe has closed it, as `head` does, the rest of the output is dropped
and the command goes on: its exit status is that of its work.

Printed text may come from an untrusted file. Control characters are escaped, so that a name cannot
move the cursor, write to the clipboard or imitate another line of a table.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from enginery.core.errors import EngineryError, printable

if TYPE_CHECKING:
    from rich.console import Console as Rich

Row = Mapping[str, Any]

FACTS = ["what", "value"]
"""The columns of a table that lists facts; its header is left out."""

_FIRST_LINE_SECONDS, _LINE_SECONDS = 10.0, 30.0
"""When a line says how far a task in a pipe is: after the first, and then after each second one."""
_SHORT = 14
"""Columns up to this width in cells are never wrapped: numbers, verdicts, `max abs error`."""
_FOLDED = 12
"""The least width of each of the other columns."""
_STYLES = {
    "ok": "green",
    "passed": "green",
    "runs": "green",
    "failed": "bold red",
    "error": "bold red",
}
_DEL_AND_C1 = re.compile(r"[\x7f-\x9f]")


class Console:
    """The output of a command. All printing goes through it; it is a `core.progress.Progress`."""

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
        """True if standard output is a terminal."""
        return bool(self._out.is_terminal)

    @contextmanager
    def task(self, name: str, total: int = 0) -> Iterator[Callable[[], None]]:
        """Show a progress bar on a terminal; in a pipe a line now and then if it takes long."""
        if self.quiet:
            yield lambda: None
            return
        if not self._err.is_terminal:
            with self._saying_now_and_then(name, total) as advance:
                yield advance
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
            *((TextColumn("{task.percentage:>3.0f}%"),) if total else ()),
            TimeElapsedColumn(),
            *((TextColumn("so far,"), TimeRemainingColumn(), TextColumn("left")) if total else ()),
        )
        with Progress(*columns, console=self._err, transient=True) as progress:
            task = progress.add_task(printable(name), total=total or None)
            yield lambda: progress.advance(task)

    @contextmanager
    def _saying_now_and_then(self, name: str, total: int) -> Iterator[Callable[[], None]]:
        """Say how far a task is after ten seconds and then every half minute."""
        begun, steps, ended = time.monotonic(), 0, threading.Event()

        def advance() -> None:
            nonlocal steps
            steps += 1

        def report() -> None:
            pause = _FIRST_LINE_SECONDS
            while not ended.wait(pause):
                done = f"{steps / total:.0%}, " if total else ""
                self.say(f"{name}: {done}{time.monotonic() - begun:.0f} s")
                pause = _LINE_SECONDS

        reporter = threading.Thread(target=report, name="enginery-progress", daemon=True)
        reporter.start()
        try:
            yield advance
        finally:
            ended.set()
            reporter.join()

    def say(self, message: str) -> None:
        """Print one message."""
        if not self.quiet:
            self._err.print(printable(message), style="dim", markup=False)

    def line(self, message: str = "") -> None:
        """Print one line of the result."""
        if not self.as_json:
            with _writing_result():
                self._out.print(printable(message), markup=False)

    def piece(self, text: str) -> None:
        """Print a piece of a text at once, without an end of line."""
        self._write(printable(text))

    def table(self, title: str, rows: Sequence[Row]) -> None:
        """Print rows with the same keys: a table on a terminal, aligned lines in a pipe."""
        if self.as_json or not rows:
            return
        if self._tables:
            self.line()
        self._tables += 1
        with _writing_result():
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
            with _writing_result():
                self._out.print(_rich_table(rows, widths), soft_wrap=False)

    def json_lines(self, path: Path) -> None:
        """Print a file of JSON lines as it is, one line of output each."""
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                self._write(_DEL_AND_C1.sub(_escape, line))

    def json(self, value: Any) -> None:
        """Print the result as one JSON document, if --json was given."""
        if not self.as_json:
            return
        # JSON's own escapes where the stream cannot hold the character itself.
        escaped = not (sys.stdout.encoding or "").lower().startswith("utf")
        text = json.dumps(value, indent=2, ensure_ascii=escaped) + "\n"
        # json.dumps leaves DEL and C1, which occur only in strings, where JSON allows escapes.
        self._write(_DEL_AND_C1.sub(_escape, text))

    def _write(self, text: str) -> None:
        try:
            with _writing_result():
                sys.stdout.write(text)
                sys.stdout.flush()
        except BrokenPipeError:
            discard(sys.stdout)

    def error(self, error: EngineryError) -> None:
        """Print an error. A failed check has printed its JSON already."""
        self._err.print("error:", style="bold red", end=" ")
        self._err.print(printable(str(error)), markup=False)
        if error.exit_code not in (1, 3):  # those come after a result
            kind = type(error).__name__
            self.json({"error": error.message, "do": error.do, "kind": kind})

    def _plain(self, rows: Sequence[Row], widths: Sequence[int]) -> None:
        """Print columns padded with blanks and never wrapped: one line per row."""
        from rich.cells import set_cell_size

        columns = list(rows[0])
        header = [] if columns == FACTS else [columns]
        for cells in [*header, *([str(row[name]) for name in columns] for row in rows)]:
            padded = [set_cell_size(cell, width) for cell, width in zip(cells, widths, strict=True)]
            self.line("  ".join(padded).rstrip())

    def _blocks(self, rows: Sequence[Row]) -> None:
        """Print one line per cell, for a terminal that is too narrow for the table."""
        for row in rows:
            for name, value in row.items():
                self.line(f"{name}: {value}")
            self.line()


def _escape(character: re.Match[str]) -> str:
    return f"\\u{ord(character[0]):04x}"


@contextmanager
def _writing_result() -> Iterator[None]:
    """Raise an error that names standard output if it cannot be written: a full disk."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        discard(sys.stdout)  # or Python would try again when it ends
        raise EngineryError(f"standard output cannot be written: {error.strerror}.") from error


def discard(stream: IO[str]) -> None:
    """Redirect a stream whose reader has closed it to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def _rich(stream: IO[str]) -> Rich:
    """Return a rich console on a stream, with colours and boxes only on a terminal."""
    # Importing rich takes a third of the time of `enginery --help`.
    from rich.console import Console as Rich

    class Pipe(Rich):
        """A console that goes on without its reader; rich would exit with the status 1."""

        def on_broken_pipe(self) -> None:
            discard(stream)

    # Without emoji: rich would replace the `:100:` in a profile `1:100:512`.
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
    """Return the text of a cell in one line, so that a value cannot look like a row."""
    return printable(str(value)).replace("\n", "\\n").replace("\t", " ")


def _width(cells: Sequence[Any]) -> int:
    from rich.cells import cell_len

    return max(cell_len(str(cell)) for cell in cells)
