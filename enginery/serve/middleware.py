"""Middlewares around routes: API keys, and bodies within limits."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from enginery.serve.api.errors import HTTPError, invalid_body
from enginery.serve.config import ServeConfig
from enginery.serve.keys import ApiKeys

_WATCH_AFTER_SECONDS = 0.05
"""A request that takes longer is watched for its client's going; a task for each would cost more
than it saves."""


class RequireKey:
    """Refuses requests without an API key, before their bodies are read."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raise HTTPError 401 unless the request has a key."""
        headers = Headers(scope=scope)
        if not self._keys.accept(headers):
            sent = "authorization" in headers or "x-api-key" in headers
            raise HTTPError(
                401,
                "the API key is not one of this server's." if sent else "an API key is needed.",
                do="Send 'Authorization: Bearer KEY', or 'X-Api-Key: KEY'.",
            )
        await self._app(scope, receive, send)


class BodyBudget:
    """The bytes of bodies that one server holds."""

    def __init__(self, config: ServeConfig) -> None:
        self.max_body_bytes, self.max_held_bytes = config.max_body_bytes, config.max_held_bytes
        self.held_bytes = 0

    def take(self, size: int, body_size: int) -> None:
        """Count bytes that arrive; one body of the largest size is always taken.

        Args:
            size: of what has arrived.
            body_size: of its body, as far as it is known.

        Raises:
            HTTPError: 413, the body is too large; 503, all bodies together are.
        """
        if body_size > self.max_body_bytes:
            raise HTTPError(
                413,
                f"the body has more than {self.max_body_bytes} bytes, which is the most that is "
                "taken.",
                do="Send it in several requests.",
            )
        held = self.held_bytes + size
        if held > max(self.max_held_bytes, self.max_body_bytes) and self.held_bytes:
            raise HTTPError(
                503,
                f"the server holds {self.held_bytes} bytes of other requests, its most is "
                f"{self.max_held_bytes}.",
                do="Send the request again later.",
                retry_after_seconds=1.0,
            )
        self.held_bytes = held


class BufferBody:
    """Reads the whole body within limits, then runs the route until it ends or its client goes.

    The body is at `scope["state"]["body"]`, and can be received once more.
    """

    def __init__(self, app: ASGIApp, budget: BodyBudget) -> None:
        self._app, self._budget = app, budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the route, and cancel it when the client disconnects.

        Raises:
            HTTPError: 400, the body is compressed; 413 or 503, it is too large.
        """
        budget, state, held = self._budget, scope["state"], 0
        headers = dict(scope["headers"])
        encoding, declared = headers.get(b"content-encoding"), headers.get(b"content-length", b"0")
        if encoding not in (None, b"", b"identity"):
            # A few bytes could become gigabytes, which the limit of the body would not see.
            raise invalid_body(
                f"the body is encoded with {encoding[:40].decode('latin-1')!r}, expected none.",
                do="Send it uncompressed.",
            )
        try:
            budget.take(0, int(declared) if declared.isdigit() and len(declared) < 20 else 0)
            parts: list[bytes] = []
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                part = message.get("body", b"")
                budget.take(len(part), held + len(part))
                held += len(part)
                state["record"].body_bytes = held
                parts.append(part)
                more = message.get("more_body", False)
            state["body"] = parts[0] if len(parts) == 1 else b"".join(parts)
            await self._run(scope, receive, send)
        finally:
            budget.held_bytes -= held
            state["body"] = b""  # uvicorn keeps the scope until the connection's next request

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher: asyncio.Task[None] | None = None
        has_gone = False
        loop, route = asyncio.get_running_loop(), asyncio.current_task()

        async def watch() -> None:
            nonlocal has_gone
            while (await receive())["type"] != "http.disconnect":
                continue
            has_gone = True
            if route is not None:
                route.cancel()

        def start_watching() -> None:
            nonlocal watcher
            watcher = loop.create_task(watch())

        async def replay() -> Message:
            return {"type": "http.request", "body": scope["state"]["body"], "more_body": False}

        timer = loop.call_later(_WATCH_AFTER_SECONDS, start_watching)
        try:
            await self._app(scope, replay, send)
        except asyncio.CancelledError:
            if not has_gone or route is None:
                raise
            route.uncancel()  # the client's going is no reason to end the server's task
        finally:
            timer.cancel()
            if watcher is not None:
                watcher.cancel()
