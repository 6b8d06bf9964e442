"""The application under any ASGI server.

    $ ENGINERY_MODELS=minilm=build/minilm uvicorn --factory enginery.serve.asgi:create_app

What the server's own HTTP layer does not hold is held here too: the limit of bodies, a path that is
UTF-8, and a task that ends with its client. ASGI 3.0, its lifespan and HTTP messages:
asgi.readthedocs.io/en/latest/specs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from enginery.core.errors import OptionError
from enginery.core.options import options_from
from enginery.serve import http_messages as http
from enginery.serve.config import ServeConfig, check_options
from enginery.serve.http_messages import RefusedMessageError
from enginery.serve.messages import Application, Request, Response
from enginery.serve.refusals import RefusalError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Hook = Callable[[], Awaitable[None]]

if TYPE_CHECKING:
    from enginery.serve.service import ModelService

MODELS = "ENGINERY_MODELS"
OPTION = "ENGINERY_SERVE_"
THE_SERVERS = frozenset({"host", "port", "grace", "drain_delay", "restart", "idle_timeout",
                         "request_timeout", "max_connections", "max_held_bytes"})  # fmt: skip
"""Options that are the ASGI server's own."""

log = logging.getLogger("enginery.serve")


def create_app(environment: Mapping[str, str] = os.environ) -> AsgiApp:
    """The whole server as an ASGI application; the lifespan loads its models.

    Args:
        environment: `ENGINERY_MODELS` has artifacts, `path` or `name=path`, with commas between
            them; `ENGINERY_SERVE_BATCH_ROWS` and so on are the options of `ServeConfig`.

    Raises:
        OptionError: a variable cannot be used, or there are no models.
        ArtifactError: a directory is not an artifact.
    """
    from enginery.serve.service import named_paths

    artifacts = [word.strip() for word in environment.get(MODELS, "").split(",") if word.strip()]
    if not artifacts:
        raise OptionError(
            f"{MODELS} is empty, expected artifacts.", do=f"Set {MODELS}=name=path,name=path."
        )
    config = config_from(environment)
    served = _Served(named_paths(artifacts), config)
    return AsgiApp(
        served, max_body_bytes=config.max_body_bytes, startup=served.start, shutdown=served.stop
    )


def config_from(environment: Mapping[str, str]) -> ServeConfig:
    """The options that variables give, `ENGINERY_SERVE_` before their names.

    Raises:
        OptionError: an option is unknown, is the ASGI server's own, or has a value that is wrong.
    """
    values: dict[str, Any] = {}
    for variable, value in environment.items():
        if not variable.startswith(OPTION):
            continue
        name = variable.removeprefix(OPTION).lower()
        if name in THE_SERVERS:
            raise OptionError(
                f"{variable} is set, but option '{name}' is the ASGI server's own.",
                do="Give it to that server.",
            )
        values[name] = value.split(",") if name == "provider_option" else value
    config = options_from(ServeConfig, "serve", values)
    check_options(config)
    return config


class _Served:
    """The models and their application, which need the loop that the ASGI server makes."""

    def __init__(self, paths: Mapping[str, Path], config: ServeConfig) -> None:
        self._paths = paths
        self._config = dataclasses.replace(config, restart=False)
        self._service: ModelService | None = None

    async def start(self) -> None:
        """Loads the models."""
        from enginery.serve.service import ModelService, require_packages

        require_packages()
        self._service = ModelService(self._paths, self._config, None, log.info)
        await self._service.load()

    async def stop(self) -> None:
        """Frees them."""
        if self._service:
            self._service.drain()
            await self._service.close()

    def admit(self, request: Request) -> None:
        """Before the body is read."""
        if self._service:
            self._service.application.admit(request)

    async def __call__(self, request: Request) -> Response:
        """The answer; 503 where the server runs no lifespan."""
        if self._service is None:
            return self.refusal(request, 503, "the ASGI server has not run the lifespan.")
        return await self._service.application(request)

    def refusal(self, request: Request, status: int, message: str) -> Response:
        """An error in the shape of the path's protocol."""
        if self._service is None:
            return Response.of_json({"error": message}, status=status)
        return self._service.application.refusal(request, status, message)


async def _nothing() -> None:
    return


class AsgiApp:
    """An ASGI application of ours; `startup` and `shutdown` are its lifespan."""

    def __init__(
        self,
        application: Application,
        *,
        max_body_bytes: int = ServeConfig.max_body_bytes,
        startup: Hook = _nothing,
        shutdown: Hook = _nothing,
    ) -> None:
        self._application = application
        self._max_body_bytes = max_body_bytes
        self._startup = startup
        self._shutdown = shutdown

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """A request, the lifespan, or a websocket, which is refused."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            raise ValueError(f"scope {scope['type']!r} is not known.")

    async def _live(self, receive: Receive, send: Send) -> None:
        for name, hook in (("startup", self._startup), ("shutdown", self._shutdown)):
            await receive()
            try:
                await hook()
            except Exception as error:
                await send({"type": f"lifespan.{name}.failed", "message": str(error)})
                return
            await send({"type": f"lifespan.{name}.complete"})

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        request = _request(scope)
        try:
            request.path = _path(scope)
            http.check_length(request.headers.get("content-length", "0"), self._max_body_bytes)
            self._application.admit(request)
            body = await self._body(receive)
        except (RefusedMessageError, RefusalError) as refused:
            response = self._application.refusal(request, refused.status, refused.message)
            await _send(response, scope["method"], send)
            return
        if body is None:
            return  # the client has gone
        request.body = body
        task = asyncio.create_task(self._respond(request))
        watch = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await _send(task.result(), request.method, send)
        finally:
            task.cancel()
            watch.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def _respond(self, request: Request) -> Response:
        try:
            return await self._application(request)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task and task.cancelling():
                raise
            log.exception("%s %s was cancelled from within", request.method, request.path)
        except Exception:
            log.exception("%s %s", request.method, request.path)
        return self._application.refusal(request, 500, "internal error")

    async def _body(self, receive: Receive) -> bytes | None:
        """The whole body, or None where the client has gone."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            if size > self._max_body_bytes:
                raise http.body_too_large(self._max_body_bytes)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)


def _path(scope: Message) -> str:
    """The path below where the application is mounted, decoded.

    Raises:
        RefusedMessageError: 400, it is not UTF-8.
    """
    raw, root = scope.get("raw_path"), scope.get("root_path", "")
    path: str = http.percent_decoded(raw.partition(b"?")[0]) if raw else scope["path"]
    is_below = root and f"{path}/".startswith(f"{root.rstrip('/')}/")
    return path[len(root.rstrip("/")) :] or "/" if is_below else path


def _request(scope: Message) -> Request:
    """The request without its path, which may be none, and its body, which has yet to come."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    address = scope.get("client") or ("", 0)
    host, port = address[0], address[1]
    client = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}") if host else ""
    query = scope.get("query_string", b"").decode("latin-1")
    return Request(scope["method"], "", query, headers, b"", client, perf_counter())


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(response: Response, method: str, send: Send) -> None:
    headers = [
        (name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers
    ]
    if http.may_have_body(response.status):
        if response.content_type:
            headers.append((b"content-type", response.content_type.encode("latin-1")))
        headers.append((b"content-length", str(len(response.body)).encode("ascii")))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    body = response.body if http.has_body(method, response.status) else b""
    await send({"type": "http.response.body", "body": body})
