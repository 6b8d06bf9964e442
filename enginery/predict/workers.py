"""A function over a stream, several at a time, results in the stream's order.

    >>> list(in_order(str.upper, iter("abc"), threads=2))
    ['A', 'B', 'C']

The stream is read no further than what runs and one more, so that memory does not follow it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


def in_order(
    function: Callable[[Given], Made], stream: Iterator[Given], *, threads: int
) -> Iterator[Made]:
    """What `function` makes of each item, in order; the stream is read by the caller's thread.

    Raises:
        Whatever the function or the stream raises; what waits is dropped then.
    """
    waiting: deque[Future[Made]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="enginery-window")
    try:
        for item in stream:
            waiting.append(pool.submit(function, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
