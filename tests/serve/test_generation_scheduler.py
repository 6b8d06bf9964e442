"""The thread that generates: it warms up first, and passes pieces on as fast as they are sent."""

import asyncio
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from enginery.core.errors import InputError
from enginery.runtime.generation.inputs import GenerationRow
from enginery.runtime.generation.options import GenerationOptions
from enginery.runtime.generation.search import Candidates, make_search
from enginery.runtime.generation.stream import TextStream
from enginery.runtime.tasks.generate import TextSearch
from enginery.runtime.tasks.task import Row
from enginery.serve.batching.generation import GenerationScheduler
from enginery.serve.batching.queue import QueueEntry
from enginery.serve.batching.scheduler import Timings
from enginery.serve.config import ServeConfig

TOKENS = 60


class Decoder:
    """A decoder whose steps take half a millisecond and give 7, 8, 9, …"""

    takes_more = True

    def __init__(self):
        self.warmed = []
        self.error = None
        self.rows = 0

    def warm_up(self, rows):
        self.warmed.append((rows, threading.current_thread().name))
        if self.error is not None:
            raise self.error

    def begin(self, prompts, need, inputs=None):
        return self._state(len(prompts)), self._candidates([6] * len(prompts))

    def step(self, state, tokens, parents, need):
        time.sleep(0.0005)
        self.rows = max(self.rows, len(tokens))
        return self._state(len(tokens)), self._candidates(tokens)

    def undefined(self, state):
        return []

    def keep(self, state, rows):
        return self._state(len(rows))

    def join(self, above, below):
        return self._state(above.rows + below.rows)

    def _state(self, rows):
        return SimpleNamespace(rows=rows)

    def _candidates(self, tokens):
        return Candidates(np.array(tokens, np.int64)[:, None] + 1)


def decode(tokens):
    return "".join(f"{token} " for token in tokens)


def entry():
    options = GenerationOptions(max_new_tokens=TOKENS)
    search = make_search((1, 2), options, positions=None)
    prepared = GenerationRow((1, 2), {})
    texts = [TextStream(decode)]
    content = TextSearch(prepared, options, search, texts, prompt_tokens=2, streams=True)
    return QueueEntry(None, 0, "any", 2, Row(content, 2))


def open_scheduler(decoder, loop, steps=None):
    task = SimpleNamespace(
        collate=lambda rows, width: {}, has_encoder=False, following=lambda row: None
    )
    return GenerationScheduler(
        SimpleNamespace(decoder=decoder, task=task),
        ServeConfig(generation_rows=32, queue_inputs=100, queue_tokens=10_000, max_wait=60),
        loop,
        explain=lambda error, _: error,
        on_batch=lambda batch: None if steps is None else steps.append(batch.rows),
    )


def stream_all(count, *, seconds_per_piece=0.0):
    """Return the pieces of each stream, and the numbers of rows of all steps."""
    steps = []

    async def one(scheduler):
        pieces = []
        async for progress in scheduler.steps([entry()], Timings()):
            time.sleep(seconds_per_piece)  # the event loop is busy
            pieces += [piece for _, piece in progress.pieces]
        return pieces

    async def together():
        scheduler = open_scheduler(Decoder(), asyncio.get_running_loop(), steps)
        try:
            return await asyncio.gather(*(one(scheduler) for _ in range(count)))
        finally:
            scheduler.close(drain=True)
            assert await asyncio.to_thread(scheduler.join, 10)

    return asyncio.run(together()), steps


WANTED = decode(range(7, 7 + TOKENS))


def test_each_token_of_a_few_streams_is_a_piece():
    streams, _ = stream_all(2, seconds_per_piece=0.001)
    for pieces in streams:
        assert "".join(pieces) == WANTED
        assert len([piece for piece in pieces if piece]) >= TOKENS - 1


def test_many_streams_do_not_wait_for_the_event_loop():
    streams, steps = stream_all(12, seconds_per_piece=0.002)
    for pieces in streams:
        assert "".join(pieces) == WANTED
        assert pieces[0] == "7 "  # the first token comes at once
        assert 2 <= len(pieces) < TOKENS / 2
    assert sum(steps) >= 12 * (TOKENS - 1)  # each step is counted


async def test_pieces_are_passed_on_after_a_step_could_not_be_counted():
    class Broken(list):
        def append(self, _):
            raise ValueError("a bug")

    loop, failures = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
    scheduler = open_scheduler(Decoder(), loop, Broken())
    async for _ in scheduler.steps([entry()], Timings()):
        pass
    await asyncio.sleep(0.05)
    is_sent = scheduler._is_sent
    scheduler.close(drain=True)
    assert await asyncio.to_thread(scheduler.join, 10)
    assert is_sent
    assert {type(error) for error in failures} == {ValueError}


def test_the_thread_that_generates_has_warmed_the_decoder_up():
    decoder = Decoder()
    loop = asyncio.new_event_loop()
    scheduler = open_scheduler(decoder, loop)
    assert decoder.warmed == [(32, "enginery-generate-model")]
    scheduler.close(drain=False)
    assert scheduler.join(10)
    loop.close()


def test_a_decoder_that_does_not_run_is_an_error_at_once():
    decoder = Decoder()
    decoder.error = InputError("the graph fails: no memory")
    loop = asyncio.new_event_loop()
    with pytest.raises(InputError, match="no memory"):
        open_scheduler(decoder, loop)
    loop.close()
