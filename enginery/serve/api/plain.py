"""POST /predict/{model}: one route for every task.

    $ curl -d '{"inputs": "The pump runs again.", "parameters": {"top_k": 1}}' \
        localhost:8000/predict/mood
    {"model":"mood","outputs":{"labels":[{"label":"glad","score":0.97}]},"truncated":0}

One input gets one result, a list of inputs a list of results. A body with the content type of an
image or audio, such as image/png or audio/wav, is one input, with the parameters in the query
string: `/predict/photos?top_k=3`. A multipart form has images or audio as files, and the parameters
as JSON in the field `parameters`.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import orjson
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from enginery.runtime.tasks.generate import Generate
from enginery.runtime.tasks.task import PLURALS, Modality, Task
from enginery.serve.api.endpoints import (
    Routes,
    config_of,
    form_of,
    json_response,
    parsed,
    run_inference,
    select_model,
)
from enginery.serve.api.errors import HTTPError, empty_input, invalid_body, invalid_field
from enginery.serve.api.generate import generated_json
from enginery.serve.api.requests import (
    FILES,
    ListOfTexts,
    RequestBody,
    Schema,
    StrictRequestBody,
    Texts,
    file_from_base64,
    invalid_value,
    json_object,
    listed,
    parse,
    read_token_ids,
    unknown_field,
)
from enginery.serve.models.served_model import too_many_inputs

routes = Routes("plain")

_JSON_STARTS = (b"", *(bytes([byte]) for byte in b'{["-0123456789tfn'))
_MAX_FORM_PARTS = 4096
_FILE = {"type": "string", "contentMediaType": "application/octet-stream"}
FILE_BODIES: dict[str, Any] = {
    "multipart/form-data": {
        "type": "object",
        "required": ["file"],
        "properties": {"file": _FILE, "parameters": {"type": "string"}},
    },
    "image/*": {},
    "audio/*": {},
}
"""JSON schemas of bodies that are files, by content type."""


class PredictAnyRequest(StrictRequestBody):
    """Body of /predict/{model}."""

    inputs: Any
    """An input of the task, or a list of them."""
    parameters: dict[str, Any] | None = None


class PredictAnyResponse(Schema):
    """Response of /predict/{model}: one result, or a list with one per input."""

    model: str
    outputs: dict[str, Any] | list[Any]
    truncated: int
    """Number of inputs that were truncated."""


class PredictInputs:
    """The inputs and parameters of a request; `single` if the request has one input, not a list."""

    def __init__(self, items: list[Any], parameters: dict[str, Any], *, single: bool) -> None:
        self.items, self.parameters, self.single = items, parameters, single


@routes.post(
    "/predict/{model}",
    summary="Run a model of any task",
    body=PredictAnyRequest,
    response=PredictAnyResponse,
    runs_model=True,
    other_bodies=FILE_BODIES,
)
async def predict_any(request: Request) -> Response:
    """Answer POST /predict/{model}: run the model's task."""
    model, task = select_model(request)
    inputs = await read_any(request, task, model.name)
    results = await run_inference(
        request, model, task, inputs.items, inputs.parameters, "parameters."
    )
    outputs = results
    if isinstance(task, Generate):
        outputs = [generated_json(result, task) for result in results]
    return json_response(
        {
            "model": model.name,
            "outputs": outputs[0] if inputs.single else outputs,
            "truncated": request.scope["state"]["record"].timings.truncated,
        }
    )


class ZeroShotParameters(StrictRequestBody):
    """Parameters of /zero-shot-classification."""

    candidate_labels: ListOfTexts
    hypothesis_template: str | None = None
    multi_label: bool | None = None


class ZeroShotRequest(RequestBody):
    """Body of /zero-shot-classification."""

    inputs: Texts
    parameters: ZeroShotParameters
    model: str | None = None


class ZeroShotResponse(Schema):
    """The labels of one text, best first."""

    sequence: str
    labels: list[str]
    scores: list[float]


@routes.post(
    "/zero-shot-classification",
    "/models/{model}/zero-shot-classification",
    summary="Choose among labels that the model was not trained on",
    body=ZeroShotRequest,
    response=ZeroShotResponse | list[ZeroShotResponse],
    runs_model=True,
)
async def zero_shot(request: Request, body: ZeroShotRequest) -> Response:
    """Answer POST /zero-shot-classification in the form of Hugging Face's inference API."""
    model, task = select_model(request, body.model, "classify")
    is_single = isinstance(body.inputs, str)
    texts = listed(body.inputs)
    options = body.parameters.model_dump(exclude_none=True)
    results = await run_inference(request, model, task, texts, options, "parameters.")
    answers = [
        {
            "sequence": text,
            "labels": [label.label for label in result.labels],
            "scores": [label.score for label in result.labels],
        }
        for text, result in zip(texts, results, strict=True)
    ]
    return json_response(answers[0] if is_single else answers)


