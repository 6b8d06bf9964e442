"""What is finished of an output: parts, and a journal with a line for each.

Takes the path of an output; leaves `OUTPUT.parts/` beside it, with `part-000000`, `part-000001`, …
and `journal.jsonl`, until the output is whole. Everything temporary is in that directory.

    >>> journal = Journal.open(Path("out.parquet"), fingerprint, schema)
    >>> journal.counts.rows
    8192

A part is on the disk before its line is, and a line counts when it is whole and its part has the
hash that the line says: a run that was killed goes on after the last such line, and what it had
begun after that is written anew. A file lock keeps two runs from one output.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from enginery.core.artifact.fingerprint import Fingerprint
from enginery.core.errors import InputError
from enginery.core.home import enginery_home, file_lock
from enginery.core.json_file import json_bytes
from enginery.core.progress import SILENT, Progress
from enginery.predict.answering import Answered
from enginery.predict.columns import AnswerColumns
from enginery.predict.config import PredictConfig
from enginery.predict.report import Counts, PredictReport, sidecar
from enginery.predict.writing import ASSEMBLED, OutputFormat, PartWriter, file_sha256

_JOURNAL = "journal.jsonl"
_PART = "part-"
STDIN_COPY = "stdin"
_REPORT = "report.json"
_OURS = (_JOURNAL, STDIN_COPY, _REPORT, ASSEMBLED)
_SAY_SECONDS = 10.0


@contextmanager
def only_run(output: Path) -> Iterator[None]:
    """Hold the output for one run; raise InputError where another process has it.

    While there are parts, a note in the store says where, for `remove_leftovers`.
    """
    lock = _lock(output)
    try:
        lock.acquire()
    except Timeout:
        raise InputError(
            f"output '{output}' is being written by another process.",
            do="Wait for it, or name another --output.",
        ) from None
    note = _notes() / _place(output)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_bytes(os.fsencode(output.resolve()))
        yield
    finally:
        if not parts_directory(output).exists():
            note.unlink(missing_ok=True)
        lock.release()


def remove_leftovers() -> int:
    """Remove what killed runs left of any output and no run goes on from; return its bytes.

    Finished parts stay, from which the same command goes on, and so does what a run is writing.
    """
    freed = 0
    for note in _notes().iterdir() if _notes().is_dir() else ():
        with suppress(FileNotFoundError):  # of a run that has just ended
            # Empty where a run was killed while it wrote the note, before it had anything else.
            output = Path(os.fsdecode(note.read_bytes()) or note)
            with suppress(Timeout), _lock(output):
                freed += _clear(output)
                if not parts_directory(output).exists():
                    note.unlink(missing_ok=True)
    return freed


def _clear(output: Path) -> int:
    """Remove what is of no use beside the finished parts of an output; return its bytes."""
    freed = 0
    directory = parts_directory(output)
    kept = set() if _is_delivered(output) else _resumable(directory)
    for path in directory.iterdir() if directory.is_dir() else ():
        ours = path.name in _OURS or path.name.startswith(_PART)
        if ours and path.name not in kept and path.is_file():
            freed += path.stat().st_size
            path.unlink()
    with suppress(OSError):  # it is not empty, or not there
        directory.rmdir()
    return freed


class Journal:
    """The parts of one output, and how far they go."""

    def __init__(
        self,
        directory: Path,
        parts: list[Counts],
        *,
        whole: bool = False,
        first_bad: str = "",
        damage: str = "",
    ) -> None:
        self.directory = directory
        self.parts = parts
        self.whole = whole
        """All rows are in the parts; they only have to be put together."""
        self.first_bad = first_bad
        """The first bad row of all and what is wrong with it."""
        self.damage = damage
        """Which part of an earlier run cannot be used, and why; empty where all can."""

    @classmethod
    def open(cls, output: Path, fingerprint: Fingerprint, schema: str) -> Journal:
        """Open the journal of an earlier run of the same, or begin a new one.

        Args:
            output: where the result goes.
            fingerprint: of the input, the artifact and the options; parts of another are removed.
            schema: of the parts, as text; likewise.

        Raises:
            InputError: the directory cannot be written, or is of something else.
        """
        directory = parts_directory(output)
        _require_ours(directory)
        head = {"key": fingerprint.key, "schema": schema}
        try:
            found = _read(directory, head)
            if found is not None:
                return found
            directory.mkdir(exist_ok=True)
            for path in [directory / _JOURNAL, *directory.glob(f"{_PART}*")]:
                path.unlink(missing_ok=True)
            journal = cls(directory, [])
            journal._append(head)
        except OSError as error:
            raise InputError(f"output '{output}' cannot be written: {error.strerror}.") from error
        return journal

    @property
    def counts(self) -> Counts:
        """Over all finished parts."""
        return sum(self.parts, Counts())

    def paths(self) -> list[Path]:
        """Return all finished parts, in order."""
        return [self.directory / _name(number) for number in range(len(self.parts))]

    def write_parts(
        self,
        windows: Iterator[Answered],
        columns: AnswerColumns,
        config: PredictConfig,
        *,
        kind: OutputFormat,
        progress: Progress = SILENT,
    ) -> None:
        """Write the rows that no finished part has, part after part.

        Args:
            windows: answered, from the first row that no part has.
            columns: of the windows.
            config: when a part ends.
            kind: of the output.
            progress: receives progress messages.

        Raises:
            InputError: the input cannot be read to its end, or holds no rows; with `fail_fast`,
                the first bad row. The parts that are finished stay.
        """
        steps, done, said = 0, 0.0, time.monotonic()
        with progress.task("predicting", total=100) as advance:

            def show(share: float) -> None:
                nonlocal steps, done
                done = share
                while steps < int(done * 100):
                    advance()
                    steps += 1

            while self._write_part(windows, columns, config, kind, show):
                if time.monotonic() - said > _SAY_SECONDS:
                    said = time.monotonic()
                    progress.say(f"predict: {self.counts.rows:,} rows, {done:.0%} of the input")
        if not self.parts:
            raise InputError("the input holds no rows.")
        self._append({"whole": True})
        self.whole = True

    def write_report(self, report: PredictReport) -> None:
        """Write the report of the finished output, beside the parts, and move it to its place."""
        fresh = self.directory / _REPORT
        with fresh.open("wb") as stream:
            stream.write(json_bytes(report.as_json()))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(fresh, sidecar(Path(report.output)))

    def _write_part(
        self,
        windows: Iterator[Answered],
        columns: AnswerColumns,
        config: PredictConfig,
        kind: OutputFormat,
        show: Callable[[float], None],
    ) -> bool:
        """Write the next part; return False where there were no rows left for one."""
        counts, first_bad = Counts(), ""
        until = time.monotonic() + config.part_seconds
        path = self.directory / _name(len(self.parts))
        with PartWriter(path, kind, columns.schema) as part:
            for window in windows:
                if window.first_bad:
                    row, problem = window.first_bad
                    first_bad = first_bad or f"row {row + 1}: {problem}"
                    if config.fail_fast:
                        raise InputError(f"{first_bad}.", do="Leave out --fail-fast to go on.")
                part.write(window.batch)
                counts += window.counts
                show(window.done)
                if counts.rows >= config.part_rows or time.monotonic() > until:
                    break
        if not counts.rows:
            return False
        _sync(self.directory)
        entry = {"part": len(self.parts), "sha256": file_sha256(path), "first_bad": first_bad}
        self._append({**entry, "counts": asdict(counts)})
        self.parts.append(counts)
        self.first_bad = self.first_bad or first_bad
        return True

    def _append(self, line: dict[str, Any]) -> None:
        with (self.directory / _JOURNAL).open("ab") as stream:
            stream.write(json.dumps(line).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())


def parts_directory(output: Path) -> Path:
    """Return `out.parquet.parts`, beside `out.parquet`."""
    return output.with_name(f"{output.name}.parts")


def remove_parts(output: Path) -> None:
    """Remove the parts of an output, which are in it now."""
    directory = parts_directory(output)
    if (directory / _JOURNAL).is_file():
        shutil.rmtree(directory, ignore_errors=True)


def is_whole(output: Path, fingerprint: Fingerprint) -> bool:
    """Return whether a run of the same had all its rows, and ended while it put them together."""
    lines = _lines(parts_directory(output))
    return lines[:1] != [] and lines[0].get("key") == fingerprint.key and {"whole": True} in lines


def _read(directory: Path, head: dict[str, Any]) -> Journal | None:
    """Return the journal of the same run, cut to what is whole; None where there is none."""
    lines = _lines(directory)
    if not lines or lines[0] != head:
        return None
    journal = Journal(directory, [])
    good = 1
    for line in lines[1:]:
        if "part" in line:
            journal.damage = _damage(directory, line, len(journal.parts))
            if journal.damage:
                break
            journal.parts.append(Counts(**line["counts"]))
            journal.first_bad = journal.first_bad or line["first_bad"]
        journal.whole = "whole" in line
        good += 1
    file = directory / _JOURNAL
    with file.open("r+b") as stream:
        for _ in range(good):
            stream.readline()
        stream.truncate(stream.tell())
        os.fsync(stream.fileno())
    return journal


def _require_ours(directory: Path) -> None:
    """Raise InputError for a directory with files that no run of predict writes."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name not in _OURS and not path.name.startswith(_PART):
            raise InputError(
                f"{directory} holds {path.name}, which is not of predict; expected nothing there, "
                "or parts of an earlier run.",
                do="Move it elsewhere, or name another --output.",
            )


