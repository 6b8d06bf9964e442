"""The small parent of the process that serves: starts it, and starts it anew when it dies.

    status = supervise(lambda restarts: run(make_service, sockets, config, ...), sockets)

The parent holds the listening sockets, so that connections wait while a dead child is replaced. It
forks before anything heavy is imported: no onnxruntime, no event loop and no thread is in it.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from enginery.core.errors import EngineryError
from enginery.serve.http_sockets import close

RESTART = 70
"""The status of a child that asks to be started anew: EX_SOFTWARE of sysexits.h."""
CANNOT_START = EngineryError.exit_code
HEALTHY_SECONDS = 60.0
"""A child that lived for so long was well: the next one starts at once again."""
LONGEST_PAUSE_SECONDS = 30.0


@dataclass(frozen=True)
class Restarts:
    """What came before this process."""

    count: int = 0
    reason: str = ""
    """Why its predecessor ended, in words; empty for the first."""


def pause_seconds(failures: int) -> float:
    """How long to wait after so many failures in a row: 0, 0.5, 1, 2 … 30 seconds."""
    return min(LONGEST_PAUSE_SECONDS, 2.0 ** (failures - 3)) if failures > 1 else 0.0


def supervise(
    serve: Callable[[Restarts], int],
    sockets: Sequence[socket.socket],
    *,
    restart: bool = True,
    patience_seconds: float = 60.0,
    say: Callable[[str], object] = lambda line: sys.stderr.write(f"{line}\n"),
) -> int:
    """Runs `serve` in a child process for as long as it should run.

    SIGTERM, SIGINT and SIGHUP are handed on. They are blocked in a fresh child until it listens to
    them, as `server.run` does, so that none is lost or ends it half started. The child is in a
    process group of its own, for Ctrl-C to reach it once; it ends when the parent does, however
    that ends.

    Args:
        serve: given what came before; returns the exit status. It may import what it likes.
        sockets: listening ones; this closes the parent's side of them when the end has begun.
        restart: False runs `serve` in this process, as a platform without fork does.
        patience_seconds: how long a child may take to end after SIGTERM before it is killed.
        say: told a line for each death, what killed it, and what comes next.

    Returns:
        The exit status of the child: its own, or 128 and the signal that killed it.
    """
    if not restart or not hasattr(os, "fork"):
        return serve(Restarts())
    with _Signals() as signals:
        return _Supervisor(serve, sockets, signals, patience_seconds, say).run()


class _Signals:
    """Signals as bytes of a pipe: waiting for one and for a time is one call, and none is lost."""

    forwarded = (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGTERM))

    def __enter__(self) -> _Signals:
        self.taken = (*self.forwarded, signal.SIGCHLD)
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = {number: signal.signal(number, _heard) for number in self.taken}
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def wait(self, seconds: float | None) -> set[int]:
        """The signals that came, after so many seconds at the latest."""
        ready, _, _ = select.select([self._read], [], [], seconds)
        return set(os.read(self._read, 4096)) if ready else set()

    def forget(self) -> None:
        """In a child: everything as it is in a fresh process, what is forwarded blocked."""
        signal.set_wakeup_fd(-1)
        for number in self.taken:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.close(self._read)
        os.close(self._write)


def _heard(_number: int, _frame: object) -> None:
    """The wakeup pipe tells; without a handler Python would not write to it."""


class _Supervisor:
    def __init__(
        self,
        serve: Callable[[Restarts], int],
        sockets: Sequence[socket.socket],
        signals: _Signals,
        patience_seconds: float,
        say: Callable[[str], object],
    ) -> None:
        self._serve = serve
        self._sockets = sockets
        self._signals = signals
        self._patience_seconds = patience_seconds
        self._say = say
        self._stopping = False
        # Nobody writes to it. It closes when this process is gone, and the kernel tells the child.
        self._alive = os.pipe()

    def run(self) -> int:
        restarts, failures = Restarts(), 0
        try:
            while True:
                started = time.monotonic()
                status = self._watch(self._fork(restarts))
                lived = time.monotonic() - started
                cannot_start = not restarts.count and (
                    status == CANNOT_START
                    or (status not in {0, RESTART} and status > 0 and lived < HEALTHY_SECONDS)
                )
                if self._stopping or status == 0 or cannot_start:
                    return status if status >= 0 else 128 - status
                failures = failures + 1 if lived < HEALTHY_SECONDS else 1
                restarts = Restarts(restarts.count + 1, _how_it_ended(status))
                pause = pause_seconds(failures)
                then = f"in {pause:g} seconds" if pause else "at once"
                self._say(
                    f"the serving process {restarts.reason}; it is started anew {then} "
                    f"(restart {restarts.count})."
                )
                if self._ended_while_waiting(pause):
                    return 0
        finally:
            for end in self._alive:
                os.close(end)

    def _fork(self, restarts: Restarts) -> int:
        gc.freeze()  # else the child's collector would touch, and so copy, every page of ours
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals.taken)
        child = os.fork()
        if child == 0:
            self._be_child(restarts)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals.taken)
        return child

    def _be_child(self, restarts: Restarts) -> NoReturn:
        status = 1
        try:
            self._signals.forget()
            os.setpgid(0, 0)
            theirs, ours = self._alive
            os.close(ours)
            _end_with_writer(theirs)
            status = self._serve(restarts)
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except OSError:
                    continue
            # A thread that is stuck in a provider must not keep the process.
            os._exit(status)

    def _watch(self, child: int) -> int:
        """The status of the child once it has ended, negative for a signal."""
        until: float | None = None
        while True:
            left = None if until is None else max(0.0, until - time.monotonic())
            came = self._signals.wait(left)
            for number in came.intersection(self._signals.forwarded):
                if number in {signal.SIGTERM, signal.SIGINT} and not self._stopping:
                    self._stop()
                    until = time.monotonic() + self._patience_seconds
                os.kill(child, number)
            status = _reaped(child)
            if status is not None:
                return status
            if until is not None and time.monotonic() >= until:
                self._say(
                    f"the serving process did not end within {self._patience_seconds:g} seconds; "
                    "it is killed."
                )
                os.kill(child, signal.SIGKILL)
                until = None

    def _ended_while_waiting(self, pause: float) -> bool:
        """Waits before a restart; whether SIGTERM or SIGINT came."""
        until = time.monotonic() + pause
        while True:
            left = until - time.monotonic()
            if self._signals.wait(max(0.0, left)) & {signal.SIGTERM, signal.SIGINT}:
                self._stop()
                return True
            if left <= 0:
                return False

    def _stop(self) -> None:
        """From here on the child alone decides for how long connections are taken."""
        self._stopping = True
        close(self._sockets)


def _reaped(child: int) -> int | None:
    """The child's status if it has ended. As a container's first process we have others, too."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return os.waitstatus_to_exitcode(status)
        if pid == 0:
            return None


def _end_with_writer(pipe: int) -> None:
    """Ends this process when nobody can write to the pipe any more.

    The kernel sends SIGIO then, whose default is to end the process: no thread has to watch, and
    none could while a provider's code holds the interpreter.
    """
    import fcntl  # not on Windows

    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:  # gone before we asked
        os._exit(1)


def _how_it_ended(status: int) -> str:
    if status == RESTART:
        return "ended itself, because it was stuck"
    from enginery.core.child import how_it_ended  # brings modules that a parent seldom needs

    return how_it_ended(status)
