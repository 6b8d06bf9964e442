"""What connects the application with the process that it runs in: signals, draining, the end.

    async def lifespan(app):
        lifecycle.start(begin_drain=models.drain, reload=models.reload, activity=activity)
        loading = asyncio.create_task(load())        # lifecycle.fail_startup(error) where it fails
        yield

`server.py` makes one in each worker process and gives it to the application's factory. Under any
other ASGI server there is none: signals and the end of the process are that server's own.

SIGTERM and SIGINT drain: readiness is off at once, new connections are taken for `drain_delay`
seconds, and whatever clients have sent by then is answered, what the kernel has accepted and nobody
has read yet included. What still runs after `grace` seconds is cancelled, which the application
answers with 503. A second SIGINT cancels at once. SIGHUP reloads the models.
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
from enginery.serve.http_sockets import drop_new_connections

if TYPE_CHECKING:
    from uvicorn import Server

STARTUP_FAILURE = 3
"""The status of a worker that cannot start: uvicorn's, which stops the parent."""
REPLACE = 70
"""The status of a worker that asks to be replaced: EX_SOFTWARE of sysexits.h."""
INTERRUPTED = 128 + signal.SIGINT
CLOSE_SECONDS = 5.0
"""How long models may take to be freed at the end."""

_TICK_SECONDS = 0.02
_QUIET_TICKS = 15
"""A draining server ends once nothing ran and no request began for so many rounds of its loop: a
client that was just answered may be sending its next request. Rounds are counted, because each one
reads what has arrived; seconds may pass without one while another thread holds the interpreter."""
_CANCEL_SECONDS = 1.0
"""How long cancelled requests may take to be answered with 503."""
_SPARE_SECONDS = 3.0
"""Beyond all of these, until a process that does not end by itself is ended."""

_log = logging.getLogger("enginery.serve")


@dataclass
class Activity:
    """What a worker process is doing; whoever receives requests keeps it up to date."""

    in_flight: int = 0
    """Requests that began and are not answered."""
    last_request_at: float = 0.0
    """When the last request began, by `time.perf_counter`."""
    draining: bool = False
    """Answers should carry `connection: close`."""


