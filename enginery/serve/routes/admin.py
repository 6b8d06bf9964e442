"""What the server says of itself, and what it can be told.

    $ curl localhost:8000/health
    {"status":"ready","models":{"minilm":{"state":"ready","reason":"","providers":[…],…}}}

No key is needed for the health routes, /metrics, the page and /openapi.json: probes and scrapers
have none, and nothing there comes from a request. Reloading needs a key, and is off on a server
without one. A server that drains says 503 at its health routes, and answers what still comes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from enginery import __version__
from enginery.core.manifest import SourceRecord
from enginery.runtime.pooling import read_pooling
from enginery.runtime.text_rows import SENTENCE_OUTPUT
from enginery.serve.call import Call
from enginery.serve.keys import ForbiddenError
from enginery.serve.messages import Response
from enginery.serve.reading import JsonObject
from enginery.serve.refusals import NotFoundError
from enginery.serve.rooms import HostedModel, Models
from enginery.serve.routes.schemas import FREE_OBJECT, STRING, array, nullable, obj
from enginery.serve.routing import Operation, Route, get, post
from enginery.serve.verdicts import verdict_of

_log = logging.getLogger("enginery.serve")

# What TEI calls them.
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_NOT_LOADED = ("loading", "failed")
_SHOWN_BY_HEALTH = ("providers", "provider", "precision", "verdict")


async def page(_: Call) -> Response:
    """GET /: the page to try the models."""
    from enginery.serve.page import page_response

    return page_response()


async def health(call: Call) -> Response:
    """GET /health: 200 where every model is ready, else 503.

    Each with its state, its provider, and whether its validation passed.
    """
    models = call.parts.models
    described = {model.name: _health_of(model) for model in models}
    body = {"status": status_word(models), "models": described}
    return Response.of_json(body, status=200 if models.ready else 503)


async def live(_: Call) -> Response:
    """GET /health/live: 200 as long as the server answers."""
    return Response.of_json({"status": "live"})


async def ready(call: Call) -> Response:
    """GET /health/ready and /ping: 200 where every model is ready, else 503."""
    models = call.parts.models
    return Response.of_json({"status": status_word(models)}, status=200 if models.ready else 503)


def status_word(models: Models) -> str:
    """`ready`, `draining`, or the state of the first model that is not ready."""
    if models.draining:
        return "draining"
    return next((model.state for model in models if model.state != "ready"), "ready")


def _described(model: HostedModel) -> dict[str, Any]:
    """All there is to know of a model, without where on this machine it came from."""
    found = {"name": model.name, "state": model.state, **model.info()}
    if model.state in _NOT_LOADED:
        return found
    source = _source_name(model.artifact.manifest.source, model.name)
    return {**found, "source": source, "verdict": verdict_of(model.artifact)}


def _source_name(source: SourceRecord, served_as: str) -> str:
    """What the model was made of; of files on disk the last part of their path."""
    is_path = source.kind in ("directory", "onnx")
    return (source.name or served_as) if is_path else source.id


def _health_of(model: HostedModel) -> dict[str, Any]:
    known = _described(model)
    shown = {name: known[name] for name in _SHOWN_BY_HEALTH if name in known}
    return {"state": model.state, "reason": model.reason, **shown}


async def metrics(call: Call) -> Response:
    """GET /metrics, in the format of Prometheus."""
    if call.parts.metrics is None:
        raise NotFoundError("this server measures nothing.")
    accept = call.request.headers.get("accept", "")
    body, content_type = call.parts.metrics.exposition(accept)
    return Response(200, body, content_type)


async def info(call: Call) -> Response:
    """GET /info: all models; where there is one, also the fields of text-embeddings-inference."""
    models = list(call.parts.models)
    body: dict[str, Any] = {"version": __version__, "draining": call.parts.models.draining}
    if len(models) == 1 and models[0].state not in _NOT_LOADED:
        body |= tei_info(call, models[0])
    body["models"] = [_described(model) for model in models]
    return Response.of_json(body)


async def model_info(call: Call) -> Response:
    """GET /models/{model}/info: one model, with the fields of text-embeddings-inference."""
    model = call.parts.models.get(call.path_values["model"])
    call.model = model
    described = _described(model)
    if model.state in _NOT_LOADED:
        return Response.of_json(described)
    return Response.of_json({**tei_info(call, model), **described})


def tei_info(call: Call, model: HostedModel) -> dict[str, Any]:
    """A model as text-embeddings-inference describes its own."""
    manifest, config = model.artifact.manifest, call.parts.config
    known = model.info()
    batching = known.get("batching") or {}
    kind: dict[str, Any] = {}
    if model.method in ("embed", "embed_images"):
        kind = {"embedding": {"pooling": _pooling(model)}}
    elif model.method == "classify":
        names = model.config.id2label
        labels = {
            "id2label": {str(index): name for index, name in names.items()},
            "label2id": {name: index for index, name in names.items()},
        }
        kind = {"reranker" if len(names) == 1 else "classifier": labels}
    return {
        "model_id": _source_name(manifest.source, model.name),
        "model_sha": manifest.source.revision or None,
        "model_dtype": _DTYPES.get(manifest.precision, manifest.precision),
        "served_model_name": model.name,
        "model_type": kind,
        "max_concurrent_requests": config.queue_inputs,
        "max_input_length": model.limit,
        "max_batch_tokens": int(batching.get("max_tokens") or config.batch_tokens),
        "max_batch_requests": int(batching.get("max_rows") or config.batch_rows),
        "max_client_batch_size": config.max_inputs,
        "auto_truncate": config.truncate,
        "tokenization_workers": 1,
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }


def _pooling(model: HostedModel) -> str:
    """`cls`, `mean` and so on; `model` where the graph has it inside, or the images' model has."""
    if any(spec.name == SENTENCE_OUTPUT for spec in model.record.outputs) or model.takes_images:
        return "model"
    return "+".join(read_pooling(model.artifact.path).modes)


