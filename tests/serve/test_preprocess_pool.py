"""Threads that preprocess inputs: in order, and without keeping anybody waiting."""

import asyncio
import threading

import pytest

from enginery.serve.batching import preprocess_pool
from enginery.serve.batching.preprocess_pool import PreprocessPool
from enginery.serve.batching.queue import ClosedError, OverloadedError

WAIT = 60


@pytest.fixture
async def pool():
    made = PreprocessPool(asyncio.get_running_loop(), max_inputs=2048, name="m")
    yield made
    made.close()


@pytest.fixture
def go():
    """What lets the work of `hang` end."""
    event = threading.Event()
    yield event
    event.set()


def hang(pool, go):
    return asyncio.create_task(pool.run(lambda: go.wait(WAIT), inputs=1))


async def until_busy(pool):
    while not pool.busy_seconds():
        await asyncio.sleep(0.001)


async def test_list_is_encoded_in_chunks_and_keeps_its_order(pool, monkeypatch):
    monkeypatch.setattr(preprocess_pool, "usable_cores", lambda: 3)
    pieces, texts = [], list(range(1000))

    def encode(texts):
        pieces.append(len(texts))
        return [text * 2 for text in texts]

    found = await pool.run(lambda: pool.encode_in_parallel(encode, texts), inputs=1000)
    assert found == [number * 2 for number in range(1000)]
    assert sorted(pieces) == [40] + [64] * 15


async def test_error_of_a_chunk_fails_the_list(pool, monkeypatch):
    monkeypatch.setattr(preprocess_pool, "usable_cores", lambda: 2)

    def encode(texts):
        if 150 in texts:
            raise ValueError("no 150")
        return texts

    with pytest.raises(ValueError, match="no 150"):
        await pool.run(lambda: pool.encode_in_parallel(encode, list(range(200))), inputs=200)


async def test_short_work_does_not_wait_for_work_that_hangs(pool, go):
    stuck = [hang(pool, go) for _ in range(5)]
    await until_busy(pool)
    assert await pool.run(lambda: "read", inputs=1, short=True) == "read"
    go.set()
    await asyncio.gather(*stuck)


async def test_closing_fails_requests_that_wait_for_work_that_hangs(pool, go):
    stuck = hang(pool, go)
    await until_busy(pool)
    pool.close()
    with pytest.raises(ClosedError, match="model 'm' is shutting down"):
        await stuck
    with pytest.raises(ClosedError, match="model 'm' is shutting down"):
        await pool.run(lambda: None, inputs=1)
    assert pool.busy_seconds()


async def test_inputs_are_limited_and_cancelled_requests_free_their_slots(pool, go):
    pool._max_inputs = 4
    stuck = [hang(pool, go) for _ in range(2)]
    await asyncio.sleep(0)
    waits = asyncio.create_task(pool.run(lambda: pytest.fail("nobody waits for it"), inputs=2))
    await asyncio.sleep(0)
    assert pool.inputs == 4
    message = "4 in preprocessing and 0 in the queue, expected at most 4"
    with pytest.raises(OverloadedError, match=message):
        await pool.run(lambda: None, inputs=1)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    await asyncio.sleep(0)
    assert pool.inputs == 2
    go.set()
    await asyncio.gather(*stuck)
