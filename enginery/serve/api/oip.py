"""The Open Inference Protocol, version 2, over HTTP.

    $ curl localhost:8000/v2/models/mood/infer -d '{"inputs":
        [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["The pump runs again."]}]}'
    {"model_name":"mood","model_version":"1","outputs":[{"name":"label",…},{"name":"score",…}]}

A request has either the inputs of the model's task (`text`; `text` and `text_pair`; `question` and
`context`; `image`, base64 in JSON) and gets the task's results, or the graph's own inputs and gets
the graph's outputs. Options of the task are `parameters` of the request. Every model has a single
version, "1"; /info has the hash of its content.

Sources: KServe's Open Inference Protocol, and Triton's extensions for binary data and
classification, and for the configuration, statistics and index of models.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from enginery.core.errors import nearest
from enginery.core.version import __version__
from enginery.runtime.tasks.classify import LabelOptions, label_names
from enginery.runtime.tasks.results import output_tensors
from enginery.runtime.tasks.task import MAX_RESULTS, Task
from enginery.serve.api.endpoints import (
    Routes,
    json_response,
    parsed,
    registry_of,
    require_ready,
    run_inference,
)
from enginery.serve.api.errors import HTTPError, invalid_body, invalid_field
from enginery.serve.api.oip_tensors import (
    BinaryData,
    Datatype,
    InferTensor,
    RequestTensor,
    feeds_from_tensors,
    inputs_from_tensors,
    read_tensor,
    task_metadata,
    tensor_metadata,
    tensors_from_outputs,
    tensors_from_results,
)
from enginery.serve.api.requests import (
    RequestBody,
    Schema,
    StrictRequestBody,
    invalid_value,
    json_object,
    parse,
    quote,
    unknown_field,
)
from enginery.serve.models.served_model import ServedModel
from enginery.serve.observability.metrics import InferenceStatistics, ModelTotals

routes = Routes("oip")

VERSION = "1"
PLATFORM = "onnxruntime_onnx"
_INDEX_STATES = {"ready": "READY", "loading": "LOADING", "closed": "UNLOADING"}
# Models are not loaded and unloaded by requests, as the extension model_repository requires.
EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "statistics",
    "model_repository(index)",
)
HEADER_LENGTH = "inference-header-content-length"
# Parameters that Triton's clients send for features of Triton: sequences and priorities.
_IGNORED = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout")


class OutputParameters(StrictRequestBody):
    """Parameters of a requested output."""

    binary_data: bool | None = None
    """Append the data as bytes, instead of as JSON; null for what the request says of all."""
    classification: Annotated[int, Field(ge=0, le=MAX_RESULTS)] | None = None
    """Triton's classification: number of best classes to return as `score:index:label`."""


class RequestOutput(RequestBody):
    """An output that a request names ($request_output in the protocol)."""

    name: str
    parameters: OutputParameters | None = None

    @property
    def classes(self) -> int:
        """Number of classes to return; 0 for the tensor itself."""
        return (self.parameters and self.parameters.classification) or 0

    def is_binary(self, *, default: bool) -> bool:
        """Return True if its data are sent as bytes."""
        chosen = self.parameters.binary_data if self.parameters else None
        return default if chosen is None else chosen


class InferRequest(RequestBody):
    """Body of /infer; tensors are read by `read_tensor`."""

    inputs: Annotated[list[RequestTensor], Field(min_length=1, fail_fast=True)]
    id: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: Annotated[list[RequestOutput], Field(fail_fast=True)] | None = None


class InferResponse(Schema):
    """Response of /infer."""

    model_name: str
    model_version: str
    outputs: list[RequestTensor]
    id: str | None = None


class ServerMetadata(Schema):
    """Name, version and protocol extensions of the server."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(Schema):
    """An input or output of a model; -1 in its shape for a dynamic dim."""

    name: str
    datatype: Datatype
    shape: list[int]


class ModelMetadata(Schema):
    """The inputs and outputs of a model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ConfigTensor(Schema):
    """An input or output in a model's configuration; -1 in its dims for a dynamic dim."""

    name: str
    data_type: str
    dims: list[int]


class ConfigInput(ConfigTensor):
    """An input in a model's configuration."""

    optional: bool


class ModelConfiguration(Schema):
    """Fields of Triton's ModelConfig (model_config.proto)."""

    name: str
    platform: str
    backend: str
    max_batch_size: int
    input: list[ConfigInput]
    output: list[ConfigTensor]


