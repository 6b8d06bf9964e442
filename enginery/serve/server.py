"""The process that serves: an application over listening sockets, from its start to its end.

    status = run(make_service, bind("127.0.0.1", 8000), config, restarts=Restarts(), say=print)

Listening comes first; the models load meanwhile, and the application answers 503 until they are
there. SIGTERM and SIGINT drain, a second SIGINT ends at once, SIGHUP reloads.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

from enginery.core.errors import EngineryError
from enginery.serve.config import ServeConfig
from enginery.serve.http_connections import Connections, affordable
from enginery.serve.http_life import Life, Say, Service
from enginery.serve.http_sockets import BACKLOG, urls
from enginery.serve.news import ERROR
from enginery.serve.protocol import HttpProtocol
from enginery.serve.supervisor import Restarts

log = logging.getLogger("enginery.serve")
_CLOSE_SECONDS = 5.0
"""How long a service may take to free its models."""


def run(
    make_service: Callable[[Life], Service],
    sockets: Sequence[socket.socket],
    config: ServeConfig,
    *,
    restarts: Restarts,
    say: Say,
) -> int:
    """Runs `serve` on uvloop, where that is installed; the exit status.

    Threads that are still stuck are not waited for; a caller that wants the process to end uses
    `os._exit`, as the supervisor does.
    """
    loop = _new_loop()
    try:
        return loop.run_until_complete(
            serve(make_service, sockets, config, restarts=restarts, say=say)
        )
    except EngineryError as error:
        say(f"{ERROR}{error}")
        return error.exit_code
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def serve(
    make_service: Callable[[Life], Service],
    sockets: Sequence[socket.socket],
    config: ServeConfig,
    *,
    restarts: Restarts,
    say: Say,
) -> int:
    """Serves until a signal or the service ends it.

    Args:
        make_service: quick; what takes time belongs into the service's `load`.
        sockets: listening ones, from `http_sockets.bind`; closed at the end.
        config: limits, timeouts, grace.
        restarts: what came before this process.
        say: told what happens, a line each.

    Returns:
        0 after draining, 130 after a second SIGINT, `RESTART` where the service asked for it.

    Raises:
        EngineryError: the models cannot be loaded.
    """
    loop = asyncio.get_running_loop()
    life = Life(restarts, loop)
    service = make_service(life)
    connections = Connections(service.application, affordable(config, say))
    connections.start(loop)
    background: set[asyncio.Task[Any]] = set()

    def begin(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = loop.create_task(work)
        background.add(task)
        task.add_done_callback(background.discard)
        return task

    def hang_up() -> None:
        begin(_reload(service, say))

    addresses = urls(sockets)
    servers = [
        await loop.create_server(lambda: HttpProtocol(connections), sock=each, backlog=BACKLOG)
        for each in sockets
    ]
    try:
        with _signals(loop, {"SIGTERM": life.end, "SIGINT": life.interrupt, "SIGHUP": hang_up}):
            say(f"listening on {', '.join(addresses)}")
            loading = begin(service.load())
            ending = begin(life.ending.wait())
            await asyncio.wait({loading, ending}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                await ending
            else:
                loading.cancel()
            service.drain()
            if not life.hurry.is_set():
                draining = begin(_drain(connections, servers, config, say))
                hurry = begin(life.hurry.wait())
                await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
                draining.cancel()
                with suppress(asyncio.CancelledError):
                    await draining
            if life.hurry.is_set():
                say(f"ending at once: {life.reason or 'asked for.'}")
            return life.status
    finally:
        for server in servers:
            server.close()
        cancelled = await connections.give_up("the server is shutting down.")
        if cancelled:
            say(f"{cancelled} requests were still running; they were answered with 503.")
        connections.stop()
        for task in list(background):
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await _closed(service)


async def _drain(
    connections: Connections, servers: Sequence[asyncio.Server], config: ServeConfig, say: Say
) -> None:
    say("draining")
    until = perf_counter() + config.drain_delay + config.grace
    connections.draining = True
    await asyncio.sleep(config.drain_delay)
    for server in servers:
        # Connections that the kernel has accepted are ours: their requests may be here already.
        waiting = [socket.fromfd(s.fileno(), s.family, s.type) for s in server.sockets]
        server.close()
        for each in waiting:
            with each:
                await _take_waiting(each, connections)
    await connections.drain(until)


async def _take_waiting(listening: socket.socket, connections: Connections) -> None:
    listening.setblocking(False)
    while True:
        try:
            accepted, _ = listening.accept()
        except OSError:  # none is left, or it has gone again
            return
        accepted.setblocking(False)
        await connections.loop.connect_accepted_socket(
            lambda: HttpProtocol(connections), sock=accepted
        )


async def _reload(service: Service, say: Say) -> None:
    try:
        for line in await service.reload():
            say(line)
    except EngineryError as error:
        say(f"{ERROR}not reloaded: {error}")
    except Exception:
        log.exception("reloading failed")


async def _closed(service: Service) -> None:
    try:
        await asyncio.wait_for(service.close(), _CLOSE_SECONDS)
    except TimeoutError:
        log.warning("the models were not freed within %g seconds.", _CLOSE_SECONDS)
    except Exception:
        log.exception("freeing the models failed")


@contextmanager
def _signals(
    loop: asyncio.AbstractEventLoop, handlers: dict[str, Callable[[], None]]
) -> Iterator[None]:
    numbers = {
        getattr(signal, name): handler
        for name, handler in handlers.items()
        if hasattr(signal, name)
    }
    for number, handler in numbers.items():
        try:
            loop.add_signal_handler(number, handler)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_, act=handler: loop.call_soon_threadsafe(act))
    if hasattr(signal, "pthread_sigmask"):  # the supervisor has blocked them until now
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    try:
        yield
    finally:
        for number in numbers:
            with suppress(NotImplementedError):
                loop.remove_signal_handler(number)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
