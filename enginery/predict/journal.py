"""Finished parts of an unfinished output, and a journal with one line per part.

They are in `OUTPUT.parts/` beside the output, as `part-000000`, `part-000001`, … and
`journal.jsonl`, until the output is complete.

>>> fingerprint = Fingerprint("predict", {"input": "reviews.csv"})
>>> journal = Journal.open(tmp_path / "out.parquet", fingerprint, schema="text: string")
>>> journal.counts.rows, journal.has_all_rows
(0, False)

A part is synced to the disk before its line is written. A line ends with a digest of itself and of
the lines before it, and counts if that fits and its part has the recorded hash. A killed run is
resumed after the last such line; later rows are predicted again. A lock beside the output prevents
two runs from writing it, wherever their ENGINERY_HOMEs are.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from enginery.core.artifact.fingerprint import Fingerprint
from enginery.core.artifact.inputs import InputFiles
from enginery.core.errors import InputError
from enginery.core.home import enginery_home
from enginery.core.json_file import read_document
from enginery.core.paths import list_directory
from enginery.core.scratch import final_name, locked, make_directory, sync, write_atomically
from enginery.core.scratch import remove_leftovers as remove_beside
from enginery.predict.batch_predictor import PredictedBatch
from enginery.predict.columns import OutputColumns
from enginery.predict.config import PredictConfig
from enginery.predict.report import Counts, sidecar
from enginery.predict.writer import Assembly, FinishedPart, PartWriter, file_sha256

_JOURNAL = "journal.jsonl"
_PART = "part-"
_PART_NAME = re.compile(r"part-\d{6,}")
_NOTE_NAME = re.compile(r"[0-9a-f]{16}")
_FORMAT = 2
_DIGEST_KEY, _DIGEST_DIGITS = b', "digest": "', 16
_LINE_END = b'"}\n'
_MAX_LINE_BYTES = 1 << 20
_CHECKED_FILES = 50_000
"""Largest number of input files that are looked at after each part; of a table of more pictures the
others are looked at once, at the end."""


@contextmanager
def lock_output(output: Path) -> Iterator[None]:
    """Lock the output for this run; raise InputError if another process has locked it.

    While there are parts, a note in the store has the output's path, for `remove_leftovers`.
    """
    note = _notes() / _output_id(output)
    with ExitStack() as stack:
        try:
            if os.access(output.resolve().parent, os.W_OK):  # else it may be up to date
                stack.enter_context(locked(output))
        except TimeoutError:
            raise InputError(
                f"output '{output}' is being written by another process.",
                do="Wait for it, or choose another --out.",
            ) from None
        remove_beside(output.parent, output.name)  # an output that is up to date is not written
        try:
            with suppress(OSError):  # without it, only `store prune` does not find the parts
                make_directory(note.parent)
                write_atomically(note, os.fsencode(output.resolve()))
            yield
        finally:
            if not parts_directory(output).exists():
                with suppress(OSError):  # the next run removes it
                    note.unlink()


def remove_leftovers(on_removed: Callable[[Path], object] = lambda _: None) -> int:
    """Remove the temporary files of killed runs of any output; return their size in bytes.

    Finished parts stay, so that the same command can resume, and so do the files of runs that
    still write.

    Args:
        on_removed: called with each removed file.
    """
    freed, notes = 0, _notes()
    names = {final_name(path) for path in list_directory(notes)} if not notes.is_symlink() else ()
    for note in [notes / name for name in names if _NOTE_NAME.fullmatch(name)]:
        freed += remove_beside(notes, note.name, on_removed)
        with suppress(OSError):  # of a run that has just ended, or of another user
            output = Path(os.fsdecode(read_document(note).replace(b"\0", b"")))
            if _output_id(output) != note.name:  # it was damaged
                note.unlink()
                on_removed(note)
                continue
            with suppress(TimeoutError), locked(output):
                freed += _clear(output, on_removed)
                for name in (output.name, sidecar(output).name):
                    freed += remove_beside(output.parent, name, on_removed)
                if not parts_directory(output).exists():
                    note.unlink(missing_ok=True)
    return freed


def _clear(output: Path, on_removed: Callable[[Path], object]) -> int:
    """Remove all but the finished parts of an output; return the removed size in bytes."""
    freed = 0
    directory = parts_directory(output)
    finished_files = set() if _is_delivered(output) else _resumable_files(directory)
    for path in list_directory(directory):
        if _is_own(path) and path.name not in finished_files and path.is_file():
            freed += path.stat().st_size
            path.unlink()
            on_removed(path)
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

    def __init__(self, directory: Path, inputs: InputFiles) -> None:
        self.directory = directory
        self.parts: list[FinishedPart] = []
        """The finished parts, in order."""
        self.counts = Counts()
        """Totals of all finished parts."""
        self.has_all_rows = False
        """True if the parts have all rows and only need to be assembled."""
        self.first_bad = ""
        """The first bad row and its problem; empty if there is none."""
        self.notes: list[str] = []
        """What the user should know about the parts of an earlier run."""
        self._inputs = inputs
        self._digest = ""
        """Digest of the last line."""

    @classmethod
    def open(cls, output: Path, fingerprint: Fingerprint, schema: str) -> Journal:
        """Open the journal from an earlier run with the same inputs, or start a new one.

        Args:
            output: path of the output.
            fingerprint: fingerprint of the output; parts with another one are removed, which a
                note says.
            schema: schema of the parts, as text; parts with another one are removed, too.

        Raises:
            InputError: the directory cannot be written, or has files that predict does not write.
        """
        directory = parts_directory(output)
        _check_untracked_files(directory)
        head = {
            "format": _FORMAT,
            "key": fingerprint.key,
            "schema": schema,
            "parts": "arrow",
            "fields": fingerprint.fields,
        }
        journal = cls(directory, fingerprint.inputs)
        try:
            lines = _lines(directory)
            if lines and lines[0].entry == head:
                journal._resume(lines)
                return journal
            make_directory(directory)
            own_files = [path for path in list_directory(directory) if _is_own(path)]
            if any(path.name.startswith(_PART) for path in own_files):
                reason = _why_removed(directory, lines, fingerprint)
                journal.notes.append(
                    f"{directory.name}: parts of an earlier run are removed, because {reason}"
                )
            for path in own_files:
                path.unlink()
            journal._append(head)
        except OSError as error:
            raise InputError(f"output '{output}' cannot be written: {error.strerror}.") from error
        return journal

    def _resume(self, lines: list[_Line]) -> None:
        """Take the parts of the lines, and cut the journal after its last valid line."""
        valid = lines[0]
        for line in lines[1:]:
            entry, number = line.entry, len(self.parts)
            if "part" in entry:
                if problem := _find_damage(self.directory, entry, number):
                    self._note_damage(problem)
                    break
                counts = Counts(**entry["counts"])
                part = FinishedPart(self.directory / _name(number), entry["sha256"], counts.rows)
                self._add(part, counts, entry["first_bad"])
            self.has_all_rows = "whole" in entry
            valid = line
        self._digest = valid.digest
        file = self.directory / _JOURNAL
        if valid is lines[-1] and _has_full_line(file, valid.end):
            self._note_damage(f"{_JOURNAL} is damaged in line {len(lines) + 1}")
        with file.open("r+b") as stream:
            stream.truncate(valid.end)
            os.fsync(stream.fileno())

    def _note_damage(self, problem: str) -> None:
        self.notes.append(
            f"{self.directory.name} from an earlier run: {problem}; its rows are predicted again"
        )

    def _add(self, part: FinishedPart, counts: Counts, first_bad: str) -> None:
        self.parts.append(part)
        self.counts += counts
        self.first_bad = self.first_bad or first_bad

    def write_parts(
        self,
        windows: Iterator[PredictedBatch],
        columns: OutputColumns,
        config: PredictConfig,
        assembly: Assembly,
        *,
        show: Callable[[float], object],
    ) -> None:
        """Write the remaining rows, part by part.

        While a part is synced to the disk, which may take as long as its rows took a GPU, a thread
        of its own does that and the next part is written.

        Args:
            windows: predicted windows, starting after the rows of the finished parts.
            columns: columns of the windows.
            config: the options, with the size of a part.
            assembly: joins the finished parts.
            show: is called after each window with the share of the input that is predicted.

        Raises:
            InputError: the input cannot be read to its end, or has no rows; with `fail_fast`, a
                row is bad. Finished parts stay.
        """
        finishing: deque[Future[FinishedPart]] = deque()
        with ThreadPoolExecutor(1, "enginery-finish-part") as finisher:
            number = len(self.parts)
            while (part := self._write_part(number, windows, columns, config, show)) is not None:
                finishing.append(finisher.submit(self._finish_part, part))
                number += 1
                while len(finishing) > 1:
                    assembly.add(finishing.popleft().result())
            for future in finishing:
                assembly.add(future.result())
        if not self.parts:
            raise InputError("the input has no rows.")
        self._append({"whole": True})
        self.has_all_rows = True

    def _write_part(
        self,
        number: int,
        windows: Iterator[PredictedBatch],
        columns: OutputColumns,
        config: PredictConfig,
        show: Callable[[float], object],
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

    def _finish_part(self, part: _WrittenPart) -> FinishedPart:
        """Sync a part to the disk, and add it to the journal; return it.

        Raises:
            OSError: it cannot be written, or the part before it could not.
            InputError: an input has changed, so that the part may not be of what the key says.
        """
        part.writer.close()
        if part.number != len(self.parts):  # the journal has no gaps
            raise OSError(f"part {part.number} follows one that could not be written")
        self._inputs.check(first=_CHECKED_FILES)
        sync(self.directory)
        finished = FinishedPart.of(self.directory / _name(part.number), part.counts.rows)
        entry = {"part": part.number, "sha256": finished.sha256, "first_bad": part.first_bad}
        self._append({**entry, "counts": asdict(part.counts)})
        self._add(finished, part.counts, part.first_bad)
        return finished

    def _append(self, entry: dict[str, Any]) -> None:
        content = json.dumps(entry).encode()[:-1]
        digest = _line_digest(self._digest, content)
        with (self.directory / _JOURNAL).open("ab") as stream:
            stream.write(content + _DIGEST_KEY + digest.encode() + _LINE_END)
            stream.flush()
            os.fsync(stream.fileno())
        self._digest = digest


def parts_directory(output: Path) -> Path:
    """Return the directory of an output's parts: `out.parquet.parts` for `out.parquet`."""
    return output.with_name(f"{output.name}.parts")


