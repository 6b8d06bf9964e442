"""Routes about the server: health, metrics, model information and reload.

    $ curl localhost:8000/health
    {"status":"ready","models":{"minilm":{"state":"ready","reason":"","providers":[…],…}}}

The health routes, /metrics, the page and /openapi.json need no API key, because probes and scrapers
have none, and these routes reveal nothing about requests. Reloading needs a key and is disabled on
a server without keys. While the server drains, health routes return 503 and other routes still
work.
"""

from __future__ import annotations

import logging
from typing import Any

from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from enginery.core.artifact.manifest import SourceRecord
from enginery.core.version import __version__
from enginery.runtime.tasks.embed import Embed
from enginery.runtime.tasks.examples import example_input
from enginery.runtime.tasks.generate import Generate
from enginery.serve.api.endpoints import Routes, config_of, json_response, registry_of
from enginery.serve.api.errors import HTTPError
from enginery.serve.api.oip_tensors import DATATYPE_OF
from enginery.serve.api.requests import Schema, StrictRequestBody
from enginery.serve.models.registry import ModelRegistry
from enginery.serve.models.served_model import ServedModel

_log = logging.getLogger("enginery.serve")
routes = Routes("admin")

# TEI's names of precisions.
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_NOT_LOADED = ("loading", "failed")
_EXAMPLE_TOKENS = 4
_MAX_EXAMPLE_ELEMENTS = 1000
"""Number of elements up to which tensors are shown as an example."""
_HEALTH_FIELDS = ("providers", "provider", "precision", "verdict")


class Status(Schema):
    """The state of the server."""

    status: str


class Health(Status):
    """The state of the server and of each model."""

    models: dict[str, Any]


class ServerInfo(Schema):
    """All properties of every model; with one model, also the fields of TEI's /info."""

    model_config = ConfigDict(extra="allow")
    models: list[dict[str, Any]]


class ModelInfo(Schema):
    """All properties of one model."""

    model_config = ConfigDict(extra="allow")
    name: str


class ReloadRequest(StrictRequestBody):
    """Body of /admin/reload."""

    model: str | None = None


class ReloadResponse(Schema):
    """The result for each model."""

    models: dict[str, str]


@routes.get("/", summary="A page to try the models", response_types=("text/html",), public=True)
async def page(_: Request) -> Response:
    """Answer GET /: the web page to try the models."""
    from enginery.serve.page import page_response

    return page_response()


@routes.get("/docs", summary="A page of all routes", response_types=("text/html",), public=True)
async def docs(request: Request) -> Response:
    """Answer GET /docs: the OpenAPI document as a web page."""
    from enginery.serve.page import docs_response

    return docs_response(request.app.state.docs())


@routes.get(
    "/health", summary="State of every model", response=Health, public=True, is_readiness=True
)
async def health(request: Request) -> Response:
    """Answer GET /health: 200 if every model is ready, else 503.

    The response has each model's state, provider and validation status.
    """
    models = registry_of(request)
    described = {model.name: _model_health(model) for model in models}
    body = {"status": readiness_status(models), "models": described}
    return json_response(body, 200 if models.ready else 503)


@routes.get("/health/live", summary="Liveness of the server", response=Status, public=True)
async def live(_: Request) -> Response:
    """Answer GET /health/live: 200 as long as the server responds."""
    return json_response({"status": "live"})


@routes.get(
    "/health/ready",
    "/ping",
    summary="Readiness of all models",
    response=Status,
    public=True,
    is_readiness=True,
)
async def ready(request: Request) -> Response:
    """Answer GET /health/ready and /ping: 200 if every model is ready, else 503."""
    models = registry_of(request)
    return json_response({"status": readiness_status(models)}, 200 if models.ready else 503)


def readiness_status(models: ModelRegistry) -> str:
    """Return `ready`, `draining`, or the state of the first model that is not ready."""
    if models.draining:
        return "draining"
    return next((model.state for model in models if model.state != "ready"), "ready")


@routes.get(
    "/metrics", summary="Metrics for Prometheus", response_types=("text/plain",), public=True
)
async def metrics(request: Request) -> Response:
    """Answer GET /metrics in Prometheus' or OpenMetrics' text format."""
    accept = request.headers.get("accept", "")
    await registry_of(request).refresh()
    body, content_type = request.app.state.metrics.exposition(accept)
    return Response(body, headers={"content-type": content_type})


@routes.get("/openapi.json", summary="This document", response=dict[str, Any], public=True)
async def openapi(request: Request) -> Response:
    """Answer GET /openapi.json: the OpenAPI document of this server."""
    return Response(request.app.state.openapi(), media_type="application/json")


@routes.get("/info", summary="Properties of every model", response=ServerInfo)
async def info(request: Request) -> Response:
    """Answer GET /info: all properties of every model."""
    await registry_of(request).refresh()
    models = list(registry_of(request))
    body: dict[str, Any] = {"version": __version__, "draining": registry_of(request).draining}
    if len(models) == 1 and models[0].state not in _NOT_LOADED:
        body |= _tei_info(request, models[0])
    body["models"] = [_model_description(model) for model in models]
    return json_response(body)


@routes.get(
    "/models/{model}/info", summary="Properties of one model", response=ModelInfo, statuses=(404,)
)
async def model_info(request: Request) -> Response:
    """Answer GET /models/{model}/info: all properties of one model."""
    model = registry_of(request).get(request.path_params["model"])
    request.scope["state"]["record"].model = model.name
    await registry_of(request).refresh()
    described = _model_description(model)
    if model.state in _NOT_LOADED:
        return json_response(described)
    return json_response({**_tei_info(request, model), **described})


