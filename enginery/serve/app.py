"""The server's ASGI application, for `enginery serve`, other ASGI servers, and tests.

$ ENGINERY_MODELS=minilm=build/minilm uvicorn --factory enginery.serve.app:create_app
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from enginery.core.errors import EngineryError, OptionError, nearest
from enginery.core.options import options_from
from enginery.serve.api import (
    admin,
    completions,
    generate,
    images,
    oip,
    openai,
    plain,
    rerank,
    speech,
    tei,
)
from enginery.serve.api.endpoints import Endpoint
from enginery.serve.api.errors import HTTPError, error_response, scope_protocol, to_http_error
from enginery.serve.api.requests import quote
from enginery.serve.config import ServeConfig, check_options, named_paths, require_packages
from enginery.serve.device.front import FrontRegistry
from enginery.serve.http.lifecycle import CLOSE_SECONDS, Activity, ProcessLifecycle
from enginery.serve.keys import ApiKeys
from enginery.serve.middleware import BodyBudget, BufferBody, RequireKey
from enginery.serve.models.loading import load, reload
from enginery.serve.models.registry import ModelRegistry
from enginery.serve.observability.access_log import AccessLog
from enginery.serve.observability.metrics import Metrics
from enginery.serve.observability.middleware import ObservabilityMiddleware
from enginery.serve.observability.tracing import Tracing

_log = logging.getLogger("enginery.serve")

_WAIT_SECONDS = 0.02
"""Time between two looks at whether the process may listen."""
MODELS_VARIABLE = "ENGINERY_MODELS"
OPTION_PREFIX = "ENGINERY_SERVE_"
SERVER_OPTIONS = frozenset(
    {
        "host",
        "port",
        "grace",
        "drain_delay",
        "restart",
        "idle_timeout",
        "processes",
        "fronts",
        "gpus",
    }
)
"""Options of `enginery serve` that other ASGI servers have themselves."""
ENDPOINTS: tuple[Endpoint, ...] = (
    *tei.routes.endpoints,
    *openai.routes.endpoints,
    *rerank.routes.endpoints,
    *completions.routes.endpoints,
    *speech.routes.endpoints,
    *plain.routes.endpoints,
    *images.routes.endpoints,
    *generate.routes.endpoints,
    *oip.routes.endpoints,
    *admin.routes.endpoints,
)


def create_app(environment: Mapping[str, str] = os.environ) -> Starlette:
    """Build the application from environment variables.

    Args:
        environment: `ENGINERY_MODELS` lists artifacts, `path` or `name=path`, separated by commas;
            `ENGINERY_SERVE_BATCH_ROWS` and so on set the options of `ServeConfig`.

    Raises:
        OptionError: a variable is invalid, or `ENGINERY_MODELS` is empty.
        ArtifactError: a directory is not an artifact.
    """
    require_packages()
    variable = environment.get(MODELS_VARIABLE, "")
    artifacts = [word.strip() for word in variable.split(",") if word.strip()]
    if not artifacts:
        raise OptionError(
            f"{MODELS_VARIABLE} is empty, expected one artifact or more.",
            do=f"Set {MODELS_VARIABLE}=name=path,name=path.",
        )
    config = dataclasses.replace(config_from(environment), restart=False)
    return make_app(named_paths(artifacts), config)


def config_from(environment: Mapping[str, str]) -> ServeConfig:
    """Read options from environment variables whose names start with `ENGINERY_SERVE_`.

    Raises:
        OptionError: an option is unknown, belongs to the ASGI server, or has an invalid value.
    """
    values: dict[str, Any] = {}
    for variable, value in environment.items():
        if not variable.startswith(OPTION_PREFIX):
            continue
        name = variable.removeprefix(OPTION_PREFIX).lower()
        if name in SERVER_OPTIONS:
            raise OptionError(
                f"{variable} is set, but option '{name}' belongs to the ASGI server.",
                do="Unset the variable, and set the option of that server.",
            )
        values[name] = value.split(",") if name == "provider_option" else value
    config = options_from(ServeConfig, "serve", values)
    check_options(config)
    return config


def make_app(
    paths: Mapping[str, Path],
    config: ServeConfig,
    lifecycle: ProcessLifecycle | None = None,
    *,
    keys: ApiKeys | None = None,
    devices: Sequence[Path] = (),
) -> Starlette:
    """Build the application. Its lifespan loads the models.

    Args:
        paths: directories of artifacts, by model name.
        config: the options of the server.
        lifecycle: the lifecycle of a worker of `enginery serve`; None under other ASGI servers.
        keys: the API keys; None to read them from `config` and the environment.
        devices: the Unix sockets of the device processes that run the models; empty if they run in
            this process.

    Raises:
        OptionError: the keys cannot be read.
    """
    # Each model tokenizes lists of texts in its own threads. The threads of `tokenizers` are shared
    # by all models: a text that never finishes would block every model.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    keys = ApiKeys.from_config(config, os.environ) if keys is None else keys
    metrics, activity = Metrics(), Activity()
    metrics.watch_activity(lambda: activity.in_flight > 0)
    access_log = AccessLog.from_option(config.access_log)
    if access_log is not None:
        metrics.watch_dropped_lines(lambda: access_log.dropped)
    tracing = Tracing.from_environment()
    budget = BodyBudget(config)
    app = Starlette(
        routes=[_route(endpoint, keys, budget) for endpoint in ENDPOINTS],
        middleware=[
            Middleware(
                ObservabilityMiddleware,
                metrics=metrics,
                access_log=access_log,
                tracing=tracing,
                activity=activity,
                shutting_down=answer_shutting_down,
            ),
            *_cors(config),
        ],
        exception_handlers={
            EngineryError: answer_error,  # type: ignore[dict-item]
            HTTPException: answer_routing_error,  # type: ignore[dict-item]
        },
        lifespan=partial(
            _lifespan, paths=paths, lifecycle=lifecycle, activity=activity, devices=devices
        ),
    )
    app.router.redirect_slashes = False
    app.state.config, app.state.keys, app.state.lifecycle = config, keys, lifecycle
    app.state.metrics = metrics
    app.state.access_log, app.state.tracing, app.state.budget = access_log, tracing, budget
    app.state.openapi = cache(partial(_openapi_json, with_keys=bool(keys)))
    app.state.docs = cache(lambda: _docs_html(app.state.openapi()))
    return app


def _cors(config: ServeConfig) -> list[Middleware]:
    """Return what answers browsers that ask whether a page of another origin may call."""
    if not config.cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    ]


@asynccontextmanager
async def _lifespan(
    app: Starlette,
    *,
    paths: Mapping[str, Path],
    lifecycle: ProcessLifecycle | None,
    activity: Any,
    devices: Sequence[Path] = (),
) -> AsyncIterator[None]:
    """Load the models at startup, and free them at shutdown.

    Under `enginery serve` they load in the background, so that health routes respond meanwhile. A
    process beside others that may be ready listens when it can answer: connections are divided
    among all, and the server has reported that it is ready.
    """
    state = app.state
    config: ServeConfig = state.config

    def on_broken(reason: str) -> None:
        if lifecycle is not None and config.restart:
            lifecycle.replace(reason, registry.refuse_all)

    registry: ModelRegistry
    loop = asyncio.get_running_loop()
    loads_first = lifecycle is not None and lifecycle.supervision.loads_first
    if devices:
        registry = fronts = FrontRegistry(paths, config, loop, sockets=devices, on_broken=on_broken)
        loads_first = await fronts.connect()
    else:
        registry = ModelRegistry(
            paths, config, loop, on_batch=state.metrics.observe_batch, on_broken=on_broken
        )
    state.registry = registry
    state.metrics.watch_models(lambda: registry)
    if lifecycle is not None:
        lifecycle.start(
            begin_drain=registry.begin_drain, reload=partial(reload, registry), activity=activity
        )
    loading = None
    if lifecycle is None:
        await load(registry)
    else:
        loading = asyncio.create_task(_load_or_fail(registry, lifecycle))
        if loads_first:
            draining = asyncio.create_task(lifecycle.draining.wait())
            await asyncio.wait({loading, draining}, return_when=asyncio.FIRST_COMPLETED)
            draining.cancel()
            while not (lifecycle.supervision.may_listen or lifecycle.draining.is_set()):
                await asyncio.sleep(_WAIT_SECONDS)
    try:
        yield
    finally:
        if loading is not None:
            loading.cancel()
        registry.begin_drain()
        with suppress(TimeoutError):  # a model may hang
            await asyncio.wait_for(registry.close(), CLOSE_SECONDS)
        state.metrics.count()  # the last requests, for the other processes
        if state.access_log is not None:
            state.access_log.close()
        if state.tracing is not None:
            state.tracing.close()


async def _load_or_fail(registry: ModelRegistry, lifecycle: ProcessLifecycle) -> None:
    try:
        await load(registry)
    except Exception as error:
        lifecycle.fail_startup(error)
    lifecycle.supervision.report_loaded()


def _openapi_json(*, with_keys: bool) -> bytes:
    from enginery.serve.api.openapi import openapi_json  # slow to build and rarely requested

    return openapi_json(ENDPOINTS, with_keys=with_keys)


def _docs_html(openapi: bytes) -> bytes:
    from enginery.serve.page import docs_html  # as above

    return docs_html(openapi)


# -- routes and errors --------------------------------------------------------------------------


def _route(endpoint: Endpoint, keys: ApiKeys, budget: BodyBudget) -> Route:
    middleware = []
    if keys and not endpoint.public:
        middleware.append(Middleware(RequireKey, keys=keys))
    if endpoint.method == "POST":
        middleware.append(Middleware(BufferBody, budget=budget))
    route = Route(endpoint.path, endpoint, methods=[endpoint.method], middleware=middleware)
    if endpoint.path != "/":  # accept /embed/ as /embed, without a redirect
        route.path_regex = re.compile(route.path_regex.pattern.removesuffix("$") + "/?$")
    return route


async def answer_error(request: Request, error: EngineryError) -> Response:
    """Convert an expected error to a response in the format of the route's protocol."""
    return error_response(scope_protocol(request.scope), to_http_error(error))


