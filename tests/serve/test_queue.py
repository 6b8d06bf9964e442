import asyncio
import random
import threading
import time
from types import SimpleNamespace

import pytest

from enginery.core.errors import ProviderError
from enginery.serve.batching.planner import BatchRules
from enginery.serve.batching.queue import BatchQueue, ClosedError, OverloadedError, QueueEntry
from enginery.serve.batching.scheduler import BatchScheduler, Timings, WorkerOptions

RULES = BatchRules(max_tokens=64, max_rows=8, max_padding=0.1)


def new_queue(*, max_rows=1000, max_tokens=100_000, max_wait=1e9, rules=RULES):
    return BatchQueue(rules, max_rows=max_rows, max_tokens=max_tokens, max_wait_seconds=max_wait)


def rows(request, *lengths, kind="texts"):
    return [
        QueueEntry(request, place, kind, length, row=(request, place), tokens=length)
        for place, length in enumerate(lengths)
    ]


def names(batch):
    return [item.row for item in batch]


def test_inputs_of_equal_length_share_a_batch_across_requests():
    queue = new_queue()
    queue.put(rows("a", 8), now=0)
    queue.put(rows("b", 8, 8), now=1)
    assert sorted(names(queue.take())) == [("a", 0), ("b", 0), ("b", 1)]
    assert (queue.rows, queue.tokens) == (0, 0)


def test_oldest_row_runs_first():
    queue = new_queue()
    for place, length in enumerate([30, 3, 60, 12]):
        queue.put(rows(place, length), now=place)
    assert [names(queue.take())[0][0] for _ in range(4)] == [0, 1, 2, 3]


def test_rows_of_different_keys_never_share_a_batch():
    queue = new_queue()
    queue.put(rows("a", 8, kind="texts"), now=0)
    queue.put(rows("b", 8, kind=("tensors", 8)), now=0)
    assert [len(queue.take()), len(queue.take())] == [1, 1]


def test_long_list_does_not_block_later_requests():
    queue = new_queue()
    queue.put(rows("list", *[64] * 10), now=0)
    assert names(queue.take()) == [("list", 0)]
    queue.put(rows("short", 3), now=1)
    assert [names(queue.take())[0][0] for _ in range(3)] == ["short", "list", "list"]


def test_short_requests_and_a_list_share_the_workers():
    """In proportion to their number, and with a list in every second batch at most."""
    queue = new_queue()
    queue.put(rows("list", *[64] * 10), now=0)
    taken = []
    for _ in range(20):  # as many as two lists could use
        while len(queue._short.parts) < 3:
            queue.put(rows("short", 64), now=0)
        taken.append(names(queue.take())[0][0])
    assert 4 <= taken.count("list") <= 6
    queue, taken = new_queue(), []
    for number in range(9):
        queue.put(rows(f"list{number}", *[64] * 10), now=0)
    for _ in range(20):
        while not queue._short.parts:
            queue.put(rows("short", 64), now=0)
        taken.append(names(queue.take())[0][0])
    assert taken.count("short") == 10


def test_lists_take_turns():
    queue = new_queue()
    queue.put(rows("long", *[64] * 100), now=0)
    for _ in range(50):
        queue.take()
    queue.put(rows("late", *[64] * 3), now=0)
    taken = [names(queue.take())[0][0] for _ in range(7)]
    assert taken.count("late") == 3


