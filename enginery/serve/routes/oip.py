"""The Open Inference Protocol, version 2, over HTTP.

    $ curl localhost:8000/v2/models/mood/infer -d '{"inputs":
        [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["The pump runs again."]}]}'
    {"model_name":"mood","model_version":"1","outputs":[{"name":"label",…},{"name":"score",…}]}

A request has either what the task takes (`text`; `text` and `text_pair`; `question` and `context`;
`image`, in JSON as base64) and gets what the task answers, or the graph's own inputs and gets its
outputs. Options of the task are the request's `parameters`. There is one version of a model at a
time, "1": which content it has says /info, by its hash.

Source: the protocol of KServe (open-inference-protocol), and Triton's extensions for binary data
and classification.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from enginery import __version__
from enginery.core.errors import nearest
from enginery.runtime.classification import label_names
from enginery.serve.call import Call
from enginery.serve.messages import Response
from enginery.serve.reading import FieldError, JsonObject, json_object, shown
from enginery.serve.refusals import InvalidBodyError, NotFoundError
from enginery.serve.rooms import HostedModel
from enginery.serve.routes.asking import ask, finish
from enginery.serve.routes.oip_binary import Tail, Tensor, read_tensor
from enginery.serve.routes.oip_tensors import (
    answer_tensors,
    feeds_of,
    graph_tensors,
    task_inputs,
    task_metadata,
    tensor_metadata,
)

VERSION = "1"
EXTENSIONS = ("binary_tensor_data", "classification")
HEADER_LENGTH = "inference-header-content-length"
# What Triton's clients send for things that this server does not do: it keeps no sequences, and
# takes requests in its own order.
_IGNORED = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout")


@dataclass(frozen=True)
class Wanted:
    """One output that a request asks for."""

    name: str
    binary: bool
    classes: int
    """Triton's classification: so many best, as `score:index:label`; 0 for the tensor itself."""


async def server_metadata(_: Call) -> Response:
    """GET /v2."""
    return Response.of_json(
        {"name": "enginery", "version": __version__, "extensions": list(EXTENSIONS)}
    )


async def live(_: Call) -> Response:
    """GET /v2/health/live: 200 as long as the server answers."""
    return Response.of_json({"live": True})


async def ready(call: Call) -> Response:
    """GET /v2/health/ready: 200 where every model is ready, else 503."""
    is_ready = call.parts.models.ready
    # The protocol's schema of this answer has the key `live`, which is true of whoever answers.
    body = {"ready": is_ready, "live": True}
    return Response.of_json(body, status=200 if is_ready else 503)


async def model_ready(call: Call) -> Response:
    """GET /v2/models/{model}/ready: 200 where it is, else 503."""
    model = _model(call)
    is_ready = model.state == "ready" and not call.parts.models.draining
    return Response.of_json(
        {"name": model.name, "ready": is_ready}, status=200 if is_ready else 503
    )


async def model_metadata(call: Call) -> Response:
    """GET /v2/models/{model}: its inputs and outputs, those of the task and those of the graph."""
    model = call.take(_model(call))
    inputs, outputs = task_metadata(model)
    return Response.of_json({
        "name": model.name,
        "versions": [VERSION],
        "platform": "onnxruntime_onnx",
        "inputs": [*inputs, *(tensor_metadata(spec) for spec in model.record.inputs)],
        "outputs": [*outputs, *(tensor_metadata(spec) for spec in model.record.outputs)],
    })  # fmt: skip


async def infer(call: Call) -> Response:
    """POST /v2/models/{model}/infer."""
    body, tail = _split(call)
    model = call.take(_model(call))
    request_id = body.string("id")
    inputs = _inputs(body, tail)
    parameters = body.object("parameters")
    binary = bool(parameters.flag("binary_data_output"))
    wanted = _wanted(body, binary)
    options = {
        name: value
        for name, value in parameters.values.items()
        if name not in ("binary_data_output", *_IGNORED)
    }
    known = {tensor.name for tensor in inputs} & {spec.name for spec in model.record.inputs}
    if model.method and not known:
        outputs = await _infer_task(call, model, inputs, options, wanted)
    else:
        JsonObject(options, "parameters.").only(())
        feeds = feeds_of(inputs, model)
        rows = max((len(array) for array in feeds.values() if array.ndim), default=1)
        values = call.keep(await model.infer(feeds), inputs=rows)
        outputs = graph_tensors(values, model)
    return _answer(model, request_id, outputs, wanted, binary=binary)


async def _infer_task(
    call: Call,
    model: HostedModel,
    tensors: list[Tensor],
    options: dict[str, Any],
    wanted: list[Wanted],
) -> list[Tensor]:
    classes = max((want.classes for want in wanted), default=0)
    if classes and "top_k" not in options and model.method in ("classify", "classify_images"):
        options["top_k"] = classes
    inputs = task_inputs(tensors, model)
    parameters = JsonObject(options, "parameters.")
    _, known = task_metadata(model)
    _check_outputs(wanted, [output["name"] for output in known])
    reply = await ask(model, inputs, parameters)
    values = call.keep(reply, inputs=len(inputs))
    return answer_tensors(model, finish(model, values, parameters))


