"""The whole of the work between an open input and its parts on the disk.

    >>> write_parts(answerer, reader, columns, journal, config, kind="parquet")

Two windows are on their way at a time: while the batches of one run, the other is tokenized or its
answers are written. For images, whose preparation takes longer than a thread's run, there is a
window for each worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from enginery.core.errors import InputError
from enginery.core.progress import SILENT, Progress
from enginery.predict.answering import Answered, Answerer
from enginery.predict.columns import AnswerColumns
from enginery.predict.config import PredictConfig
from enginery.predict.counts import Counts
from enginery.predict.journal import Journal
from enginery.predict.pace import Pace
from enginery.predict.rows import Reader
from enginery.predict.workers import in_order
from enginery.predict.writing import OutputFormat, PartWriter

_TEXT_WINDOWS = 2


def write_parts(
    answerer: Answerer,
    reader: Reader,
    columns: AnswerColumns,
    journal: Journal,
    config: PredictConfig,
    *,
    kind: OutputFormat,
    progress: Progress = SILENT,
) -> None:
    """Answers the rows that no finished part has, part after part, and says when that is all.

    Raises:
        InputError: the input cannot be read to its end, or holds no rows; with `fail_fast`, the
            first bad row. The parts that are finished stay.
    """
    resumed = journal.counts.rows
    threads = answerer.workers if answerer.takes_images else _TEXT_WINDOWS
    answered = in_order(partial(answerer, columns=columns), reader.read(resumed), threads=threads)
    with progress.task("predicting", total=100) as advance:
        pace = Pace(progress, advance, done=reader.done())
        tell = partial(_tell, pace, reader, resumed)
        while _write_part(answered, columns, journal, config, kind, tell):
            pass
    if not journal.counts.rows:
        raise InputError("the input holds no rows.")
    journal.close_rows()


def _tell(pace: Pace, reader: Reader, resumed: int, rows: int) -> None:
    pace.tell(rows=rows - resumed, done=reader.done())


def _write_part(
    answered: Iterator[Answered], columns: AnswerColumns, journal: Journal, config: PredictConfig,
    kind: OutputFormat, tell: Callable[[int], None],
) -> bool:  # fmt: skip
    """Writes the next part; False where there was nothing left for one."""
    counts = Counts()
    first_bad = ""
    until = time.monotonic() + config.part_seconds
    with PartWriter(journal.path(len(journal.parts)), kind, columns.schema) as part:
        for window in answered:
            if window.first_bad:
                row, problem = window.first_bad
                first_bad = first_bad or f"row {row + 1}: {problem}"
                if config.fail_fast:
                    raise InputError(f"{first_bad}.", do="Leave out --fail-fast to go on.")
            part.write(window.batch)
            counts += window.counts
            tell(journal.counts.rows + counts.rows)
            if counts.rows >= config.part_rows or time.monotonic() > until:
                break
    if not counts.rows:
        return False
    journal.add(counts, first_bad=first_bad)
    return True
