"""The lifecycle of a worker process: signals, draining, reloading and exit.

    async def lifespan(app):
        lifecycle.start(begin_drain=models.drain, reload=models.reload, activity=activity)
        loading = asyncio.create_task(load())        # calls lifecycle.fail_startup(error) on errors
        yield

`server.py` creates one in each worker process and passes it to the application's factory. Under
other ASGI servers there is none, because those handle signals and exit themselves.

SIGTERM and SIGINT drain the server: it reports at once that it is not ready, accepts new
connections for `drain_delay` seconds, and answers all requests that clients have sent by then,
including those on connections that wait in the kernel. Requests that still run after `grace`
seconds are cancelled and answered with 503. A second SIGINT cancels at once. SIGHUP reloads the
models.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from enginery.core.errors import EngineryError
from enginery.serve.config import ServeConfig
from enginery.serve.http.sockets import Acceptor, drop_new_connections

if TYPE_CHECKING:
    from uvicorn import Server

STARTUP_FAILURE = 3
"""Exit status of a worker that cannot start: uvicorn's own, on which the parent stops."""
REPLACE = 70
"""Exit status of a worker that needs to be replaced: EX_SOFTWARE of sysexits.h."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit status after a second SIGINT."""
CLOSE_SECONDS = 5.0
"""Maximum time to free the models at shutdown."""

_TICK_SECONDS = 0.02
_QUIET_TICKS = 15
"""Number of iterations of the event loop without a running or new request after which a draining
server exits; until then a client may send its next request. Iterations are counted instead of
seconds, because only an iteration reads new data, and another thread may hold the GIL for
seconds."""
_HANDSHAKE_SECONDS = 0.2
"""Time to establish the connections that clients have begun before the server stops listening."""
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
    """How a worker process starts and ends together with its parent process."""

    supervised: bool
    """A parent process replaces this one when it exits."""
    startup_status: int = STARTUP_FAILURE
    """Exit status for `fail_startup`."""
    loads_first: bool = False
    """Load the models before the process listens."""
    may_listen: Callable[[], bool] = lambda: True
    """Returns True once a process that `loads_first` may listen."""
    on_loaded: Callable[[], object] = lambda: None
    """Called once the models are loaded."""
    server_ends: Callable[[], bool] = lambda: True
    """Returns True if the whole server shuts down, not only this process."""


