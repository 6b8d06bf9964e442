"""The sockets that the server listens on, bound before anything heavy is imported.

    sockets = bind("127.0.0.1", 8000)
    urls(sockets)                            # ["http://127.0.0.1:8000"]

They outlive the process that serves: a connection that comes while it is replaced waits.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from enginery.core.errors import EngineryError, OptionError

BACKLOG = 2048
"""Connections that wait to be accepted; the kernel may allow fewer, net.core.somaxconn."""

_SO_ATTACH_FILTER = 26
"""Of Linux; Python's socket module does not have it."""


def bind(host: str, port: int) -> list[socket.socket]:
    """Listen on every address of `host`; empty for all addresses of the machine.

    Args:
        host: a name or an address, IPv4 or IPv6.
        port: 0 for a free one, the same for all addresses.

    Raises:
        OptionError: the host is unknown or not of this machine, or the port is privileged.
        EngineryError: the port is taken.
    """
    sockets: list[socket.socket] = []
    failures: list[OSError] = []
    for family, (name, _, *scope) in _addresses(host, port):
        # Where any will do, the first socket has chosen for all.
        chosen = sockets[0].getsockname()[1] if sockets else port
        try:
            sockets.append(_listening(family, (name, chosen, *scope)))
        except OSError as error:
            failures.append(error)
            # A machine without IPv6 still resolves localhost to it.
            if error.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
                break
    if sockets and all(f.errno in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT} for f in failures):
        return sockets
    close(sockets)
    raise _bind_error(failures[-1], host, port)


def close(sockets: Sequence[socket.socket]) -> None:
    """Close this process's side of them."""
    for each in sockets:
        each.close()


def drop_new_connections(listening: socket.socket) -> None:
    """Let nobody connect any more, on Linux; connections that wait can still be accepted.

    The kernel drops what arrives, and the client tries to connect again. Without this a connection
    that comes between the last `accept` and `close` is reset, with its request. It holds for all
    processes that share the socket, and for good.
    """
    if sys.platform != "linux":
        return
    import ctypes

    # A program of one instruction for the socket's packet filter: BPF_RET | BPF_K, take 0 bytes.
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    with suppress(OSError):  # a sandboxed kernel may have no filters
        listening.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program))
        )


def urls(sockets: Sequence[socket.socket]) -> list[str]:
    """Return their addresses: `http://127.0.0.1:8000`."""
    found = []
    for each in sockets:
        host, port = each.getsockname()[:2]
        found.append(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    return found


def _addresses(host: str, port: int) -> list[tuple[int, Any]]:
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError) as error:
        raise OptionError(
            f"option 'host' is {host!r}, which no address is known for: {error}.",
            do="Give an address of this machine, or 0.0.0.0 for all.",
        ) from error
    unique = dict.fromkeys((int(family), address) for family, _, _, _, address in found)
    return sorted(unique, key=lambda each: each[0] != socket.AF_INET)


def _listening(family: int, address: tuple[str | int, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # on Windows it would let two servers share a port
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # IPv4 has a socket of its own
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(BACKLOG)
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return made


def _bind_error(error: OSError, host: str, port: int) -> EngineryError:
    where = f"{host or 'all addresses'} port {port}"
    if error.errno == errno.EADDRINUSE:
        return EngineryError(
            f"{where} is taken{_port_owner(port)}.",
            do="End what listens there, or choose another port; --port 0 takes a free one.",
        )
    if error.errno == errno.EACCES:
        return OptionError(
            f"{where} may not be listened on: ports below 1024 are the system's.",
            do="Choose a higher port, or grant CAP_NET_BIND_SERVICE.",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return OptionError(
            f"option 'host' is {host!r}, which is no address of this machine.",
            do="Give one of its own, or 0.0.0.0 for all.",
        )
    return EngineryError(f"{where} cannot be listened on: {error.strerror or error}.")


def _port_owner(port: int) -> str:
    """` by process 1234 (nginx)`, as far as the system tells us."""
    import psutil

    try:
        for each in psutil.net_connections("tcp"):
            if each.status != psutil.CONN_LISTEN or not (each.laddr and each.pid):
                continue
            if each.laddr.port == port:
                mine = " (this one)" if each.pid == os.getpid() else ""
                return f" by process {each.pid} ({psutil.Process(each.pid).name()}){mine}"
    except (psutil.Error, OSError):
        return ""
    return " by a process of another user" if sys.platform == "linux" else ""
