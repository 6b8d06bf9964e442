"""Preprocessing or postprocessing in Triton's Python backend. Written by `enginery export-triton`.

The parameter `step` in config.pbtxt says which of the two it is. It needs enginery in the Python
that runs it, with tokenizers, numpy and pydantic; ONNX Runtime is not imported.
"""

import json
import traceback
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found,unused-ignore]

try:
    from enginery.core.errors import EngineryError, InputError, ShapeError
    from enginery.deploy.triton.steps import FILES, open_step
except ImportError as error:
    raise ImportError(
        f"this model needs the package 'enginery' in Triton's Python: {error}. Install it in the "
        "server's image, or export the model with --execution-env."
    ) from error


class TritonPythonModel:
    """An instance of the model in Triton's Python backend."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the task's files beside this file."""
        config = json.loads(args["model_config"])
        # Protobuf's JSON may leave out empty strings.
        parameters = config["parameters"].items()
        options = {name: value.get("string_value", "") for name, value in parameters}
        self.inputs = [tensor["name"] for tensor in config["input"]]
        # The server may have copied the repository, so the path is relative to this file.
        self.step = open_step(Path(__file__).parent / FILES, options)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return one response per request; a request that fails gets an error response."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        try:
            return pb_utils.InferenceResponse(output_tensors=self._answer(request))
        except EngineryError as error:
            wrong = isinstance(error, InputError | ShapeError)
            code = pb_utils.TritonError.INVALID_ARG if wrong else pb_utils.TritonError.INTERNAL
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))
        except Exception as error:
            # An exception from `execute` would fail all requests of the call.
            traceback.print_exc()
            message = f"internal error: {type(error).__name__}; see the server's log."
            internal = pb_utils.TritonError(message, pb_utils.TritonError.INTERNAL)
            return pb_utils.InferenceResponse(error=internal)

    def _answer(self, request: Any) -> list[Any]:
        tensors = {n: pb_utils.get_input_tensor_by_name(request, n) for n in self.inputs}
        arrays = {name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None}
        outputs = self.step(arrays, json.loads(request.parameters() or "{}"))
        requested = set(request.requested_output_names())
        return [
            pb_utils.Tensor(name, array) for name, array in outputs.items() if name in requested
        ]