class ModelStatistics(Schema):
    """What a model has done since the server started ($model_stat in the protocol)."""

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferenceStatistics


class Statistics(Schema):
    """Statistics of one model or of all."""

    model_stats: list[ModelStatistics]


class RepositoryIndexRequest(RequestBody):
    """Body of /v2/repository/index."""

    ready: bool = False


class IndexEntry(Schema):
    """The state of a model; empty reason if it is ready."""

    name: str
    version: str
    state: Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]
    reason: str


class Live(Schema):
    """Liveness of the server."""

    live: bool


class Ready(Live):
    """Readiness of all models."""

    ready: bool


class ModelReady(Schema):
    """Readiness of one model."""

    name: str
    ready: bool


@routes.post(
    "/v2/models/{model}/infer",
    "/v2/models/{model}/versions/{version}/infer",
    summary="Inference on tensors; texts are BYTES",
    body=InferRequest,
    response=InferResponse,
    response_types=("application/json", "application/octet-stream"),
    runs_model=True,
    other_bodies={"application/octet-stream": {}},
)
async def infer(request: Request) -> Response:
    """Answer POST /v2/models/{model}/infer."""
    content, length = request.scope["state"]["body"], request.headers.get(HEADER_LENGTH)
    values, tail = await parsed(partial(_split, content, length), len(content))
    model = require_ready(request, _model(request))
    body = await parsed(partial(parse, InferRequest, values), len(content))
    tensors = await parsed(partial(_tensors, body, tail), len(content))
    parameters = dict(body.parameters or {})
    binary = parameters.pop("binary_data_output", None)
    if binary is not None and not isinstance(binary, bool):
        raise invalid_value("parameters.binary_data_output", "true or false", binary)
    requested = _requested(body)
    options = {name: value for name, value in parameters.items() if name not in _IGNORED}
    graph_inputs = {spec.name for spec in model.backend.record.inputs}
    if _tensor_task(model) and not graph_inputs & {tensor.name for tensor in tensors}:
        outputs = await _infer_task(request, model, tensors, options, requested)
    else:
        for name in options:
            raise unknown_field(name, (), "parameters.")
        outputs = await _infer_graph(request, model, tensors)
    return _respond(model, body.id or "", outputs, requested, binary=bool(binary))


@routes.get("/v2", summary="Server metadata", response=ServerMetadata)
async def server_metadata(_: Request) -> Response:
    """Answer GET /v2: name, version and protocol extensions of the server."""
    return json_response(
        {"name": "enginery", "version": __version__, "extensions": list(EXTENSIONS)}
    )


@routes.get("/v2/health/live", summary="Liveness of the server", response=Live, public=True)
async def live(_: Request) -> Response:
    """Answer GET /v2/health/live: 200 as long as the server responds."""
    return json_response({"live": True})


@routes.get(
    "/v2/health/ready",
    summary="Readiness of all models",
    response=Ready,
    public=True,
    is_readiness=True,
)
async def ready(request: Request) -> Response:
    """Answer GET /v2/health/ready: 200 if every model is ready, else 503."""
    is_ready = registry_of(request).ready
    # The protocol's schema of this response also has the key `live`.
    return json_response({"ready": is_ready, "live": True}, 200 if is_ready else 503)


@routes.get(
    "/v2/models/{model}/ready",
    "/v2/models/{model}/versions/{version}/ready",
    summary="Readiness of a model",
    response=ModelReady,
    statuses=(404,),
    public=True,
    is_readiness=True,
)
async def model_ready(request: Request) -> Response:
    """Answer GET /v2/models/{model}/ready: 200 if the model is ready, else 503."""
    model = _model(request)
    is_ready = model.state == "ready" and not registry_of(request).draining
    return json_response({"name": model.name, "ready": is_ready}, 200 if is_ready else 503)


@routes.get("/v2/models/stats", summary="Statistics of all models", response=Statistics)
async def statistics(request: Request) -> Response:
    """Answer GET /v2/models/stats."""
    return json_response({"model_stats": _model_stats(request, list(registry_of(request)))})


@routes.get(
    "/v2/models/{model}/stats",
    "/v2/models/{model}/versions/{version}/stats",
    summary="Statistics of a model",
    response=Statistics,
    statuses=(404,),
)
async def model_statistics(request: Request) -> Response:
    """Answer GET /v2/models/{model}/stats."""
    return json_response({"model_stats": _model_stats(request, [_model(request)])})


