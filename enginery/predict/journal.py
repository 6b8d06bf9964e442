"""Finished parts of an unfinished output, and a journal with one line per part.

They are in `OUTPUT.parts/` beside the output, as `part-000000`, `part-000001`, … and
`journal.jsonl`, until the output is complete. All temporary files of a run are in that directory.

>>> fingerprint = Fingerprint("predict", {"input": "reviews.csv"})
>>> journal = Journal.open(tmp_path / "out.parquet", fingerprint, schema="text: string")
>>> journal.counts.rows, journal.has_all_rows
(0, False)

A part is synced to the disk before its line is written. A line counts if it is complete and its
part has the recorded hash. A killed run is resumed after the last such line; later rows are
predicted again. A file lock prevents two runs from writing the same output.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from enginery.core.artifact.fingerprint import Fingerprint
from enginery.core.durable import make_directory, replace_synced, sync_directory
from enginery.core.errors import InputError
from enginery.core.home import enginery_home, file_lock
from enginery.core.json_file import json_bytes, read_document
from enginery.core.paths import list_directory, list_prefixed
from enginery.core.progress import SILENT, Progress
from enginery.core.temporary import remove_leftovers as remove_temporary
from enginery.core.temporary import write_atomically
from enginery.predict.batch_predictor import PredictedBatch
from enginery.predict.columns import OutputColumns
from enginery.predict.config import PredictConfig
from enginery.predict.report import Counts, PredictReport, sidecar
from enginery.predict.writer import ASSEMBLED, Assembly, PartWriter, file_sha256

_JOURNAL = "journal.jsonl"
_PART = "part-"
STDIN_COPY = "stdin"
_REPORT = "report.json"
_KNOWN_FILES = (_JOURNAL, STDIN_COPY, _REPORT, ASSEMBLED)
_LOG_INTERVAL_SECONDS = 10.0


@contextmanager
def lock_output(output: Path) -> Iterator[None]:
    """Lock the output for this run; raise InputError if another process has locked it.

    While there are parts, a note in the store has the output's path, for `remove_leftovers`.
    """
    lock = _lock(output)
    try:
        lock.acquire()
    except Timeout:
        raise InputError(
            f"output '{output}' is being written by another process.",
            do="Wait for it, or choose another --out.",
        ) from None
    note = _notes() / _output_id(output)
    try:
        make_directory(note.parent)
        write_atomically(note, os.fsencode(output.resolve()))
        yield
    finally:
        if not parts_directory(output).exists():
            with suppress(OSError):  # the next run removes it
                note.unlink()
        lock.release()


def remove_leftovers() -> int:
    """Remove the temporary files of killed runs of any output; return their size in bytes.

    Finished parts stay, so that the same command can resume, and so do the files of runs that
    still write.
    """
    freed = remove_temporary(_notes())
    for note in list_directory(_notes()):
        with suppress(OSError):  # of a run that has just ended, or of another user
            output = Path(os.fsdecode(read_document(note).replace(b"\0", b"")))
            if _output_id(output) != note.name:  # it was damaged
                note.unlink()
                continue
            with suppress(Timeout), _lock(output):
                freed += _clear(output) + remove_temporary(output.parent, output.name)
                if not parts_directory(output).exists():
                    note.unlink(missing_ok=True)
    return freed


def _clear(output: Path) -> int:
    """Remove all but the finished parts of an output; return the removed size in bytes."""
    freed = 0
    directory = parts_directory(output)
    finished_files = set() if _is_delivered(output) else _resumable_files(directory)
    for path in list_directory(directory):
        ours = path.name in _KNOWN_FILES or path.name.startswith(_PART)
        if ours and path.name not in finished_files and path.is_file():
            freed += path.stat().st_size
            path.unlink()
    with suppress(OSError):  # it is not empty, or not there
        directory.rmdir()
    return freed


@dataclass(frozen=True)
class _WrittenPart:
    """A part with all of its rows, which is not synced to the disk yet."""

    number: int
    writer: PartWriter
    counts: Counts
    first_bad: str
    """The first bad row and its problem; empty if there is none."""


class Journal:
    """The finished parts of an output."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.parts: list[Counts] = []
        """Counts of each finished part."""
        self.has_all_rows = False
        """True if the parts have all rows and only need to be assembled."""
        self.first_bad = ""
        """The first bad row and its problem; empty if there is none."""
        self.damage = ""
        """The part from an earlier run that cannot be used, and the reason; empty if all can."""

    @classmethod
    def open(cls, output: Path, fingerprint: Fingerprint, schema: str) -> Journal:
        """Open the journal from an earlier run with the same inputs, or start a new one.

        Args:
            output: path of the output.
            fingerprint: fingerprint of the output; parts with another one are removed.
            schema: schema of the parts, as text; parts with another one are removed.

        Raises:
            InputError: the directory cannot be written, or has files that predict does not write.
        """
        directory = parts_directory(output)
        _check_untracked_files(directory)
        head = {"key": fingerprint.key, "schema": schema, "parts": "arrow"}
        try:
            resumed = _read(directory, head)
            if resumed is not None:
                return resumed
            make_directory(directory)
            for path in [directory / _JOURNAL, *list_prefixed(directory, _PART)]:
                path.unlink(missing_ok=True)
            journal = cls(directory)
            journal._append(head)
        except OSError as error:
            raise InputError(f"output '{output}' cannot be written: {error.strerror}.") from error
        return journal

    @property
    def counts(self) -> Counts:
        """Totals of all finished parts."""
        return sum(self.parts, Counts())

    def paths(self) -> list[Path]:
        """Return all finished parts, in order."""
        return [self.directory / _name(number) for number in range(len(self.parts))]

    def write_parts(
        self,
        windows: Iterator[PredictedBatch],
        columns: OutputColumns,
        config: PredictConfig,
        assembly: Assembly,
        *,
        progress: Progress = SILENT,
    ) -> None:
        """Write the remaining rows, part by part.

        While a part is synced to the disk, which may take as long as its rows took a GPU, a thread
        of its own does that and the next part is written.

        Args:
            windows: predicted windows, starting after the rows of the finished parts.
            columns: columns of the windows.
            config: the options, with the size of a part.
            assembly: joins the finished parts.
            progress: receives progress messages.

        Raises:
            InputError: the input cannot be read to its end, or has no rows; with `fail_fast`, a
                row is bad. Finished parts stay.
        """
        steps, share_done, last_message_at = 0, 0.0, time.monotonic()
        finishing: deque[Future[Path]] = deque()
        with (
            progress.task("predicting", total=100) as advance,
            ThreadPoolExecutor(1, "enginery-finish-part") as finisher,
        ):

            def show(share: float) -> None:
                nonlocal steps, share_done
                share_done = share
                while steps < int(share_done * 100):
                    advance()
                    steps += 1

            number = len(self.parts)
            while (part := self._write_part(number, windows, columns, config, show)) is not None:
                finishing.append(finisher.submit(self._finish_part, part))
                number += 1
                while len(finishing) > 1:
                    assembly.add(finishing.popleft().result())
                if time.monotonic() - last_message_at > _LOG_INTERVAL_SECONDS:
                    last_message_at = time.monotonic()
                    progress.say(
                        f"predict: {self.counts.rows:,} rows, {share_done:.0%} of the input"
                    )
            for future in finishing:
                assembly.add(future.result())
        if not self.parts:
            raise InputError("the input has no rows.")
        self._append({"whole": True})
        self.has_all_rows = True

    def write_report(self, report: PredictReport) -> None:
        """Write the report of the finished output, atomically."""
        fresh = self.directory / _REPORT
        with fresh.open("wb") as stream:
            stream.write(json_bytes(report.as_json()))
            stream.flush()
            os.fsync(stream.fileno())
        replace_synced(fresh, sidecar(Path(report.output)))  # before the parts are removed

    def _write_part(
        self,
        number: int,
        windows: Iterator[PredictedBatch],
        columns: OutputColumns,
        config: PredictConfig,
        show: Callable[[float], None],
    ) -> _WrittenPart | None:
        """Write the rows of the next part; return None if there were no rows left."""
        counts, first_bad = Counts(), ""
        until = time.monotonic() + config.part_seconds
        with ExitStack() as stack:
            writer = stack.enter_context(PartWriter(self.directory / _name(number), columns.schema))
            for window in windows:
                if window.first_bad:
                    row, problem = window.first_bad
                    first_bad = first_bad or f"row {row + 1}: {problem}"
                    if config.fail_fast:
                        raise InputError(
                            f"{first_bad}.", do="Leave out --fail-fast to skip bad rows."
                        )
                writer.write(window.batch)
                counts += window.counts
                show(window.done)
                if counts.rows >= config.part_rows or time.monotonic() > until:
                    break
            if counts.rows:
                stack.pop_all()  # `_finish_part` closes it
                return _WrittenPart(number, writer, counts, first_bad)
        return None

    def _finish_part(self, part: _WrittenPart) -> Path:
        """Sync a part to the disk, and add it to the journal; return its path.

        Raises:
            OSError: it cannot be written, or the part before it could not.
        """
        part.writer.close()
        if part.number != len(self.parts):  # the journal has no gaps
            raise OSError(f"part {part.number} follows one that could not be written")
        sync_directory(self.directory)
        path = self.directory / _name(part.number)
        entry = {"part": part.number, "sha256": file_sha256(path), "first_bad": part.first_bad}
        self._append({**entry, "counts": asdict(part.counts)})
        self.parts.append(part.counts)
        self.first_bad = self.first_bad or part.first_bad
        return path

    def _append(self, line: dict[str, Any]) -> None:
        with (self.directory / _JOURNAL).open("ab") as stream:
            stream.write(json.dumps(line).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())


