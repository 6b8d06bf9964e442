"""The interface by which stages report progress and decisions.

>>> with SILENT.task("validating", total=12) as advance:
...     advance()

The command line passes an implementation that uses rich; from Python the default is `SILENT`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    """A receiver of progress and messages."""

    def task(self, name: str, total: int = 0) -> AbstractContextManager[Callable[[], None]]:
        """Start a task of `total` steps (0: unknown) and yield a function that marks one step."""

    def say(self, message: str) -> None:
        """Show one line: a decision and its reason, a cache hit or a warning."""


class Silent:
    """A Progress that shows nothing."""

    def __repr__(self) -> str:  # the default in signatures
        return "SILENT"

    @contextmanager
    def task(self, name: str, total: int = 0) -> Iterator[Callable[[], None]]:  # noqa: ARG002
        """Yield a function that does nothing."""
        yield lambda: None

    def say(self, message: str) -> None:
        """Show nothing."""


SILENT = Silent()
