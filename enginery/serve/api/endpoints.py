"""What all routes share: how they are declared, and how they reach models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from enginery.core.errors import EngineryError
from enginery.runtime.tasks import TASKS
from enginery.runtime.tasks.task import RowTask, Task
from enginery.serve.api.errors import fault_response, invalid_field
from enginery.serve.api.requests import json_object, parse
from enginery.serve.config import ServeConfig
from enginery.serve.models.registry import ModelRegistry
from enginery.serve.models.served_model import ServedModel, UnavailableError
from enginery.serve.observability.record import Protocol

Handler = Callable[..., Awaitable[Response]]

INFERENCE_STATUSES = (400, 404, 413, 422, 429, 503)
"""Of a route that runs a model; 401, 500 and the server's own are added to every route."""


@dataclass(frozen=True)
class Endpoint:
    """One route, with all that the OpenAPI document says of it."""

    method: str
    path: str
    """As Starlette has it; `{model}` and so on are parameters."""
    handler: Handler
    protocol: Protocol
    summary: str
    body: type[BaseModel] | None = None
    response: Any = Any
    """The type of the answer's JSON."""
    statuses: tuple[int, ...] = ()
    public: bool = False
    """No key is needed."""
    has_optional_body: bool = False
    is_readiness: bool = False
    """503 has the same shape as 200."""
    other_bodies: dict[str, Any] = field(default_factory=dict)
    """JSON schemas by content type."""
    response_types: tuple[str, ...] = ("application/json",)

    @property
    def pattern(self) -> str:
        """Return the path as logs, metrics and the OpenAPI document have it."""
        return self.path.replace(":path}", "}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body that is declared, call the handler, and send its response."""
        request = Request(scope, receive, send)
        try:
            if self.body is None or self.other_bodies:
                response = await self.handler(request)
            else:
                given = scope["state"]["body"]
                is_empty = self.has_optional_body and not given.strip()
                values = {} if is_empty else json_object(given)
                response = await self.handler(request, parse(self.body, values))
        except (EngineryError, HTTPException):
            raise
        except Exception as error:  # a bug: one request must not end more than itself
            response = fault_response(scope, error)
        await response(scope, receive, send)


class Routes:
    """Collects the endpoints of one protocol."""

    def __init__(self, protocol: Protocol) -> None:
        self.protocol: Protocol = protocol
        self.endpoints: list[Endpoint] = []

    def get(self, *paths: str, summary: str, **more: Any) -> Callable[[Handler], Handler]:
        """Declare a handler of GET: `handler(request)`."""
        return self._declare("GET", paths, summary=summary, **more)

    def post(self, *paths: str, summary: str, **more: Any) -> Callable[[Handler], Handler]:
        """Declare a handler of POST: `handler(request, body)` where a body is declared."""
        return self._declare("POST", paths, summary=summary, **more)

    def _declare(
        self, method: str, paths: Sequence[str], **more: Any
    ) -> Callable[[Handler], Handler]:
        def declare(handler: Handler) -> Handler:
            for path in paths:
                self.endpoints.append(Endpoint(method, path, handler, self.protocol, **more))
            return handler

        return declare


def json_response(value: Any, status: int = 200) -> Response:
    """Return a JSON answer; arrays of numpy are lists, NaN is null."""
    body = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    return Response(body, status, media_type="application/json")


def registry_of(request: Request) -> ModelRegistry:
    """Return the models of the server."""
    found: ModelRegistry = request.scope["app"].state.registry
    return found


def config_of(request: Request) -> ServeConfig:
    """Return the options of the server."""
    found: ServeConfig = request.scope["app"].state.config
    return found


def select_model(
    request: Request,
    name: str | None,
    *verbs: str,
    fits: Callable[[ServedModel], bool] | None = None,
) -> tuple[ServedModel, Task]:
    """Return the model that the path or the body names, or the only one for a task; and its task.

    Args:
        request: to be answered.
        name: of the body; empty for none.
        verbs: the tasks that the route is for.
        fits: chooses among models where none is named; None for all that have such a task.

    Raises:
        UnknownModelError: there is no model of that name.
        ModelChoiceError: none was named, and not exactly one fits.
        UnavailableError: the model cannot answer now.
        HTTPError: it was exported for another task.
    """
    registry: ModelRegistry = request.scope["app"].state.registry
    named = request.path_params.get("model") or name or ""
    model = registry.select(named, fits or (lambda model: has_task(model, verbs)))
    return model, require_task(request, model, *verbs)


def has_task(model: ServedModel, verbs: Sequence[str]) -> bool:
    """Whether a model was exported for one of some tasks."""
    return model.task is not None and model.task.verb in verbs


def require_ready(request: Request, model: ServedModel) -> ServedModel:
    """Note that the request is for a model; raise UnavailableError where it cannot answer."""
    request.scope["state"]["record"].model = model.name
    if model.state != "ready":
        reason = f": {model.reason.rstrip('.')}" if model.reason else ""
        raise UnavailableError(f"model '{model.name}' is {model.state}{reason}.")
    return model


def require_task(request: Request, model: ServedModel, *verbs: str) -> Task:
    """Return the task of a model that is ready, which must be one of `verbs`; none for any.

    Raises:
        UnavailableError: the model cannot answer now.
        HTTPError: it was exported for another task.
    """
    task = require_ready(request, model).task
    if task is not None and (not verbs or task.verb in verbs):
        return task
    wanted = " or ".join(TASKS[verb].purpose for verb in verbs)
    raise invalid_field(
        f"model '{model.name}' was exported for {model.artifact.manifest.task}"
        + (f", expected a model that {wanted}." if verbs else ", which has no answer in words."),
        field="model",
        do=f"It {task.purpose}: POST /predict/{model.name}."
        if task
        else f"Send it tensors: POST /v2/models/{model.name}/infer.",
    )


async def run_inference(
    request: Request,
    model: ServedModel,
    task: RowTask,
    inputs: Any,
    options: dict[str, Any],
    where: str = "",
) -> Any:
    """Answer inputs by a task of a model, and note for headers, metrics and log what it took.

    Args:
        request: what is answered.
        model: that is ready.
        task: its own, or `backend.tensors`.
        inputs: as the task takes them.
        options: of the task; None counts as absent.
        where: what the options' names begin with in messages.

    Returns:
        A result for each input; of tensors, the graph's outputs by name.
    """
    result = await model.infer(task, inputs, task.Options.read(options, where=where))
    record = request.scope["state"]["record"]
    record.timings, record.inputs = result.timings, task.count(inputs)
    record.characters = task.characters(inputs)
    record.compute_type = "cpu" if model.backend.on_cpu else "gpu"
    return result.results
