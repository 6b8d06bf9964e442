"""The sockets that the server listens on: free ports, taken ports, hosts that are not ours."""

import contextlib
import errno
import socket
import sys

import pytest

from enginery.core.errors import EngineryError, OptionError
from enginery.serve.http.sockets import bind, bind_each, close, urls


def test_port_0_is_a_free_port_and_the_same_for_all_addresses():
    sockets = bind("localhost", 0)
    try:
        assert len({each.getsockname()[1] for each in sockets}) == 1
        assert f"http://127.0.0.1:{sockets[0].getsockname()[1]}" in urls(sockets)
    finally:
        close(sockets)


def test_ipv6_address_is_written_in_brackets():
    try:
        sockets = bind("::1", 0)
    except EngineryError:
        pytest.skip("no IPv6 here")
    assert urls(sockets) == [f"http://[::1]:{sockets[0].getsockname()[1]}"]
    close(sockets)


def test_port_in_use_is_an_error():
    held = bind("127.0.0.1", 0)
    port = held[0].getsockname()[1]
    try:
        with pytest.raises(EngineryError) as caught:
            bind("127.0.0.1", port)
    finally:
        close(held)
    assert f"127.0.0.1 port {port} is in use." in caught.value.message
    assert "--port 0" in caught.value.do


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("192.0.2.1", "not an address of this machine"),
        ("no-such-host.invalid", "cannot be resolved"),
    ],
)
def test_host_of_another_machine_is_an_option_error(host, words):
    with pytest.raises(OptionError, match=words):
        bind(host, 0)


def test_privileged_port_is_an_option_error(monkeypatch):
    def refused(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refused)
    with pytest.raises(OptionError, match=r"no permission to listen on .* port 80"):
        bind("127.0.0.1", 80)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes share their sockets")
def test_each_process_gets_a_share_of_the_connections():
    each = bind_each("127.0.0.1", 0, 4)
    try:
        (port,) = {own[0].getsockname()[1] for own in each}
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
        accepted = []
        for (listening,) in each:
            count = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    listening.accept()[0].close()
                    count += 1
            accepted.append(count)
        for client in clients:
            client.close()
        assert sum(accepted) == 200
        assert min(accepted) > 20
    finally:
        for own in each:
            close(own)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes share their sockets")
def test_port_is_never_free_while_processes_bind_it(monkeypatch):
    """A second server that starts at the same time must not get the port, too."""
    from enginery.serve.http import sockets as http_sockets

    original, refused = http_sockets.bind, []

    def rival(host, port, **options):
        if options:
            with pytest.raises(EngineryError, match="is in use"):
                original(host, port)
            refused.append(port)
        return original(host, port, **options)

    monkeypatch.setattr(http_sockets, "bind", rival)
    each = bind_each("127.0.0.1", 0, 3)
    try:
        assert refused == [each[0][0].getsockname()[1]] * 2
    finally:
        for own in each:
            close(own)


def test_a_port_that_other_processes_share_is_in_use():
    """SO_REUSEPORT alone would let a second server take part of the first one's connections."""
    each = bind_each("127.0.0.1", 0, 2)
    try:
        port = each[0][0].getsockname()[1]
        with pytest.raises(EngineryError, match="is in use"):
            bind_each("127.0.0.1", port, 2)
    finally:
        for own in each:
            close(own)