class Clients:
    """In virtual time: clients with lists, and two with short texts, send again once answered.

    One worker takes 10 ms for a batch and 1 ms for each token in it.
    """

    def __init__(self, lists, *, texts=64, tokens=260, seconds=600):
        rules = BatchRules(max_tokens=256, max_rows=64, max_padding=0.1, fixed_cost_tokens=10)
        self.queue = new_queue(max_rows=2048, max_tokens=262_144, max_wait=10, rules=rules)
        self.queue.seconds_per_token = 0.001
        self.lists, self.shorts, self.refused = 0, [], []
        chance, now, number = random.Random(0), 0.0, 0
        sends = [(chance.random() / 10, f"list{k}", [tokens] * texts) for k in range(lists)]
        sends += [(chance.random(), f"short{k}", [12]) for k in range(2)]
        open_rows, sent = {}, {}
        while now < seconds:
            sends.sort()
            while sends and (sends[0][0] <= now or not self.queue.rows):
                at, name, lengths = sends.pop(0)
                now = max(now, at)
                number += 1
                entries = rows((name, number), *lengths)
                try:
                    sent[name] = (at, self.queue.put(entries, now=now))
                    open_rows[name] = len(entries)
                except OverloadedError:
                    self.refused.append(name)
                    sends.append((now + 1, name, lengths))
                    sends.sort()
            started, batch = now, self.queue.take()
            now += 0.01 + 0.001 * len(batch) * max(entry.length for entry in batch)
            for entry in batch:
                name = entry.request[0]
                open_rows[name] -= 1
                if open_rows[name]:
                    continue
                at, backlog_seconds = sent[name]
                self.queue.observe_wait(backlog_seconds, started - at)
                if name.startswith("list"):
                    self.lists += 1
                    sends.append((now, name, [tokens] * texts))
                else:
                    self.shorts.append(started - at)
                    sends.append((now + chance.random() / 10, name, [12]))