def _model(call: Call) -> HostedModel:
    version = call.path_values.get("version", VERSION)
    model = call.parts.models.get(call.path_values["model"])
    if version != VERSION:
        raise NotFoundError(
            f"model '{model.name}' has no version {shown(version)}, expected '{VERSION}'."
        )
    return model


def _split(call: Call) -> tuple[JsonObject, Tail]:
    """The JSON of a request, and the bytes behind it."""
    call.require_plain_bytes()
    body, given = call.request.body, call.request.headers.get(HEADER_LENGTH)
    if given is None:
        return json_object(body), Tail(b"")
    if not (given.isascii() and given.isdigit() and len(given) < 16 and int(given) <= len(body)):
        raise InvalidBodyError(
            f"{HEADER_LENGTH} is {shown(given)}, expected a whole number up to the body's "
            f"{len(body)} bytes."
        )
    return json_object(body[: int(given)]), Tail(body[int(given) :])


def _inputs(body: JsonObject, tail: Tail) -> list[Tensor]:
    given = body.need("inputs", "a list of tensors")
    if type(given) is not list:
        raise body.wrong("inputs", "a list of tensors", given)
    tensors: dict[str, Tensor] = {}
    for index, item in enumerate(given):
        if type(item) is not dict:
            raise body.wrong(f"inputs[{index}]", "an object with name, datatype, shape, data", item)
        tensor = read_tensor(JsonObject(item, f"inputs[{index}]."), tail)
        if tensor.name in tensors:
            raise FieldError(f"input {shown(tensor.name)} is there twice.", field="inputs")
        tensors[tensor.name] = tensor
    tail.end()
    if not tensors:
        raise FieldError("inputs is empty, expected a tensor or more.", field="inputs")
    return list(tensors.values())


def _wanted(body: JsonObject, binary: bool) -> list[Wanted]:
    """The outputs that are asked for; none for all."""
    given = body.values.get("outputs")
    if given is None:
        return []
    if type(given) is not list:
        raise body.wrong("outputs", "a list of objects with a name", given)
    wanted: list[Wanted] = []
    names: set[str] = set()
    for index, item in enumerate(given):
        if type(item) is not dict:
            raise body.wrong(f"outputs[{index}]", "an object with a name", item)
        output = JsonObject(item, f"outputs[{index}].")
        output.need("name", "a string")
        name = output.string("name")
        if name in names:
            raise FieldError(f"outputs: {shown(name)} is asked for twice.", field="outputs")
        names.add(name)
        parameters = output.object("parameters")
        parameters.only(("binary_data", "classification"))
        wanted.append(
            Wanted(
                name,
                bool(parameters.flag("binary_data", binary)),
                parameters.whole("classification", 0, least=0, most=10_000),
            )
        )
    return wanted


def _check_outputs(wanted: list[Wanted], names: list[str]) -> None:
    for want in wanted:
        if want.name not in names:
            raise FieldError(
                f"there is no output {shown(want.name)}{nearest(want.name[:100], names)}",
                field="outputs",
                do=f"Outputs: {', '.join(names)}.",
            )


def _answer(
    model: HostedModel,
    request_id: str,
    outputs: list[Tensor],
    wanted: list[Wanted],
    *,
    binary: bool,
) -> Response:
    by_name = {tensor.name: tensor for tensor in outputs}
    _check_outputs(wanted, list(by_name))
    wanted = wanted or [Wanted(name, binary, 0) for name in by_name]
    graph_outputs = {spec.name for spec in model.record.outputs}
    described: list[dict[str, Any]] = []
    pieces: list[bytes] = []
    for want in wanted:
        tensor = by_name[want.name]
        if want.classes and tensor.name in graph_outputs:
            tensor = _classified(tensor, want.classes, model)
        entry: dict[str, Any] = {
            "name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape),
        }  # fmt: skip
        if want.binary:
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
        return Response.of_json(body)
    head = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(
        200, b"".join([head, *pieces]), "application/octet-stream",
        ((HEADER_LENGTH, str(len(head))),),
    )  # fmt: skip


def _classified(tensor: Tensor, classes: int, model: HostedModel) -> Tensor:
    """The best of the last axis as `score:index:label`, as Triton writes them."""
    values: NDArray[Any] = np.atleast_1d(np.asarray(tensor.values))
    order = np.argsort(-values.astype(np.float64), axis=-1, kind="stable")[..., :classes]
    names = label_names(model.config, values.shape[-1])
    scores = np.take_along_axis(values, order, axis=-1)
    items = [
        f"{score:.6f}:{index}:{names[index]}".encode()
        for score, index in zip(scores.reshape(-1), order.reshape(-1).tolist(), strict=True)
    ]
    return Tensor(tensor.name, "BYTES", order.shape, items)