class ProcessLifecycle:
    """The lifecycle of a worker process. Create it before the event loop runs."""

    def __init__(
        self,
        server: Server,
        sockets: Sequence[socket.socket],
        config: ServeConfig,
        supervision: Supervision,
    ) -> None:
        """Block SIGTERM, SIGINT and SIGHUP until `start`, so that none is lost until then.

        Args:
            server: the uvicorn server, whose loop does not run yet.
            sockets: the listening sockets, which are closed when the process drains.
            config: the options; `grace`, `drain_delay` and `processes` are used.
            supervision: whether it has a parent process, and what it agrees on with it.
        """
        self._server, self._sockets, self._config = server, sockets, config
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
        self._acceptor: Acceptor | None = None
        self._is_listening = True
        self._mask(block=True)

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
        for number, handler in self._handlers().items():
            try:
                self._loop.add_signal_handler(number, handler)
            except NotImplementedError:  # Windows
                call = partial(self._loop.call_soon_threadsafe, handler)
                signal.signal(number, lambda *_, call=call: call())
        self._mask(block=False)

    def fail_startup(self, error: Exception) -> NoReturn:
        """Log why the models cannot be served, and exit. Call this from any task or thread.

        If a first worker cannot start, the parent exits with status 2. A worker that replaces
        another one is started again, because the cause may be temporary.
        """
        log_failed_startup(error)
        exit_process(self.supervision.startup_status)

    def replace(self, reason: str, refuse_all: Callable[[], object] | None = None) -> None:
        """Exit, so that the parent starts another process. Call this from any thread.

        Use it if a batch hangs or a device is lost. Running requests are answered with 503, because
        they cannot finish. New connections wait for the next process. Without a parent this does
        nothing.

        Args:
            reason: what happened, for the log.
            refuse_all: answers running requests with 503; those that remain are cancelled.
        """
        if self.supervision.supervised and self._loop is not None:
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
        except SystemExit as ended:  # raised by uvicorn if the application did not start
            status = ended.code if isinstance(ended.code, int) else 1
            if status == STARTUP_FAILURE:
                status = self.supervision.startup_status
        except BaseException:
            _log.exception("the server failed")
        finally:
            exit_process(status)

    async def _serve(self) -> None:
        if sys.platform == "win32":
            await self._server.serve(list(self._sockets))
        else:
            self._spawn(self._accept())
            await self._server.serve([])
        # Exit here: asyncio.Runner would wait for the threads of its executor.
        exit_process(self._status)

    def _handlers(self) -> dict[int, Callable[[], None]]:
        handlers: dict[int, Callable[[], None]] = {
            signal.SIGTERM: self._handle_sigterm,
            signal.SIGINT: self._handle_sigint,
        }
        if sys.platform != "win32":
            handlers[signal.SIGHUP] = self._handle_sighup
        return handlers

    def _mask(self, *, block: bool) -> None:
        if sys.platform != "win32":
            how = signal.SIG_BLOCK if block else signal.SIG_UNBLOCK
            signal.pthread_sigmask(how, self._handlers())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _handle_sigterm(self) -> None:
        if self._shutdown_task is None:
            _log.info("draining")
            self._turn_unready()
            self._exit_after(self._config.drain_delay + self._config.grace)
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
        self._exit_after(0.0)
        self._shutdown_task = self._spawn(self._finish(0.0, refuse_all))

    def _handle_sighup(self) -> None:
        self._spawn(self._do_reload())

    async def _do_reload(self) -> None:
        if self._reload is None:
            return
        try:
            await self._reload()
        except EngineryError as error:
            _log.error("not reloaded: %s", error)
        except Exception:
            _log.exception("reloading failed")

    def _turn_unready(self) -> None:
        self._activity.draining = True
        self.draining.set()
        self._begin_drain()

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._config.drain_delay + self._config.grace
        while not self._server.started:  # a signal came before it listens
            await asyncio.sleep(_TICK_SECONDS)
        await asyncio.sleep(self._config.drain_delay)
        await self._accept_pending()
        quiet, last = 0, self._activity.last_request_at
        while quiet < _QUIET_TICKS and loop.time() < until:
            await asyncio.sleep(_TICK_SECONDS)
            began, last = self._activity.last_request_at != last, self._activity.last_request_at
            quiet = 0 if began or self._activity.in_flight else quiet + 1
        await self._finish(until - loop.time())

    async def _accept_pending(self) -> None:
        """Stop listening, and accept the connections that wait in the kernel.

        Closing a listening socket resets waiting connections, whose requests may already be here,
        and those that are being established.
        """
        if self.supervision.server_ends():  # else the next process accepts new connections
            for listener in self._sockets:
                drop_new_connections(listener)
            await asyncio.sleep(_HANDSHAKE_SECONDS)
        waiting = [listener.dup() for listener in self._sockets]
        self._stop_listening()
        for listener in waiting:
            listener.setblocking(False)
        await self._acceptor_of(waiting).accept_waiting()
        for listener in waiting:
            listener.close()

    async def _accept(self) -> None:
        """Accept connections once the application has started."""
        while not self._server.started:
            await asyncio.sleep(_TICK_SECONDS)
        if not self._is_listening:
            return
        self._acceptor = self._acceptor_of(self._sockets)
        self._acceptor.start()

    def _acceptor_of(self, sockets: Sequence[socket.socket]) -> Acceptor:
        return Acceptor(sockets, self._new_connection, self._server.server_state.connections)

    def _stop_listening(self) -> None:
        self._is_listening = False
        if self._acceptor is not None:
            self._acceptor.stop()
        for server in self._server.servers:
            server.close()
        for listener in self._sockets:
            listener.close()

    def _new_connection(self) -> asyncio.Protocol:
        server = self._server
        make: Callable[..., asyncio.Protocol] = server.config.http_protocol_class
        return make(
            config=server.config, server_state=server.server_state, app_state=server.lifespan.state
        )

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
        self._stop_listening()
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

    def _exit_after(self, seconds: float) -> None:
        """Exit after some seconds even if the event loop is blocked.

        If a provider's code holds the GIL, only the parent can end the process.
        """
        seconds += _CANCEL_SECONDS + CLOSE_SECONDS + _SPARE_SECONDS
        timer = threading.Timer(seconds, lambda: exit_process(self._status))
        timer.daemon = True
        timer.start()

    @staticmethod
    async def _wait_for(tasks: Sequence[asyncio.Task[None]]) -> None:
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)


def log_failed_startup(error: Exception) -> None:
    """Log why the models cannot be served."""
    if isinstance(error, EngineryError):
        _log.error("%s", error)
    else:
        _log.error("loading the models failed", exc_info=error)


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
