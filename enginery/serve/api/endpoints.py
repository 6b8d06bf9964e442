"""Declare the routes, and run inference for their handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import orjson
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from enginery.core.errors import EngineryError
from enginery.runtime.tasks import TASKS
from enginery.runtime.tasks.task import RowTask, Task, count_characters, count_inputs
from enginery.runtime.tasks.views import View
from enginery.serve.api.errors import fault_response, invalid_body, invalid_field
from enginery.serve.api.requests import RequestBody, json_object, parse
from enginery.serve.batching.scheduler import Timings
from enginery.serve.config import ServeConfig
from enginery.serve.models.registry import ModelRegistry
from enginery.serve.models.served_model import ServedModel, UnavailableError
from enginery.serve.observability.record import Protocol

Handler = Callable[..., Awaitable[Response]]
Result = TypeVar("Result")

_SMALL_BODY_BYTES = 65_536
"""Size of a body that is parsed in less than a few milliseconds."""
_PARSING = ThreadPoolExecutor(1, "enginery-parse")
"""The thread that parses larger ones."""

INFERENCE_STATUSES = (400, 404, 413, 422, 429, 503)
"""Error statuses of a route that runs a model."""


@dataclass(frozen=True)
class Endpoint:
    """A route, with its description for the OpenAPI document."""

    method: str
    path: str
    """Path in Starlette's syntax, with parameters such as `{model}`."""
    handler: Handler
    protocol: Protocol
    summary: str
    body: type[RequestBody] | None = None
    response: Any = Any
    """Type of the JSON response."""
    statuses: tuple[int, ...] = ()
    """Error statuses beside those of every route, and of every route that runs a model."""
    runs_model: bool = False
    """A model runs for each request, which Triton's statistics count."""
    public: bool = False
    """No API key is needed."""
    has_optional_body: bool = False
    is_readiness: bool = False
    """A response with status 503 has the format of one with 200."""
    other_bodies: dict[str, Any] = field(default_factory=dict)
    """JSON schemas of bodies that the handler reads itself, by content type."""
    response_types: tuple[str, ...] = ("application/json",)
    """Content types of the response."""

    @property
    def pattern(self) -> str:
        """The path in the form used by logs, metrics and the OpenAPI document."""
        return self.path.replace(":path}", "}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Parse the declared body, call the handler, and send its response."""
        request = Request(scope, receive, send)
        try:
            if self.body is None or self.other_bodies:
                response = await self.handler(request)
            else:
                body = scope["state"]["body"]
                is_empty = self.has_optional_body and not body.strip()
                read = partial(_read_body, self.body, b"{}" if is_empty else body)
                response = await self.handler(request, await parsed(read, len(body)))
        except (EngineryError, HTTPException):
            raise
        except Exception as error:  # a bug, which must not affect other requests
            response = fault_response(scope, error)
        await response(scope, receive, send)


class Routes:
    """The endpoints of one protocol, collected by decorators."""

    def __init__(self, protocol: Protocol) -> None:
        self.protocol: Protocol = protocol
        self.endpoints: list[Endpoint] = []

    def get(self, *paths: str, summary: str, **more: Any) -> Callable[[Handler], Handler]:
        """Declare a handler for GET: `handler(request)`."""
        return self._declare("GET", paths, summary=summary, **more)

    def post(self, *paths: str, summary: str, **more: Any) -> Callable[[Handler], Handler]:
        """Declare a handler for POST: `handler(request, body)`, without `body` if none is given."""
        return self._declare("POST", paths, summary=summary, **more)

    def _declare(
        self, method: str, paths: Sequence[str], **more: Any
    ) -> Callable[[Handler], Handler]:
        def declare(handler: Handler) -> Handler:
            for path in paths:
                self.endpoints.append(Endpoint(method, path, handler, self.protocol, **more))
            return handler

        return declare


def _read_body(kind: type[RequestBody], body: bytes) -> RequestBody:
    return parse(kind, json_object(body))


async def parsed(read: Callable[[], Result], size: int) -> Result:
    """Return what `read` makes of a request's body; run it in a thread if the body is large.

    Args:
        read: parses the body; raises HTTPError if it is invalid.
        size: number of bytes of the body.
    """
    if size <= _SMALL_BODY_BYTES:
        return read()
    # In one thread for all: a parser holds Python's lock, which the event loop gets in between.
    return await asyncio.get_running_loop().run_in_executor(_PARSING, read)


async def form_of(request: Request, *, max_files: int, max_fields: int) -> FormData:
    """Return the parts of a form, which are to be closed; raise HTTPError if it is malformed."""
    limit = config_of(request).max_body_bytes
    try:
        return await request.form(max_files=max_files, max_fields=max_fields, max_part_size=limit)
    except (ValueError, LookupError) as error:  # LookupError: an unknown charset
        raise invalid_body(f"the form cannot be read: {error}.") from error


def json_response(value: Any, status: int = 200) -> Response:
    """Build a JSON response; numpy arrays become lists, NaN becomes null."""
    body = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    return Response(body, status, media_type="application/json")


def registry_of(request: Request) -> ModelRegistry:
    """Return the server's models."""
    registry: ModelRegistry = request.scope["app"].state.registry
    return registry


def config_of(request: Request) -> ServeConfig:
    """Return the server's options."""
    config: ServeConfig = request.scope["app"].state.config
    return config


def select_model(
    request: Request,
    name: str | None = "",
    *verbs: str,
    fits: Callable[[ServedModel], bool] | None = None,
) -> tuple[ServedModel, Task]:
    """Return the model that the path or body names, or the only one that fits, and its task.

    Args:
        request: the request.
        name: name in the body; empty or None for none.
        verbs: the tasks of the route; none for any task.
        fits: returns True for models to choose from without a name; None for all with such a task.

    Raises:
        UnknownModelError: no model has this name.
        ModelChoiceError: the request names no model, and not exactly one fits.
        UnavailableError: the model is not ready.
        HTTPError: the model was exported for another task.
    """
    named = request.path_params.get("model") or name or ""
    tasks = dict.fromkeys(task for verb in verbs for task in TASKS[verb].tasks)
    fits = fits or (lambda model: has_task(model, verbs))
    model = require_ready(request, registry_of(request).select(named, fits, tasks))
    task = model.task
    if task is not None and (not verbs or task.verb in verbs):
        return model, task
    purposes = " or ".join(TASKS[verb].purpose for verb in verbs)
    if task is not None:
        do = f"It {task.purpose}: POST /predict/{model.name}."
    else:
        do = f"Send tensors: POST /v2/models/{model.name}/infer."
    raise invalid_field(
        f"model '{model.name}' was exported for {model.artifact.manifest.task}"
        + (
            f", expected a model that {purposes}."
            if verbs
            else ", which this server supports with tensors only."
        ),
        field="model",
        do=do,
    )


def select_view(
    request: Request, name: str | None, verb: str, view: str
) -> tuple[ServedModel, View]:
    """Return the model of a request, and a view of its task.

    Args:
        request: the request.
        name: see `select_model`.
        verb: the task that has the view.
        view: the verb of the view.

    Raises:
        HTTPError: the model was exported for another task, or has no such view; or see
            `select_model`.
    """
    model, task = select_model(request, name, verb)
    if view not in model.backend.views:
        raise invalid_field(
            f"model '{model.name}' {task.purpose}, and does nothing else.", field="model"
        )
    return model, model.backend.views[view]


def has_task(model: ServedModel, verbs: Sequence[str]) -> bool:
    """Return True if a model was exported for one of the tasks."""
    return model.task is not None and model.task.verb in verbs


def require_ready(request: Request, model: ServedModel) -> ServedModel:
    """Add the model to the request's record; raise UnavailableError if it is not ready."""
    request.scope["state"]["record"].model = model.name
    if not model.is_serving:
        reason = f": {model.reason.rstrip('.')}" if model.reason else ""
        raise UnavailableError(f"model '{model.name}' is {model.state}{reason}.")
    return model


async def run_inference(
    request: Request,
    model: ServedModel,
    task: RowTask,
    inputs: Any,
    options: dict[str, Any],
    where: str = "",
) -> Any:
    """Run inference for a request, and add timings and counts to its record.

    Args:
        request: the request.
        model: the model, which must be ready.
        task: the model's own task, or `backend.tensors`.
        inputs: inputs of the task.
        options: options of the task by name; None counts as absent.
        where: prefix of option names in error messages.

    Returns:
        A result for each input; for tensors, the graph's outputs by name.
    """
    record, timings = request.scope["state"]["record"], Timings()
    read = task.Options.read(options, where=where)
    try:
        result = await model.infer(task, inputs, read, timings)
    finally:  # tokens count also if the client has gone
        record.generated, record.first_token_at = timings.generated, timings.first_token_at
    record.timings, record.inputs = result.timings, count_inputs(inputs)
    record.characters = count_characters(inputs)
    record.compute_type = "cpu" if model.backend.on_cpu else "gpu"
    return result.results