def other_files(folder: Path, output: Path) -> Callable[[str], bool]:
    """Return a function that is False for what belongs to the output in a folder.

    That is the output itself, its report, its parts and its temporary files. The function takes
    the path of a file below the folder.
    """
    target, root = Path(os.path.realpath(output)), Path(os.path.realpath(folder))
    if not target.is_relative_to(root):
        return lambda _: True
    above = target.relative_to(root).parts[:-1]
    own_names = (target.name, sidecar(target).name, parts_directory(target).name)

    def is_other(name: str) -> bool:
        parts = Path(name).parts
        if parts[: len(above)] != above or len(parts) == len(above):
            return True
        first = Path(parts[len(above)])
        return first.name not in own_names and final_name(first) not in own_names

    return is_other


def remove_parts(output: Path) -> None:
    """Remove the parts of an assembled output; what cannot be removed is left to the next run."""
    directory = parts_directory(output)
    journal = directory / _JOURNAL
    with suppress(OSError):
        if journal.is_file():
            for path in directory.iterdir():
                if path != journal and _is_own(path):
                    path.unlink()
            sync(directory)  # parts without a journal would be taken for foreign files
            journal.unlink()
        directory.rmdir()


def is_complete(output: Path, fingerprint: Fingerprint) -> bool:
    """Return True if the parts of a run with this fingerprint have all rows."""
    entries = [line.entry for line in _lines(parts_directory(output))]
    return bool(entries) and entries[0]["key"] == fingerprint.key and "whole" in entries[-1]


