"""The whole of the work between answered windows and their parts on the disk.

>>> windows = answerer.stream(reader, columns, skip=journal.counts.rows)
>>> write_parts(windows, columns, journal, config, kind="parquet")
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from enginery.core.errors import InputError
from enginery.core.progress import SILENT, Progress
from enginery.predict.answering import Answered
from enginery.predict.columns import AnswerColumns
from enginery.predict.config import PredictConfig
from enginery.predict.counts import Counts
from enginery.predict.journal import Journal
from enginery.predict.pace import Pace
from enginery.predict.writing import OutputFormat, PartWriter


def write_parts(
    windows: Iterator[Answered],
    columns: AnswerColumns,
    journal: Journal,
    config: PredictConfig,
    *,
    kind: OutputFormat,
    progress: Progress = SILENT,
) -> None:
    """Writes the rows that no finished part has, part after part, and says when that is all.

    Args:
        windows: answered, from the first row that no part has.
        columns: of the windows.
        journal: of the output.
        config: when a part ends.
        kind: of the output.
        progress: who is told.

    Raises:
        InputError: the input cannot be read to its end, or holds no rows; with `fail_fast`, the
            first bad row. The parts that are finished stay.
    """
    resumed = journal.counts.rows
    with progress.task("predicting", total=100) as advance:
        pace = Pace(progress, advance, resumed=resumed)

        def tell(rows: int, done: float) -> None:
            pace.tell(rows=rows - resumed, done=done)

        while _write_part(windows, columns, journal, config, kind, tell):
            pass
    if not journal.counts.rows:
        raise InputError("the input holds no rows.")
    journal.close_rows()


def _write_part(
    windows: Iterator[Answered], columns: AnswerColumns, journal: Journal, config: PredictConfig,
    kind: OutputFormat, tell: Callable[[int, float], None],
) -> bool:  # fmt: skip
    """Writes the next part; False where there was nothing left for one."""
    counts = Counts()
    first_bad = ""
    until = time.monotonic() + config.part_seconds
    with PartWriter(journal.path(len(journal.parts)), kind, columns.schema) as part:
        for window in windows:
            if window.first_bad:
                row, problem = window.first_bad
                first_bad = first_bad or f"row {row + 1}: {problem}"
                if config.fail_fast:
                    raise InputError(f"{first_bad}.", do="Leave out --fail-fast to go on.")
            part.write(window.batch)
            counts += window.counts
            tell(journal.counts.rows + counts.rows, window.done)
            if counts.rows >= config.part_rows or time.monotonic() > until:
                break
    if not counts.rows:
        return False
    journal.add(counts, first_bad=first_bad)
    return True
