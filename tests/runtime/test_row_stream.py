"""Windows of inputs are prepared ahead and run in order."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from enginery.core.errors import InputError
from enginery.runtime.tasks.row_stream import (
    SWITCH_INTERVAL,
    RowStream,
    Window,
    read_ahead,
    run_here,
)
from enginery.runtime.tasks.task import ModelInputs, Row


class Doubling:
    """A batch runner that doubles the numbers in its rows; `split` returns lists or arrays."""

    def __init__(self, *, arrays=True):
        spec = SimpleNamespace(name="ids")
        self.arrays, self.runs = arrays, []
        self.record = SimpleNamespace(inputs=[spec])
        self.runner = self
        self.task = SimpleNamespace(outputs_read=lambda raw: ("double",))

    def feeds(self, rows):
        return {"ids": np.array([[row.content, 1] for row in rows])}

    def __call__(self, feeds, outputs):
        assert outputs == ("double",)
        numbers = feeds["ids"][:, 0].tolist()
        self.runs.append(numbers)
        if 13 in numbers:
            raise InputError("the graph fails on 13.")
        if 99 in numbers:
            raise MemoryError("99")
        return {"double": feeds["ids"][:, :1] * 2}

    def split(self, rows, feeds, outputs):
        assert len(rows) == len(feeds["ids"])
        return outputs["double"] if self.arrays else outputs["double"][:, 0].tolist()


def preprocess(numbers):
    if 7 in numbers:
        raise InputError("seven cannot be tokenized.")
    return ModelInputs([Row(number, number) for number in numbers])


def longest_first(rows):
    """Plan batches of two rows."""
    order = sorted(range(len(rows)), key=lambda index: -rows[index].tokens)
    return [order[first : first + 2] for first in range(0, len(order), 2)]


def stream_of(batches, submit=run_here, concurrent=0):
    return RowStream(batches, preprocess, longest_first, submit, concurrent)


def run(stream, *inputs):
    windows = [Window(numbers, index) for index, numbers in enumerate(inputs)]
    return list(stream.run(stream.prepare(windows)))


@pytest.mark.parametrize("arrays", [True, False])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_windows_and_outputs_are_in_order(arrays, workers):
    batches = Doubling(arrays=arrays)
    inputs = [1, 5, 3], [], [2], [8, 4, 6, 10, 12]
    with ThreadPoolExecutor(max(workers, 1)) as pool:

        def submit(work):
            return pool.submit(lambda: run_here(work).result()) if workers else run_here(work)

        done = run(stream_of(batches, submit, workers), *inputs)
    assert [window.origin for window in done] == [0, 1, 2, 3]
    for window, numbers in zip(done, inputs, strict=True):
        outputs = window.outputs()
        assert isinstance(outputs, np.ndarray) == (arrays and bool(numbers))
        assert np.ravel(outputs).tolist() == [2 * number for number in numbers]
        assert [row.tokens for row in window.work.rows] == list(numbers)
        assert window.padded_tokens == 2 * len(numbers)
        assert window.error is None
    assert sorted(batches.runs) == [[1], [2], [4], [5, 3], [8, 6], [12, 10]]


def test_input_that_fails_ends_its_window_alone():
    batches = Doubling()
    done = run(stream_of(batches), [1, 2], [7, 3], [12, 13, 5, 4, 3], [6])
    assert [str(window.error or "") for window in done] == [
        "",
        "seven cannot be tokenized.",
        "the graph fails on 13.",
        "",
    ]
    assert done[3].outputs().tolist() == [[12]]
    assert batches.runs == [[2, 1], [13, 12], [6]]  # not the rest of a failed window


def test_feeds_that_fail_end_their_window_alone():
    batches = Doubling()

    def feeds(rows):
        if any(row.content == 4 for row in rows):
            raise InputError("four is too long.")
        return Doubling.feeds(batches, rows)

    batches.feeds = feeds
    done = run(stream_of(batches), [1, 9, 8, 4], [5])
    assert [str(window.error or "") for window in done] == ["four is too long.", ""]


def test_other_errors_end_the_stream_and_cancel_what_waits():
    futures = []

    def submit(work):
        future = Future()
        futures.append(future)
        if len(futures) == 1:
            future.set_exception(MemoryError("of a run"))
        return future

    with pytest.raises(MemoryError, match="of a run"):
        run(stream_of(Doubling(), submit, concurrent=2), [1, 2, 3, 4, 5, 6])
    assert [future.cancelled() for future in futures] == [False, True, True]


def test_read_ahead_keeps_order_and_reads_only_so_many_items_early():
    read = []

    def numbers():
        for number in range(20):
            read.append((number, threading.current_thread().name))
            yield number

    ahead = read_ahead(numbers(), ahead=3, name="reader")
    assert not read  # nothing starts before the first item is taken
    assert next(ahead) == 0
    assert len(read) <= 6
    assert list(ahead) == list(range(1, 20))
    assert {name for _, name in read} == {"reader"}


def test_read_ahead_raises_errors_after_the_items_before_them():
    def numbers():
        yield 1
        raise ValueError("two")

    ahead = read_ahead(numbers(), ahead=3, name="reader")
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="two"):
        next(ahead)
    assert not [thread for thread in threading.enumerate() if thread.name == "reader"]


def test_closing_ends_the_threads_and_closes_what_they_read():
    closed = []

    def numbers():
        try:
            number = 0
            while True:
                yield number
                number += 1
        finally:
            closed.append(threading.current_thread().name)

    inner = read_ahead(numbers(), ahead=2, name="inner")
    with closing(read_ahead(inner, ahead=1, name="outer")) as outer:
        assert [next(outer) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert closed == ["inner"]
    assert not [thread for thread in threading.enumerate() if thread.name in ("inner", "outer")]


def test_the_switch_interval_is_lowered_until_the_last_user_has_ended():
    before = sys.getswitchinterval()
    with SWITCH_INTERVAL.lowered():
        lowered = sys.getswitchinterval()
        with SWITCH_INTERVAL.lowered():
            pass
        assert sys.getswitchinterval() == lowered < before
    assert sys.getswitchinterval() == before
