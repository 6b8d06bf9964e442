"""What `export-triton` writes: configurations in Triton's own proto, and steps without a server."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import tritonclient
from google.protobuf import text_format
from tritonclient.utils import np_to_triton_dtype

from enginery.deploy.triton.steps import FILES, open_step


def _proto() -> Any:
    """Import the proto of tritonclient.grpc without grpc."""
    path = Path(tritonclient.__path__[0]) / "grpc/model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("triton_model_config_pb2", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROTO = _proto()


def read_config(directory: Path) -> Any:
    """Parse the config.pbtxt of a model's folder."""
    text = (directory / "config.pbtxt").read_text(encoding="utf-8")
    return text_format.Parse(text, PROTO.ModelConfig())


def dtype_name(number: int) -> str:
    return PROTO.DataType.Name(number)


def texts(values: Sequence[str]) -> np.ndarray:
    """Return a BYTES tensor (n,)."""
    array = np.empty(len(values), dtype=object)
    array[:] = [value.encode() for value in values]
    return array


def _fits(array: np.ndarray, tensor: Any, batch: list[int]) -> bool:
    """Return True if an array has the data type and the dims of a tensor's configuration."""
    dims = [*batch, *tensor.dims]
    return (
        f"TYPE_{np_to_triton_dtype(array.dtype)}".replace("BYTES", "STRING")
        == dtype_name(tensor.data_type)
        and array.ndim == len(dims)
        and all(dim in (-1, size) for dim, size in zip(dims, array.shape, strict=True))
    )


def run_ensemble(
    repository: Path,
    model: str,
    inputs: Mapping[str, np.ndarray],
    parameters: Mapping[str, Any] = {},
) -> dict[str, np.ndarray]:
    """Return the outputs of version 1 of an ensemble, whose steps are run in this process.

    Raises AssertionError if a tensor is none of its configuration, which a server does not check.
    """
    config = read_config(repository / model)
    tensors = dict(inputs)
    for step in config.ensemble_scheduling.step:
        arrays = {n: tensors[tensor] for n, tensor in step.input_map.items() if tensor in tensors}
        directory = repository / step.model_name
        part = read_config(directory)
        if part.backend == "python":
            options = {name: value.string_value for name, value in part.parameters.items()}
            outputs = open_step(directory / "1" / FILES, options)(arrays, parameters)
        else:
            session = ort.InferenceSession(
                directory / "1/model.onnx", providers=["CPUExecutionProvider"]
            )
            names = [node.name for node in session.get_outputs()]
            outputs = dict(zip(names, session.run(names, arrays), strict=True))
        batch = [-1] if part.max_batch_size else []
        for tensor in (*part.input, *part.output):
            array = (arrays | outputs).get(tensor.name)
            assert array is not None or tensor.optional, tensor.name
            assert array is None or _fits(array, tensor, batch), f"{step.model_name}: {tensor}"
        tensors |= {tensor: outputs[name] for name, tensor in step.output_map.items()}
    return {tensor.name: tensors[tensor.name] for tensor in config.output}
