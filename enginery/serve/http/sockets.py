"""Listening sockets, bound before anything heavy is imported.

    sockets = bind("127.0.0.1", 8000)
    urls(sockets)                            # ["http://127.0.0.1:8000"]

The parent process keeps them open, so that connections wait while a worker process is replaced.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from enginery.core.errors import EngineryError, OptionError

BACKLOG = 2048
"""Number of connections that may wait to be accepted; the kernel's net.core.somaxconn also limits
it."""


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
            f"{where} is in use.",
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