@routes.get(
    "/v2/models/{model}/config",
    "/v2/models/{model}/versions/{version}/config",
    summary="Configuration of a model, as Triton's",
    response=ModelConfiguration,
    statuses=(404, 503),
)
async def model_configuration(request: Request) -> Response:
    """Answer GET /v2/models/{model}/config.

    `max_batch_size` is 0, so that `dims` are whole shapes, as in the model's metadata.
    """
    model = require_ready(request, _model(request))
    inputs, outputs = _tensors_of(model)
    # A request has the inputs of the task, or those of the graph.
    is_optional = _tensor_task(model) is not None
    return json_response(
        {
            "name": model.name,
            "platform": PLATFORM,
            "backend": "onnxruntime",
            "max_batch_size": 0,
            "input": [{**_config_tensor(tensor), "optional": is_optional} for tensor in inputs],
            "output": [_config_tensor(tensor) for tensor in outputs],
        }
    )


@routes.post(
    "/v2/repository/index",
    summary="State of every model",
    body=RepositoryIndexRequest,
    has_optional_body=True,
    response=list[IndexEntry],
    statuses=(422,),
)
async def repository_index(request: Request, body: RepositoryIndexRequest) -> Response:
    """Answer POST /v2/repository/index."""
    entries = [
        {
            "name": model.name,
            "version": VERSION,
            "state": _INDEX_STATES.get(model.state, "UNAVAILABLE"),
            "reason": model.reason,
        }
        for model in registry_of(request)
    ]
    return json_response(
        [entry for entry in entries if entry["state"] == "READY" or not body.ready]
    )


@routes.get(
    "/v2/models/{model}",
    "/v2/models/{model}/versions/{version}",
    summary="Inputs and outputs of a model",
    response=ModelMetadata,
    statuses=(404, 503),
)
async def model_metadata(request: Request) -> Response:
    """Answer GET /v2/models/{model}: inputs and outputs of the task, then those of the graph."""
    model = require_ready(request, _model(request))
    inputs, outputs = _tensors_of(model)
    return json_response(
        {
            "name": model.name,
            "versions": [VERSION],
            "platform": PLATFORM,
            "inputs": inputs,
            "outputs": outputs,
        }
    )


def _tensor_task(model: ServedModel) -> Task | None:
    """Return the model's task if its results are tensors; None for generated texts."""
    task = model.task
    return task if task is not None and output_tensors(task.result_type) else None