def _why_removed(directory: Path, lines: list[_Line], fingerprint: Fingerprint) -> str:
    """Return why the parts of an earlier run cannot be used."""
    if lines:
        changes = fingerprint.changes(lines[0].entry["fields"])
        return (
            f"they were made from something else: {changes[0]}"
            if changes
            else ("they have other columns")
        )
    with suppress(OSError):
        first = (directory / _JOURNAL).read_bytes()[:_MAX_LINE_BYTES]
        if first.startswith(b'{"key": ') and _DIGEST_KEY not in first:
            return "another version of enginery wrote them"
    return f"{_JOURNAL} is missing or damaged in line 1"


def _check_untracked_files(directory: Path) -> None:
    """Raise InputError if the directory has files that predict does not write."""
    for path in list_directory(directory):
        if not _is_own(path):
            raise InputError(
                f"{directory} contains {path.name}, expected only parts from an earlier run.",
                do="Move it elsewhere, or choose another --out.",
            )


@dataclass(frozen=True)
class _Line:
    """A valid line of a journal."""

    entry: dict[str, Any]
    digest: str
    end: int
    """Position after it, in bytes."""


def _lines(directory: Path) -> list[_Line]:
    """Return the lines of a journal up to the first that is incomplete or was changed.

    The first one describes the run, the others the parts in their order, and the last one may say
    that the output is whole. A line that was removed or moved does not fit the digests after it.
    """
    lines: list[_Line] = []
    digest, end = "", 0
    with suppress(OSError), (directory / _JOURNAL).open("rb") as stream:
        while line := stream.readline(_MAX_LINE_BYTES):
            content, _, remainder = line.rpartition(_DIGEST_KEY)
            digest = _line_digest(digest, content)
            if remainder != digest.encode() + _LINE_END:
                break
            entry = json.loads(content + b"}")
            if not lines and entry.get("format") != _FORMAT:
                break
            end += len(line)
            lines.append(_Line(entry, digest, end))
    return lines


