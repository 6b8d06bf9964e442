"""How fast a run goes and how long it has to go, for whoever watches.

>>> pace = Pace(progress, started)
>>> pace.tell(rows=20480, done=0.4)
predict: 20,480 rows, 455.1 a second, 40 %, 1 min 7 s left
"""

from __future__ import annotations

import time
from collections.abc import Callable

from enginery.core.progress import Progress

_EVERY_SECONDS = 10.0


class Pace:
    """Tells at intervals; the share that is done moves a bar of 100 steps."""

    def __init__(
        self, progress: Progress, advance: Callable[[], None], *, resumed: int = 0
    ) -> None:
        """Starts the clock.

        Args:
            progress: who is told.
            advance: moves the bar by one.
            resumed: rows that an earlier run had finished.
        """
        self._progress, self._advance, self._resumed = progress, advance, resumed
        self._started = self._told = time.monotonic()
        self._from, self._steps = 0.0, 0

    def tell(self, *, rows: int, done: float) -> None:
        """Moves the bar, and says a line if the last one is some time ago.

        Args:
            rows: how many this run has answered.
            done: the share of the input, 0 to 1, that is read.
        """
        if not self._steps and self._resumed:
            # What an earlier run had read is not known; its rows are, and so are those since.
            self._from = done * self._resumed / (self._resumed + rows)
        while self._steps < int(done * 100):
            self._advance()
            self._steps += 1
        now = time.monotonic()
        if now - self._told < _EVERY_SECONDS:
            return
        self._told = now
        self._progress.say(pace_line(rows, done, done - self._from, now - self._started))


def pace_line(rows: int, done: float, gained: float, seconds: float) -> str:
    """The line: what `rows` rows in so many seconds, and `gained` of the whole by them, mean."""
    left = f", {duration(seconds * (1 - done) / gained)} left" if gained > 0 else ""
    return f"predict: {rows:,} rows, {rows / seconds:,.1f} a second, {done:.0%}{left}"


def duration(seconds: float) -> str:
    """`1 h 2 min`, `1 min 7 s`, `9 s`."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"
