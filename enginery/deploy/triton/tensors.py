"""Describe a graph's inputs and outputs for Triton: names, data types, dims without the batch.

>>> graph = artifact.manifest.graphs[0]
>>> has_batch_dim(graph)
True
>>> tensor_fields(graph.inputs[0], batched=True)
{'name': 'input_ids', 'data_type': 'TYPE_INT64', 'dims': [-1]}

If `max_batch_size` is above 0, Triton uses the first dim of every tensor as the batch, and `dims`
has the other dims. An output's dims must be exactly those of the graph. Sources:
docs/user_guide/model_configuration.md of triton-inference-server/server, and
`CompareDimsSupported` in onnxruntime_utils.cc of the ONNX Runtime backend.
"""

from __future__ import annotations

from typing import Any

from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError
from enginery.core.shapes import TensorSpec, canonical_dim
from enginery.deploy.triton.options import Backend
from enginery.deploy.triton.text_format import EnumValue

DATA_TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "uint16": "TYPE_UINT16",
    "uint32": "TYPE_UINT32",
    "uint64": "TYPE_UINT64",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "string": "TYPE_STRING",
    "bfloat16": "TYPE_BF16",
}
STRING = EnumValue("TYPE_STRING")

# From the table "Datatypes" in model_configuration.md.
_NOT_TAKEN = {
    "onnxruntime": ("bfloat16",),
    "tensorrt": ("uint16", "uint32", "uint64", "int16", "float64", "string"),
}
_BACKENDS = {"onnxruntime": "ONNX Runtime", "tensorrt": "TensorRT"}


def has_batch_dim(record: GraphRecord) -> bool:
    """Return True if the first dim of every input and output is the same dynamic dim."""
    first = {spec.dims[0] if spec.dims else 0 for spec in (*record.inputs, *record.outputs)}
    return len(first) == 1 and isinstance(dim := first.pop(), str) and bool(dim) and "+" not in dim


def batch_dim(record: GraphRecord) -> str:
    """Return the name that profiles use for the inputs' first dim; empty for a fixed dim."""
    dim = record.inputs[0].dims[0] if record.inputs and record.inputs[0].dims else 0
    return canonical_dim(dim) if isinstance(dim, str) else ""


def tensor_fields(spec: TensorSpec, *, batched: bool) -> dict[str, Any]:
    """Return an entry of `input` or `output` in a model configuration.

    Args:
        spec: a tensor of the graph.
        batched: True if its first dim is the batch, which the entry leaves out.

    Raises:
        ArtifactError: Triton does not support the data type or the size of a dim.
    """
    sizes = [dim if isinstance(dim, int) else -1 for dim in spec.dims]
    if any(size == 0 or size < -1 for size in sizes):
        raise ArtifactError(
            f"{spec} has an empty dim, but Triton supports sizes from 1, or any size (-1)."
        )
    sizes = sizes[1:] if batched else sizes
    fields: dict[str, Any] = {
        "name": spec.name,
        "data_type": EnumValue(_data_type(spec)),
        # Triton has no tensors without dims: a scalar is (1,).
        "dims": sizes or [1],
    }
    if batched and not sizes:
        fields["reshape"] = {"shape": []}
    return fields


def check_types(record: GraphRecord, backend: Backend) -> None:
    """Raise ArtifactError if Triton's backend does not support a data type of the graph."""
    for spec in (*record.inputs, *record.outputs):
        if _data_type(spec) and spec.dtype in _NOT_TAKEN[backend]:
            raise ArtifactError(
                f"{spec}: Triton's {_BACKENDS[backend]} backend does not support {spec.dtype}.",
                do="Use an artifact in another precision, fp16 or fp32.",
            )


def _data_type(spec: TensorSpec) -> str:
    if spec.dtype not in DATA_TYPES:
        raise ArtifactError(
            f"{spec}: Triton does not support {spec.dtype}, expected one of "
            f"{', '.join(DATA_TYPES)}."
        )
    return DATA_TYPES[spec.dtype]
