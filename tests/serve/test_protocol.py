"""HTTP/1.1 over real sockets, on uvloop and on asyncio's own loop."""

import asyncio
import logging
import math
import random
import socket
import struct
import time
import tracemalloc
from email.utils import parsedate_to_datetime

import orjson
import pytest

from enginery.serve import protocol
from enginery.serve.http_connections import QUIET_SECONDS
from enginery.serve.http_requests import Bodies, RequestReader
from tests.serve.echo import GET, LOOPS, post, run_server, until

loops = pytest.mark.parametrize("loop", LOOPS)
EXPECTING = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\nExpect: 100-Continue\r\n\r\n"
CHUNKED = b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n%b\r\n"


def error(answer):
    return orjson.loads(answer.body)["error"]


@loops
def test_a_connection_is_kept_for_many_requests(loop):
    async def scenario(server):
        client = await server.connect()
        for number in range(5):
            client.send(post(b"echo?q=%d" % number, b"body %d" % number))
            answer = await client.answer()
            found = orjson.loads(answer.body)
            assert (answer.status, found["query"], found["body"]) == (
                200, f"q={number}", f"body {number}",
            )  # fmt: skip
        assert "connection" not in answer.headers
        client.close()

    run_server(scenario, loop)


def test_every_answer_says_who_when_and_how_long():
    async def scenario(server):
        answer = await server.ask(GET % b"echo")
        assert answer.headers["server"] == "enginery"
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["content-length"] == str(len(answer.body))
        assert answer.headers["x-from"] == "echo"
        when = parsedate_to_datetime(answer.headers["date"])
        assert answer.headers["date"].endswith(" GMT")
        first = server.connections.stamp
        await until(lambda: server.connections.stamp != first)
        later = parsedate_to_datetime((await server.ask(GET % b"echo")).headers["date"])
        assert later > when

    run_server(scenario)


def test_request_has_client_headers_and_start():
    async def scenario(server):
        client = await server.connect()
        client.send(
            b"GET /a%20b%2Fc%C3%A9?x=%20 HTTP/1.1\r\nHost: a\r\nX-One: 1\r\nx-one:  2 \r\n\r\n"
        )
        await client.answer()
        request = server.application.requests[0]
        assert (request.method, request.path, request.query) == ("GET", "/a b/cé", "x=%20")
        assert request.headers == {"host": "a", "x-one": "1, 2"}
        host, port = client.writer.get_extra_info("sockname")
        assert request.client == f"{host}:{port}"
        assert request.started > 0
        client.close()

    run_server(scenario)


@loops
def test_pipelined_requests_are_answered_in_order(loop):
    rng = random.Random(0)

    async def scenario(server):
        client = await server.connect()
        client.send(*(GET % b"sleep/%.4f?%d" % (rng.random() / 100, n) for n in range(100)))
        found = [orjson.loads((await client.answer()).body)["query"] for _ in range(100)]
        assert found == [str(n) for n in range(100)]
        client.close()

    run_server(scenario, loop)


@loops
def test_reading_stops_when_many_requests_wait(loop):
    async def scenario(server):
        client = await server.connect()
        client.send(GET % b"wait", *(GET % b"echo?%d" % n for n in range(20_000)))
        await until(lambda: len(server.application.requests) == 1)
        await asyncio.sleep(0.2)
        (held,) = server.connections.open
        one_slice = protocol.SLICE_BYTES // len(GET % b"echo?1")
        assert len(held._waiting) <= protocol.MAX_PIPELINED + one_slice
        assert not held._transport.is_reading()
        server.application.gate.set()
        await client.answer()
        found = [orjson.loads((await client.answer()).body)["query"] for _ in range(20_000)]
        assert found == [str(n) for n in range(20_000)]
        client.close()

    run_server(scenario, loop)


@loops
def test_pipelined_requests_of_a_client_that_ended_its_side_are_answered(loop):
    async def scenario(server):
        client = await server.connect()
        client.send(*(GET % b"sleep/0.001?%d" % n for n in range(100)))
        client.writer.write_eof()
        found = [orjson.loads((await client.answer()).body)["query"] for _ in range(100)]
        assert found == [str(n) for n in range(100)]
        assert await client.ended()
        assert server.application.cancelled == 0
        client.close()

    run_server(scenario, loop)


