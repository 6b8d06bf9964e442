"""Requests to the Hugging Face Hub that get no answer, whatever HTTP client huggingface_hub uses.

    with hub_requests():    # without a network it raises HubUnreachableError, an OSError
        HfApi().model_info("org/name")

huggingface_hub below 1 uses requests, 1 uses httpx and 2 httpx2. Their errors have no common class
but Exception, and only one of them is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class HubUnreachableError(OSError):
    """The Hub gives no answer; the message has its address and the reason."""


@contextmanager
def hub_requests() -> Iterator[None]:
    """Raise HubUnreachableError for a request of the block that gets no answer.

    Errors in an answer, and all others of huggingface_hub, stay what they are.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except HfHubHTTPError:
        raise
    except _client_errors() as error:
        if getattr(error, "response", None) is not None:
            raise
        raise HubUnreachableError(f"{constants.ENDPOINT}: {_reason(error)}") from error


def _client_errors() -> tuple[type[Exception], ...]:
    """Return the HTTP client's classes of errors.

    huggingface_hub's own error derives from the client's, which is how the client is found without
    importing it by name.
    """
    from huggingface_hub.errors import HfHubHTTPError

    kinds = [
        kind
        for kind in HfHubHTTPError.__mro__
        if kind.__module__.partition(".")[0] not in ("huggingface_hub", "builtins")
    ]
    client = sys.modules[kinds[0].__module__.partition(".")[0]]
    invalid_url = getattr(client, "InvalidURL", None)  # of httpx, and derives from no other there
    return (*kinds, *([invalid_url] if invalid_url else []))


def _reason(error: BaseException) -> str:
    """Return the reason in the operating system's words, which clients wrap several times."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    text = getattr(error, "strerror", None) or str(error)
    return next(iter(text.splitlines()), type(error).__name__).rstrip(".")