def _lines(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of a journal up to the first one that is torn."""
    found: list[dict[str, Any]] = []
    with suppress(OSError, ValueError), (directory / _JOURNAL).open("rb") as stream:
        for line in stream:
            entry = json.loads(line) if line.endswith(b"\n") else None
            if not isinstance(entry, dict):
                break
            found.append(entry)
    return found


def _damage(directory: Path, line: dict[str, Any], number: int) -> str:
    """Say what is wrong with the part of a line of the journal."""
    path = directory / _name(number)
    if line["part"] != number or not path.is_file():
        return f"{path.name} is missing"
    return "" if file_sha256(path) == line["sha256"] else f"{path.name} was changed since"


def _resumable(directory: Path) -> set[str]:
    """Return the names of the journal and of its parts; of nothing where no part is finished."""
    parts = {_name(line["part"]) for line in _lines(directory) if "part" in line}
    return {_JOURNAL, *parts} if parts else set()


def _is_delivered(output: Path) -> bool:
    """Return whether the parts of an output are in it, and a run was killed before they went."""
    with suppress(OSError, ValueError, IndexError, KeyError, TypeError):
        report = json.loads(sidecar(output).read_bytes())
        return output.is_file() and report["key"] == _lines(parts_directory(output))[0]["key"]
    return False


def _name(number: int) -> str:
    return f"{_PART}{number:06d}"


def _notes() -> Path:
    """Where the store notes which outputs have parts."""
    return enginery_home() / "predict"


def _place(output: Path) -> str:
    return hashlib.sha256(os.fsencode(output.resolve())).hexdigest()[:16]


def _lock(output: Path) -> FileLock:
    return file_lock(f"predict-{_place(output)}", timeout_seconds=0)


def _sync(directory: Path) -> None:
    """Flush a directory, so that the names in it survive a loss of power."""
    if os.name == "nt":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