@routes.post(
    "/admin/reload",
    summary="Reload artifacts",
    body=ReloadRequest,
    has_optional_body=True,
    response=ReloadResponse,
    statuses=(403, 404, 409, 422),
)
async def reload(request: Request, body: ReloadRequest) -> Response:
    """Answer POST /admin/reload: 200 if all models were reloaded, 409 if one could not be.

    A model that could not be reloaded keeps serving as before. Waiting requests are not lost. If
    the server has several processes, this one reloads first; if that succeeds, all processes reload
    all of their models.
    """
    if not request.app.state.keys:
        raise HTTPError(
            403,
            "reloading over HTTP is disabled, because this server has no API key.",
            do="Start the server with --api-key-file, or send it SIGHUP.",
        )
    outcomes = await registry_of(request).reload(body.model or "")
    result: dict[str, Any] = {
        "models": {name: outcome.message for name, outcome in outcomes.items()}
    }
    failed = [name for name, outcome in outcomes.items() if not outcome.swapped]
    if not failed:
        if request.app.state.lifecycle is not None:
            request.app.state.lifecycle.reload_all_processes()
        return json_response(result)
    for name in failed:
        _log.error("%s: %s", name, outcomes[name].message)
    keeps = "keeps serving as before" if len(failed) == 1 else "keep serving as before"
    error = f"not reloaded: {', '.join(failed)}, which {keeps}."
    return json_response({"error": error, "failed": failed, **result}, 409)


def _model_info(model: ServedModel) -> dict[str, Any]:
    """Return a model's properties, without the path of its source on this machine."""
    properties = {"name": model.name, "state": model.state, **model.info()}
    if model.state == "loading" or not model.is_loaded:
        return properties
    source = _source_name(model.artifact.manifest.source, model.name)
    return {**properties, "source": source, "verdict": model.artifact.validation_status()}


def _model_description(model: ServedModel) -> dict[str, Any]:
    """Return a model's properties with what a form needs: fields, options and an example.

    `example` is a body for /predict/M or, for a model of no supported task, for /v2/models/M/infer;
    null if its tensors are too large to read.
    """
    properties = _model_info(model)
    loaded = model.state != "loading" and model.is_loaded
    return {**properties, **_request_form(model)} if loaded else properties


def _request_form(model: ServedModel) -> dict[str, Any]:
    task = model.task
    if task is not None:
        example = example_input(task)
        # A reranker needs a pair, which other models of its task may be given.
        needed = example if isinstance(example, dict) else {}
        schemas = task.option_schemas() if isinstance(task, Generate) else task.Options.schemas()
        return {
            "fields": [
                {"name": part.name, "optional": part.optional and part.name not in needed}
                for part in task.inputs
            ],
            "options": schemas,
            "example": {"inputs": example},
        }
    feeds = model.backend.synthetic_feeds(_EXAMPLE_TOKENS)
    if sum(array.size for array in feeds.values()) > _MAX_EXAMPLE_ELEMENTS:
        return {"fields": [], "options": {}, "example": None}
    tensors = [
        {
            "name": name,
            "datatype": DATATYPE_OF[str(array.dtype)],
            "shape": list(array.shape),
            "data": array.ravel().tolist(),
        }
        for name, array in feeds.items()
    ]
    return {"fields": [], "options": {}, "example": {"inputs": tensors}}


def _source_name(source: SourceRecord, served_as: str) -> str:
    """Return the id of the source model; for files on disk the last part of their path."""
    is_path = source.kind in ("directory", "onnx")
    return (source.name or served_as) if is_path else source.id


def _model_health(model: ServedModel) -> dict[str, Any]:
    properties = _model_info(model)
    shown = {name: properties[name] for name in _HEALTH_FIELDS if name in properties}
    return {"state": model.state, "reason": model.reason, **shown}


def _tei_info(request: Request, model: ServedModel) -> dict[str, Any]:
    """Return a model's properties in the format of text-embeddings-inference."""
    manifest, config = model.artifact.manifest, config_of(request)
    batching = model.info()["batching"]
    kind: dict[str, Any] = {}
    verb = model.task.verb if model.task else ""
    if verb in ("embed", "embed_images"):
        kind = {"embedding": {"pooling": _pooling(model)}}
    elif verb == "classify":
        names = model.backend.config.id2label
        labels = {
            "id2label": {str(index): name for index, name in names.items()},
            "label2id": {name: index for index, name in names.items()},
        }
        kind = {"reranker" if len(names) == 1 else "classifier": labels}
    return {
        "model_id": _source_name(manifest.source, model.name),
        "model_sha": manifest.source.revision or None,
        "model_dtype": _DTYPES[manifest.float_precision],
        "served_model_name": model.name,
        "model_type": kind,
        "max_concurrent_requests": config.queue_inputs,
        "max_input_length": model.backend.limit,
        "max_batch_tokens": int(batching["max_tokens"] or config.batch_tokens),
        "max_batch_requests": int(batching["max_rows"] or config.batch_rows),
        "max_client_batch_size": config.max_inputs,
        "auto_truncate": config.truncate,
        "tokenization_workers": 1,
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }


def _pooling(model: ServedModel) -> str:
    """Return the pooling (`cls`, `mean`, …); `model` if it is in the graph or not of texts."""
    task = model.task
    return "+".join(task.pooling_modes) if isinstance(task, Embed) else "model"
