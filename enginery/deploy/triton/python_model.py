"""Tokenizes or answers in Triton's Python backend. Made by `enginery export-triton`.

It needs enginery in the Python that runs it (tokenizers, numpy and pydantic; ONNX Runtime is not
imported). Which of the two steps it is, the parameter `step` of config.pbtxt says.
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
        "server's image, or export with --execution-env."
    ) from error


class TritonPythonModel:
    """One instance of the model, as Triton's Python backend makes it."""

    def initialize(self, args: dict[str, str]) -> None:
        """Reads the tokenizer beside this file."""
        config = json.loads(args["model_config"])
        # Protobuf's JSON may leave out a text that is empty.
        given = config["parameters"].items()
        options = {name: value.get("string_value", "") for name, value in given}
        self.inputs = [tensor["name"] for tensor in config["input"]]
        # Beside this file, wherever the server keeps its copy of the repository.
        self.step = open_step(Path(__file__).parent / FILES, options)

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response a request; a request that cannot be answered gets an error of its own."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        try:
            return pb_utils.InferenceResponse(output_tensors=self._answer(request))
        except EngineryError as error:
            wrong = isinstance(error, InputError | ShapeError)
            code = pb_utils.TritonError.INVALID_ARG if wrong else pb_utils.TritonError.INTERNAL
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))
        except Exception as error:
            # What leaves `execute` fails all requests that came with this one.
            traceback.print_exc()
            said = f"internal error: {type(error).__name__}; the server's log says more."
            internal = pb_utils.TritonError(said, pb_utils.TritonError.INTERNAL)
            return pb_utils.InferenceResponse(error=internal)

    def _answer(self, request: Any) -> list[Any]:
        tensors = {n: pb_utils.get_input_tensor_by_name(request, n) for n in self.inputs}
        arrays = {name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None}
        found = self.step(arrays, json.loads(request.parameters() or "{}"))
        wanted = set(request.requested_output_names())
        return [pb_utils.Tensor(name, array) for name, array in found.items() if name in wanted]