def parts_directory(output: Path) -> Path:
    """Return the directory of an output's parts: `out.parquet.parts` for `out.parquet`."""
    return output.with_name(f"{output.name}.parts")


def remove_parts(output: Path) -> None:
    """Remove the parts of an assembled output; what cannot be removed is left to the next run."""
    directory = parts_directory(output)
    journal = directory / _JOURNAL
    with suppress(OSError):
        if journal.is_file():
            for path in directory.iterdir():
                if path != journal:
                    path.unlink()
            sync_directory(directory)  # parts without a journal would be taken for foreign files
            journal.unlink()
        directory.rmdir()


def is_complete(output: Path, fingerprint: Fingerprint) -> bool:
    """Return True if the parts of a run with this fingerprint have all rows."""
    lines = _lines(parts_directory(output))
    return lines[:1] != [] and lines[0].get("key") == fingerprint.key and {"whole": True} in lines


def _read(directory: Path, head: dict[str, Any]) -> Journal | None:
    """Return the journal with this head, cut after its last valid line; None if there is none."""
    lines = _lines(directory)
    if not lines or lines[0] != head:
        return None
    journal = Journal(directory)
    valid_lines = 1
    for line in lines[1:]:
        if "part" in line:
            journal.damage = _find_damage(directory, line, len(journal.parts))
            if journal.damage:
                break
            journal.parts.append(Counts(**line["counts"]))
            journal.first_bad = journal.first_bad or line["first_bad"]
        journal.has_all_rows = "whole" in line
        valid_lines += 1
    file = directory / _JOURNAL
    with file.open("r+b") as stream:
        for _ in range(valid_lines):
            stream.readline()
        stream.truncate(stream.tell())
        os.fsync(stream.fileno())
    return journal


