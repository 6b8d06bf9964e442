"""The application under any ASGI server.

    $ ENGINERY_MODELS=minilm=build/minilm uvicorn --factory enginery.serve.asgi:create_app

What ASGI servers leave to their application is held here: the limits of bodies, a path that is
UTF-8, and a task that ends with its client. ASGI 3.0, its lifespan and HTTP messages:
asgi.readthedocs.io/en/latest/specs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from enginery.core.errors import OptionError
from enginery.core.options import options_from
from enginery.serve.config import ServeConfig, check_options
from enginery.serve.lifecycle import CLOSE_SECONDS, Activity
from enginery.serve.messages import Application, Request, Response
from enginery.serve.refusals import RefusalError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Hook = Callable[[], Awaitable[None]]

if TYPE_CHECKING:
    from enginery.serve.lifecycle import ProcessLifecycle
    from enginery.serve.service import ModelService

MODELS = "ENGINERY_MODELS"
OPTION = "ENGINERY_SERVE_"
THE_SERVERS = frozenset(
    {"host", "port", "grace", "drain_delay", "processes", "restart", "idle_timeout"}
)
"""Options that are the ASGI server's own."""

_BODILESS = frozenset({204, 304})
_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")

_ENDING = "the server is shutting down."

log = logging.getLogger("enginery.serve")


class RefusedMessageError(Exception):
    """A request that is answered before it is whole, with a status and a reason in words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


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
    return _Served(named_paths(artifacts), dataclasses.replace(config, restart=False)).app()


def served_app(
    paths: Mapping[str, Path], config: ServeConfig, lifecycle: ProcessLifecycle
) -> AsgiApp:
    """The whole server in a worker process; it answers 503 until its models are loaded."""
    return _Served(paths, config, lifecycle).app()


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

    def __init__(
        self,
        paths: Mapping[str, Path],
        config: ServeConfig,
        lifecycle: ProcessLifecycle | None = None,
    ) -> None:
        self._paths, self._config, self._lifecycle = paths, config, lifecycle
        self._service: ModelService | None = None
        self._loading: asyncio.Task[None] | None = None
        self._activity = Activity()

    def app(self) -> AsgiApp:
        """The ASGI application."""
        return AsgiApp(
            self, max_body_bytes=self._config.max_body_bytes,
            max_held_bytes=self._config.max_held_bytes, startup=self.start, shutdown=self.stop,
            activity=self._activity,
        )  # fmt: skip

    async def start(self) -> None:
        """Loads the models; in a process of ours, while it listens."""
        from enginery.serve.service import ModelService, require_packages

        require_packages()
        lifecycle = self._lifecycle
        replace = lifecycle.replace if lifecycle and self._config.restart else None
        self._service = ModelService(self._paths, self._config, replace=replace)
        if lifecycle is None:
            await self._service.load()
            return
        lifecycle.start(
            begin_drain=self._service.drain, reload=self._service.reload, activity=self._activity
        )
        self._loading = asyncio.create_task(self._load(self._service, lifecycle))

    async def _load(self, service: ModelService, lifecycle: ProcessLifecycle) -> None:
        try:
            await service.load()
        except Exception as error:
            lifecycle.fail_startup(error)

    async def stop(self) -> None:
        """Frees them."""
        if self._loading:
            self._loading.cancel()
        if self._service:
            self._service.drain()
            try:
                await asyncio.wait_for(self._service.close(), CLOSE_SECONDS)
            except TimeoutError:
                log.warning("the models were not freed within %g seconds.", CLOSE_SECONDS)

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
        max_held_bytes: int = ServeConfig.max_held_bytes,
        startup: Hook = _nothing,
        shutdown: Hook = _nothing,
        activity: Activity | None = None,
    ) -> None:
        self._application = application
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = max(max_held_bytes, max_body_bytes)
        self._held = 0
        self._activity = activity or Activity()
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
            self._activity.in_flight += 1
            self._activity.last_request_at = perf_counter()
            try:
                await self._answer(scope, receive, send)
            finally:
                self._activity.in_flight -= 1
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
            check_length(request.headers.get("content-length", "0"), self._max_body_bytes)
            self._application.admit(request)
            response = await self._read_and_respond(request, receive)
        except (RefusedMessageError, RefusalError) as refused:
            response = self._application.refusal(request, refused.status, refused.message)
        except asyncio.CancelledError:
            # By the server alone: a client that goes is seen by `receive`.
            response = self._application.refusal(request, 503, _ENDING)
        finally:
            self._held -= len(request.body)
        if response is not None:
            if self._activity.draining:
                response.headers += (("connection", "close"),)
            await _send(response, request.method, send)

    async def _read_and_respond(self, request: Request, receive: Receive) -> Response | None:
        """The response, or None where the client has gone."""
        body = await self._body(receive)
        if body is None:
            return None
        request.body = body
        task = asyncio.create_task(self._respond(request))
        watch = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        except asyncio.CancelledError:  # noted before the task is cancelled, which is noted, too
            return self._application.refusal(request, 503, _ENDING)
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
        whole = False
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                part = message.get("body", b"")
                size += len(part)
                self._held += len(part)
                if size > self._max_body_bytes:
                    raise body_too_large(self._max_body_bytes)
                if self._held > self._max_held_bytes:
                    raise RefusedMessageError(
                        503, "the bodies of all requests together are more than the server holds."
                    )
                parts.append(part)
                if not message.get("more_body", False):
                    whole = True
                    return b"".join(parts)
        finally:
            if not whole:  # a whole body is held until it is answered
                self._held -= size


def percent_decoded(path: bytes) -> str:
    """A path without its `%` escapes.

    Raises:
        RefusedMessageError: 400, an escape is incomplete, or the bytes are not UTF-8.
    """
    if _BAD_ESCAPE.search(path):
        raise RefusedMessageError(400, "the path holds a '%' without two hexadecimal digits.")
    try:
        return unquote_to_bytes(path).decode("utf-8")
    except UnicodeDecodeError:
        raise RefusedMessageError(
            400, "the path is not UTF-8 once it is percent-decoded."
        ) from None


def check_length(length: str, max_body_bytes: int) -> None:
    """Raises RefusedMessageError (413) where a Content-Length is more than the server takes."""
    if not length.isdecimal():
        raise RefusedMessageError(400, f"header Content-Length is {length[:80]!r}.")
    if int(length) > max_body_bytes:
        raise body_too_large(max_body_bytes, found=f"{int(length):,} bytes")


def body_too_large(max_body_bytes: int, *, found: str = "more") -> RefusedMessageError:
    """The refusal of a body that is larger than the server takes."""
    return RefusedMessageError(
        413, f"the body has {found}, and at most {max_body_bytes:,} bytes are taken."
    )


def _path(scope: Message) -> str:
    """The path below where the application is mounted, decoded.

    Raises:
        RefusedMessageError: 400, it is not UTF-8.
    """
    raw, root = scope.get("raw_path"), scope.get("root_path", "")
    path: str = percent_decoded(raw.partition(b"?")[0]) if raw else scope["path"]
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
    if response.status not in _BODILESS:
        if response.content_type:
            headers.append((b"content-type", response.content_type.encode("latin-1")))
        headers.append((b"content-length", str(len(response.body)).encode("ascii")))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    body = response.body if method != "HEAD" and response.status not in _BODILESS else b""
    await send({"type": "http.response.body", "body": body})
