from __future__ import annotations

import gc
from functools import partial
from itertools import cycle

import pytest

from enginery.bench.backends import worker
from enginery.bench.backends.warmup import take_turn, wait_until_idle, warm_up
from enginery.bench.measurement.rounds import RoundLimits, run_rounds, runs_in_turn
from enginery.bench.measurement.statistics import compare
from enginery.core.errors import InputError


class FakeClock:
    """A clock that each run advances by the next given time, and then by `after`."""

    def __init__(self, *seconds, after=1.0):
        self.now = 0.0
        self.runs = 0
        self._seconds = list(seconds)
        self._after = after

    def __call__(self):
        return self.now

    def run(self):
        self.now += self._seconds[self.runs] if self.runs < len(self._seconds) else self._after
        self.runs += 1


def run_warm_up(clock, *, max_seconds=1e9, max_runs=100, window=3, tolerance=0.05):
    return warm_up(
        clock.run,
        max_seconds=max_seconds,
        max_runs=max_runs,
        window=window,
        tolerance=tolerance,
        clock=clock,
    )


def test_constant_times_settle_after_the_first_run_and_two_windows():
    found = run_warm_up(FakeClock(after=0.5))
    assert (found.runs, found.settled, found.typical_ms, found.first_ms) == (7, True, 500, 500)


def test_first_run_is_in_no_window():
    found = run_warm_up(FakeClock(30.0, after=1.0))
    assert (found.runs, found.settled, found.first_ms, found.typical_ms) == (7, True, 30_000, 1000)


def test_warm_up_continues_while_times_fall():
    falling = [10.0, *(8.0 * 0.8**index for index in range(12))]
    found = run_warm_up(FakeClock(*falling, after=falling[-1]))
    assert found.settled
    assert found.runs > len(falling)
    assert found.typical_ms == pytest.approx(falling[-1] * 1e3)


def test_rising_times_do_not_settle():
    found = run_warm_up(FakeClock(*(1.2**index for index in range(40))), max_runs=40)
    assert (found.runs, found.settled) == (40, False)


def test_time_limit_ends_a_warm_up_after_at_least_one_run():
    assert run_warm_up(FakeClock(after=4.0), max_seconds=10).runs == 3
    found = run_warm_up(FakeClock(after=100.0), max_seconds=10)
    assert (found.runs, found.settled, found.first_ms) == (1, False, 100_000)


def test_turn_does_not_count_its_first_run():
    clock = FakeClock(7.0, 1.0, 2.0, 3.0)
    assert take_turn(clock.run, runs=3, clock=clock) == [1000, 2000, 3000]
    assert clock.runs == 4


def test_garbage_collector_is_off_during_a_turn_and_on_after_an_error():
    seen = []

    def run():
        seen.append(gc.isenabled())
        if len(seen) == 2:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        take_turn(run, runs=5)
    assert seen == [False, False]
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("busy_seconds", "waited", "idle"), [(0.0, 0.02, True), (0.5, 0.52, True), (60.0, 2.0, False)]
)
def test_backend_waits_until_its_threads_are_idle(busy_seconds, waited, idle):
    clock = FakeClock()

    def sleep(seconds):
        clock.now += seconds

    def cpu_seconds():
        return min(clock.now, busy_seconds)

    assert wait_until_idle(cpu_seconds=cpu_seconds, clock=clock, sleep=sleep) is idle
    assert clock.now == pytest.approx(waited, abs=0.021)


@pytest.mark.parametrize("becomes_idle", [True, False])
def test_turn_is_answered_once_no_thread_is_busy(monkeypatch, becomes_idle):
    events = []
    made = worker.BenchmarkWorker()
    made._run = lambda: events.append("run")
    monkeypatch.setattr(worker, "wait_until_idle", lambda: events.append("wait") or becomes_idle)
    for _ in range(2):
        assert len(made.answer({"do": "turn", "runs": 1})["times_ms"]) == 1
        events.append("answer")
    runs = ["run", "run"]  # the first is not timed
    again = ["wait"] if becomes_idle else []  # threads that never rest are not waited for again
    assert events == [*runs, "wait", "answer", *runs, *again, "answer"]


