"""What goes to an OCI registry as it is read, and what its answers say; they are bounded.

>>> words(answer)
'blob unknown to registry'
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from enginery.core.errors import RegistryError

MAX_ANSWER_BYTES = 4 * 2**20
"""Of everything but a blob. The distribution specification wants registries to take manifests up to
this size, and lets them refuse larger ones."""


class Body:
    """A request's body that can be sent again, and whose length is known: no chunks, no copy."""

    def __init__(self, size_bytes: int, pieces: Callable[[], Iterator[bytes]]) -> None:
        self._size_bytes, self._pieces = size_bytes, pieces

    def __len__(self) -> int:
        return self._size_bytes

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces()


class _Bounded:
    """The body of an answer, as urllib3 has it, which ends with an error where it is too long."""

    def __init__(self, raw: Any, host: str) -> None:
        self._raw, self._host = raw, host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def stream(self, *args: Any, **options: Any) -> Iterator[bytes]:
        """Yield the decoded body in pieces; raise RegistryError beyond 4 MiB."""
        left = MAX_ANSWER_BYTES
        for piece in self._raw.stream(*args, **options):
            left -= len(piece)
            if left < 0:
                self._raw.close()
                raise RegistryError(
                    f"the registry {self._host} answers with more than {MAX_ANSWER_BYTES} bytes "
                    "where a manifest or a message was expected.",
                    do="Check the address; this registry cannot be used.",
                )
            yield piece


def bound_answer(answer: Any, *_args: Any, stream: bool = False, **_options: Any) -> Any:
    """Bound the body of an answer of requests, as its hook `response`; blobs are streamed.

    requests calls the hook for redirects and tokens too, before it reads anything of a body.
    """
    if not (stream and answer.status_code in (200, 206)):
        answer.raw = _Bounded(answer.raw, urlsplit(answer.url).netloc)
    return answer


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