@loops
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_half_closed_client_gets_its_answer(loop, version):
    async def scenario(server):
        client = await server.connect()
        client.send(b"GET /sleep/0.4 HTTP/%b\r\nHost: a\r\n\r\n" % version)
        client.writer.write_eof()
        answer = await client.answer()
        assert answer.status == 200
        assert answer.headers["connection"] == "close"
        assert await client.ended()
        assert client.interim == ([100] if version == b"1.1" else [])
        client.close()

    run_server(scenario, loop)


@loops
@pytest.mark.parametrize("reset", [False, True])
def test_client_that_has_gone_cancels_its_request(loop, reset):
    async def scenario(server):
        client = await server.connect()
        client.send(GET % b"wait", GET % b"echo")
        await until(lambda: server.application.requests)
        if reset:
            raw = client.writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        await until(lambda: server.application.cancelled == 1)
        await until(lambda: not server.connections.open)
        assert len(server.application.requests) == 1

    run_server(scenario, loop)


def test_request_may_come_a_byte_at_a_time():
    async def scenario(server):
        client = await server.connect()
        for byte in post(b"a%20b", b"0123456789"):
            client.send(bytes([byte]))
            await asyncio.sleep(0)
        found = orjson.loads((await client.answer()).body)
        assert (found["path"], found["body"]) == ("/a b", "0123456789")
        client.close()

    run_server(scenario)


def test_chunked_body_is_joined_and_its_trailers_are_no_headers():
    async def scenario(server):
        client = await server.connect()
        client.send(
            CHUNKED % b"", b"3;x=1\r\nabc\r\n", b"A\r\n0123456789\r\n0\r\nX-Api-Key: k\r\n\r\n",
            GET % b"next",
        )  # fmt: skip
        found = orjson.loads((await client.answer()).body)
        assert found["body"] == "abc0123456789"
        assert "x-api-key" not in found["headers"]
        assert orjson.loads((await client.answer()).body)["path"] == "/next"
        client.close()

    run_server(scenario)


def test_http_1_0_closes_unless_it_asks_to_keep():
    async def scenario(server):
        client = await server.connect()
        client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert (await client.answer()).headers["connection"] == "keep-alive"
        client.send(b"GET / HTTP/1.0\r\n\r\n")
        assert (await client.answer()).headers["connection"] == "close"
        assert await client.ended()
        client.close()

    run_server(scenario)


def test_connection_close_is_obeyed_and_what_follows_ignored():
    async def scenario(server):
        client = await server.connect()
        client.send(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", GET % b"after")
        assert (await client.answer()).headers["connection"] == "close"
        assert await client.ended()
        assert len(server.application.requests) == 1
        client.close()

    run_server(scenario)


def test_head_has_a_length_and_no_body():
    async def scenario(server):
        client = await server.connect()
        client.send(b"HEAD /large/70000 HTTP/1.1\r\nHost: a\r\n\r\n", GET % b"echo")
        answer = await client.answer(head=True)
        assert (answer.status, answer.headers["content-length"]) == (200, "70000")
        assert (await client.answer()).status == 200
        client.close()

    run_server(scenario)


@pytest.mark.parametrize("status", [204, 304])
def test_answers_without_a_body_have_none(status):
    async def scenario(server):
        client = await server.connect()
        client.send(GET % b"status/%d" % status, GET % b"echo")
        answer = await client.answer()
        assert answer.status == status
        assert "content-length" not in answer.headers
        assert (await client.answer()).status == 200
        client.close()

    run_server(scenario)


@loops
def test_100_continue_is_sent_when_the_body_is_wanted(loop):
    async def scenario(server):
        client = await server.connect()
        client.send(EXPECTING % 5)
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"first")
        assert orjson.loads((await client.answer()).body)["body"] == "first"
        # Behind another request: the interim answer must not come before that one's.
        client.send(GET % b"sleep/0.1", EXPECTING % 4)
        assert orjson.loads((await client.answer()).body)["path"] == "/sleep/0.1"
        assert not client.interim
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"body")
        assert orjson.loads((await client.answer()).body)["body"] == "body"
        client.send(EXPECTING % 4, b"here")
        assert orjson.loads((await client.answer()).body)["body"] == "here"
        assert not client.interim, "the body was there already"
        client.close()

    run_server(scenario, loop)