@pytest.mark.parametrize(("typical", "runs"), [(0.05, 1000), (0.1, 500), (5.0, 10), (800.0, 1)])
def test_number_of_runs_in_a_turn(typical, runs):
    assert runs_in_turn(typical) == runs
    assert runs_in_turn(1e-4) == 1000


LIMITS = RoundLimits(confidence=0.95, precision=0.01, min_rounds=4, max_rounds=30, max_seconds=1e9)


def rounds_of(limits, **times):
    clock = FakeClock()
    order = []

    def turn(name, runs):
        order.append(name)
        clock.now += 1.0
        return [next(times[name])] * runs

    turns = {name: partial(turn, name) for name in times}
    found = run_rounds(turns, dict.fromkeys(times, 2), limits, clock=clock)
    return found, order


def test_every_other_round_has_the_reverse_order():
    _, order = rounds_of(LIMITS, a=cycle([1.0]), b=cycle([2.0]), c=cycle([3.0]))
    assert "".join(order[:12]) == "abccbaabccba"


def test_rounds_end_when_every_interval_is_narrow():
    found, _ = rounds_of(LIMITS, a=cycle([1.0]), b=cycle([2.0, 2.001]))
    assert [len(turns) for turns in found.turns.values()] == [6, 6]  # an interval needs six
    assert found.ended == "every median is known within 1.00%"


def test_rounds_continue_while_one_backend_is_noisy():
    found, _ = rounds_of(LIMITS, a=cycle([1.0]), b=cycle([1.0, 3.0]))
    assert [len(turns) for turns in found.turns.values()] == [30, 30]
    assert found.ended == "30 rounds, the maximum"


def test_time_limit_ends_the_rounds_once_there_are_enough_for_an_interval():
    limits = RoundLimits(0.95, 0.01, min_rounds=20, max_rounds=30, max_seconds=5)
    found, _ = rounds_of(limits, a=cycle([1.0]), b=cycle([1.0, 3.0]))
    assert [len(turns) for turns in found.turns.values()] == [6, 6]
    assert found.ended == "the time limit of 5 s for a shape was reached"
    late = RoundLimits(0.95, 0.01, min_rounds=20, max_rounds=30, max_seconds=15)
    assert len(rounds_of(late, a=cycle([1.0]), b=cycle([1.0, 3.0]))[0].turns["a"]) == 8


def test_max_rounds_may_be_fewer_than_an_interval_needs():
    limits = RoundLimits(0.95, 0.01, min_rounds=2, max_rounds=3, max_seconds=5)
    assert len(rounds_of(limits, a=cycle([1.0]))[0].turns["a"]) == 3


def test_slow_backend_does_not_cost_others_their_intervals():
    clock, limits = (
        FakeClock(),
        RoundLimits(0.95, 0.01, min_rounds=10, max_rounds=30, max_seconds=5),
    )

    def turn(seconds):
        def run(runs):
            clock.now += seconds
            return [1.0] * runs

        return run

    turns = {"fast": turn(0.1), "slow": turn(8.0)}
    found = run_rounds(turns, dict.fromkeys(turns, 2), limits, clock=clock)
    assert {name: len(times) for name, times in found.turns.items()} == {"fast": 6, "slow": 4}
    assert found.ended == "the time limit of 5 s for a shape was reached"
    pair = compare(found.turns["slow"], found.turns["fast"], confidence=0.95, smallest=0.02)
    assert pair.words == "too few rounds for an interval (4 of 6)"


def test_failing_optional_backend_does_not_stop_the_others():
    calls = []

    def failing(runs):
        calls.append(runs)
        if len(calls) == 3:
            raise InputError("it broke.")
        return [1.0]

    turns = {"steady": lambda runs: [1.0], "auto": failing}
    found = run_rounds(turns, dict.fromkeys(turns, 1), LIMITS, may_fail={"auto"})
    assert found.failed == {"auto": "it broke."}
    assert {name: len(times) for name, times in found.turns.items()} == {"steady": 6}
    calls.clear()
    with pytest.raises(InputError, match="it broke"):
        run_rounds(turns, dict.fromkeys(turns, 1), LIMITS)
