"""What one connection can make the server keep: headers, waiting requests, time to arrive."""

import asyncio
import socket
import threading
import time

import pytest
import uvicorn

from enginery.serve.config import ServeConfig
from enginery.serve.http import protocol as http_protocol
from enginery.serve.http.protocol import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_WAITING_REQUESTS,
    JoiningTransport,
    LimitedProtocol,
)
from enginery.serve.http.sockets import bind
from enginery.serve.server import uvicorn_config

HEAD = b"GET /now HTTP/1.1\r\nhost: a\r\n"
POST = b"POST /body HTTP/1.1\r\nhost: a\r\n"


class Echo:
    """Answers at once, with the length of the body, or after `go`."""

    def __init__(self):
        self.go = threading.Event()
        self.seen, self.events = [], []

    async def __call__(self, scope, receive, send):
        self.seen.append(scope["path"])
        text = b"."
        if scope["path"] == "/wait":
            while not self.go.is_set():
                await asyncio.sleep(0.005)
        elif scope["path"] == "/body":
            more, size = True, 0
            while more:
                message = await receive()
                self.events.append(message["type"])
                if message["type"] == "http.disconnect":
                    return
                size += len(message["body"])
                more = message["more_body"]
            text = b"%d" % size
        headers = [(b"content-length", b"%d" % len(text))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text})


@pytest.fixture
def served():
    """The application's port and the application, under the server's protocol."""
    app = Echo()
    options = uvicorn_config(None, ServeConfig())
    options.factory, options.lifespan = False, "off"
    options.app, options.http = app, LimitedProtocol
    server = uvicorn.Server(options)
    sockets = bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=(sockets,), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    app.port, app.server = sockets[0].getsockname()[1], server
    yield app
    app.go.set()
    server.should_exit = True
    thread.join(10)


def connect(app):
    return socket.create_connection(("127.0.0.1", app.port), timeout=20)


def everything(client):
    """What the server sends until it ends the connection."""
    with client:
        parts = []
        while part := client.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def answers(app, *parts):
    client = connect(app)
    for part in parts:
        client.sendall(part)
    return everything(client)


