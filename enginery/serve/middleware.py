"""Middlewares around routes: API keys, and limits of bodies."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from enginery.core.errors import OptionError
from enginery.serve.api.errors import HTTPError
from enginery.serve.config import ServeConfig

KEY_VARIABLE = "ENGINERY_API_KEY"


@dataclass(frozen=True)
class Keys:
    """The API keys of one server; none lets everybody in.

    A key comes as `Authorization: Bearer KEY` or as `X-Api-Key: KEY`.
    """

    keys: tuple[bytes, ...] = field(default=(), repr=False)

    @classmethod
    def from_config(cls, config: ServeConfig, environment: Mapping[str, str]) -> Keys:
        """Return the keys of `api_key`, else of `api_key_file`, else of ENGINERY_API_KEY.

        Raises:
            OptionError: the file cannot be read or has no key, or a key cannot be sent in a header.
        """
        if config.api_key:
            return cls((_checked(config.api_key, "option 'api_key'"),))
        if config.api_key_file:
            return cls(_read(Path(config.api_key_file)))
        found = environment.get(KEY_VARIABLE, "")
        return cls((_checked(found, KEY_VARIABLE),) if found else ())

    def __bool__(self) -> bool:
        return bool(self.keys)

    def require(self, headers: Mapping[str, str]) -> None:
        """Raise HTTPError 401 unless a request with these headers is let in."""
        if not self.keys:
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else ""
        if self._are_known(given) or self._are_known(headers.get("x-api-key", "")):
            return
        sent = "authorization" in headers or "x-api-key" in headers
        raise HTTPError(
            401,
            "the API key is not one of this server's." if sent else "an API key is needed.",
            do="Send 'Authorization: Bearer KEY', or 'X-Api-Key: KEY'.",
        )

    def _are_known(self, given: str) -> bool:
        found = given.encode("utf-8", "surrogateescape")
        # All of them, every time: how long it takes says nothing of which one was near.
        known = [hmac.compare_digest(found, key) for key in self.keys]
        return any(known)


class RequireKey:
    """Refuses requests without an API key, before their bodies are read."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raise HTTPError 401 unless the request has a key."""
        self._keys.require(Headers(scope=scope))
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


def _read(path: Path) -> tuple[bytes, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"option 'api_key_file': {path} cannot be read: {reason}.") from error
    keys = tuple(
        _checked(line.strip(), f"{path}:{number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    )
    if not keys:
        raise OptionError(f"option 'api_key_file': {path} has no key.", do="Write one a line.")
    return keys


def _checked(key: str, where: str) -> bytes:
    # Never the key itself in a message: messages are logged.
    if not all("!" <= letter <= "~" for letter in key):
        raise OptionError(
            f"{where}: the key has a space or a letter beyond ASCII, which no header can carry.",
            do="Use letters, digits and punctuation, for example `openssl rand -hex 32`.",
        )
    return key.encode("ascii")
