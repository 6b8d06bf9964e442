"""What goes to an OCI registry as it is read, and what its answers say.

>>> words(answer)
'blob unknown to registry'
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Body:
    """A request's body that can be sent again, and whose length is known: no chunks, no copy."""

    def __init__(self, size_bytes: int, pieces: Callable[[], Iterator[bytes]]) -> None:
        self._size_bytes, self._pieces = size_bytes, pieces

    def __len__(self) -> int:
        return self._size_bytes

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces()


def words(answer: Any) -> str:
    """The registry's own message: `errors[0].message` of the distribution specification."""
    try:
        first = answer.json()["errors"][0]
        said = str(first.get("message") or first.get("code") or "")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        said = ""
    return (said or str(answer.reason)).strip().rstrip(".") or "no reason"


def tail(reason: str) -> str:
    """`[Errno 111] Connection refused` of the client's own long sentence."""
    return reason.rpartition(": ")[2].strip(" .()'\"") or "no reason"
