"""An application without models, a server around it on a free port, and a client of bytes."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field

import uvloop

from enginery.serve.config import ServeConfig
from enginery.serve.http_connections import Connections
from enginery.serve.messages import Response
from enginery.serve.protocol import HttpProtocol
from enginery.serve.refusals import UnauthorizedError

LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


class Echo:
    """Answers with what it was asked; some paths behave badly."""

    def __init__(self):
        self.requests = []
        self.refused = []
        self.admitted = []
        self.cancelled = 0
        self.gate = asyncio.Event()

    def admit(self, request):
        self.admitted.append((request.method, request.path, request.body))
        if request.headers.get("x-api-key") == "wrong":
            raise UnauthorizedError("the key is wrong.", do="Send another.")

    async def __call__(self, request):
        self.requests.append(request)
        try:
            return await self.answer(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def answer(self, request):
        first, _, rest = request.path.strip("/").partition("/")
        if first == "wait":
            await self.gate.wait()
        elif first == "sleep":
            with suppress(ValueError):  # a fuzzer writes numbers that are none
                await asyncio.sleep(min(1.5, float(rest)))
        elif first == "bug":
            raise ZeroDivisionError("a bug")
        elif first == "inner":
            raise asyncio.CancelledError
        elif first == "large":
            return Response(200, b"x" * int(rest), "text/plain")
        elif first == "status":
            return Response(int(rest), b"body", "text/plain")
        elif first == "split":
            return Response(200, b"", headers=(("x-a", "1\r\nx-b: 2"),))
        elif first == "stubborn":
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                return Response(200, b"late")
        return Response.of_json(
            {"method": request.method, "path": request.path, "query": request.query,
             "body": request.body.decode("latin-1"), "headers": dict(request.headers)},
            headers=(("x-from", "echo"),),
        )  # fmt: skip

    def refusal(self, request, status, message):
        self.refused.append((request, status))
        facts = {"error": message, "method": request.method, "path": request.path}
        return Response.of_json(facts, status=status)


@dataclass
class Answer:
    status: int
    headers: dict
    body: bytes


@dataclass
class Client:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    interim: list = field(default_factory=list)

    def send(self, *parts):
        self.writer.write(b"".join(parts))

    async def answer(self, *, head=False) -> Answer:
        """The next answer, read by its own Content-Length."""
        while True:
            block = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 30)).decode(
                "latin-1"
            )
            first, *lines = block.split("\r\n")[:-2]
            version, status, _ = first.split(" ", 2)
            assert version == "HTTP/1.1"
            if int(status) < 200:
                self.interim.append(int(status))
                continue
            headers = dict(line.split(": ", 1) for line in lines)
            assert len(headers) == len(lines), lines
            size = 0 if head else int(headers.get("content-length", "0"))
            return Answer(int(status), headers, await self.reader.readexactly(size))

    async def ended(self) -> bool:
        """Whether the server has ended its side, with nothing more to read."""
        return await asyncio.wait_for(self.reader.read(), 30) == b""

    def close(self):
        self.writer.close()


class Running:
    """A server on a free port, in the loop of the test."""

    def __init__(self, config):
        self.application = Echo()
        self.connections = Connections(self.application, config)

    async def connect(self, **options) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.port, **options))

    async def ask(self, *parts) -> Answer:
        """One answer on a connection of its own."""
        client = await self.connect()
        try:
            client.send(*parts)
            return await client.answer()
        finally:
            client.close()


async def until(true, seconds=30):
    """Waits for something to become true; a test fails here when it does not."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        await asyncio.sleep(0.01)


def run_server(scenario, loop="uvloop", **options):
    """Runs `scenario(server)` in a fresh loop, and holds that nothing is left of it afterwards."""

    async def whole():
        running = asyncio.get_running_loop()
        failures = []
        running.set_exception_handler(lambda _, context: failures.append(context))
        server = Running(ServeConfig(**options))
        server.connections.start(running)
        listening = await running.create_server(
            lambda: HttpProtocol(server.connections), "127.0.0.1", 0
        )
        server.port = listening.sockets[0].getsockname()[1]
        try:
            await asyncio.wait_for(scenario(server), 120)
        finally:
            listening.close()
            server.application.gate.set()
            await server.connections.give_up("the test is over.")
            server.connections.stop()
            await asyncio.sleep(0.05)
        assert not server.connections.open
        assert server.connections.bodies.held == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not failures, failures

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(whole())


GET = b"GET /%b HTTP/1.1\r\nHost: a\r\n\r\n"


def post(path=b"echo", body=b"", *headers):
    lines = b"".join(line + b"\r\n" for line in headers)
    return (
        b"POST /%b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n" % (path, len(body))
        + lines + b"\r\n" + body
    )  # fmt: skip
