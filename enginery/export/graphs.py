"""Check exported graphs, give their dims readable names, and record their interface.

The functions take the path of an ONNX file, and optionally the `onnx.ModelProto` that was read from
it, because reading inline weights again takes time and memory. External data stays on disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from pydantic import TypeAdapter, ValidationError

from enginery.core.artifact.external_data import external_data_files, load_graph
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ExportError
from enginery.core.shapes import (
    Dim,
    TensorSpec,
    canonical_dim,
    dim_terms,
    dynamic_dims,
    resolve_dim,
)

_READABLE = re.compile(r"^[a-z][a-z0-9_]*$")

_DTYPES = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.DOUBLE: "float64",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "bfloat16",
    onnx.TensorProto.INT64: "int64",
    onnx.TensorProto.INT32: "int32",
    onnx.TensorProto.INT8: "int8",
    onnx.TensorProto.UINT8: "uint8",
    onnx.TensorProto.BOOL: "bool",
    onnx.TensorProto.STRING: "string",
}

# The outputs from which the result of a task is read. Other tasks may have any outputs.
_TASK_OUTPUTS = {
    "feature-extraction": (
        "last_hidden_state",
        "sentence_embedding",
        "token_embeddings",
        "pooler_output",
        "image_embeds",
        "text_embeds",
    ),
    "text-classification": ("logits",),
    "token-classification": ("logits",),
    "fill-mask": ("logits",),
    "question-answering": ("start_logits",),
    "image-classification": ("logits",),
    "audio-classification": ("logits",),
    "text-generation": ("logits",),
    "text-generation-with-past": ("logits",),
}

_SPECS = TypeAdapter(tuple[TensorSpec, ...])


def name_dims(path: Path, fixed: Mapping[str, int]) -> Any:
    """Give every dim its canonical name, and set the dims in `fixed` to their sizes; save the file.

    Returns:
        The `onnx.ModelProto` as it is now on disk, without external data.
    """
    model = load_graph(path)
    values = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    for value in values:
        for dim in value.type.tensor_type.shape.dim:
            name = canonical_dim(dim.dim_param) if dim.dim_param else ""
            if name in fixed:
                dim.dim_value = fixed[name]
            elif name and not dim_terms(name):
                dim.dim_value = resolve_dim(name, {})
            elif name:
                dim.dim_param = name
    onnx.save(model, str(path))
    return model


def check_exported_graph(path: Path, model: Any = None) -> None:
    """Raise ExportError unless the graph is valid ONNX and its inputs have readable dims.

    An input without a shape, and a dynamic dim of an input without a name or with a generated one
    (`Addlogits_dim_1`), are errors too.
    """
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"{path.name} is not valid ONNX: {error}") from error
    model = load_graph(path) if model is None else model
    for value in model.graph.input:
        if not value.type.tensor_type.HasField("shape"):
            raise ExportError(
                f"{path.name}: input '{value.name}' has no shape; expected one of known rank."
            )
        for axis, dim in enumerate(_dims(value)):
            if not all(_READABLE.match(term) for term in dim_terms(dim)):
                raise ExportError(
                    f"{path.name}: dim {axis} of input '{value.name}' is dynamic and "
                    f"{f'named {dim!r}' if dim else 'has no name'}; expected a name such as batch."
                )


def record_graph(path: Path, root: Path, model: Any = None) -> GraphRecord:
    """Return the record of the graph's interface for the manifest; files are relative to `root`.

    Raises:
        ExportError: a name or a size does not fit a manifest.
    """
    model = load_graph(path) if model is None else model
    data = external_data_files(path, model)
    folder = path.parent.relative_to(root)
    initializers = {tensor.name for tensor in model.graph.initializer}
    return GraphRecord(
        file=path.relative_to(root).as_posix(),
        opset=next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0),
        inputs=_specs(path, (v for v in model.graph.input if v.name not in initializers)),
        outputs=_specs(path, model.graph.output),
        data_files=tuple((folder / name).as_posix() for name in data),
    )


def float_precision(path: Path, model: Any = None) -> str:
    """Return the type of most of the graph's weights: fp32, fp16 or bf16."""
    model = load_graph(path) if model is None else model
    counts = {"fp32": 0, "fp16": 0, "bf16": 0}
    names = {
        onnx.TensorProto.FLOAT: "fp32",
        onnx.TensorProto.FLOAT16: "fp16",
        onnx.TensorProto.BFLOAT16: "bf16",
    }
    for tensor in model.graph.initializer:
        if tensor.data_type in names:
            size = 1
            for dim in tensor.dims:
                size *= dim
            counts[names[tensor.data_type]] += size
    return max(counts, key=lambda name: counts[name])


def check_task_outputs(task: str, records: Sequence[GraphRecord]) -> None:
    """Raise ExportError if no graph has an output of the task, or a graph has no batch dim."""
    wanted = _TASK_OUTPUTS.get(task)
    found = [spec.name for record in records for spec in record.outputs]
    if wanted and not any(name in wanted for name in found):
        raise ExportError(
            f"the task {task} needs the output {' or '.join(wanted)}, "
            f"but the graph has {', '.join(found)}."
        )
    for record in records:
        if "batch" not in dynamic_dims(record.inputs) and task != "unknown":
            raise ExportError(
                f"{record.file}: no input has a dynamic dim 'batch'; "
                f"found {'; '.join(str(spec) for spec in record.inputs)}."
            )


def set_interface_dims(path: Path, changes: Mapping[str, Sequence[Dim]]) -> None:
    """Set the dims of the inputs and outputs named in `changes`, and save the file."""
    model = load_graph(path)
    for value in [*model.graph.input, *model.graph.output]:
        if value.name in changes:
            for dim, new in zip(value.type.tensor_type.shape.dim, changes[value.name], strict=True):
                if isinstance(new, int):
                    dim.dim_value = new
                else:
                    dim.dim_param = new
    onnx.save(model, str(path))


def _specs(path: Path, values: Iterable[Any]) -> tuple[TensorSpec, ...]:
    """Return the specs of inputs or outputs; raise ExportError if one does not fit a manifest."""
    found = [
        {"name": v.name, "dtype": _dtype(v.type.tensor_type.elem_type), "dims": _dims(v)}
        for v in values
    ]
    try:
        return _SPECS.validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        name = found[int(first["loc"][0])]["name"]
        raise ExportError(
            f"{path.name}: '{name[:40]}': {'.'.join(map(str, first['loc'][1:]))}: {first['msg']}.",
            do="Give the model's inputs and outputs shorter names and sizes that fit 32 bits.",
        ) from error


def _dims(value: Any) -> list[Dim]:
    shape = value.type.tensor_type.shape
    return [
        dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dim.dim_param
        for dim in shape.dim
    ]


def _dtype(element: int) -> str:
    if element in _DTYPES:
        return _DTYPES[element]
    return str(onnx.TensorProto.DataType.Name(element)).lower()