def _check_untracked_files(directory: Path) -> None:
    """Raise InputError if the directory has files that predict does not write."""
    for path in list_directory(directory):
        if path.name not in _KNOWN_FILES and not path.name.startswith(_PART):
            raise InputError(
                f"{directory} contains {path.name}, expected only parts from an earlier run.",
                do="Move it elsewhere, or choose another --out.",
            )


def _lines(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of a journal up to the first incomplete one."""
    entries: list[dict[str, Any]] = []
    with suppress(OSError, ValueError), (directory / _JOURNAL).open("rb") as stream:
        for line in stream:
            entry = json.loads(line) if line.endswith(b"\n") else None
            if not isinstance(entry, dict):
                break
            entries.append(entry)
    return entries


def _find_damage(directory: Path, line: dict[str, Any], number: int) -> str:
    """Return the problem of the part that a line of the journal describes; empty if none."""
    path = directory / _name(number)
    if line["part"] != number or not path.is_file():
        return f"{path.name} is missing"
    return "" if file_sha256(path) == line["sha256"] else f"{path.name} was changed since"


def _resumable_files(directory: Path) -> set[str]:
    """Return the names of the journal and its parts; nothing if no part is finished."""
    part_names = {_name(line["part"]) for line in _lines(directory) if "part" in line}
    return {_JOURNAL, *part_names} if part_names else set()


def _is_delivered(output: Path) -> bool:
    """Return True if the output has been assembled from these parts and has its report."""
    with suppress(OSError, ValueError, IndexError, KeyError, TypeError):
        report = json.loads(sidecar(output).read_bytes())
        return output.is_file() and report["key"] == _lines(parts_directory(output))[0]["key"]
    return False


def _name(number: int) -> str:
    return f"{_PART}{number:06d}"


def _notes() -> Path:
    """Return the directory of the store with the paths of outputs that have parts."""
    return enginery_home() / "predict"


def _output_id(output: Path) -> str:
    return hashlib.sha256(os.fsencode(output.resolve())).hexdigest()[:16]


def _lock(output: Path) -> FileLock:
    return file_lock(f"predict-{_output_id(output)}", timeout_seconds=0)
