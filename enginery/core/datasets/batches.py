"""Rows on their way from a file to the model: what is kept of them, and what the model is asked.

    >>> for piece in reader.read(skip=0):
    ...     piece.kept.num_rows, piece.values[0]
    (1024, ('The engine is warm.',))

A piece is bounded by rows and by bytes, so that memory does not follow the file, nor its longest
cell times the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Protocol, TypeVar

from enginery.core.errors import InputError

PIECE_BYTES = 4 << 20
"""A piece ends after the row that reaches this."""
CELL_BYTES = 64 << 20
"""The longest line or cell that is read. A longer one is a missing line break or quotation mark."""

RAW_LINE = "line"
"""The one column that is kept of JSONL which becomes JSONL: the line as it was."""

Values = tuple[Any, ...]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Piece:
    """Neighbouring rows of an input."""

    first: int
    """The number of its first row, from 0."""
    kept: Any
    """`pyarrow.RecordBatch` with all columns of the input."""
    values: list[Values]
    """What the columns that were asked for hold, one tuple a row."""
    errors: dict[int, str] = field(default_factory=dict)
    """Why a row of the piece cannot be used, where the reader saw it."""


class Reader(Protocol):
    """An input that is opened, its columns known."""

    schema: Any
    """`pyarrow.Schema` of what is kept."""
    names: list[str]
    """The input's own columns."""

    def read(self, skip: int) -> Iterator[Piece]:
        """The rows after the first `skip`, in order.

        Raises:
            InputError: the input cannot be read to its end; the message has the line or the row.
        """

    def done(self) -> float:
        """The share of the input that was read, 0 to 1."""


def pieces_of(rows: Iterable[tuple[int, Item]], most: int) -> Iterator[list[Item]]:
    """Lists of up to `most` rows, given each row's size in bytes."""
    piece: list[Item] = []
    size = 0
    for row_bytes, row in rows:
        piece.append(row)
        size += row_bytes
        if len(piece) >= most or size >= PIECE_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def lines_of(stream: IO[str], path: str) -> Iterator[str]:
    """The lines of a text stream, with their ends.

    Raises:
        InputError: a line is longer than any text.
    """
    number = 0
    try:
        while line := stream.readline(CELL_BYTES + 1):
            number += 1
            if len(line) > CELL_BYTES:
                raise InputError(
                    f"data '{path}': line {number} is longer than {CELL_BYTES >> 20} MiB.",
                    do="Is it a text file with line breaks?",
                )
            yield line
    except UnicodeError as error:  # of encodings that cannot go on after a bad byte
        raise InputError(f"data '{path}': line {number + 1}: {error}.") from error


def is_clean(text: str) -> bool:
    """Whether every byte of a text was a character of its encoding, and no half of a pair is left.

    Bad bytes are read as lone surrogates (PEP 383), which no text has.
    """
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(text: str) -> str:
    r"""A text with what is no character written out, `caf\xe9`, so that nothing is lost."""
    if is_clean(text):
        return text
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()


def require_names(names: Sequence[str], path: str) -> None:
    """Raises InputError for columns that could not be told apart in the output."""
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InputError(
                f"data '{path}' has two columns named '{name}'.", do="Rename one of them."
            )