class ProcessLifecycle:
    """The process of one server; made before its event loop runs."""

    def __init__(
        self,
        server: Server,
        sockets: Sequence[socket.socket],
        config: ServeConfig,
        *,
        supervised: bool,
        startup_status: int = STARTUP_FAILURE,
        server_ends: Callable[[], bool] = lambda: True,
    ) -> None:
        """Block SIGTERM, SIGINT and SIGHUP until `start`, so that none is lost on the way there.

        Args:
            server: runs the application; its loop does not run yet.
            sockets: what it listens on; closed when the process drains.
            config: `grace` and `drain_delay`.
            supervised: a parent starts another process when this one ends.
            startup_status: of the process when `fail_startup` ends it.
            server_ends: tells whether the server ends, and not this one of its processes alone.
        """
        self._server, self._sockets, self._config = server, sockets, config
        self._supervised, self._startup_status = supervised, startup_status
        self._server_ends = server_ends
        self._status = 0
        self._forcing_exit = False
        self._activity = Activity()
        self._begin_drain: Callable[[], object] = lambda: None
        self._reload: Callable[[], Awaitable[object]] | None = None
        self._shutdown_task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mask(block=True)

    def start(
        self,
        *,
        begin_drain: Callable[[], object],
        reload: Callable[[], Awaitable[object]],
        activity: Activity,
    ) -> None:
        """Handle SIGTERM, SIGINT and SIGHUP from here on; the loop is running.

        Args:
            begin_drain: turns readiness off; called once, when the process begins to end.
            reload: loads the models anew and says what happened; EngineryError where it cannot.
            activity: tells when nothing runs any more; its `draining` is set here.
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
        """Say why the models cannot be served and end the process, from any task or thread.

        A worker that cannot start stops the parent with status 2. The worker that replaces one
        which served before is tried again: the cause may pass.
        """
        if isinstance(error, EngineryError):
            _log.error("%s", error)
        else:
            _log.error("loading the models failed", exc_info=error)
        _exit(self._startup_status)

    def replace(self, reason: str, refuse_all: Callable[[], object] | None = None) -> None:
        """End this process for the parent to start another; from any thread.

        For a batch that does not end, or a device that is lost: what runs is answered with 503,
        because it waits for something that will not come. New connections wait for the next
        process. Without a parent this does nothing.

        Args:
            reason: what happened, in words.
            refuse_all: answers what runs with 503; whatever is left is cancelled.
        """
        if self._supervised and self._loop is not None:
            self._loop.call_soon_threadsafe(self._replace, reason, refuse_all)

    def ask_all_to_reload(self) -> None:
        """Have all worker processes of the server reload, this one included, by way of the parent.

        Does nothing where there is no parent, or no other worker.
        """
        import multiprocessing

        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid and self._config.processes > 1:
            os.kill(parent.pid, signal.SIGHUP)

    def run(self) -> NoReturn:
        """Run the server until it ends, and end the process with its status.

        The process does not wait for threads: one may be stuck in a provider's code.
        """
        status = 1
        try:
            with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
                runner.run(self._serve())
        except SystemExit as ended:  # uvicorn's, where the application has not started
            status = ended.code if isinstance(ended.code, int) else 1
            if status == STARTUP_FAILURE:
                status = self._startup_status
        except BaseException:
            _log.exception("the server failed")
        finally:
            _exit(status)

    async def _serve(self) -> None:
        await self._server.serve(list(self._sockets))
        # Before the runner would wait for the threads of its executor.
        _exit(self._status)

    def _handlers(self) -> dict[int, Callable[[], None]]:
        found: dict[int, Callable[[], None]] = {
            signal.SIGTERM: self._handle_sigterm,
            signal.SIGINT: self._handle_sigint,
        }
        if sys.platform != "win32":
            found[signal.SIGHUP] = self._handle_sighup
        return found

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
        """Stop listening, and take the connections that the kernel has accepted by then.

        To close a listening socket would reset them, though their requests may be here already.
        """
        listening = [each.dup() for each in self._sockets]
        self._stop_listening()
        loop = asyncio.get_running_loop()
        for each in listening:
            with each:
                each.setblocking(False)
                if self._server_ends():  # else the next process is to accept them
                    drop_new_connections(each)
                while True:
                    try:
                        accepted, _ = each.accept()
                    except OSError:  # none is left, or it has gone again
                        break
                    accepted.setblocking(False)
                    await loop.connect_accepted_socket(self._new_connection, sock=accepted)

    def _stop_listening(self) -> None:
        for server in self._server.servers:
            server.close()
        for each in self._sockets:
            each.close()

    def _new_connection(self) -> asyncio.Protocol:
        server = self._server
        make: Callable[..., asyncio.Protocol] = server.config.http_protocol_class
        return make(
            config=server.config, server_state=server.server_state, app_state=server.lifespan.state
        )

    async def _finish(self, left: float, refuse_all: Callable[[], object] | None = None) -> None:
        """End the server, with so many seconds for answers to be sent.

        Args:
            left: 0 or less where it has to end now.
            refuse_all: answers what runs.
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
        # Answers that their clients are slow to read.
        self._server.config.timeout_graceful_shutdown = max(1, round(left))
        self._server.should_exit = True

    def _exit_after(self, seconds: float) -> None:
        """End the process some seconds later, though a thread holds its loop up.

        Where a provider's code holds the interpreter too, the parent has to do it.
        """
        seconds += _CANCEL_SECONDS + CLOSE_SECONDS + _SPARE_SECONDS
        timer = threading.Timer(seconds, lambda: _exit(self._status))
        timer.daemon = True
        timer.start()

    @staticmethod
    async def _wait_for(tasks: Sequence[asyncio.Task[None]]) -> None:
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)


def _exit(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
