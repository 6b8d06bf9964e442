"""Listening sockets, bound before anything heavy is imported.

    sockets = bind("127.0.0.1", 8000)
    urls(sockets)                            # ["http://127.0.0.1:8000"]

The parent process keeps them open, so that connections wait while a worker process is replaced.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from enginery.core.errors import EngineryError, OptionError

_log = logging.getLogger("enginery.serve")

BACKLOG = 2048
"""Number of connections that may wait to be accepted; the kernel's net.core.somaxconn also limits
it."""

_SPARE_FILES = 64
"""Number of open files that are left for other things than connections."""
_ACCEPTS_TOGETHER = 64
"""Maximum number of connections that are accepted in one turn of the event loop."""
_PAUSE_SECONDS = 0.1
"""Time until the server accepts connections again after it had too many open files."""
_CALM_SECONDS = 60.0
"""Time without such a pause after which the next one is logged again."""
_IDLE_SECONDS = 5.0
"""Idle time of a connection after which it is closed if others wait to be accepted."""

_SO_ATTACH_FILTER = 26
"""Linux's socket option, which Python's socket module does not define."""
_BPF_LOAD_BYTE, _BPF_JUMP_IF_SET, _BPF_RETURN = 0x30, 0x45, 0x06
"""Instructions of classic BPF: BPF_LD | BPF_B | BPF_ABS, BPF_JMP | BPF_JSET | BPF_K, BPF_RET."""


def bind_each(host: str, port: int, count: int) -> list[list[socket.socket]]:
    """Listen with sockets of their own for each of several processes.

    Linux then divides new connections evenly. If processes share a socket, the first one that wakes
    up accepts many of those that arrive together. Elsewhere they share it.

    Args:
        host: see `bind`.
        port: see `bind`; the port is the same for all processes.
        count: number of processes.

    Raises:
        OptionError, EngineryError: see `bind`.
    """
    # Bound without SO_REUSEPORT, so that it fails if another server has the port, even one that
    # shares it among its own processes.
    first = bind(host, port)
    if sys.platform != "linux" or count == 1:
        return [first] * count
    port = first[0].getsockname()[1]
    with ExitStack() as undo:
        undo.callback(close, first)
        for listener in first:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound = [first]
        for _ in range(count - 1):
            process_sockets = bind(host, port, shares_port=True)
            undo.callback(close, process_sockets)
            bound.append(process_sockets)
        undo.pop_all()
    return bound


def bind(host: str, port: int, *, shares_port: bool = False) -> list[socket.socket]:
    """Listen on every address of `host`.

    Args:
        host: a name, or an IPv4 or IPv6 address; empty for all addresses of the machine.
        port: the port; 0 for a free one, which is the same for all addresses.
        shares_port: other sockets of this user may listen on the port, too (SO_REUSEPORT).

    Raises:
        OptionError: the host is unknown or is not this machine, or the port is privileged.
        EngineryError: the port is in use.
    """
    sockets: list[socket.socket] = []
    failures: list[OSError] = []
    for family, (name, _, *scope) in _addresses(host, port):
        # With port 0 the first socket chooses the port for all.
        chosen = sockets[0].getsockname()[1] if sockets else port
        try:
            sockets.append(_listen(family, (name, chosen, *scope), shares_port=shares_port))
        except OSError as error:
            failures.append(error)
            # Machines without IPv6 may still resolve localhost to an IPv6 address.
            if error.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
                break
    if sockets and all(f.errno in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT} for f in failures):
        return sockets
    close(sockets)
    raise _bind_error(failures[-1], host, port)


def close(sockets: Sequence[socket.socket]) -> None:
    """Close the sockets in this process."""
    for listener in sockets:
        listener.close()


def drop_new_connections(listening: socket.socket) -> None:
    """Drop the first packet of new connections, on Linux; those begun before can be accepted.

    The client's kernel retries to connect. Without this, a connection that arrives between the last
    `accept` and `close` would be reset, and its request lost. It applies to all processes that
    share the socket and cannot be undone.
    """
    if sys.platform != "linux":
        return
    import ctypes

    # A program for the socket's packet filter, which sees packets from their TCP header on. Packets
    # without SYN belong to a connection that the client has begun.
    instructions = (
        (_BPF_LOAD_BYTE, 0, 0, 13),  # the flags
        (_BPF_JUMP_IF_SET, 0, 1, 0x02),  # SYN
        (_BPF_RETURN, 0, 0, 0),  # take 0 bytes
        (_BPF_RETURN, 0, 0, 0xFFFFFFFF),  # take all
    )
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *i) for i in instructions))
    with suppress(OSError):  # a sandboxed kernel may have no filters
        listening.setsockopt(
            socket.SOL_SOCKET,
            _SO_ATTACH_FILTER,
            struct.pack("HP", len(instructions), ctypes.addressof(program)),
        )


class JoiningTransport:
    """A transport that sends what is written in one turn of the event loop in one piece.

    uvicorn writes the head of a response and its body one after the other, each with a system call.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the transport."""
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send data before the event loop waits for events."""
        if not self._held:
            self._loop.call_soon(self._send)
        self._held.append(data)

    def write_eof(self) -> None:
        """Send what was written, and say that nothing follows."""
        self._send()
        self._transport.write_eof()

    def close(self) -> None:
        """Send what was written, and close the connection."""
        self._send()
        self._transport.close()

    def _send(self) -> None:
        if self._held:
            held, self._held = self._held, []
            if not self._transport.is_closing():  # the client may have reset the connection
                self._transport.write(b"".join(held))


