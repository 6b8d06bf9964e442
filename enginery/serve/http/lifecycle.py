"""The lifecycle of a worker process: signals, draining, reloading and exit.

    async def lifespan(app):
        lifecycle.start(begin_drain=models.drain, reload=models.reload, activity=activity)
        loading = asyncio.create_task(load())        # calls lifecycle.fail_startup(error) on errors
        yield

`server.py` creates one in each worker process and passes it to the application's factory. Under
other ASGI servers there is none, because those handle signals and exit themselves.

SIGTERM and SIGINT drain the server: it reports at once that it is not ready, accepts new
connections for `drain_delay` seconds, and answers all requests on those. Requests that still run
after `grace` seconds are cancelled and answered with 503. A second SIGINT cancels at once. SIGHUP
reloads the models.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from enginery.core.errors import EngineryError
from enginery.serve.config import ServeConfig
from enginery.serve.http.listener import Listener

if TYPE_CHECKING:
    from uvicorn import Server

CANNOT_START = 2
"""Exit status of a process that cannot load its models; if it is the first of its kind, also of the
server."""
REPLACE = 70
"""Exit status of a worker that needs to be replaced: EX_SOFTWARE of sysexits.h."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit status after a second SIGINT."""
CLOSE_SECONDS = 5.0
"""Maximum time to free the models at shutdown."""

SIGNALS: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT)
"""The signals that a server handles; SIGHUP is unknown to Windows."""
if sys.platform != "win32":
    SIGNALS += (signal.SIGHUP,)

_TICK_SECONDS = 0.02
_QUIET_TICKS = 15
"""Number of iterations of the event loop without a running or new request after which a draining
server exits; until then a client may send its next request. Iterations are counted instead of
seconds, because only an iteration reads new data, and another thread may hold the GIL for
seconds."""
_ACCEPT_SECONDS = 0.2
"""Minimum time to accept the connections that wait in the kernel, which are reset when the last
process stops listening."""
_CANCEL_SECONDS = 1.0
"""Maximum time to answer cancelled requests with 503."""
_FLUSH_SECONDS = 1.0
"""Maximum time to write what was logged before the process exits."""
_SPARE_SECONDS = 3.0
"""Time beyond all of these after which a process that does not exit is killed."""

_log = logging.getLogger("enginery.serve")


@dataclass
class Activity:
    """The requests in progress of a worker process, updated by the outermost middleware."""

    in_flight: int = 0
    """Number of requests in progress."""
    last_request_at: float = 0.0
    """When the last request started, by `time.perf_counter`."""
    draining: bool = False
    """Responses should carry `connection: close`."""


@dataclass(frozen=True)
class Supervision:
    """How a worker process starts and ends beside others."""

    is_supervised: bool = False
    """A parent process replaces this one when it exits."""
    is_first: bool = True
    """The process answers health routes while the models of all load."""
    first_is_loaded: Any = None
    """Shared memory whose `value` is 1 once the first process has loaded its models; None if there
    are no others."""

    @property
    def may_listen(self) -> bool:
        """True once a process that `loads_first` may listen."""
        return self.first_is_loaded is None or self.first_is_loaded.value == 1

    @property
    def loads_first(self) -> bool:
        """True if the process loads its models before it listens, beside others that may be ready.

        Until the first process is ready it answers 503, and so would the server to some requests if
        others were ready before it.
        """
        return self.first_is_loaded is not None and (self.may_listen or not self.is_first)

    def report_loaded(self) -> None:
        """Let the other processes listen if this is the first one."""
        if self.is_first and self.first_is_loaded is not None:
            self.first_is_loaded.value = 1