def test_body_that_is_too_large_is_refused_before_it_is_sent():
    async def scenario(server):
        client = await server.connect()
        client.send(EXPECTING % 1001)
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (413, "close")
        assert error(answer) == "the body has 1,001 bytes, and at most 1,000 bytes are taken."
        assert orjson.loads(answer.body)["path"] == "/echo"
        assert not client.interim
        assert await client.ended()
        client.close()
        assert (await server.ask(post(body=b"x" * 1000))).status == 200

    run_server(scenario, max_body_bytes=1000)


@loops
def test_answer_to_a_body_too_large_arrives_while_it_is_being_sent(loop):
    async def scenario(server):
        client = await server.connect()
        size = 4_000_000
        client.send(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size)
        client.send(b"x" * size)
        assert (await client.answer()).status == 413
        assert await client.ended()
        client.close()

    run_server(scenario, loop, max_body_bytes=1000)


def test_chunked_body_is_counted():
    async def scenario(server):
        whole = b"1F4\r\n" + b"x" * 500 + b"\r\n"
        assert (await server.ask(CHUNKED % b"", whole * 2, b"0\r\n\r\n")).status == 200
        client = await server.connect()
        client.send(CHUNKED % b"", whole * 2, b"1\r\nx\r\n")
        assert (await client.answer()).status == 413
        assert await client.ended()
        client.close()

    run_server(scenario, max_body_bytes=1000)


def test_whoever_may_not_ask_is_told_before_a_large_body_is_read():
    async def scenario(server):
        for framing in (b"Content-Length: 9000\r\nExpect: 100-Continue", b"Content-Length: 9000",
                        b"Transfer-Encoding: chunked"):  # fmt: skip
            client = await server.connect()
            client.send(b"POST /echo HTTP/1.1\r\nHost: a\r\nX-Api-Key: wrong\r\n", framing,
                        b"\r\n\r\n")  # fmt: skip
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (401, "close")
            assert error(answer) == "the key is wrong. Send another."
            assert not client.interim
            client.close()
        assert server.application.admitted == [("POST", "/echo", b"")] * 3
        assert not server.application.requests

    run_server(scenario)


