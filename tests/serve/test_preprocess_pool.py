"""Threads that preprocess inputs: in order, and without keeping anybody waiting."""

import asyncio
import threading

import pytest

from enginery.serve.batching import preprocess_pool
from enginery.serve.batching.preprocess_pool import PreprocessPool
from enginery.serve.batching.queue import ClosedError, OverloadedError

WAIT = 60


def with_pool(ask, *, most=2048):
    """Runs `ask(pool)` in a loop, and ends the threads."""

    async def run():
        made = PreprocessPool(asyncio.get_running_loop(), max_inputs=most, name="m")
        try:
            return await ask(made)
        finally:
            made.close()

    return asyncio.run(run())


def test_list_is_encoded_in_chunks_and_keeps_its_order(monkeypatch):
    monkeypatch.setattr(preprocess_pool, "usable_cores", lambda: 3)
    pieces = []

    def encode(texts):
        pieces.append(len(texts))
        return [text * 2 for text in texts]

    async def ask(made):
        texts = list(range(1000))
        return await made.run(lambda: made.encode_in_parallel(encode, texts), inputs=1000)

    assert with_pool(ask) == [number * 2 for number in range(1000)]
    assert sorted(pieces) == [40] + [64] * 15


def test_error_of_a_chunk_fails_the_list(monkeypatch):
    monkeypatch.setattr(preprocess_pool, "usable_cores", lambda: 2)

    def encode(texts):
        if 150 in texts:
            raise ValueError("no 150")
        return texts

    async def ask(made):
        await made.run(lambda: made.encode_in_parallel(encode, list(range(200))), inputs=200)

    with pytest.raises(ValueError, match="no 150"):
        with_pool(ask)


def test_short_work_does_not_wait_for_work_that_hangs():
    go = threading.Event()

    async def ask(made):
        stuck = [asyncio.create_task(made.run(lambda: go.wait(WAIT), inputs=1)) for _ in range(5)]
        while not made.busy_seconds():
            await asyncio.sleep(0.001)
        assert await made.run(lambda: "read", inputs=1, short=True) == "read"
        go.set()
        await asyncio.gather(*stuck)

    with_pool(ask)


def test_closing_fails_requests_that_wait_for_work_that_hangs():
    go = threading.Event()

    async def ask(made):
        stuck = asyncio.create_task(made.run(lambda: go.wait(WAIT), inputs=1))
        while not made.busy_seconds():
            await asyncio.sleep(0.001)
        made.close()
        with pytest.raises(ClosedError, match="model 'm' is shutting down"):
            await stuck
        with pytest.raises(ClosedError, match="model 'm' is shutting down"):
            await made.run(lambda: None, inputs=1)
        assert made.busy_seconds()

    try:
        with_pool(ask)
    finally:
        go.set()


def test_inputs_are_limited_and_cancelled_requests_free_their_slots():
    go = threading.Event()

    async def ask(made):
        stuck = [asyncio.create_task(made.run(lambda: go.wait(WAIT), inputs=1)) for _ in range(2)]
        await asyncio.sleep(0)
        waits = asyncio.create_task(made.run(lambda: pytest.fail("nobody waits for it"), inputs=2))
        await asyncio.sleep(0)
        assert made.inputs == 4
        with pytest.raises(
            OverloadedError,
            match="4 in preprocessing and 0 in the queue, expected at most 4",
        ):
            await made.run(lambda: None, inputs=1)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        await asyncio.sleep(0)
        assert made.inputs == 2
        go.set()
        await asyncio.gather(*stuck)

    with_pool(ask, most=4)
