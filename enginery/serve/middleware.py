"""Middlewares of routes: check API keys, read bodies within limits."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from enginery.serve.api.errors import HTTPError, invalid_body
from enginery.serve.config import ServeConfig
from enginery.serve.keys import ApiKeys

_WATCH_AFTER_SECONDS = 0.05
"""Time after which a request is watched for its client's disconnect. A task for every short request
would cost more than it saves."""


class RequireKey:
    """A middleware that rejects requests without a valid API key before reading their bodies."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raise HTTPError 401 unless the request has a valid key."""
        headers = Headers(scope=scope)
        if not self._keys.accept(headers):
            sent = "authorization" in headers or "x-api-key" in headers
            raise HTTPError(
                401,
                "the API key is invalid." if sent else "an API key is required.",
                do="Send 'Authorization: Bearer KEY', or 'X-Api-Key: KEY'.",
            )
        await self._app(scope, receive, send)


class BodyBudget:
    """The number of bytes of request bodies in memory, with its limits."""

    def __init__(self, config: ServeConfig) -> None:
        self.max_body_bytes, self.max_held_bytes = config.max_body_bytes, config.max_held_bytes
        self.held_bytes = 0

    def take(self, size: int, body_size: int) -> None:
        """Count received bytes. One body of up to the maximum size is always accepted.

        Args:
            size: number of bytes received.
            body_size: size of their body, as far as it is known.

        Raises:
            HTTPError: 413 if the body is too large; 503 if all bodies together are.
        """
        if body_size > self.max_body_bytes:
            raise HTTPError(
                413,
                f"the body is too large: expected at most {self.max_body_bytes} bytes.",
                do="Send it in several requests.",
            )
        held = self.held_bytes + size
        if held > max(self.max_held_bytes, self.max_body_bytes) and self.held_bytes:
            raise HTTPError(
                503,
                f"the server holds {self.held_bytes} bytes of other requests, expected at most "
                f"{self.max_held_bytes} with this one.",
                do="Send the request again later.",
                retry_after_seconds=1.0,
            )
        self.held_bytes = held


class BufferBody:
    """A middleware that reads the whole body, then runs the route while the client is connected.

    The body is in `scope["state"]["body"]`, and can be received again.
    """

    def __init__(self, app: ASGIApp, budget: BodyBudget) -> None:
        self._app, self._budget = app, budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, run the route, and cancel the route if the client disconnects.

        Raises:
            HTTPError: 400 if the body is compressed; 413 or 503 if it is too large.
        """
        budget, state, held = self._budget, scope["state"], 0
        headers = dict(scope["headers"])
        encoding, declared = headers.get(b"content-encoding"), headers.get(b"content-length", b"0")
        if encoding not in (None, b"", b"identity"):
            # A few bytes could decompress to gigabytes, which the limit on the body does not bound.
            raise invalid_body(
                f"found content-encoding {encoding[:40].decode('latin-1')!r}, expected none.",
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
            route.uncancel()  # the client's disconnect must not end the server's task
        finally:
            timer.cancel()
            if watcher is not None:
                watcher.cancel()
