"""Tokenizing that ends: a text that the tokenizer does not come back from is found and refused.

    >>> watch = EncodingWatch()
    >>> watch(tokenizer.encode, ["The engine is warm."])[0].ids
    [101, 1996, 3194, 2003, 4010, 1012, 102]

The regular expressions and normalizers of a tokenizer.json may take hours for a text, and nothing
stops a thread that is in them. It is left behind, at the price of a core, and the other rows are
answered; the process does not wait for it when it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from enginery.core.errors import ArtifactError, InputError

Made = TypeVar("Made")

STUCK_SECONDS = 60.0
"""A window of texts is tokenized within seconds, by a slow machine too."""
_MOST_STUCK = 3
"""Each keeps a core busy."""


class EncodingWatch:
    """Encodes the texts of one run; any thread may call it."""

    def __init__(self) -> None:
        self._stuck: list[Any] = []
        """Texts that the tokenizer did not come back from."""

    def __call__(
        self, encode: Callable[[Sequence[Any]], list[Any]], texts: Sequence[Any]
    ) -> list[Any]:
        """What `encode` makes of texts.

        Raises:
            InputError: the tokenizer does not come back from a text; the message has its index.
            ArtifactError: it did not from several before.
            Exception: whatever `encode` raises.
        """
        for index, text in enumerate(texts):
            if self._stuck and text in self._stuck:
                raise _never(index)
        if not self._stuck:
            whole = _in_thread(lambda: encode(texts))
            if _ended(whole):
                return whole.result()
        # One after the other: a list goes through threads that stuck texts may have taken.
        encodings: list[Any] = []

        def encode_all() -> None:
            for text in texts:
                encodings.extend(encode([text]))

        job = _in_thread(encode_all)
        encoded = -1
        while not _ended(job):
            if len(encodings) == encoded:
                self._give_up(texts[encoded])
                raise _never(encoded)
            encoded = len(encodings)
        job.result()
        return encodings

    def _give_up(self, text: Any) -> None:
        if text not in self._stuck:
            self._stuck.append(text)
        if len(self._stuck) > _MOST_STUCK:
            raise ArtifactError(
                f"the tokenizer has not come back from {len(self._stuck)} texts within "
                f"{STUCK_SECONDS:g} seconds each; the last one begins with {str(text)[:40]!r}.",
                do="Take such texts out of the input, or mend the regular expressions and "
                "normalizers of tokenizer.json.",
            )


def _never(index: int) -> InputError:
    return InputError(
        f"text {index} cannot be tokenized: the tokenizer has not come back from it within "
        f"{STUCK_SECONDS:g} seconds."
    )


def _ended(job: Future[Any]) -> bool:
    """Whether it ends in time."""
    return bool(wait([job], STUCK_SECONDS).done)


def _in_thread(work: Callable[[], Made]) -> Future[Made]:
    """Runs `work` in a thread that the process does not wait for when it ends."""
    job: Future[Made] = Future()

    def run() -> None:
        try:
            job.set_result(work())
        except BaseException as error:
            job.set_exception(error)

    threading.Thread(target=run, daemon=True, name="enginery-encode").start()
    return job