class ProcessLifecycle:
    """The lifecycle of a worker process. Create it before the event loop runs."""

    def __init__(
        self,
        server: Server,
        listener: Listener,
        config: ServeConfig,
        supervision: Supervision,
    ) -> None:
        """Create the lifecycle. Signals should be blocked until `start`; see `block_signals`.

        Args:
            server: the uvicorn server, whose loop does not run yet.
            listener: what it listens on, which is closed when the process drains.
            config: the options; `grace`, `drain_delay` and `processes` are used.
            supervision: whether it has a parent process, and what it agrees on with it.
        """
        self._server, self._listener, self._config = server, listener, config
        self.supervision = supervision
        self.draining = asyncio.Event()
        """Set once the process drains."""
        self._status = 0
        self._forcing_exit = False
        self._activity = Activity()
        self._begin_drain: Callable[[], object] = lambda: None
        self._reload: Callable[[], Awaitable[object]] | None = None
        self._shutdown_task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(
        self,
        *,
        begin_drain: Callable[[], object],
        reload: Callable[[], Awaitable[object]],
        activity: Activity,
    ) -> None:
        """Handle SIGTERM, SIGINT and SIGHUP from now on. Call this in the event loop.

        Args:
            begin_drain: makes the server report that it is not ready; called once, at shutdown.
            reload: reloads the models and logs the result; raises EngineryError if it cannot.
            activity: the requests in progress; `draining` is set here.
        """
        self._begin_drain, self._reload, self._activity = begin_drain, reload, activity
        self._loop = asyncio.get_running_loop()
        handlers = (self._handle_sigterm, self._handle_sigint, self._handle_sighup)
        for number, handler in zip(SIGNALS, handlers, strict=False):
            try:
                self._loop.add_signal_handler(number, handler)
            except NotImplementedError:  # Windows
                call = partial(self._loop.call_soon_threadsafe, handler)
                signal.signal(number, lambda *_, call=call: call())
        block_signals(block=False)

    def fail_startup(self, error: Exception) -> NoReturn:
        """Log why the models cannot be served, and exit. Call this from any task or thread.

        If a first worker cannot start, the parent exits, too. A worker that replaces another one is
        started again, because the cause may be temporary.
        """
        log_failed_startup(error)
        exit_process(CANNOT_START)

    def replace(self, reason: str, refuse_all: Callable[[], object] | None = None) -> None:
        """Exit, so that the parent starts another process. Call this from any thread.

        Use it if a batch hangs or a device is lost. Running requests are answered with 503, because
        they cannot finish. New connections wait for the next process. Without a parent this does
        nothing.

        Args:
            reason: what happened, for the log.
            refuse_all: answers running requests with 503; those that remain are cancelled.
        """
        if self.supervision.is_supervised and self._loop is not None:
            self._loop.call_soon_threadsafe(self._replace, reason, refuse_all)

    def reload_all_processes(self) -> None:
        """Ask the parent to make all worker processes reload their models, this one included.

        Do nothing if there is no parent or no other worker.
        """
        import multiprocessing

        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid and self._config.processes > 1:
            os.kill(parent.pid, signal.SIGHUP)

    def run(self) -> NoReturn:
        """Run the server until it shuts down, then exit with its status.

        The process exits without waiting for threads, because one may hang in a provider's code.
        """
        status = 1
        try:
            with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
                runner.run(self._serve())
        except SystemExit:  # raised by uvicorn if the application did not start
            status = CANNOT_START
        except BaseException:
            _log.exception("the server failed")
        finally:
            exit_process(status)

    async def _serve(self) -> None:
        await self._listener.serve()
        # Exit here: asyncio.Runner would wait for the threads of its executor.
        exit_process(self._status)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _handle_sigterm(self) -> None:
        if self._shutdown_task is None:
            _log.info("draining")
            self._turn_unready()
            exit_after(self._config.drain_delay + self._config.grace, lambda: self._status)
            self._shutdown_task = self._spawn(self._drain())

    def _handle_sigint(self) -> None:
        if self._shutdown_task is None:
            self._handle_sigterm()
        else:
            self._status = INTERRUPTED
            self._force_exit("interrupted.")

    def _replace(self, reason: str, refuse_all: Callable[[], object] | None) -> None:
        if self._shutdown_task is None:
            self._status = REPLACE
            self._turn_unready()
        self._force_exit(reason, refuse_all)

    def _force_exit(self, reason: str, refuse_all: Callable[[], object] | None = None) -> None:
        if self._forcing_exit:
            return
        self._forcing_exit = True
        _log.warning("ending at once: %s", reason)
        if self._shutdown_task is not None:
            self._shutdown_task.cancel()
        exit_after(0.0, lambda: self._status)
        self._shutdown_task = self._spawn(self._finish(0.0, refuse_all))

    def _handle_sighup(self) -> None:
        if self._reload is not None:
            self._spawn(log_errors(self._reload()))

    def _turn_unready(self) -> None:
        self._activity.draining = True
        self.draining.set()
        self._begin_drain()

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._config.drain_delay + self._config.grace
        while not self._server.started:  # a signal came before it listens
            await asyncio.sleep(_TICK_SECONDS)
        await asyncio.sleep(max(self._config.drain_delay, _ACCEPT_SECONDS))
        self._listener.close()
        quiet, last = 0, self._activity.last_request_at
        while quiet < _QUIET_TICKS and loop.time() < until:
            await asyncio.sleep(_TICK_SECONDS)
            began, last = self._activity.last_request_at != last, self._activity.last_request_at
            quiet = 0 if began or self._activity.in_flight else quiet + 1
        await self._finish(until - loop.time())

    async def _finish(
        self, remaining_seconds: float, refuse_all: Callable[[], object] | None = None
    ) -> None:
        """Shut the server down.

        Args:
            remaining_seconds: seconds to send responses; 0 or less to shut down at once.
            refuse_all: answers running requests with 503.
        """
        while not self._server.started:
            await asyncio.sleep(_TICK_SECONDS)
        self._listener.close()
        state = self._server.server_state
        if refuse_all is not None:
            refuse_all()
            await self._wait_for(list(state.tasks))
        if running := list(state.tasks):
            _log.warning(
                "%d requests were still running; they are answered with 503.", len(running)
            )
            for task in running:
                task.cancel()
            await self._wait_for(running)
        # Time for responses that clients read slowly.
        self._server.config.timeout_graceful_shutdown = max(1, round(remaining_seconds))
        self._server.should_exit = True

    @staticmethod
    async def _wait_for(tasks: Sequence[asyncio.Task[None]]) -> None:
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)


