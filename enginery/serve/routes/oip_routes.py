"""The routes of the Open Inference Protocol, as the OpenAPI document describes them."""

from __future__ import annotations

from collections.abc import Iterator

from enginery.serve.routes import oip
from enginery.serve.routes.oip_binary import DATATYPES
from enginery.serve.routes.schemas import (
    ANYTHING,
    BOOLEAN,
    COUNT,
    FREE_OBJECT,
    INFERENCE_STATUSES,
    INTEGER,
    STRING,
    array,
    nullable,
    obj,
    word,
)
from enginery.serve.routing import Operation, Route, get, post

_TENSOR_IN = obj(
    {"name": STRING, "datatype": word(*DATATYPES), "shape": array(COUNT)},
    {"data": array(ANYTHING), "parameters": FREE_OBJECT},
)
_TENSOR_OUT = obj(
    {"name": STRING, "datatype": word(*DATATYPES), "shape": array(COUNT)},
    {"data": array(ANYTHING), "parameters": FREE_OBJECT},
)
_INFER = Operation(
    "Tensors in, tensors out; texts as BYTES",
    body=obj(
        {"inputs": array(_TENSOR_IN, least=1)},
        {
            "id": nullable(STRING),
            "parameters": nullable(FREE_OBJECT),
            "outputs": nullable(array(obj({"name": STRING}, {"parameters": FREE_OBJECT}))),
        },
    ),
    other_bodies={"application/octet-stream": {}},
    answer=obj(
        {"model_name": STRING, "model_version": STRING, "outputs": array(_TENSOR_OUT)},
        {"id": STRING},
    ),
    answer_types=("application/json", "application/octet-stream"),
    statuses=INFERENCE_STATUSES,
)
_METADATA_TENSOR = obj({"name": STRING, "datatype": word(*DATATYPES), "shape": array(INTEGER)})
_METADATA = Operation(
    "The inputs and outputs of a model",
    answer=obj({
        "name": STRING, "versions": array(STRING), "platform": STRING,
        "inputs": array(_METADATA_TENSOR), "outputs": array(_METADATA_TENSOR),
    }),
    statuses=(404, 503),
)  # fmt: skip
_MODEL_READY = obj({"name": STRING, "ready": BOOLEAN})
_SERVER_READY = obj({"ready": BOOLEAN, "live": BOOLEAN})


def oip_routes() -> Iterator[Route]:
    """The routes."""
    described = obj({"name": STRING, "version": STRING, "extensions": array(STRING)})
    yield get("oip", "/v2", oip.server_metadata, Operation("The server", answer=described))
    live = Operation("Whether the server answers", answer=obj({"live": BOOLEAN}))
    yield get("oip", "/v2/health/live", oip.live, live, public=True)
    ready = Operation("Whether every model is ready", answer=_SERVER_READY, not_ready=_SERVER_READY)
    yield get("oip", "/v2/health/ready", oip.ready, ready, public=True)
    for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        yield get("oip", prefix, oip.model_metadata, _METADATA)
        model_ready = Operation(
            "Whether a model is ready", answer=_MODEL_READY, not_ready=_MODEL_READY, statuses=(404,)
        )
        yield get("oip", f"{prefix}/ready", oip.model_ready, model_ready, public=True)
        yield post("oip", f"{prefix}/infer", oip.infer, _INFER)
