"""What huggingface_hub says when it fails, as one of our errors and without the token.

>>> with told("hf://org/name"):
...     api.model_info("org/name")
enginery.core.errors.RegistryError: hf://org/name: there is none, or it is private. Set HF_TOKEN …
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from enginery.core.errors import EngineryError, RegistryError


@contextmanager
def told(url: str) -> Iterator[None]:
    """The Hub's errors as one of ours, without the token."""
    try:
        yield
    except EngineryError:
        raise
    except (OSError, ValueError) as error:  # every error of the library's and of its client's
        # Not `from error`: what is chained may hold a request, and that the token.
        raise _refusal(url, error) from None


@contextmanager
def without_bars() -> Iterator[None]:
    """One display of progress, ours."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def first_line(error: Exception) -> str:
    """The part of the library's message that says something: it opens with request ids."""
    server = str(getattr(error, "server_message", None) or "")
    lines = [line.strip() for line in (server or str(error)).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


def _refusal(url: str, error: Exception) -> RegistryError:
    from huggingface_hub import errors, get_token

    status = getattr(getattr(error, "response", None), "status_code", 0)
    said = first_line(error)
    if token := get_token():
        said = said.replace(token, "***")
    login = "Set HF_TOKEN to a token that may write there, or log in with: hf auth login"
    if isinstance(error, errors.GatedRepoError):
        return RegistryError(f"{url}: its authors grant access on request.", do=login)
    if isinstance(error, errors.RevisionNotFoundError):
        return RegistryError(f"{url}: there is no such revision.", do="See its branches.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return RegistryError(f"{url}: there is none, or it is private.", do=login)
    if status in (401, 403):
        why = "the token may not do that" if token else "there is no token"
        return RegistryError(f"the Hub refuses {url} ({status}): {why}: {said}.", do=login)
    if status == 412:
        return RegistryError(f"{url} was changed meanwhile.", do="Publish again.")
    if status == 429:
        return RegistryError(f"the Hub refuses more requests for now: {said}.", do="Try later.")
    if status:
        return RegistryError(f"the Hub answers {status} for {url}: {said}.")
    return RegistryError(
        f"the Hub cannot be reached for {url}: {said}.",
        do="Check the network, HF_ENDPOINT and HF_HUB_OFFLINE. What was sent stays there.",
    )
