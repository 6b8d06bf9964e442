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
from queue import SimpleQueue
from typing import Any

from enginery.core.errors import ArtifactError, InputError

STUCK_SECONDS = 60.0
"""A window of texts is tokenized within seconds, by a slow machine too."""
_MOST_STUCK = 3
"""Each keeps a core busy."""


class EncodingWatch:
    """Encodes the texts of one run; any thread may call it."""

    def __init__(self) -> None:
        self._stuck: list[Any] = []
        """Texts that the tokenizer did not come back from."""
        self._idle: list[_EncodingThread] = []
        """New threads for every window would each take memory of their own."""

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
            whole = self._submit(lambda: encode(texts))
            if _ended(whole):
                found: list[Any] = whole.result()
                return found
        # One after the other: a list goes through threads that stuck texts may have taken.
        encodings: list[Any] = []

        def encode_all() -> None:
            for text in texts:
                encodings.extend(encode([text]))

        job = self._submit(encode_all)
        encoded = -1
        while not _ended(job):
            if len(encodings) == encoded:
                self._give_up(texts[encoded])
                raise _never(encoded)
            encoded = len(encodings)
        job.result()
        return encodings

    def close(self) -> None:
        """End the threads that are not stuck."""
        while self._idle:
            thread = self._idle.pop()
            thread.jobs.put(None)
            thread.join()

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Run `work` in a thread that the process does not wait for when it ends."""
        job: Future[Any] = Future()
        try:
            thread = self._idle.pop()
        except IndexError:
            thread = _EncodingThread(self._idle)
            thread.start()
        thread.jobs.put((job, work))
        return job

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


class _EncodingThread(threading.Thread):
    """Runs what is put into `jobs` until that is None, and is in `idle` between."""

    def __init__(self, idle: list[_EncodingThread]) -> None:
        super().__init__(daemon=True, name="enginery-encode")
        self.jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._idle = idle

    def run(self) -> None:
        while (taken := self.jobs.get()) is not None:
            job, work = taken
            try:
                made = work()
            except BaseException as error:
                self._idle.append(self)
                job.set_exception(error)
            else:
                self._idle.append(self)
                job.set_result(made)
                del made
            del taken, job, work  # texts of megabytes


def _never(index: int) -> InputError:
    return InputError(
        f"text {index} cannot be tokenized: the tokenizer has not come back from it within "
        f"{STUCK_SECONDS:g} seconds."
    )


def _ended(job: Future[Any]) -> bool:
    """Whether it ends in time."""
    return bool(wait([job], STUCK_SECONDS).done)
