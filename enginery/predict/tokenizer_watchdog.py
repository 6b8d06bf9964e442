"""Tokenize with a timeout, so that a text on which the tokenizer hangs becomes an error.

>>> watchdog = TokenizerWatchdog()
>>> watchdog(lambda texts: [text.split() for text in texts], ["It works."])
[['It', 'works.']]
>>> watchdog.close()

The regular expressions and normalizers of a tokenizer.json may need hours for a text, and a thread
cannot be stopped. The hanging thread is abandoned: it keeps one core busy, and the process does not
wait for it at exit. The other rows go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any

from enginery.core.errors import ArtifactError, InputError

TIMEOUT_SECONDS = 60.0
"""Even a slow machine tokenizes a window of texts within a few seconds."""
_MAX_STUCK = 3
"""Each hanging text keeps a core busy."""


class TokenizerWatchdog:
    """Runs the tokenizer in threads with a timeout. Thread-safe."""

    def __init__(self) -> None:
        self._stuck: list[Any] = []
        """Texts on which the tokenizer hangs."""
        self._idle: list[_EncoderThread] = []
        """Threads to use again: each new one would take memory of its own."""

    def __call__(
        self, encode: Callable[[Sequence[Any]], list[Any]], texts: Sequence[Any]
    ) -> list[Any]:
        """Return `encode(texts)`.

        Raises:
            InputError: the tokenizer hangs on a text; the message has its index.
            ArtifactError: the tokenizer hangs on more than three texts.
            Exception: any error of `encode`.
        """
        for index, text in enumerate(texts):
            if self._stuck and text in self._stuck:
                raise _timeout_error(index)
        if not self._stuck:
            batch_job = self._submit(lambda: encode(texts))
            if _finished_in_time(batch_job):
                return list(batch_job.result())
        # One text at a time: the tokenizer's thread pool, which encodes lists, may be blocked by
        # texts on which it hangs.
        encodings: list[Any] = []

        def encode_all() -> None:
            for text in texts:
                encodings.extend(encode([text]))

        job = self._submit(encode_all)
        encoded = -1
        while not _finished_in_time(job):
            if len(encodings) == encoded:
                self._give_up(texts[encoded])
                raise _timeout_error(encoded)
            encoded = len(encodings)
        job.result()
        return encodings

    def close(self) -> None:
        """End the threads that do not hang."""
        while self._idle:
            thread = self._idle.pop()
            thread.jobs.put(None)
            thread.join()

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Run `work` in a daemon thread."""
        job: Future[Any] = Future()
        try:
            thread = self._idle.pop()
        except IndexError:
            thread = _EncoderThread(self._idle)
            thread.start()
        thread.jobs.put((job, work))
        return job

    def _give_up(self, text: Any) -> None:
        if text not in self._stuck:
            self._stuck.append(text)
        if len(self._stuck) > _MAX_STUCK:
            raise ArtifactError(
                f"the tokenizer hangs on {len(self._stuck)} texts: each took more than "
                f"{TIMEOUT_SECONDS:g} seconds. The last one starts with {str(text)[:40]!r}.",
                do="Remove such texts from the input, or fix the regular expressions and "
                "normalizers in tokenizer.json.",
            )


class _EncoderThread(threading.Thread):
    """A thread that runs the functions in `jobs` until None comes; between two it is in `idle`."""

    def __init__(self, idle: list[_EncoderThread]) -> None:
        super().__init__(daemon=True, name="enginery-encode")
        self.jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._idle = idle

    def run(self) -> None:
        while (item := self.jobs.get()) is not None:
            job, work = item
            try:
                result = work()
            except BaseException as error:
                self._idle.append(self)
                job.set_exception(error)
            else:
                self._idle.append(self)
                job.set_result(result)
                del result
            del item, job, work  # they may hold megabytes of text


def _timeout_error(index: int) -> InputError:
    return InputError(
        f"text {index} cannot be tokenized within {TIMEOUT_SECONDS:g} seconds: the tokenizer hangs."
    )


def _finished_in_time(job: Future[Any]) -> bool:
    """Return True if the job ends within the timeout."""
    return bool(wait([job], TIMEOUT_SECONDS).done)
