"""How a stage tells whoever watches what it is doing, without knowing who that is.

    >>> with progress.task("validating", total=12) as advance:
    ...     advance()

The command line passes a rich implementation; Python callers get the silent one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    """What a stage may report."""

    def task(self, name: str, total: int = 0) -> AbstractContextManager[Callable[[], None]]:
        """Opens a task of `total` steps (0: unknown); what it yields marks one step."""

    def say(self, message: str) -> None:
        """One line of news: a decision and its reason, a cache hit, a warning."""


class Silent:
    """Reports nothing."""

    @contextmanager
    def task(self, name: str, total: int = 0) -> Iterator[Callable[[], None]]:  # noqa: ARG002
        """Yields a function that does nothing."""
        yield lambda: None

    def say(self, message: str) -> None:
        """Says nothing."""


SILENT = Silent()