def _tensors_of(model: ServedModel) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the metadata of inputs and outputs: of the task, then of the graph."""
    inputs, outputs = task_metadata(_tensor_task(model), model.backend.dim)
    record = model.backend.record
    return (
        [*inputs, *map(tensor_metadata, record.inputs)],
        [*outputs, *map(tensor_metadata, record.outputs)],
    )


def _config_tensor(tensor: dict[str, Any]) -> dict[str, Any]:
    """Return a tensor of a model's metadata with the names of Triton's ModelConfig."""
    datatype = "STRING" if tensor["datatype"] == "BYTES" else tensor["datatype"]
    return {"name": tensor["name"], "data_type": f"TYPE_{datatype}", "dims": tensor["shape"]}


def _model_stats(request: Request, models: list[ServedModel]) -> list[dict[str, Any]]:
    """Return the statistics of models, without `compute_output`, which is not measured."""
    app = request.app
    endpoints = (route.endpoint for route in app.router.routes)
    totals = app.state.metrics.totals(
        {endpoint.pattern for endpoint in endpoints if endpoint.runs_model}
    )
    return [
        {"name": model.name, "version": VERSION, **asdict(totals.get(model.name, ModelTotals()))}
        for model in models
    ]


async def _infer_task(
    request: Request,
    model: ServedModel,
    tensors: list[InferTensor],
    options: dict[str, Any],
    requested: list[RequestOutput],
) -> list[InferTensor]:
    task = _tensor_task(model)
    if task is None:
        raise AssertionError("only called for a model that answers a task")
    classes = max((output.classes for output in requested), default=0)
    if classes and "top_k" not in options and issubclass(task.Options, LabelOptions):
        options["top_k"] = classes
    inputs = inputs_from_tensors(tensors, task, model.backend.record.inputs)
    _check_outputs(requested, [output.name for output in output_tensors(task.result_type)])
    results = await run_inference(request, model, task, inputs, options, "parameters.")
    return tensors_from_results(task, results)


async def _infer_graph(
    request: Request, model: ServedModel, tensors: list[InferTensor]
) -> list[InferTensor]:
    record = model.backend.record
    feeds = feeds_from_tensors(tensors, record.inputs)
    outputs = await run_inference(request, model, model.backend.tensors, feeds, {})
    return tensors_from_outputs(outputs, record.outputs)


def _model(request: Request) -> ServedModel:
    version = request.path_params.get("version", VERSION)
    model = registry_of(request).get(request.path_params["model"])
    if version != VERSION:
        raise HTTPError(
            404, f"model '{model.name}' has no version {quote(version)}, expected '{VERSION}'."
        )
    return model


def _split(body: bytes, length: str | None) -> tuple[dict[str, Any], BinaryData]:
    """Split a body into its JSON object, of so many bytes, and the binary data after it."""
    if length is None:
        return json_object(body), BinaryData(b"")
    if not (
        length.isascii() and length.isdigit() and len(length) < 16 and int(length) <= len(body)
    ):
        raise invalid_body(
            f"{HEADER_LENGTH} is {quote(length)}, expected a whole number up to the body's "
            f"{len(body)} bytes."
        )
    return json_object(body[: int(length)]), BinaryData(body[int(length) :])


def _tensors(body: InferRequest, tail: BinaryData) -> list[InferTensor]:
    tensors: dict[str, InferTensor] = {}
    for index, item in enumerate(body.inputs):
        path = f"inputs[{index}]"
        tensor = read_tensor(item, tail, path)
        if tensor.name in tensors:
            raise invalid_field(f"input {quote(tensor.name)} occurs twice.", field="inputs")
        tensors[tensor.name] = tensor
    tail.end()
    return list(tensors.values())


def _requested(body: InferRequest) -> list[RequestOutput]:
    """Return the outputs that the request names; an empty list for all."""
    outputs: dict[str, RequestOutput] = {}
    for output in body.outputs or []:
        if output.name in outputs:
            raise invalid_field(f"outputs: {quote(output.name)} occurs twice.", field="outputs")
        outputs[output.name] = output
    return list(outputs.values())


def _check_outputs(requested: list[RequestOutput], names: list[str]) -> None:
    for output in requested:
        if output.name not in names:
            raise invalid_field(
                f"there is no output {quote(output.name)}{nearest(output.name[:100], names)}",
                field="outputs",
                do=f"Outputs: {', '.join(names)}.",
            )


def _respond(
    model: ServedModel,
    request_id: str,
    outputs: list[InferTensor],
    requested: list[RequestOutput],
    *,
    binary: bool,
) -> Response:
    by_name = {tensor.name: tensor for tensor in outputs}
    _check_outputs(requested, list(by_name))
    graph_outputs = {spec.name for spec in model.backend.record.outputs}
    described: list[dict[str, Any]] = []
    pieces: list[bytes] = []
    for output in requested or [RequestOutput(name=name) for name in by_name]:
        tensor = by_name[output.name]
        if output.classes and tensor.name in graph_outputs:
            tensor = _classified(tensor, output.classes, model)
        entry: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
        }
        if output.is_binary(default=binary):
            pieces.append(tensor.raw())
            entry["parameters"] = {"binary_data_size": len(pieces[-1])}
        else:
            entry["data"] = tensor.plain()
        described.append(entry)
    body: dict[str, Any] = {"model_name": model.name, "model_version": VERSION}
    if request_id:
        body["id"] = request_id
    body["outputs"] = described
    if not pieces:
        return json_response(body)
    head = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(
        b"".join([head, *pieces]),
        headers={HEADER_LENGTH: str(len(head))},
        media_type="application/octet-stream",
    )


def _classified(tensor: InferTensor, classes: int, model: ServedModel) -> InferTensor:
    """Return the best classes along the last axis in Triton's format, `score:index:label`."""
    values: NDArray[Any] = np.atleast_1d(np.asarray(tensor.values))
    order = np.argsort(-values.astype(np.float64), axis=-1, kind="stable")[..., :classes]
    names = label_names(model.backend.config, values.shape[-1])
    scores = np.take_along_axis(values, order, axis=-1)
    items = [
        f"{score:.6f}:{index}:{names[index]}".encode()
        for score, index in zip(scores.reshape(-1), order.reshape(-1).tolist(), strict=True)
    ]
    return InferTensor(tensor.name, "BYTES", order.shape, items)
