"""An application without models."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from enginery.serve.messages import Response
from enginery.serve.refusals import UnauthorizedError


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


async def until(true, seconds=30):
    """Waits for something to become true; a test fails here when it does not."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        await asyncio.sleep(0.01)