async def reload(call: Call) -> Response:
    """POST /admin/reload: opens artifacts again; 409 where one could not be, and goes on as it was.

    Requests that wait are answered all the same.
    """
    if not call.parts.keys:
        raise ForbiddenError(
            "reloading over HTTP is off, because this server has no API key.",
            do="Start it with --api-key-file, or send it SIGHUP.",
        )
    body = call.json() if call.request.body.strip() else JsonObject({})
    body.only(("model",))
    happened = await call.parts.models.reload(body.string("model"))
    found: dict[str, Any] = {"models": {name: each.text for name, each in happened.items()}}
    failed = [name for name, each in happened.items() if not each.swapped]
    if not failed:
        return Response.of_json(found)
    for name in failed:
        _log.error("%s: %s", name, happened[name].text)
    go_on = "goes on as it was" if len(failed) == 1 else "go on as they were"
    error = f"not reloaded: {', '.join(failed)}, which {go_on}."
    return Response.of_json({"error": error, "failed": failed, **found}, status=409)


async def openapi(call: Call) -> Response:
    """GET /openapi.json: this description."""
    from enginery.serve.openapi import openapi_json

    return Response(200, openapi_json(call.parts.table, with_keys=bool(call.parts.keys)))


_STATUS = obj({"status": STRING})
_HEALTH = obj({"status": STRING, "models": FREE_OBJECT})


def admin_routes() -> Iterator[Route]:
    """The routes."""
    shown = Operation("A page to try the models", answer_types=("text/html",))
    yield get("admin", "/", page, shown, public=True)
    states = Operation("Every model's state", answer=_HEALTH, not_ready=_HEALTH)
    yield get("admin", "/health", health, states, public=True)
    answers = Operation("Whether the server answers", answer=_STATUS)
    yield get("admin", "/health/live", live, answers, public=True)
    for path in ("/health/ready", "/ping"):
        is_ready = Operation("Whether every model is ready", answer=_STATUS, not_ready=_STATUS)
        yield get("admin", path, ready, is_ready, public=True)
    figures = Operation("Metrics for Prometheus", answer_types=("text/plain",), statuses=(404,))
    yield get("admin", "/metrics", metrics, figures, public=True)
    described = Operation("Every model in full", answer=obj({"models": array(FREE_OBJECT)}))
    yield get("admin", "/info", info, described)
    one = Operation("One model in full", answer=obj({"name": STRING}), statuses=(404,))
    yield get("admin", "/models/{model}/info", model_info, one)
    again = Operation(
        "Open artifacts again",
        body={**obj({}, {"model": nullable(STRING)}), "additionalProperties": False},
        optional_body=True,
        answer=obj({"models": {"type": "object", "additionalProperties": STRING}}),
        statuses=(403, 404, 409, 422),
    )
    yield post("admin", "/admin/reload", reload, again)
    document = Operation("This description", answer=FREE_OBJECT)
    yield get("admin", "/openapi.json", openapi, document, public=True)
