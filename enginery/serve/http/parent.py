"""The parent process: it starts the processes of the server, replaces those that die, ends them.

    status = Parent(workers, devices, config, options.configure_logging).run()

It holds the listening sockets, so that connections wait while a process is replaced. It is small:
it imports neither onnxruntime nor numpy and has no event loop. On Linux processes are forked, so
they share its memory and do not import everything again.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, NoReturn

from enginery.serve.config import ServeConfig
from enginery.serve.http.lifecycle import (
    CANNOT_START,
    CLOSE_SECONDS,
    INTERRUPTED,
    REPLACE,
    SIGNALS,
    block_signals,
)
from enginery.serve.http.sockets import close

HEALTHY_SECONDS = 60.0
"""Uptime after which the failure of a process no longer delays its replacement."""
MAX_RESTART_DELAY_SECONDS = 30.0
HANG_SECONDS = 300.0
"""Time without a sign of life after which a process is killed. A provider's code may hold the GIL
for minutes while it builds or loads an engine."""
KILL_AFTER_SECONDS = CLOSE_SECONDS + 10.0
"""Time beyond `drain_delay` and `grace` after which a process that does not exit is killed."""
# On macOS system libraries are not safe to use after a fork.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"

_PULSE_SECONDS = 0.5
"""Time between two signs of life of a process."""
_TICK_SECONDS = 0.1

_log = logging.getLogger("enginery.serve")


@dataclass(eq=False)
class ServerProcess:
    """A process of the server, as its parent sees it, and those that replace it."""

    run: Callable[[], NoReturn]
    """Serves until the process exits."""
    sockets: Sequence[socket.socket] = ()
    """The sockets that it listens on; it closes those of other processes."""
    process: Any = None
    """The process of `multiprocessing`; None until it is started."""
    pulse: Any = None
    """The pipe on which it shows that it lives."""
    started_at: float = 0.0
    heard_at: float = 0.0
    due_at: float = 0.0
    """When it is started if it does not run."""
    failures: int = -1
    """Consecutive predecessors that died within `HEALTHY_SECONDS`; -1 for a first process."""

    def has_ended(self) -> bool:
        """Return True if the process has ended or has shown no sign of life; do not block."""
        now = time.monotonic()
        with suppress(OSError, EOFError):  # the process has just exited
            while self.pulse.poll():
                self.pulse.recv_bytes()
                self.heard_at = now
        return not self.process.is_alive() or now - self.heard_at > HANG_SECONDS


class Parent:
    """Starts processes, replaces those that die, forwards signals, and ends all."""

    def __init__(
        self,
        workers: Sequence[ServerProcess],
        devices: Sequence[ServerProcess],
        config: ServeConfig,
        configure_logging: Callable[[], object],
    ) -> None:
        """Note signals from now on, for `run`.

        Args:
            workers: processes that answer requests.
            devices: processes that run the models for them; empty if the workers do that.
            config: the options of the server.
            configure_logging: called in every process.
        """
        self._workers, self._devices = workers, devices
        self._config, self._configure_logging = config, configure_logging
        self._sockets = list(dict.fromkeys(s for worker in workers for s in worker.sockets))
        self._signals: list[int] = []
        self._is_ending = self._is_interrupted = self._cannot_start = False
        for number in SIGNALS:
            signal.signal(number, lambda number, _: self._signals.append(number))

    def run(self) -> int:
        """Run until SIGTERM or SIGINT, or until a process cannot start; return the exit status."""
        children = [*self._devices, *self._workers]
        while not self._is_ending:
            for child in children:
                self._replace_dead(child)
            connection.wait([c.process.sentinel for c in children if c.process], _TICK_SECONDS)
            self._handle_signals()
        return self._end()

    def _replace_dead(self, child: ServerProcess) -> None:
        """Start a process that is due; note when one that has ended is to be replaced."""
        if child.process is None:
            if time.monotonic() >= child.due_at:
                self._start(child)
            return
        if not child.has_ended():
            return
        hangs = child.process.is_alive()
        child.process.kill()
        child.process.join()
        status = child.process.exitcode
        if status == CANNOT_START and child.failures < 0:
            self._is_ending = self._cannot_start = True
            return
        now = time.monotonic()
        again = child.failures >= 0 and now - child.started_at < HEALTHY_SECONDS
        child.failures = child.failures + 1 if again else 0
        pause = restart_delay_seconds(child.failures)
        # Imported here because it imports modules that the parent rarely needs.
        from enginery.core.subprocess import describe_exit

        if hangs:
            reason = f"did not answer for {HANG_SECONDS:g} seconds"
        else:
            reason = "exited because it was stuck" if status == REPLACE else describe_exit(status)
        when = f"in {pause:g} seconds" if pause else "immediately"
        _log.warning("worker process %s %s; it is replaced %s.", child.process.pid, reason, when)
        child.process, child.due_at = None, now + pause

    def _start(self, child: ServerProcess) -> None:
        """Start a process, with its signals blocked until it can handle them."""
        context: Any = multiprocessing.get_context(START_METHOD)
        child.pulse, sender = context.Pipe(duplex=False)
        others = [listener for listener in self._sockets if listener not in child.sockets]
        child.process = context.Process(
            target=_run_child, args=(child.run, others, sender, self._configure_logging)
        )
        gc.freeze()  # else the process' garbage collector would write to, and copy, shared pages
        block_signals()
        try:
            child.process.start()
        finally:
            block_signals(block=False)
        sender.close()
        child.started_at = child.heard_at = time.monotonic()

    def _handle_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGHUP:  # for the processes that run models
                _send(number, [child.process for child in self._devices or self._workers])
                continue
            if number == signal.SIGINT:
                self._is_interrupted = self._is_ending
            self._is_ending = True

    def _end(self) -> int:
        """End all processes; return the exit status of the server."""
        close(self._sockets)  # each worker closes its own copies when it drains
        seconds = self._config.drain_delay + self._config.grace
        self._end_all(self._workers, seconds + KILL_AFTER_SECONDS)
        self._end_all(self._devices, KILL_AFTER_SECONDS)  # nobody asks them any more
        children = [*self._devices, *self._workers]
        statuses = [child.process.exitcode for child in children if child.process]
        if self._cannot_start:
            return CANNOT_START
        if self._is_interrupted and INTERRUPTED in statuses:
            return INTERRUPTED
        status: int = next(filter(None, statuses), 0)
        return status if status >= 0 else 128 - status

    def _end_all(self, children: Sequence[ServerProcess], seconds: float) -> None:
        """Wait until processes have ended; kill those that have not in time."""
        alive = [child.process for child in children if child.process]
        _send(signal.SIGTERM, alive)
        ends = time.monotonic() + seconds
        while alive := [process for process in alive if process.is_alive()]:
            self._handle_signals()
            if self._is_interrupted:  # repeated, because a process may have missed the first one
                _send(signal.SIGINT, alive)
            if time.monotonic() >= ends:
                for process in alive:
                    process.kill()
                    _log.error("worker process %s did not exit in time; killing it.", process.pid)
                ends = float("inf")
            connection.wait([process.sentinel for process in alive], _TICK_SECONDS)


def restart_delay_seconds(failures: int) -> float:
    """Return the delay after a number of consecutive failures: 0, 0.5, 1, 2, 4, … 30 seconds.

    >>> [restart_delay_seconds(failures) for failures in (0, 1, 2, 3, 10)]
    [0.0, 0.5, 1.0, 2.0, 30.0]
    """
    return min(MAX_RESTART_DELAY_SECONDS, 2.0 ** (failures - 2)) if failures > 0 else 0.0


def _send(number: int, processes: Sequence[Any]) -> None:
    for process in processes:
        if process is not None and process.is_alive():
            os.kill(process.pid, number)


def _run_child(
    run: Callable[[], NoReturn],
    others: Sequence[socket.socket],
    pulse: connection.Connection,
    configure_logging: Callable[[], object],
) -> NoReturn:
    """Serve until the process exits."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    close(others)
    # In its own process group: otherwise Ctrl-C would arrive twice, from the terminal and from the
    # parent.
    os.setpgid(0, 0)
    from enginery.core.subprocess import exit_when_closed

    if parent := multiprocessing.parent_process():
        exit_when_closed(parent.sentinel)
    configure_logging()
    threading.Thread(target=_show_life, args=(pulse,), daemon=True).start()
    run()


def _show_life(pulse: connection.Connection) -> None:
    with suppress(OSError):  # the parent has ended
        while True:
            pulse.send_bytes(b".")
            time.sleep(_PULSE_SECONDS)