async def answer_routing_error(request: Request, error: HTTPException) -> Response:
    """Convert Starlette's errors: unknown route, wrong method, malformed form."""
    path, method = request.url.path, request.method
    allowed = _allowed(request)
    if error.status_code == 405 or (error.status_code == 404 and allowed):
        if method == "OPTIONS":
            return Response(status_code=204, headers={"allow": ", ".join(allowed)})
        http_error = HTTPError(
            405,
            f"{path[:200]} does not support {quote(method)}, expected {' or '.join(allowed)}.",
        )
        http_error.headers["allow"] = ", ".join(allowed)
    elif error.status_code == 404:
        paths = dict.fromkeys(endpoint.path for endpoint in ENDPOINTS)
        close = nearest(path, paths) if len(path) < 200 else "."
        http_error = HTTPError(404, f"there is no route {quote(path)}{close}")
    else:
        http_error = HTTPError(error.status_code, str(error.detail))
    return await answer_error(request, http_error)


async def answer_shutting_down(scope: Scope, receive: Receive, send: Send) -> None:
    """Respond with 503 to a request that was cancelled because the server shuts down."""
    error = HTTPError(503, "the server is shutting down.", retry_after_seconds=1.0)
    await error_response(scope_protocol(scope), error)(scope, receive, send)


def _allowed(request: Request) -> list[str]:
    """Return the allowed methods of a path; an empty list if no route has this path."""
    methods: set[str] = set()
    for route in request.app.router.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return sorted({*methods, "OPTIONS"}) if methods else []