def test_all_bodies_together_are_bounded_until_they_are_answered():
    async def scenario(server):
        running, arriving = await server.connect(), await server.connect()
        running.send(post(b"wait", b"x" * 900))
        arriving.send(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 900\r\n\r\n" + b"x" * 500)
        bodies = server.connections.bodies
        await until(lambda: bodies.held == 1400)
        refused = await server.ask(post(b"echo", b"x" * 101))
        assert (refused.status, refused.headers["connection"]) == (503, "close")
        assert error(refused) == "the requests that wait hold 1,500 bytes, the server's most."
        await until(lambda: bodies.held == 1400)
        assert (await server.ask(post(b"echo", b"x" * 100))).status == 200
        arriving.close()  # half a body
        await until(lambda: bodies.held == 900)
        server.application.gate.set()
        assert (await running.answer()).status == 200
        assert bodies.held == 0
        running.close()

    run_server(scenario, max_body_bytes=1000, max_held_bytes=1500)


def test_what_a_lost_client_had_sent_is_not_held():
    async def scenario(server):
        client = await server.connect()
        client.send(post(b"wait", b"x" * 900), post(b"wait", b"x" * 50))
        await until(lambda: server.connections.bodies.held == 950)
        client.close()
        await until(lambda: server.application.cancelled)
        await until(lambda: server.connections.bodies.held == 0)

    run_server(scenario)


def test_body_in_many_pieces_takes_little_more_than_its_bytes():
    whole = []
    reader = RequestReader(lambda request, _: whole.append(request), lambda _: None,
                           Bodies(1_000_000, 1_000_000), client="")  # fmt: skip
    reader.feed(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 200000\r\n\r\n")
    tracemalloc.start()
    for _ in range(199_999):
        reader.feed(b"x")
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2 * 200_000
    reader.feed(b"y")
    assert whole[0].body == b"x" * 199_999 + b"y"


REFUSED = {
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400, "Host is missing"),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "Host is there twice"),
    "bad host": (b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", 400, "expected a host"),
    "two lengths": (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        400, "Content-Length"),
    "the same length twice": (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        400, "Content-Length"),
    "length and coding": (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"0\r\n\r\n", 400, "Transfer-Encoding"),
    "coding and length": (
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n"
        b"0\r\n\r\n", 400, "Content-Length"),
    "coding not last": (
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, gzip\r\n\r\n", 400, "Encoding"),
    "coding unknown": (
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        501, "'gzip, chunked'"),
    "coding in 1.0": (
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "HTTP/1.0 has no"),
    "negative length": (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -3\r\n\r\nabc", 400, "Content-Length"),
    "chunk size": (CHUNKED % b"" + b"xyz\r\n", 400, "chunk size"),
    "expectation": (post(b"echo", b"x", b"Expect: a-pony"), 417, "'a-pony'"),
    "bare newline": (b"GET / HTTP/1.1\nHost: a\n\n", 400, "CRLF"),
    "folded header": (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n", 400, "not HTTP/1.1"),
    "space before colon": (b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400, "not HTTP/1.1"),
    "nul in header": (b"GET / HTTP/1.1\r\nHost: a\r\nX: \0\r\n\r\n", 400, "not HTTP/1.1"),
    "path not UTF-8": (GET % b"%ff", 400, "not UTF-8"),
    "escape cut": (GET % b"%f", 400, "hexadecimal"),
    "fragment": (GET % b"a#b", 400, "fragment"),
    "other scheme": (b"GET ftp://a/b HTTP/1.1\r\nHost: a\r\n\r\n", 400, "expected a path"),
    "connect": (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 501, "CONNECT"),
    "unknown method": (b"BREW /pot HTTP/1.1\r\nHost: a\r\n\r\n", 501, "method"),
    "version 2": (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505, "HTTP/2.0"),
    "version 9": (b"GET / HTTP/9.9\r\nHost: a\r\n\r\n", 505, "expected HTTP/1.1"),
    "h2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "expected HTTP/1.1"),
    "version 0.9": (b"GET /\r\n\r\n", 505, "HTTP/0.9"),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 400, "not HTTP/1.1"),
    "long target": (GET % (b"a" * 9000), 414, "8,192"),
    "long target in the query": (GET % (b"a?" + b"b" * 9000), 414, "8,192"),
    "many headers": (
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: 1\r\n" * 100 + b"\r\n", 431, "more than 100"),
    "large header": (
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 40_000 + b"\r\n\r\n", 431, "32,768"),
    "header without end": (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 100_000, 431, "32,768"),
    "header name without end": (b"GET / HTTP/1.1\r\n" + b"y" * 100_000, 431, "32,768"),
    "large trailers": (
        CHUNKED % b"" + b"0\r\n" + b"X: %b\r\n" % (b"y" * 5000) * 8, 431, "32,768"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_message_is_refused(case):
    sent, status, words = REFUSED[case]

    async def scenario(server):
        client = await server.connect()
        client.send(sent)
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert words in error(answer)
        assert await client.ended()
        assert not server.application.requests
        client.close()

    run_server(scenario)


def test_refusal_names_the_path_as_far_as_it_is_known():
    async def scenario(server):
        found = {}
        for name in ("no host", "unknown method", "tls"):
            answer = await server.ask(REFUSED[name][0])
            found[name] = orjson.loads(answer.body)["path"]
        assert found == {"no host": "/", "unknown method": "/pot", "tls": ""}

    run_server(scenario)


def test_refused_requests_are_told_with_what_is_known_of_them():
    async def scenario(server):
        client = await server.connect()
        client.send(GET % b"echo", REFUSED["tls"][0])
        assert (await client.answer()).status == 200
        assert (await client.answer()).status == 400
        client.close()
        large = b"Host: a\r\nX-One: 1\r\nX: " + b"y" * 40_000 + b"\r\n\r\n"
        await server.ask(b"GET /a%20b?c HTTP/1.1\r\n", large)
        await server.ask(REFUSED["long target"][0])
        await server.ask(post(b"echo", b"x" * 2000, b"X-One: 1"))
        seen = [(request.method, request.path, request.query, request.headers.get("x-one"), status)
                for request, status in server.application.refused]  # fmt: skip
        assert seen == [("", "", "", None, 400), ("GET", "/a b", "c", "1", 431),
                        ("", "", "", None, 414), ("POST", "/echo", "", "1", 413)]  # fmt: skip
        for request, _ in server.application.refused:
            assert request.client.startswith("127.0.0.1:")
            assert 0 <= time.perf_counter() - request.started < 60

    run_server(scenario, max_body_bytes=1000)


def test_connection_too_many_is_told_to_the_application():
    async def scenario(server):
        first = await server.connect()
        await until(lambda: server.connections.open)
        late = await server.connect()
        assert (await late.answer()).status == 503
        ((request, status),) = server.application.refused
        assert (request.method, request.path, status) == ("", "", 503)
        assert request.started > 0
        for client in (first, late):
            client.close()

    run_server(scenario, max_connections=1)


def test_giving_up_tells_the_application_which_request_it_answers():
    async def scenario(server):
        waiting, half = await server.connect(), await server.connect()
        waiting.send(GET % b"wait")
        half.send(b"POST /half HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n")
        await until(lambda: server.application.requests)
        await server.connections.give_up("the server is shutting down.")
        running = server.application.requests[0]
        refused = {
            request.path: (request, status) for request, status in server.application.refused
        }
        assert set(refused) == {"/wait", "/half"}
        assert refused["/wait"] == (running, 503)
        assert refused["/wait"][0] is running  # by which the application knows it
        assert (refused["/half"][0].method, refused["/half"][1]) == ("POST", 503)
        for client in (waiting, half):
            assert (await client.answer()).status == 503
            client.close()

    run_server(scenario)


def test_chunk_extension_that_never_ends_is_refused():
    async def scenario(server):
        client = await server.connect()
        client.send(CHUNKED % b"", b"1;")
        for _ in range(200):
            client.send(b"x" * 65_536)
            try:
                await client.writer.drain()
            except ConnectionError:
                break
            if client.reader._buffer:
                break
        assert (await client.answer()).status == 413
        client.close()

    run_server(scenario, max_body_bytes=1000)


def test_refusal_waits_for_the_answers_before_it():
    async def scenario(server):
        client = await server.connect()
        client.send(GET % b"sleep/0.1", GET % b"echo", b"rubbish\r\n\r\n")
        found = [(await client.answer()).status for _ in range(3)]
        assert found == [200, 200, 400]
        assert await client.ended()
        client.close()

    run_server(scenario)


def test_targets_in_absolute_form_and_asterisk():
    async def scenario(server):
        client = await server.connect()
        for target, path, query in (
            (b"http://b/v2?x", "/v2", "x"), (b"HTTP://b", "/", ""), (b"http://b?q", "/", "q"),
            (b"*", "*", ""), (b"//a", "//a", ""), (b"/?", "/", ""), (b"/a?b?c", "/a", "b?c"),
        ):  # fmt: skip
            client.send(b"OPTIONS %b HTTP/1.1\r\nHost: b\r\n\r\n" % target)
            found = orjson.loads((await client.answer()).body)
            assert (found["path"], found["query"]) == (path, query)
        client.close()

    run_server(scenario)


@pytest.mark.parametrize("host", [b"", b"a", b"a:80", b"[::1]:8000", b"a_b.c", b"127.0.0.1:1"])
def test_hosts_that_are_taken(host):
    async def scenario(server):
        assert (await server.ask(b"GET / HTTP/1.1\r\nHost: %b\r\n\r\n" % host)).status == 200

    run_server(scenario)


@pytest.mark.parametrize("method", [b"PATCH", b"DELETE", b"PROPFIND", b"QUERY"])
def test_methods_of_the_registry_are_the_applications_business(method):
    async def scenario(server):
        answer = await server.ask(b"%b / HTTP/1.1\r\nHost: a\r\n\r\n" % method)
        assert orjson.loads(answer.body)["method"] == method.decode()

    run_server(scenario)


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 4\r\n\r\nbody",
        b"Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n",
    ],
)
@pytest.mark.parametrize("split", [1000, 7])
def test_wish_for_another_protocol_is_ignored(framing, split):
    async def scenario(server):
        sent = (
            b"POST /echo?q HTTP/1.1\r\nHost: a\r\nX-Own: 1\r\n"
            b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
            b"HTTP2-Settings: AAMAAABkAAQAAP__\r\n" + framing + GET % b"next"
        )
        client = await server.connect()
        for at in range(0, len(sent), split):
            client.send(sent[at : at + split])
            await asyncio.sleep(0.001)
        found = orjson.loads((await client.answer()).body)
        assert (found["path"], found["query"], found["body"]) == ("/echo", "q", "body")
        assert found["headers"]["x-own"] == "1"
        assert orjson.loads((await client.answer()).body)["path"] == "/next"
        client.close()

    run_server(scenario)


def test_websocket_is_answered_as_the_plain_request_that_it_also_is():
    async def scenario(server):
        client = await server.connect()
        client.send(
            b"GET /chat HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert (await client.answer()).status == 200
        client.send(GET % b"echo")
        assert (await client.answer()).status == 200
        client.close()

    run_server(scenario)


@loops
def test_large_bodies_arrive_whole_both_ways(loop):
    async def scenario(server):
        client = await server.connect()
        sent = random.Random(0).randbytes(2_000_000)
        client.send(post(b"echo", sent), GET % b"large/30000000", GET % b"echo")
        assert orjson.loads((await client.answer()).body)["body"] == sent.decode("latin-1")
        assert (await client.answer()).body == b"x" * 30_000_000
        assert (await client.answer()).status == 200
        client.close()

    run_server(scenario, loop)


@loops
def test_no_request_is_begun_for_a_client_that_does_not_read(loop):
    async def scenario(server):
        client = await server.connect(limit=1024)
        client.send(*[GET % b"large/30000000"] * 2)
        await until(lambda: server.application.requests)
        await asyncio.sleep(0.2)
        client.send(GET % b"large/30000000")
        await asyncio.sleep(0.2)
        assert len(server.application.requests) == 1
        for _ in range(3):
            assert len((await client.answer()).body) == 30_000_000
        assert len(server.application.requests) == 3
        client.close()

    run_server(scenario, loop)


def test_request_that_arrives_while_an_answer_is_not_read_is_not_begun():
    async def scenario(server):
        client = await server.connect(limit=1024)
        client.send(GET % b"large/30000000")
        await until(lambda: server.application.requests)
        await asyncio.sleep(0.2)
        client.send(GET % b"echo")
        await asyncio.sleep(0.2)
        assert len(server.application.requests) == 1
        assert len((await client.answer()).body) == 30_000_000
        assert (await client.answer()).status == 200
        client.close()

    run_server(scenario)


@loops
def test_client_that_never_reads_is_dropped(loop):
    async def scenario(server):
        client = await server.connect(limit=1024)
        client.send(GET % b"large/30000000")
        await until(lambda: server.application.requests)
        await until(lambda: not server.connections.open)
        client.close()

    run_server(scenario, loop, request_timeout=0.3)


@loops
def test_bug_is_500_with_a_traceback_in_the_log_and_the_connection_goes_on(loop, caplog):
    async def scenario(server):
        client = await server.connect()
        for path in (b"bug", b"inner", b"split"):
            caplog.clear()
            client.send(GET % path)
            answer = await client.answer()
            assert (answer.status, error(answer)) == (500, "internal error")
            (record,) = caplog.records
            assert record.exc_info
            assert record.name == "enginery.serve"
        client.send(GET % b"echo")
        assert (await client.answer()).status == 200
        client.close()

    with caplog.at_level(logging.ERROR):
        run_server(scenario, loop)


def test_silent_connection_is_closed_after_the_idle_timeout():
    async def scenario(server):
        new, used = await server.connect(), await server.connect()
        used.send(GET % b"echo")
        await used.answer()
        assert await new.ended()
        assert await used.ended()
        new.close()
        used.close()

    run_server(scenario, idle_timeout=0.3)


@pytest.mark.parametrize(
    "part",
    [
        b"G",
        b"GET /echo HTTP/1.1\r\nHost:",
        post(b"echo", b"0123456789")[:-1],
        CHUNKED % b"" + b"5\r\na",
    ],
)
def test_request_that_does_not_arrive_in_time_is_408(part):
    async def scenario(server):
        client = await server.connect()
        client.send(part)
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (408, "close")
        assert "within 0.3 seconds" in error(answer)
        assert await client.ended()
        client.close()

    run_server(scenario, request_timeout=0.3)


def test_request_that_runs_has_no_timeout():
    async def scenario(server):
        assert (await server.ask(GET % b"sleep/1.2")).status == 200

    run_server(scenario, request_timeout=0.3, idle_timeout=0.3)


def test_slow_clients_do_not_keep_others_waiting():
    async def scenario(server):
        slow = [await server.connect() for _ in range(200)]
        dribble = iter(b"GET /echo HTTP/1.1\r\nHost: a\r\nX-Slow: " + b"x" * 1000)

        async def drip():
            while True:
                byte = bytes([next(dribble)])
                for client in slow:
                    client.send(byte)
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        good = await server.connect()
        for _ in range(100):
            good.send(GET % b"echo")
            assert (await good.answer()).status == 200
        answers = await asyncio.gather(*(client.answer() for client in slow))
        assert {answer.status for answer in answers} == {408}
        dripping.cancel()
        good.send(GET % b"echo")
        assert (await good.answer()).status == 200
        for client in [good, *slow]:
            client.close()
        await asyncio.gather(dripping, return_exceptions=True)

    run_server(scenario, request_timeout=1.0)


def test_connections_beyond_the_most_are_told_so():
    async def scenario(server):
        first = [await server.connect() for _ in range(3)]
        for client in first:
            client.send(GET % b"echo")
            assert (await client.answer()).status == 200
        late = await server.connect()
        answer = await late.answer()
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        assert "3 connections" in error(answer)
        late.close()
        first[0].close()
        await until(lambda: len(server.connections.open) == 2)
        assert (await server.ask(GET % b"echo")).status == 200
        for client in first:
            client.close()

    run_server(scenario, max_connections=3)


def test_flood_beyond_the_most_is_dropped():
    async def scenario(server):
        clients = [await server.connect() for _ in range(60)]
        await asyncio.sleep(0.1)
        assert len(server.connections.open) <= 3 + 8
        for client in clients:
            client.close()

    run_server(scenario, max_connections=3)


def test_giving_up_answers_what_runs_with_503():
    async def scenario(server):
        clients = [await server.connect() for _ in range(4)]
        for client, path in zip(clients, (b"wait", b"wait", b"stubborn", None), strict=True):
            if path:
                client.send(GET % path)
        clients[0].send(GET % b"echo")
        await until(lambda: len(server.application.requests) == 3)
        ending = asyncio.create_task(server.connections.give_up("the server is shutting down."))
        for client in clients[:3]:
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (503, "close")
            assert await client.ended()
            client.close()
        assert await clients[3].ended()
        clients[3].close()
        assert await ending == 4  # one was waiting behind another

    run_server(scenario)


def test_request_cut_off_by_the_client_is_400_for_one_that_still_reads():
    async def scenario(server):
        client = await server.connect()
        client.send(post(b"echo", b"0123456789")[:-3])
        client.writer.write_eof()
        answer = await client.answer()
        assert (answer.status, error(answer)) == (400, "the connection ended within the request.")
        client.close()

    run_server(scenario)


def test_client_that_was_just_answered_may_send_its_next_request_to_a_draining_server():
    async def scenario(server):
        recent, old = await server.connect(), await server.connect()
        old.send(GET % b"echo")
        await old.answer()
        await asyncio.sleep(2 * QUIET_SECONDS)
        recent.send(GET % b"echo")
        assert "connection" not in (await recent.answer()).headers
        draining = asyncio.create_task(server.connections.drain(math.inf))
        assert await old.ended()
        recent.send(GET % b"echo")
        assert (await recent.answer()).headers["connection"] == "close"
        recent.close()
        old.close()
        await draining

    run_server(scenario)