async def read_any(request: Request, task: Task, name: str) -> PredictInputs:
    """Return the inputs and parameters of a request for a task: JSON, a file, or a form of files.

    Args:
        request: the request.
        task: the task.
        name: name of the model.

    Raises:
        HTTPError: the body has none of these forms, or an input is invalid.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_form = kind == "multipart/form-data"
    takes_files = task.modality != "text"
    if is_form or kind.startswith(("image/", "audio/")):
        if not takes_files or not (is_form or kind.startswith(f"{task.modality}/")):
            example = "a text" if not takes_files else f"{FILES[task.modality]} in base64"
            raise invalid_body(
                f"model '{name}' takes {PLURALS[task.modality]}, found a body of {kind[:60]!r}.",
                do=f'Send JSON: {{"inputs": "{example}"}}.',
            )
        if is_form:
            return await _read_form(request, task.modality)
        return await _read_file(request, task.modality)
    body = request.scope["state"]["body"]
    if takes_files and _is_file(body):
        # curl --data-binary declares files as forms
        return await _read_file(request, task.modality)
    try:
        values = await parsed(partial(json_object, body), len(body))
    except HTTPError as error:
        if not takes_files:
            raise
        kind = {"image": "image/png", "audio": "audio/wav"}[task.modality]
        do = f"To send {FILES[task.modality]} itself, set its content type, such as {kind}."
        raise invalid_body(error.message, do=do) from None
    fields = await parsed(partial(parse, PredictAnyRequest, values), len(body))
    inputs, max_inputs = fields.inputs, config_of(request).max_inputs
    # Counted before each is looked at; a list of whole numbers can be the token ids of one.
    if isinstance(inputs, list) and len(inputs) > max_inputs and type(inputs[0]) is not int:
        raise too_many_inputs(len(inputs), max_inputs)
    items, single = await parsed(partial(read_inputs, task, inputs), len(body))
    return PredictInputs(items, fields.parameters or {}, single=single)


def _is_file(body: bytes) -> bool:
    """Return True if a body cannot be JSON."""
    start = body[:64].lstrip(b" \t\r\n")
    return start[:1] not in _JSON_STARTS or start.startswith(b"fLaC")  # or starts as `false`


async def _read_file(request: Request, modality: Modality) -> PredictInputs:
    body = request.scope["state"]["body"]
    if not body:
        raise empty_input("inputs", f"the body is empty, expected {FILES[modality]}.")
    parameters: dict[str, Any] = {}
    for name, text in parse_qsl(request.url.query, keep_blank_values=True):
        try:  # numbers and booleans
            parameters[name] = orjson.loads(text)
        except orjson.JSONDecodeError:
            parameters[name] = text
    return PredictInputs([body], parameters, single=True)


async def _read_form(request: Request, modality: Modality) -> PredictInputs:
    """Read the files of a form, from fields of any name."""
    files: list[Any] = []
    parameters: dict[str, Any] = {}
    parts = await form_of(request, max_files=_MAX_FORM_PARTS, max_fields=_MAX_FORM_PARTS)
    try:
        for name, part in parts.multi_items():
            if isinstance(part, UploadFile):
                files.append(await part.read())
                if not files[-1]:
                    raise empty_input("inputs", f"the file in part {name[:60]!r} is empty.")
            elif name != "parameters":
                raise unknown_field(name, ("parameters",))
            elif part.strip():
                parameters = json_object(part.encode())
    finally:
        await parts.close()
    if not files:
        raise empty_input("inputs", f"the form has no file, expected {FILES[modality]} or more.")
    return PredictInputs(files, parameters, single=len(files) == 1)


def read_inputs(task: Task, value: Any) -> tuple[list[Any], bool]:
    """Parse the inputs of a task from JSON.

    Args:
        task: the task.
        value: an input or a list of inputs. An input is a text, token ids, or a file in base64;
            with two parts, [first, second] or an object with their names.

    Returns:
        The inputs, and True if `value` is a single input instead of a list.

    Raises:
        HTTPError: an input is invalid.
    """
    expected = expected_inputs(task)
    if not isinstance(value, list):
        return [_read_input(task, value, "inputs", expected)], True
    if not value:
        raise empty_input("inputs")
    if task.inputs[0].takes_token_ids and all(type(item) is int for item in value):
        return [_read_input(task, value, "inputs", expected)], True
    items = [_read_input(task, x, f"inputs[{i}]", expected) for i, x in enumerate(value)]
    return items, False


def expected_inputs(task: Task) -> str:
    """Describe the inputs that a task takes, for error messages."""
    if task.inputs[0].takes_token_ids:
        return "a string, a list of strings, or token ids"
    if len(task.inputs) == 1:
        return "a string or a list of strings"
    named = "{" + ", ".join(field.name for field in task.inputs) + "}"
    first = "a text, a pair " if task.inputs[-1].optional else ""
    return f"{first}{named}, or a list of them"


def _read_input(task: Task, value: Any, name: str, expected: str) -> Any:
    if len(task.inputs) > 1:
        return _read_parts(task, value, name, expected)
    if task.inputs[0].takes_token_ids and isinstance(value, list):
        return read_token_ids(value, name)
    if not isinstance(value, str):
        item = "a string or a list of token ids" if task.inputs[0].takes_token_ids else "a string"
        raise invalid_value(name, expected if name == "inputs" else item, value)
    return value if task.modality == "text" else file_from_base64(value, name, task.modality)


def _read_parts(task: Task, value: Any, name: str, expected: str) -> Any:
    first, second = task.inputs
    if isinstance(value, str) and second.optional:
        return value
    if isinstance(value, dict):
        for key in value:
            if key not in (first.name, second.name):
                raise unknown_field(key, (first.name, second.name), f"{name}.")
        parts = [_part(value, field.name, name, optional=field.optional) for field in task.inputs]
        return parts[0] if parts[1] is None else tuple(parts)
    if name == "inputs" or not isinstance(value, list):
        raise invalid_value(name, expected.partition(", or a list")[0], value)
    if len(value) != 2 or not all(isinstance(text, str) for text in value):
        raise invalid_field(
            f"{name}: found a list of {len(value)}, expected two strings.", field=name
        )
    return value[0], value[1]


def _part(values: dict[str, Any], key: str, name: str, *, optional: bool) -> str | None:
    value = values.get(key)
    if value is None and optional:
        return None
    if not isinstance(value, str):
        if key not in values:
            raise invalid_field(
                f"{name}.{key} is missing, expected a string.", field=f"{name}.{key}"
            )
        raise invalid_value(f"{name}.{key}", "a string", value)
    return value
