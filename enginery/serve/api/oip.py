"""The Open Inference Protocol, version 2, over HTTP.

    $ curl localhost:8000/v2/models/mood/infer -d '{"inputs":
        [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["The pump runs again."]}]}'
    {"model_name":"mood","model_version":"1","outputs":[{"name":"label",…},{"name":"score",…}]}

A request has either the inputs of the model's task (`text`; `text` and `text_pair`; `question` and
`context`; `image`, base64 in JSON) and gets the task's results, or the graph's own inputs and gets
the graph's outputs. Options of the task are `parameters` of the request. Every model has a single
version, "1"; /info has the hash of its content.

Sources: KServe's Open Inference Protocol, and Triton's extensions for binary data and
classification.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from enginery.core.errors import nearest
from enginery.core.version import __version__
from enginery.runtime.tasks.classify import LabelOptions, label_names
from enginery.runtime.tasks.task import MAX_RESULTS
from enginery.serve.api.endpoints import (
    INFERENCE_STATUSES,
    Routes,
    json_response,
    registry_of,
    require_ready,
    run_inference,
)
from enginery.serve.api.errors import HTTPError, invalid_body, invalid_field
from enginery.serve.api.oip_tensors import (
    DATATYPES,
    BinaryData,
    InferTensor,
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

routes = Routes("oip")

VERSION = "1"
EXTENSIONS = ("binary_tensor_data", "classification")
HEADER_LENGTH = "inference-header-content-length"
# Parameters that Triton's clients send for features of Triton: sequences and priorities.
_IGNORED = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout")

Datatype = Annotated[str, Field(json_schema_extra={"enum": list(DATATYPES)})]


class OutputParameters(StrictRequestBody):
    """Parameters of a requested output."""

    binary_data: bool | None = None
    classification: Annotated[int, Field(ge=0, le=MAX_RESULTS)] | None = None


class RequestOutput(RequestBody):
    """An output that a request names ($request_output in the protocol)."""

    name: str
    parameters: OutputParameters | None = None


class RequestInput(Schema):
    """An input tensor of a request ($request_input in the protocol)."""

    name: str
    datatype: Datatype
    shape: list[Annotated[int, Field(ge=0)]]
    data: list[Any] | None = None
    parameters: dict[str, Any] | None = None


class InferRequest(RequestBody):
    """Body of /infer; tensors are read by `read_tensor`."""

    inputs: Annotated[
        list[Any],
        Field(min_length=1, description="a list of tensors"),
        WithJsonSchema({"type": "array", "items": RequestInput.model_json_schema(), "minItems": 1}),
    ]
    id: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: Annotated[
        list[RequestOutput] | None, Field(description="a list of objects with a name")
    ] = None


class ResponseOutput(RequestInput):
    """An output tensor of a response ($response_output in the protocol)."""


class InferResponse(Schema):
    """Response of /infer."""

    model_name: str
    model_version: str
    outputs: list[ResponseOutput]
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


@dataclass(frozen=True)
class OutputSelection:
    """An output to return, and how."""

    name: str
    binary: bool
    """Append the data as bytes, instead of as JSON."""
    classes: int
    """Triton's classification: number of best classes to return as `score:index:label`; 0 for the
    tensor itself."""


@routes.post(
    "/v2/models/{model}/infer",
    "/v2/models/{model}/versions/{version}/infer",
    summary="Inference on tensors; texts are BYTES",
    body=InferRequest,
    response=InferResponse,
    response_types=("application/json", "application/octet-stream"),
    statuses=INFERENCE_STATUSES,
    other_bodies={"application/octet-stream": {}},
)
async def infer(request: Request) -> Response:
    """Answer POST /v2/models/{model}/infer."""
    values, tail = await _split(request)
    model = require_ready(request, _model(request))
    body = parse(InferRequest, values)
    tensors = _tensors(body, tail)
    parameters = dict(body.parameters or {})
    binary = parameters.pop("binary_data_output", None)
    if binary is not None and not isinstance(binary, bool):
        raise invalid_value("parameters.binary_data_output", "true or false", binary)
    selections = _selected_outputs(body, binary=bool(binary))
    options = {name: value for name, value in parameters.items() if name not in _IGNORED}
    graph_inputs = {spec.name for spec in model.backend.runner.record.inputs}
    if model.task and not graph_inputs & {tensor.name for tensor in tensors}:
        outputs = await _infer_task(request, model, tensors, options, selections)
    else:
        for name in options:
            raise unknown_field(name, (), "parameters.")
        outputs = await _infer_graph(request, model, tensors)
    return _respond(model, body.id or "", outputs, selections, binary=bool(binary))


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
    inputs, outputs = task_metadata(model.task, model.backend.dim)
    record = model.backend.runner.record
    return json_response(
        {
            "name": model.name,
            "versions": [VERSION],
            "platform": "onnxruntime_onnx",
            "inputs": [*inputs, *map(tensor_metadata, record.inputs)],
            "outputs": [*outputs, *map(tensor_metadata, record.outputs)],
        }
    )


async def _infer_task(
    request: Request,
    model: ServedModel,
    tensors: list[InferTensor],
    options: dict[str, Any],
    selections: list[OutputSelection],
) -> list[InferTensor]:
    task = model.task
    if task is None:
        raise AssertionError("only called for a model that answers a task")
    classes = max((selection.classes for selection in selections), default=0)
    if classes and "top_k" not in options and issubclass(task.Options, LabelOptions):
        options["top_k"] = classes
    inputs = inputs_from_tensors(tensors, task, model.backend.runner.record.inputs)
    _check_outputs(selections, [output.name for output in task.outputs])
    results = await run_inference(request, model, task, inputs, options, "parameters.")
    return tensors_from_results(task, results)


async def _infer_graph(
    request: Request, model: ServedModel, tensors: list[InferTensor]
) -> list[InferTensor]:
    record = model.backend.runner.record
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


async def _split(request: Request) -> tuple[dict[str, Any], BinaryData]:
    """Split a body into its JSON object and the binary data after it."""
    body, given = request.scope["state"]["body"], request.headers.get(HEADER_LENGTH)
    if given is None:
        return json_object(body), BinaryData(b"")
    if not (given.isascii() and given.isdigit() and len(given) < 16 and int(given) <= len(body)):
        raise invalid_body(
            f"{HEADER_LENGTH} is {quote(given)}, expected a whole number up to the body's "
            f"{len(body)} bytes."
        )
    return json_object(body[: int(given)]), BinaryData(body[int(given) :])


def _tensors(body: InferRequest, tail: BinaryData) -> list[InferTensor]:
    tensors: dict[str, InferTensor] = {}
    for index, item in enumerate(body.inputs):
        path = f"inputs[{index}]"
        if not isinstance(item, dict):
            raise invalid_value(path, "an object with name, datatype, shape, data", item)
        tensor = read_tensor(item, tail, path)
        if tensor.name in tensors:
            raise invalid_field(f"input {quote(tensor.name)} occurs twice.", field="inputs")
        tensors[tensor.name] = tensor
    tail.end()
    return list(tensors.values())


def _selected_outputs(body: InferRequest, *, binary: bool) -> list[OutputSelection]:
    """Return the outputs that the request names; an empty list for all."""
    selections: list[OutputSelection] = []
    names: set[str] = set()
    for output in body.outputs or ():
        if output.name in names:
            raise invalid_field(f"outputs: {quote(output.name)} occurs twice.", field="outputs")
        names.add(output.name)
        parameters = output.parameters or OutputParameters()
        as_binary = binary if parameters.binary_data is None else parameters.binary_data
        selections.append(OutputSelection(output.name, as_binary, parameters.classification or 0))
    return selections


def _check_outputs(selections: list[OutputSelection], names: list[str]) -> None:
    for selection in selections:
        if selection.name not in names:
            raise invalid_field(
                f"there is no output {quote(selection.name)}{nearest(selection.name[:100], names)}",
                field="outputs",
                do=f"Outputs: {', '.join(names)}.",
            )


def _respond(
    model: ServedModel,
    request_id: str,
    outputs: list[InferTensor],
    selections: list[OutputSelection],
    *,
    binary: bool,
) -> Response:
    by_name = {tensor.name: tensor for tensor in outputs}
    _check_outputs(selections, list(by_name))
    selections = selections or [OutputSelection(name, binary, 0) for name in by_name]
    graph_outputs = {spec.name for spec in model.backend.runner.record.outputs}
    described: list[dict[str, Any]] = []
    pieces: list[bytes] = []
    for selection in selections:
        tensor = by_name[selection.name]
        if selection.classes and tensor.name in graph_outputs:
            tensor = _classified(tensor, selection.classes, model)
        entry: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
        }
        if selection.binary:
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