def statuses(text):
    return [int(part[:3]) for part in text.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize(
    "parts",
    [
        [HEAD + b"x: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n"],
        [HEAD + b"x: ", *[b"a" * 10_000] * 40],
        [HEAD + b"x" * (MAX_HEAD_BYTES + 300_000)],
        [HEAD, *[b"x%d: %b\r\n" % (number, b"a" * 1000) for number in range(90)]],
        [HEAD, *[b"x%d: a\r\n" % number for number in range(MAX_HEADERS + 1)]],
        [b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nhost: a\r\n\r\n"],
        [b"GET /", *[b"a" * 50_000] * 10],
        [b"\r\n" * 200_000],
    ],
    ids=["one", "unfinished", "name", "many-large", "many", "path", "open-path", "blank"],
)
def test_headers_beyond_a_limit_get_431_and_the_end(served, parts):
    text = answers(served, *parts)
    assert statuses(text) == [431]
    assert b"connection: close" in text
    assert served.seen == []
    assert statuses(answers(served, HEAD + b"connection: close\r\n\r\n")) == [200]


@pytest.mark.parametrize(
    "parts",
    [
        [b"0\r\nx: ", *[b"a" * 10_000] * 20],
        [b"0\r\n", *[b"x%d: a\r\n" % number for number in range(200)]],
        [b"1;", *[b"a" * 10_000] * 20],
    ],
    ids=["trailer", "trailers", "extension"],
)
def test_what_belongs_to_chunks_has_the_same_limits(served, parts):
    text = answers(served, POST + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n", *parts)
    assert statuses(text) == [431]
    while served.events[-1] != "http.disconnect":  # the application learns it a little later
        time.sleep(0.005)


def test_what_is_within_the_limits_is_answered(served):
    fields = [b"x%d: %b\r\n" % (number, b"a" * 600) for number in range(MAX_HEADERS - 2)]
    size = 5 * MAX_HEAD_BYTES
    body = b"content-length: %d\r\n\r\n" % size
    text = answers(
        served,
        HEAD + b"".join(fields) + b"\r\n",  # each request counts for itself
        POST + b"".join(fields[1:]) + body + b"a" * size,
        POST + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 50_000 + b"0\r\n\r\n",
        HEAD + b"connection: close\r\n\r\n",
    )
    assert statuses(text) == [200] * 4
    assert text.count(b"\r\n\r\n%d" % size) == 1
    assert b"\r\n\r\n50000" in text


def test_requests_that_wait_on_a_connection_are_few(served):
    client = connect(served)
    client.sendall(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n" + (HEAD + b"\r\n") * 5000)
    while not served.seen:
        time.sleep(0.005)
    (protocol,) = served.server.server_state.connections
    while protocol._refusal is None:
        time.sleep(0.005)
    assert len(protocol.pipeline) == MAX_WAITING_REQUESTS
    served.go.set()
    assert statuses(everything(client)) == [200] * (1 + MAX_WAITING_REQUESTS) + [429]
    assert len(served.seen) == 1 + MAX_WAITING_REQUESTS


def test_client_that_reads_no_answer_is_not_answered_ever_more(served):
    client = connect(served)
    with client:
        client.settimeout(0.5)
        for _ in range(20_000):  # 6 MB
            try:
                client.send((HEAD + b"\r\n") * 10)
            except (TimeoutError, ConnectionError):
                break
            for protocol in list(served.server.server_state.connections):
                assert len(protocol.pipeline) <= MAX_WAITING_REQUESTS
        assert len(served.seen) < 10_000  # of 200,000: the others were discarded


@pytest.mark.parametrize("broken", [b"bad\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"x: a\r\n" * 200])
def test_requests_before_a_rejected_one_are_answered_first(served, broken):
    client = connect(served)
    client.sendall(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n" + HEAD + b"\r\n" + broken)
    client.sendall(b"a" * 1000)
    time.sleep(0.05)
    served.go.set()
    assert statuses(everything(client))[:2] == [200, 200]
    assert len(served.seen) == 2


def test_invalid_chunk_is_answered_once(served):
    text = answers(served, POST + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\nnone\r\n")
    assert statuses(text) == [400]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([], []),
        ([b"\r\n"], []),
        ([b"GET /now HT"], [408]),
        ([HEAD], [408]),
        ([HEAD + b"\r\n", HEAD], [200, 408]),
        ([POST + b"content-length: 9\r\n\r\n"], [408]),
        ([POST + b"content-length: 9\r\n\r\nab"], [408]),
        ([POST + b"transfer-encoding: chunked\r\n\r\n1\r\n"], [408]),
        ([b"GET /now HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nab"], [200]),
    ],
    ids=["nothing", "blank", "line", "head", "second", "body", "part", "chunk", "unread"],
)
def test_request_that_does_not_arrive_is_ended(served, monkeypatch, parts, expected):
    monkeypatch.setattr(http_protocol, "ARRIVAL_SECONDS", 0.1)
    monkeypatch.setattr(served.server.config, "timeout_keep_alive", 0.1)
    assert statuses(answers(served, *parts)) == expected


def test_body_that_arrives_slowly_has_time_for_its_size(served, monkeypatch):
    monkeypatch.setattr(http_protocol, "ARRIVAL_SECONDS", 0.1)
    monkeypatch.setattr(http_protocol, "BODY_BYTES_PER_SECOND", 1)
    client = connect(served)
    client.sendall(POST + b"connection: close\r\ncontent-length: 60\r\n\r\n" + b"a" * 30)
    time.sleep(0.3)
    client.sendall(b"a" * 30)
    assert everything(client).endswith(b"60")


class Sent:
    """A transport that notes what is written."""

    def __init__(self):
        self.pieces = []

    def write(self, data):
        self.pieces.append(data)

    def close(self):
        self.pieces.append("closed")

    def is_closing(self):
        return "closed" in self.pieces


async def test_head_and_body_are_sent_in_one_piece():
    sent = Sent()
    transport = JoiningTransport(sent, asyncio.get_running_loop())
    transport.write(b"head")
    transport.write(b"body")
    assert sent.pieces == []
    await asyncio.sleep(0)
    assert sent.pieces == [b"headbody"]
    transport.write(b"event")  # of a stream, long before the next one
    await asyncio.sleep(0)
    transport.write(b"last")
    assert not transport.is_closing()
    transport.close()
    assert transport.is_closing()
    await asyncio.sleep(0)
    found = sent.pieces
    assert found == [b"headbody", b"event", b"last", "closed"]


async def test_nothing_is_sent_after_the_client_has_reset_the_connection():
    sent = Sent()
    transport = JoiningTransport(sent, asyncio.get_running_loop())
    transport.write(b"head")
    sent.close()  # by the event loop
    await asyncio.sleep(0)
    transport.close()
    found = sent.pieces
    assert found == ["closed", "closed"]
