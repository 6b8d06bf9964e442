"""Malformed messages by the thousand, while a good client is served."""

import asyncio
import random
import re

import pytest

from tests.serve.echo import GET, LOOPS, post, run_server

GOOD = (
    GET % b"echo?a=b",
    post(b"echo", b"0123456789"),
    post(b"a%20b", b'{"inputs": "x"}', b"Content-Type: application/json", b"Accept: */*"),
    post(b"echo", b"abc", b"Expect: 100-continue"),
    b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3;x=y\r\nabc\r\n10\r\n0123456789abcdef\r\n0\r\nX-T: 1\r\n\r\n",
    b"GET http://a:8000/v2/models/m?q HTTP/1.1\r\nHost: a:8000\r\nConnection: keep-alive\r\n\r\n",
    b"OPTIONS * HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"HEAD /echo HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\n\r\n",
    b"POST /echo HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    b"Content-Length: 3\r\n\r\nabc",
    GET % b"sleep/0.001" * 5,
)
PIECES = (
    b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"%", b"\xff\xfe", b"Content-Length: 7\r\n",
    b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: x\r\n",
    b"Host: b\r\n", b"Upgrade: websocket\r\nConnection: upgrade\r\n", b"Expect: 100-continue\r\n",
    b"HTTP/1.1", b"HTTP/2.0", b"0\r\n\r\n", b"fffffffffffffffff\r\n", b"X" * 9000,
    b"X: y\r\n" * 120, b"99999999999999999999", b"\x16\x03\x01",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)  # fmt: skip


def mutated(rng):
    """Good messages with up to five wounds."""
    message = bytearray(b"".join(rng.choice(GOOD) for _ in range(rng.randint(1, 3))))
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(message) + 1)
        to = min(len(message), at + rng.randint(1, 12))
        wound = rng.randrange(6)
        if wound == 0:
            message[at:to] = b""
        elif wound == 1:
            message[at:to] = rng.randbytes(to - at)
        elif wound == 2:
            message[at:at] = rng.choice(PIECES)
        elif wound == 3:
            message[at:to] = rng.choice(PIECES)
        elif wound == 4:
            message[at:at] = message[at:to] * rng.randint(1, 4)
        else:
            del message[at:]
        if not message:
            message += b"G"
    return bytes(message)


def split(rng, message):
    cuts = sorted(rng.randrange(len(message) + 1) for _ in range(rng.randint(0, 6)))
    return [message[a:b] for a, b in zip([0, *cuts], [*cuts, len(message)], strict=True)]


async def strike(server, rng):
    """Sends one; the statuses that come back."""
    client = await server.connect()
    try:
        for part in split(rng, mutated(rng)):
            client.send(part)
            await asyncio.sleep(0)
        ending = rng.randrange(4)
        if ending == 0:
            return []  # gone without waiting
        if ending == 1:
            client.writer.write_eof()
        heard = await asyncio.wait_for(client.reader.read(-1), 30)
        return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d+) ", heard)]
    except ConnectionError:
        return []
    finally:
        client.close()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_good_client_is_served_during_a_thousand_malformed_messages(loop):
    rng = random.Random(7)

    async def scenario(server):
        over = asyncio.Event()

        async def good():
            client, served = await server.connect(), 0
            while not over.is_set():
                client.send(post(b"echo", b"%d" % served))
                try:
                    answer = await client.answer()
                except (asyncio.IncompleteReadError, ConnectionError):
                    # On a busy machine the pause below may be longer than the idle timeout.
                    client.close()
                    client = await server.connect()
                    continue
                assert answer.status == 200
                assert b'"body":"%d"' % served in answer.body
                served += 1
                await asyncio.sleep(0.002)
            client.close()
            return served

        serving = asyncio.create_task(good())
        statuses = []
        for _ in range(20):
            batch = (strike(server, random.Random(rng.random())) for _ in range(50))
            for found in await asyncio.gather(*batch):
                statuses += found
        over.set()
        assert await serving > 100
        assert set(statuses) <= {100, 200, 400, 408, 413, 414, 417, 431, 501, 505}
        assert {200, 400, 408, 414, 431, 501, 505} <= set(statuses), "the wounds are too alike"

    run_server(scenario, loop, request_timeout=0.2, idle_timeout=0.2)
