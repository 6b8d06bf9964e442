"""A small ASGI application whose routes are functions of the record, and a way to ask it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace

from enginery.serve.app import answer_shutting_down
from enginery.serve.batching.scheduler import Timings
from enginery.serve.http.lifecycle import Activity
from enginery.serve.observability.middleware import ObservabilityMiddleware
from enginery.serve.observability.record import RequestRecord

TIMINGS = Timings(0.00025, 0.001, 0.0025, tokens=7, truncated=1)


def record(**known):
    """A record as `POST /embed` leaves it."""
    made = RequestRecord("abc", "POST", "/embed", "10.0.0.7:51234", started=0.0)
    values = {
        "route": "/embed",
        "model": "minilm",
        "status": 200,
        "body_bytes": 24,
        "sent_bytes": 8,
        "ended": 0.0041,
    } | known
    for name, value in values.items():
        setattr(made, name, value)
    return made


@dataclass
class App:
    """Answers as a test says; `record` is that of the last request."""

    status: int = 200
    body: bytes = b"[[0.25]]"
    known: dict = field(default_factory=dict)
    headers: tuple = ()
    before: object = None
    """A coroutine function that is awaited before the response; it may raise."""

    async def __call__(self, scope, receive, send):
        self.scope = scope
        if scope["type"] != "http":
            return
        self.record = scope["state"]["record"]
        more = True
        while more:
            more = (await receive()).get("more_body", False)
        for name, value in self.known.items():
            setattr(self.record, name, value)
        if self.before:
            await self.before()
        await send(
            {"type": "http.response.start", "status": self.status, "headers": list(self.headers)}
        )
        half = len(self.body) // 2
        await send({"type": "http.response.body", "body": self.body[:half], "more_body": True})
        await send({"type": "http.response.body", "body": self.body[half:]})


def scope(*, method="POST", path="/embed", headers=(), client=("10.0.0.7", 51234), **more):
    return {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"key=secret-query",
        "headers": [(b"host", b"a"), (b"authorization", b"Bearer secret-key"), *headers],
        "client": client,
        "scheme": "http",
        "server": ("127.0.0.1", 8000),
        **more,
    }


def ask(app, *, observed=None, activity=None, chunks=(b'{"inputs":', b'"secret text"}'), **request):
    """The response of an application within the middleware, and the scope it was given."""
    parts = [
        {"type": "http.request", "body": chunk, "more_body": number < len(chunks) - 1}
        for number, chunk in enumerate(chunks)
    ]
    sent = []

    async def receive():
        return parts.pop(0) if parts else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    async def whole():
        middleware = ObservabilityMiddleware(
            app,
            activity=activity or Activity(),
            **({"shutting_down": answer_shutting_down} | (observed or {})),
        )
        await middleware(scope(**request), receive, send)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(whole())
    if not sent:
        return None
    start, *bodies = sent
    headers = [(name.decode(), value.decode()) for name, value in start["headers"]]
    return SimpleNamespace(
        status=start["status"],
        headers=dict(headers),
        all_headers=headers,
        body=b"".join(each["body"] for each in bodies),
    )
