"""What is finished of an output: parts, and a journal with a line for each.

Takes the path of an output; leaves `OUTPUT.parts/` beside it, with `part-000000`, `part-000001`, …
and `journal.jsonl`, until the output is whole.

    >>> journal = Journal.open(Path("out.parquet"), fingerprint, schema)
    >>> journal.counts.rows
    8192

A part is on the disk before its line is, and a line counts when it is whole: a run that was killed
goes on after the last line, and what it had begun after that is written anew. A file lock keeps
two runs from one output.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import Timeout

from enginery.core.errors import InputError
from enginery.core.fingerprint import Fingerprint
from enginery.core.locks import named_lock
from enginery.predict.counts import Counts

_JOURNAL = "journal.jsonl"


@contextmanager
def only_run(output: Path) -> Iterator[None]:
    """Holds the output for one run; raises InputError where another process has it."""
    place = hashlib.sha256(os.fsencode(output.resolve())).hexdigest()[:16]
    lock = named_lock(f"predict-{place}", timeout_seconds=0)
    try:
        lock.acquire()
    except Timeout:
        raise InputError(
            f"output '{output}' is being written by another process.",
            do="Wait for it, or name another --output.",
        ) from None
    try:
        yield
    finally:
        lock.release()


class Journal:
    """The parts of one output, and how far they go."""

    def __init__(
        self, directory: Path, parts: list[Counts], *, whole: bool, first_bad: str = ""
    ) -> None:
        self.directory = directory
        self.first_bad = first_bad
        """The first bad row of all and what is wrong with it."""
        self.parts = parts
        self.whole = whole
        """All rows are in the parts; they only have to be put together."""

    @classmethod
    def open(cls, output: Path, fingerprint: Fingerprint, schema: str) -> Journal:
        """The journal of an earlier run of the same, or a new one.

        Args:
            output: where the result goes.
            fingerprint: of the input, the artifact and the options; parts of another are removed.
            schema: of the parts, as text; likewise.

        Raises:
            InputError: the directory cannot be written.
        """
        directory = parts_directory(output)
        head = {"key": fingerprint.key, "schema": schema}
        try:
            found = _read(directory, head)
            if found is not None:
                return found
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            journal = cls(directory, [], whole=False)
            journal._append(head)
        except OSError as error:
            raise InputError(f"output '{output}' cannot be written: {error.strerror}.") from error
        return journal

    @property
    def counts(self) -> Counts:
        """Over all finished parts."""
        return sum(self.parts, Counts())

    def path(self, part: int) -> Path:
        """Where a part is."""
        return self.directory / f"part-{part:06d}"

    def paths(self) -> list[Path]:
        """All finished parts, in order."""
        return [self.path(part) for part in range(len(self.parts))]

    def add(self, counts: Counts, *, first_bad: str = "") -> None:
        """Makes the next part, whose file is written and flushed, a finished one."""
        _sync(self.directory)
        number = len(self.parts)
        size = self.path(number).stat().st_size
        self._append(
            {"part": number, "bytes": size, "first_bad": first_bad, "counts": asdict(counts)}
        )
        self.parts.append(counts)
        self.first_bad = self.first_bad or first_bad

    def close_rows(self) -> None:
        """Says that there are no more rows."""
        if not self.whole:
            self._append({"whole": True})
            self.whole = True

    def remove(self) -> None:
        """Removes the parts, which are in the output now."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _append(self, line: dict[str, Any]) -> None:
        with (self.directory / _JOURNAL).open("ab") as stream:
            stream.write(json.dumps(line).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())


def parts_directory(output: Path) -> Path:
    """`out.parquet.parts`, beside `out.parquet`."""
    return output.with_name(f"{output.name}.parts")


def is_whole(output: Path, fingerprint: Fingerprint) -> bool:
    """Whether a run of the same had all its rows, and ended while it put them together."""
    try:
        lines = (parts_directory(output) / _JOURNAL).read_bytes().split(b"\n")
        head = json.loads(lines[0])
        return bool(head["key"] == fingerprint.key) and b'{"whole": true}' in lines
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _read(directory: Path, head: dict[str, Any]) -> Journal | None:
    """The journal of the same run, cut to what is whole; None where there is none."""
    file = directory / _JOURNAL
    if not file.is_file():
        return None
    content = file.read_bytes()
    good = 0
    parts: list[Counts] = []
    whole = False
    first_bad = ""
    for number, line in enumerate(content.splitlines(keepends=True)):
        try:
            entry = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            entry = None
        if number == 0 and entry != head:
            return None
        if not isinstance(entry, dict) or not _is_there(directory, entry, len(parts)):
            break
        whole = whole or "whole" in entry
        if "part" in entry:
            parts.append(Counts(**entry["counts"]))
            first_bad = first_bad or entry["first_bad"]
        good += len(line)
    if good < len(content):
        whole = False
        with file.open("r+b") as stream:
            stream.truncate(good)
            os.fsync(stream.fileno())
    return Journal(directory, parts, whole=whole, first_bad=first_bad)


def _is_there(directory: Path, entry: dict[str, Any], number: int) -> bool:
    """Whether a line's part is as long as the line says; lines without one always are."""
    if "part" not in entry:
        return True
    path = directory / f"part-{number:06d}"
    return bool(
        entry["part"] == number and path.is_file() and path.stat().st_size == entry["bytes"]
    )


def _sync(directory: Path) -> None:
    """Flushes a directory, so that the names in it survive a loss of power."""
    if os.name == "nt":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