def block_signals(*, block: bool = True) -> None:
    """Block `SIGNALS`, so that none is lost until they can be handled; or let them through."""
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_BLOCK if block else signal.SIG_UNBLOCK, SIGNALS)


async def log_errors(reloading: Awaitable[object]) -> None:
    """Wait until the models are reloaded, and log why they cannot be."""
    try:
        await reloading
    except EngineryError as error:
        _log.error("not reloaded: %s", error)
    except Exception:
        _log.exception("reloading failed")


def log_failed_startup(error: Exception) -> None:
    """Log why the models cannot be served."""
    if isinstance(error, EngineryError):
        _log.error("%s", error)
    else:
        _log.error("loading the models failed", exc_info=error)


def exit_after(seconds: float, status: Callable[[], int]) -> None:
    """Exit some time after `seconds` even if the event loop is blocked.

    If a provider's code holds the GIL, only the parent can end the process.
    """
    seconds += _CANCEL_SECONDS + CLOSE_SECONDS + _SPARE_SECONDS
    timer = threading.Timer(seconds, lambda: exit_process(status()))
    timer.daemon = True
    timer.start()


def exit_process(status: int) -> NoReturn:
    """Exit at once, without waiting for threads, because one may hang in a provider's code.

    What was logged is written first, unless nobody reads it.
    """
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(_FLUSH_SECONDS)
    os._exit(status)


def _flush() -> None:
    for handler in logging.getLogger().handlers:
        handler.flush()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