@pytest.mark.parametrize("lists", [1, 2, 4, 16, 64])
def test_short_texts_wait_for_two_batches_at_most_beside_any_number_of_lists(lists):
    clients = Clients(lists, seconds=300)
    batch_seconds = 0.01 + 0.001 * 260
    assert not [name for name in clients.refused if name.startswith("short")]
    assert len(clients.shorts) > 300
    waits = sorted(clients.shorts)
    assert waits[len(waits) // 2] <= 2 * batch_seconds
    assert waits[len(waits) * 99 // 100] <= 3 * batch_seconds
    assert clients.lists * 64 * 0.27 > 0.5 * 300 - 64 * 0.27 * lists  # lists run, too


@pytest.mark.parametrize(("texts", "tokens"), [(512, 20), (3, 255), (64, 512)])
def test_lists_of_any_size_leave_short_texts_their_turn(texts, tokens):
    clients = Clients(8, texts=texts, tokens=tokens, seconds=200)
    batch_seconds = 0.01 + 0.001 * max(256, tokens)
    assert not [name for name in clients.refused if name.startswith("short")]
    waits = sorted(clients.shorts)
    assert waits[len(waits) // 2] <= 2 * batch_seconds


def test_lists_cannot_fill_the_queue():
    queue = new_queue(max_rows=100)
    for number in range(3):
        queue.put(rows(f"list{number}", *[64] * 25), now=0)
    with pytest.raises(OverloadedError, match="at most 75 and 75000 for lists"):
        queue.put(rows("list", *[64] * 25), now=0)
    for number in range(25):
        queue.put(rows(f"short{number}", 64), now=0)
    with pytest.raises(OverloadedError, match="at most 100 and"):
        queue.put(rows("short", 64), now=0)


def test_only_what_runs_before_a_request_counts_for_its_wait():
    queue = new_queue(max_wait=10)
    queue.seconds_per_token = 0.001
    assert queue.put(rows("a", *[64] * 100), now=0) == 0
    assert queue.put(rows("b", *[64] * 50), now=0) == pytest.approx(3.2)
    assert queue.put(rows("c", *[64] * 100), now=0) == pytest.approx(9.6)
    with pytest.raises(OverloadedError, match=r"would wait 16\.0 s"):
        queue.put(rows("d", *[64] * 100), now=0)
    assert queue.put(rows("short", 8), now=0) == 0
    assert queue.put(rows("short", 8), now=0) == pytest.approx(0.016)


def test_full_queue_rejects_whole_requests_with_retry_after():
    queue = new_queue(max_rows=3)
    queue.seconds_per_token = 0.5
    queue.put(rows("a", 8, 8), now=0)
    with pytest.raises(OverloadedError, match="2 inputs with 16 tokens wait") as refused:
        queue.put(rows("b", 8, 8), now=0)
    assert refused.value.retry_after_seconds == 8
    assert queue.rows == 2
    queue.put(rows("c", 8), now=0)


def test_request_that_would_wait_too_long_is_rejected_with_the_estimate():
    queue = new_queue(max_wait=10)
    queue.seconds_per_token = 0.5
    queue.put(rows("a", 16), now=0)  # 8 seconds
    queue.put(rows("b", 8), now=0)  # which would wait for 8, and makes it 12
    with pytest.raises(
        OverloadedError, match=r"would wait 12\.0 s, expected at most 10 s"
    ) as refused:
        queue.put(rows("c", 1), now=0)
    assert refused.value.retry_after_seconds == 12
    queue.put(rows("b", 8), now=0, admitted=True)  # more of a request that was taken
    assert queue.estimated_wait_seconds == 16
    while queue.rows:
        queue.take()
    queue.put(rows("large", *[64] * 100), now=0)  # nothing waits: whatever it takes itself


def test_estimate_follows_how_long_requests_have_waited():
    queue = new_queue(max_wait=10)
    queue.seconds_per_token = 0.5
    queue.put(rows("a", 16), now=0)
    assert queue.estimated_wait_seconds == queue.backlog_seconds == 8
    for _ in range(200):
        queue.observe_wait(0.5, 60.0)  # too short to say anything
    assert queue.estimated_wait_seconds == 8
    for _ in range(200):
        queue.observe_wait(8.0, 12.0)
    assert queue.estimated_wait_seconds == pytest.approx(12, rel=0.05)
    with pytest.raises(OverloadedError, match=r"would wait 1[12]\.\d s"):
        queue.put(rows("b", 1), now=0)
    for _ in range(1000):
        queue.observe_wait(8.0, 4.0)  # never less than the work before it
    assert queue.estimated_wait_seconds == 8
    for _ in range(400):
        queue.observe_wait(2.0, 60.0)  # something held the workers up: not believed beyond a limit
    assert queue.estimated_wait_seconds == 32


def test_estimate_is_a_wait_that_few_requests_exceed():
    queue, chance = new_queue(max_wait=10), random.Random(0)
    queue.seconds_per_token = 0.5
    queue.put(rows("a", 16), now=0)
    waits = [chance.uniform(0, 16) for _ in range(4000)]
    estimates = []
    for waited in waits:
        estimates.append(queue.estimated_wait_seconds)
        queue.observe_wait(8.0, waited)
    late = [w > e for w, e in zip(waits[1000:], estimates[1000:], strict=True)]
    assert 0.01 < sum(late) / len(late) < 0.03


def test_accepted_requests_wait_no_longer_than_the_maximum_at_twice_the_capacity():
    """In virtual time: one worker takes 10 ms for a batch, and 1 ms for each token in it."""
    rules = BatchRules(max_tokens=4096, max_rows=32, max_padding=0.1)
    queue, chance = new_queue(max_wait=2, max_rows=2000, rules=rules), random.Random(0)
    queue.seconds_per_token = 0.001
    now = free = arrives = started = 0.0
    waits, running, rejected = [], [], 0
    while now < 60:
        if arrives <= free or not queue.rows:
            now, free = arrives, max(arrives, free)
            arrives += chance.expovariate(2 / 0.023)  # requests have 23 tokens on average
            (entry,) = rows("a", chance.randint(3, 43))
            entry.request = (now, queue.backlog_seconds)
            try:
                queue.put([entry], now=now)
            except OverloadedError:
                rejected += 1
        else:
            for arrived, backlog_seconds in running:  # done now, and observed only now
                queue.observe_wait(backlog_seconds, started - arrived)
            batch, now, started = queue.take(), free, free
            running = [entry.request for entry in batch]
            waits += [started - arrived for arrived, _ in running]
            free += 0.01 + 0.001 * len(batch) * max(entry.length for entry in batch)
    assert rejected > 0.4 * len(waits)
    assert sum(wait > 2 for wait in waits) < 0.02 * len(waits)
    assert len(waits) * 0.023 > 0.8 * 60  # and the worker has no less to do


async def test_scheduler_reports_backlog_and_wait_to_the_queue():
    learned, began, free = [], threading.Event(), threading.Event()

    def work(batch):
        began.set()
        free.wait(30)
        return [0] * len(batch)

    queue = BatchQueue(RULES, max_rows=8, max_tokens=1000, max_wait_seconds=10)
    scheduler = BatchScheduler(
        queue, work, asyncio.get_running_loop(), WorkerOptions(1), on_batch=lambda _: None
    )
    queue.seconds_per_token = 0.5
    queue.observe_wait = lambda work, waited: learned.append((work, waited))
    requests = [asyncio.ensure_future(scheduler.run(rows("a", 8), Timings()))]
    while not began.is_set():
        await asyncio.sleep(0.01)
    requests.append(asyncio.ensure_future(scheduler.run(rows("b", 8, 8), Timings())))
    requests.append(asyncio.ensure_future(scheduler.run(rows("c", 64), Timings())))
    await asyncio.sleep(0.3)
    free.set()
    await asyncio.gather(*requests)
    scheduler.close(drain=True)
    assert sorted(work for work, _ in learned) == [0.0, 0.0, 8.0]
    waited = max(learned)[1]
    assert 0.3 <= waited < 30


async def test_rest_of_an_admitted_request_is_not_rejected():
    gate = threading.Event()
    scheduler = BatchScheduler(
        BatchQueue(RULES, max_rows=40, max_tokens=10_000, max_wait_seconds=1e9),
        lambda batch: [gate.wait(30) and 0] * len(batch),
        asyncio.get_running_loop(),
        WorkerOptions(1),
        on_batch=lambda _: None,
    )
    admitted = asyncio.ensure_future(scheduler.run(rows("list", *[8] * 60), Timings()))
    await asyncio.sleep(0)  # its first part is in the queue, the others are not
    assert 0 < scheduler.queue.rows < 60
    scheduler.queue.max_rows = 0
    with pytest.raises(OverloadedError):
        await scheduler.run(rows("other", 8), Timings())
    gate.set()
    found = await asyncio.wait_for(admitted, 30)
    scheduler.close(drain=True)
    result = found
    assert result == [0] * 60


def test_too_many_tokens_are_refused():
    queue = new_queue(max_tokens=100)
    queue.put(rows("a", 60), now=0)
    with pytest.raises(OverloadedError):
        queue.put(rows("b", 60), now=0)


def test_a_cancelled_request_leaves_the_queue():
    queue = new_queue()
    gone, kept = rows("a", 8, 30), rows("b", 8)
    queue.put(gone, now=0)
    queue.put(kept, now=0)
    assert queue.cancel(gone) == 2
    assert (queue.rows, queue.tokens) == (1, 8)
    assert names(queue.take()) == [("b", 0)]
    assert queue.cancel(kept) == 0  # it was taken
    assert queue.cancel(rows("c", 8)) == 0  # it never came in


def test_idle_workers_share_waiting_rows():
    queue = new_queue(rules=BatchRules(max_tokens=1000, max_rows=100, max_padding=0.1))
    taken = []
    threads = [threading.Thread(target=lambda: taken.append(queue.take())) for _ in range(2)]
    for thread in threads:
        thread.start()
    while queue._idle < 2:
        time.sleep(0.001)
    queue.put(rows("a", *[8] * 10), now=0)
    for thread in threads:
        thread.join(10)
    assert sorted(map(len, taken)) == [5, 5]


def test_a_closed_queue_takes_nothing_and_ends_its_workers():
    queue = new_queue()
    queue.put(rows("a", 8), now=0)
    assert queue.close(drain=True) == []
    with pytest.raises(ClosedError):
        queue.put(rows("b", 8), now=0)
    assert names(queue.take()) == [("a", 0)]
    assert queue.take() == []


@pytest.mark.parametrize("drain", [True, False])
def test_closing_the_queue_wakes_all_workers(drain):
    queue = new_queue()
    threads = [threading.Thread(target=queue.take, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    while queue._idle < 3:
        time.sleep(0.001)
    queue.close(drain=drain)
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_closing_without_drain_returns_waiting_rows():
    queue = new_queue()
    queue.put(rows("a", 8, 60), now=0)
    assert sorted(names(queue.close(drain=False))) == [("a", 0), ("a", 1)]
    assert queue.rows == 0
    assert queue.take() == []


@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_taken_exactly_once_under_concurrency(seed):
    chance = random.Random(seed)
    queue = new_queue()
    taken, cancelled = [], set()

    def work():
        while batch := queue.take():
            taken.extend(names(batch))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    sent = []
    for request in range(200):
        lengths = [chance.randint(1, 64) for _ in range(chance.randint(1, 6))]
        items = rows(request, *lengths, kind=chance.choice(["x", "y"]))
        queue.put(items, now=request)
        sent += [(request, place) for place in range(len(lengths))]
        if chance.random() < 0.2 and queue.cancel(items):
            cancelled.add(request)
    queue.close(drain=True)
    for thread in threads:
        thread.join(30)
    assert len(taken) == len(set(taken))
    assert {item for item in sent if item[0] not in cancelled} <= set(taken) <= set(sent)
    assert (queue.rows, queue.tokens) == (0, 0)
    for kind in (queue._short, queue._lists):
        assert (kind.rows, kind.tokens, kind.heap, kind.parts) == (0, 0, [], set())
    assert not queue._lanes


def weighted(name, *, length=1, weight=1):
    (entry,) = rows(name, length)
    entry.weight = weight
    return [entry]


def test_rows_are_taken_in_order_and_none_overtakes_one_that_does_not_fit():
    queue = new_queue()
    for place, weight in enumerate([1, 2, 4, 1]):
        queue.put(weighted(place, weight=weight), now=place)
    assert names(queue.take_due(4, wait=False)) == [(0, 0), (1, 0)]
    assert names(queue.take_due(3, wait=False)) == []
    assert names(queue.take_due(5, wait=False)) == [(2, 0), (3, 0)]
    assert queue.take_due(5, wait=False) == []
    assert (queue.rows, queue.tokens) == (0, 0)


def test_similar_rows_are_the_first_and_those_nearest_in_length():
    queue = new_queue()
    for place, length in enumerate([50, 3, 60, 45, 9]):
        queue.put(weighted(place, length=length), now=place)
    taken = queue.take_similar(3, wait=False)
    assert sorted(names(taken)) == [(0, 0), (2, 0), (3, 0)]
    assert names(taken)[0] == (0, 0)
    assert [entry.length for entry in queue.take_similar(9, wait=False)] == [3, 9]


def test_waiting_for_rows_ends_with_a_row_and_with_the_queue():
    queue, taken = new_queue(), []
    waiting = threading.Thread(target=lambda: taken.append(queue.take_due(2, wait=True)))
    waiting.start()
    queue.put(rows("a", 8), now=0)
    waiting.join(10)
    assert names(taken[0]) == [("a", 0)]
    waiting = threading.Thread(target=lambda: taken.append(queue.take_due(2, wait=True)))
    waiting.start()
    queue.close(drain=True)
    waiting.join(10)
    assert taken[1] is None


def scheduler_of(queue, run, workers, deliver=bool):
    """A scheduler whose results reach no request."""
    loop = SimpleNamespace(call_soon_threadsafe=lambda *_: deliver())
    return BatchScheduler(queue, run, loop, workers, on_batch=lambda _: None)


def test_workers_prepare_one_after_another_before_their_first_batch():
    seen, running = [], []

    def prepare():
        running.append(threading.current_thread())
        assert len(running) == 1
        time.sleep(0.01)
        seen.append(running.pop())

    def run(batch):
        assert threading.current_thread() in seen
        return [None] * len(batch)

    queue = new_queue()
    done = threading.Event()
    workers = scheduler_of(queue, run, WorkerOptions(3, prepare=prepare), done.set)
    workers.wait_prepared()
    assert len({*seen}) == 3
    queue.put(rows(0, 4), now=0.0)
    assert done.wait(10)
    queue.close(drain=True)
    assert workers.join(10)


def test_workers_do_not_prepare_after_the_queue_was_closed():
    prepared = []
    queue = new_queue()
    queue.close(drain=False)
    workers = scheduler_of(queue, list, WorkerOptions(2, prepare=lambda: prepared.append(1)))
    assert workers.join(10)
    assert not prepared


def test_worker_that_cannot_be_prepared_reports_why():
    def prepare():
        raise ProviderError("no GPU")

    queue = new_queue()
    workers = scheduler_of(queue, list, WorkerOptions(1, prepare=prepare))
    with pytest.raises(ProviderError, match="no GPU"):
        workers.wait_prepared()
    assert workers.join(10)
