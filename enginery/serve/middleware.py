"""Middlewares around routes: API keys, and limits of bodies."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from enginery.serve.api.errors import HTTPError
from enginery.serve.config import ServeConfig
from enginery.serve.keys import Keys


class RequireKey:
    """Refuses requests without an API key, before their bodies are read."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
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

    def check(self, size: int) -> None:
        """Raise HTTPError where a body of so many bytes is too large."""
        if size > self.max_body_bytes:
            raise HTTPError(
                413,
                f"the body has more than {self.max_body_bytes} bytes, which is the most that is "
                "taken.",
                do="Send it in several requests.",
            )

    def take(self, size: int) -> None:
        """Count bytes of a body that arrive; raise HTTPError 503 where there are too many.

        One body of the largest size is always taken.
        """
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

    def give_back(self, size: int) -> None:
        """Count bytes of a body that is done with."""
        self.held_bytes -= size


class BufferBody:
    """Reads the whole body within limits, then runs the route until it ends or its client goes."""

    def __init__(self, app: ASGIApp, budget: BodyBudget) -> None:
        self._app, self._budget = app, budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the route, and cancel it when the client disconnects.

        Raises:
            HTTPError: 413 or 503, the body is too large.
        """
        self._budget.check(_declared_size(scope))
        held = 0
        try:
            parts: list[bytes] = []
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                part = message.get("body", b"")
                self._budget.check(held + len(part))
                self._budget.take(len(part))
                held += len(part)
                parts.append(part)
                more = message.get("more_body", False)
            body = b"".join(parts)
            del parts
            scope["state"]["record"].body_bytes = held
            await self._run(scope, body, receive, send)
        finally:
            self._budget.give_back(held)

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        has_gone = False
        route = asyncio.current_task()

        async def watch() -> None:
            nonlocal has_gone
            while (await receive())["type"] != "http.disconnect":
                continue
            has_gone = True
            if route is not None:
                route.cancel()

        async def replay() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        watcher = asyncio.create_task(watch())
        try:
            await self._app(scope, replay, send)
        except asyncio.CancelledError:
            if not has_gone or route is None:
                raise
            route.uncancel()  # the client's going is no reason to end the server's task
        finally:
            watcher.cancel()


def _declared_size(scope: Scope) -> int:
    """Return the Content-Length of a request; 0 where it has none that can be read."""
    found = Headers(scope=scope).get("content-length", "0")
    return int(found) if found.isascii() and found.isdigit() and len(found) < 20 else 0