def _line_digest(before: str, content: bytes) -> str:
    """Return the digest of a line without its end, after the digest of the line before it."""
    return hashlib.sha256(before.encode() + content).hexdigest()[:_DIGEST_DIGITS]


def _has_full_line(file: Path, start: int) -> bool:
    """Return True if a line ends after a position; a killed run leaves a part of one."""
    with file.open("rb") as stream:
        stream.seek(start)
        return b"\n" in stream.read(_MAX_LINE_BYTES)


def _find_damage(directory: Path, line: dict[str, Any], number: int) -> str:
    """Return the problem of the part that a line of the journal describes; empty if none."""
    path = directory / _name(number)
    if not path.is_file():
        return f"{path.name} is missing"
    return "" if file_sha256(path) == line["sha256"] else f"{path.name} was changed since"


def _resumable_files(directory: Path) -> set[str]:
    """Return the names of the journal and its parts; nothing if no part is finished."""
    entries = [line.entry for line in _lines(directory)]
    part_names = {_name(entry["part"]) for entry in entries if "part" in entry}
    return {_JOURNAL, *part_names} if part_names else set()


def _is_delivered(output: Path) -> bool:
    """Return True if the output has been assembled from these parts and has its report."""
    with suppress(OSError, ValueError, IndexError, KeyError, TypeError):
        report = json.loads(sidecar(output).read_bytes())
        return output.is_file() and report["key"] == _lines(parts_directory(output))[0].entry["key"]
    return False


def _is_own(path: Path) -> bool:
    """Return True for a file in a directory of parts that has a name as predict gives it."""
    return path.name == _JOURNAL or _PART_NAME.fullmatch(path.name) is not None


def _name(number: int) -> str:
    return f"{_PART}{number:06d}"


def _notes() -> Path:
    """Return the directory of the store with the paths of outputs that have parts."""
    return enginery_home() / "predict"


def _output_id(output: Path) -> str:
    return hashlib.sha256(os.fsencode(output.resolve())).hexdigest()[:16]
