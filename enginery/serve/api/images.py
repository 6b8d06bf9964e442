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

from enginery.runtime.tasks.classify import Label
from enginery.runtime.tasks.detect import Detection
from enginery.runtime.tasks.segment import Segment
from enginery.serve.api.endpoints import (
    Routes,
    json_response,
    run_inference,
    select_model,
)
from enginery.serve.api.plain import FILE_BODIES, PredictAnyRequest, read_any

routes = Routes("plain")
_BODIES = {kind: schema for kind, schema in FILE_BODIES.items() if kind != "audio/*"}


def _declare(task: str, verb: str, item: Any, summary: str) -> None:
    """Declare the route of a task, whose results are lists of items."""

    @routes.post(
        f"/{task}",
        f"/models/{{model}}/{task}",
        summary=summary,
        body=PredictAnyRequest,
        other_bodies=_BODIES,
        response=list[item] | list[list[item]],
        runs_model=True,
    )
    async def answer(request: Request) -> Response:
        results, is_single = await _results(request, verb)
        answers = [getattr(result, "labels", result) for result in results]
        return json_response(answers[0] if is_single else answers)


_declare("image-classification", "classify_images", Label, "Classify an image")
_declare("object-detection", "detect", Detection, "Find objects in an image")
_declare("image-segmentation", "segment", Segment, "Segment an image")
_declare(
    "zero-shot-image-classification",
    "zero_shot_images",
    Label,
    "Choose among labels that the model was not trained on, for an image",
)


async def _results(request: Request, verb: str) -> tuple[Any, bool]:
    """Return a model's results for a request, and True if they are of one image, not of a list."""
    model, task = select_model(request, "", verb)
    inputs = await read_any(request, task, model.name)
    results = await run_inference(
        request, model, task, inputs.items, inputs.parameters, "parameters."
    )
    return results, inputs.single