class Acceptor:
    """Accepts connections as long as the process may open files.

    At the limit uvloop would close new connections without an answer. Here they wait in the kernel,
    and idle connections are closed, so that others can be accepted.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        make_protocol: Callable[[], asyncio.Protocol],
        connections: set[Any],
    ) -> None:
        """Create the acceptor without accepting.

        Args:
            sockets: the listening sockets.
            make_protocol: returns the protocol of a new connection.
            connections: the protocols of all connections.
        """
        self._sockets, self._make_protocol = sockets, make_protocol
        self._connections = connections
        self._max_connections = max_connections()
        self._accepting = 0
        """Number of connections that were accepted and have no protocol yet."""
        self._is_started = False
        self._paused_at: float | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Accept connections from now on. Call this in the event loop."""
        self._retry = None
        loop = asyncio.get_running_loop()
        for listener in self._sockets:
            if listener.fileno() >= 0:
                loop.add_reader(listener, self._accept, listener)
                self._is_started = True

    def stop(self) -> None:
        """Accept no more connections; they wait in the kernel."""
        if self._retry is not None:
            self._retry.cancel()
        if not self._is_started:
            return
        loop = asyncio.get_running_loop()
        for listener in self._sockets:
            if listener.fileno() >= 0:
                loop.remove_reader(listener)

    async def accept_waiting(self) -> None:
        """Accept all connections that wait, also those for which there are no open files yet."""
        for listener in self._sockets:
            while not self._accept(listener, at_once=sys.maxsize):
                await asyncio.sleep(_PAUSE_SECONDS)
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _accept(self, listener: socket.socket, *, at_once: int = _ACCEPTS_TOGETHER) -> bool:
        loop = asyncio.get_running_loop()
        for _ in range(at_once):
            if len(self._connections) + self._accepting >= self._max_connections:
                self._pause()
                return False
            try:
                accepted, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return True  # no connection is left, or the client has disconnected
            except OSError:  # no file can be opened
                self._pause()
                return False
            accepted.setblocking(False)
            self._accepting += 1
            task = loop.create_task(self._connect(accepted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return True

    async def _connect(self, accepted: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol, sock=accepted
            )
        except OSError:  # the client has disconnected
            accepted.close()
        finally:
            self._accepting -= 1

    def _pause(self) -> None:
        """Stop accepting for a moment, and close connections that have been idle."""
        loop = asyncio.get_running_loop()
        if self._is_started:
            self.stop()
            self._retry = loop.call_later(_PAUSE_SECONDS, self.start)
        now = loop.time()
        if self._paused_at is None or now - self._paused_at > _CALM_SECONDS:
            _log.warning(
                "%d connections are open, as many as the limit of open files allows; further ones "
                "wait. Raise the limit with `ulimit -n`.",
                len(self._connections),
            )
        self._paused_at = now
        for protocol in list(self._connections):
            since = getattr(protocol, "idle_since", None)
            if since is not None and now - since > _IDLE_SECONDS:
                protocol.transport.close()


def max_connections() -> int:
    """Return how many connections the limit of open files allows, beside those open now."""
    if sys.platform == "win32":
        return sys.maxsize
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    try:
        opened = sum(1 for _ in Path("/dev/fd").iterdir())
    except OSError:
        opened = 0
    return max(soft - opened - _SPARE_FILES, 1)


def urls(sockets: Sequence[socket.socket]) -> list[str]:
    """Return the URLs of the sockets: `http://127.0.0.1:8000`."""
    addresses = []
    for listener in sockets:
        host, port = listener.getsockname()[:2]
        addresses.append(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    return addresses


def _addresses(host: str, port: int) -> list[tuple[int, Any]]:
    try:
        address_infos = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError) as error:
        raise OptionError(
            f"option 'host' is {host!r}, which cannot be resolved: {error}.",
            do="Use an address of this machine, or 0.0.0.0 for all.",
        ) from error
    unique = dict.fromkeys((int(family), address) for family, _, _, _, address in address_infos)
    return sorted(unique, key=lambda item: item[0] != socket.AF_INET)


def _listen(
    family: int, address: tuple[str | int, ...], *, shares_port: bool = False
) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if shares_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if os.name == "posix":  # on Windows SO_REUSEADDR would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # IPv4 has its own socket
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _bind_error(error: OSError, host: str, port: int) -> EngineryError:
    where = f"{host or 'all addresses'} port {port}"
    if error.errno == errno.EADDRINUSE:
        return EngineryError(
            f"{where} is in use{_port_owner(port)}.",
            do="Stop the program that uses it, or choose another port; --port 0 takes a free one.",
        )
    if error.errno == errno.EACCES:
        return OptionError(
            f"no permission to listen on {where}: ports below 1024 are privileged.",
            do="Choose a higher port, or grant CAP_NET_BIND_SERVICE.",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return OptionError(
            f"option 'host' is {host!r}, which is not an address of this machine.",
            do="Use one of its addresses, or 0.0.0.0 for all.",
        )
    return EngineryError(f"cannot listen on {where}: {error.strerror or error}.")


def _port_owner(port: int) -> str:
    """Return ` by process 1234 (nginx)` if the system reveals the owner of a port, else less."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status != psutil.CONN_LISTEN or not (connection.laddr and connection.pid):
                continue
            if connection.laddr.port == port:
                mine = " (this one)" if connection.pid == os.getpid() else ""
                return (
                    f" by process {connection.pid} ({psutil.Process(connection.pid).name()}){mine}"
                )
    except (psutil.Error, OSError):
        return ""
    return " by a process of another user" if sys.platform == "linux" else ""
