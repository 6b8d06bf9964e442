"""Tasks on images in the forms of Hugging Face's inference API.

    client = InferenceClient(model="http://localhost:8000/models/cars/object-detection")
    client.object_detection("street.jpg", threshold=0.7)

The body is the image itself, or JSON with `inputs`, an image in base64, and `parameters`, as for
/predict/{model}. One image gets the list of its results, several images a list of such lists.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from enginery.serve.api.endpoints import (
    INFERENCE_STATUSES,
    Routes,
    json_response,
    run_inference,
    select_model,
)
from enginery.serve.api.plain import FILE_BODIES, PredictAnyRequest, read_any
from enginery.serve.api.requests import Schema

routes = Routes("plain")
_BODIES = {kind: schema for kind, schema in FILE_BODIES.items() if kind != "audio/*"}


class ImageLabel(Schema):
    """A label of an image."""

    label: str
    score: float


class BoundingBox(Schema):
    """The sides of an object in pixels."""

    xmin: int
    ymin: int
    xmax: int
    ymax: int


class DetectedObject(Schema):
    """An object in an image."""

    label: str
    score: float
    box: BoundingBox


class ImageSegment(Schema):
    """A segment of an image."""

    label: str
    score: float | None
    mask: str
    """A PNG in base64: 255 for the pixels of the segment, else 0."""


def _paths(task: str) -> tuple[str, str]:
    return f"/{task}", f"/models/{{model}}/{task}"


@routes.post(
    *_paths("image-classification"),
    summary="Classify an image",
    body=PredictAnyRequest,
    other_bodies=_BODIES,
    response=list[ImageLabel] | list[list[ImageLabel]],
    statuses=INFERENCE_STATUSES,
    runs_model=True,
)
async def classify_image(request: Request) -> Response:
    """Answer POST /image-classification."""
    results, is_single = await _results(request, "classify_images")
    answers = [result.labels for result in results]
    return json_response(answers[0] if is_single else answers)


@routes.post(
    *_paths("object-detection"),
    summary="Find objects in an image",
    body=PredictAnyRequest,
    other_bodies=_BODIES,
    response=list[DetectedObject] | list[list[DetectedObject]],
    statuses=INFERENCE_STATUSES,
    runs_model=True,
)
async def detect_objects(request: Request) -> Response:
    """Answer POST /object-detection."""
    results, is_single = await _results(request, "detect")
    return json_response(results[0] if is_single else results)


@routes.post(
    *_paths("image-segmentation"),
    summary="Segment an image",
    body=PredictAnyRequest,
    other_bodies=_BODIES,
    response=list[ImageSegment] | list[list[ImageSegment]],
    statuses=INFERENCE_STATUSES,
    runs_model=True,
)
async def segment_image(request: Request) -> Response:
    """Answer POST /image-segmentation."""
    results, is_single = await _results(request, "segment")
    return json_response(results[0] if is_single else results)


@routes.post(
    *_paths("zero-shot-image-classification"),
    summary="Choose among labels that the model was not trained on, for an image",
    body=PredictAnyRequest,
    other_bodies=_BODIES,
    response=list[ImageLabel] | list[list[ImageLabel]],
    statuses=INFERENCE_STATUSES,
    runs_model=True,
)
async def choose_labels(request: Request) -> Response:
    """Answer POST /zero-shot-image-classification."""
    results, is_single = await _results(request, "zero_shot_images")
    answers = [result.labels for result in results]
    return json_response(answers[0] if is_single else answers)


async def _results(request: Request, verb: str) -> tuple[Any, bool]:
    """Return a model's results for a request, and True if they are of one image, not of a list."""
    model, task = select_model(request, None, verb)
    inputs = await read_any(request, task, model.name)
    results = await run_inference(
        request, model, task, inputs.items, inputs.parameters, "parameters."
    )
    return results, inputs.single
