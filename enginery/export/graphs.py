"""Check exported graphs, give their dims true sizes and readable names, record their interface.

The dims that a tracer declares are not reliable. It leaves height and width of an image model
dynamic although the position embeddings fit only one size, and declares the size of a feature map
as a constant although it depends on that of the image. So `probe_dims` runs the graph once at small
base sizes, and once more for each dynamic dim, with only that dim changed. An output dim that
changes is dynamic, and one that never changes is a constant.

The other functions take the path of an ONNX file, and optionally the `onnx.ModelProto` that was
read from it, because reading inline weights again takes time and memory. External data stays on
disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
from pydantic import TypeAdapter, ValidationError

from enginery.core.artifact.external_data import external_data_files, load_graph
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ExportError
from enginery.core.model.feeds import FeedLimits, make_feeds
from enginery.core.model.files import ModelConfig
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

Shapes = dict[str, tuple[int, ...]]
"""The shape of each output."""

_BASE = {"batch": 2}

_SPECS = TypeAdapter(tuple[TensorSpec, ...])


@dataclass
class ExportedModel:
    """The graphs that an exporter has written, before they are checked."""

    files: list[str]
    """The ONNX files, relative to the staging directory."""
    task: str
    model_type: str
    library: str
    fixed_dims: dict[str, int] = field(default_factory=dict)
    """Dims that the tracer left dynamic but the weights fix, such as the channels of an image."""
    config: ModelConfig = field(default_factory=ModelConfig)
    """The model's config.json, with the image size of its processor if it has none."""
    notes: list[str] = field(default_factory=list)
    imported: str = ""
    """The name of the .onnx file that was imported, for messages; empty for other models."""


def finish_graphs(exported: ExportedModel, out: Path) -> tuple[list[GraphRecord], str]:
    """Check the graphs that an exporter wrote to `out`, and correct their dims on disk.

    What was corrected is added to `exported.notes`.

    Returns:
        The records of the graphs for the manifest, and the precision of the first.

    Raises:
        ExportError: a graph is invalid, has a dim without a name, does not fit the task, or ONNX
            Runtime cannot load it.
    """
    limits = FeedLimits.from_config(exported.config)
    records, precisions = [], []
    for path in (out / file for file in exported.files):
        name = exported.imported or path.name
        model = name_dims(path, exported.fixed_dims)
        check_exported_graph(path, model, name=name)
        record = record_graph(path, out, model, name=name)
        precisions.append(float_precision(path, model))
        del model  # else its weights would be in memory beside those of the probing session
        if precisions[-1] == "bf16":
            notes = [f"{name} did not run: ONNX Runtime has no BF16 kernels on the CPU"]
        else:
            record, notes = probe_dims(path, record, limits, name=name)
        records.append(record)
        exported.notes.extend(notes)
    check_task_outputs(exported.task, records, name=exported.imported)
    return records, precisions[0]


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


def check_exported_graph(path: Path, model: Any = None, *, name: str = "") -> None:
    """Raise ExportError unless the graph is valid ONNX and its inputs have readable dims.

    An input without a shape, and a dynamic dim of an input without a name or with a generated one
    (`Addlogits_dim_1`), are errors too. `name` is what messages call the file.
    """
    name = name or path.name
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"{name} is not valid ONNX: {error}") from error
    model = load_graph(path) if model is None else model
    for value in model.graph.input:
        if not value.type.tensor_type.HasField("shape"):
            raise ExportError(
                f"{name}: input '{value.name}' has no shape; expected one of known rank."
            )
        for axis, dim in enumerate(_dims(value)):
            if not is_readable(dim):
                raise ExportError(
                    f"{name}: dim {axis} of input '{value.name}' is dynamic and "
                    f"{f'named {dim!r}' if dim else 'has no name'}; expected a name such as batch."
                )


def is_readable(dim: Dim) -> bool:
    """Return True for a size, a name such as `batch_size`, or a sum of these."""
    return all(_READABLE.match(term) for term in dim_terms(dim))


def record_graph(path: Path, root: Path, model: Any = None, *, name: str = "") -> GraphRecord:
    """Return the record of the graph's interface for the manifest; files are relative to `root`.

    `name` is what messages call the file.

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
        inputs=_specs(
            name or path.name, (v for v in model.graph.input if v.name not in initializers)
        ),
        outputs=_specs(name or path.name, model.graph.output),
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


def check_task_outputs(task: str, records: Sequence[GraphRecord], *, name: str = "") -> None:
    """Raise ExportError if no graph has an output of the task, or a graph has no batch dim.

    `name` is what the message calls the only graph; empty for the names of the graphs.
    """
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
                f"{name or record.file}: no input has a dynamic dim 'batch'; "
                f"found {'; '.join(str(spec) for spec in record.inputs)}."
            )


def base_sizes(record: GraphRecord, limits: FeedLimits) -> dict[str, int]:
    """Return small sizes of a graph's dynamic dims, at which most models run."""
    known = {**limits.sizes, **_BASE}
    names = dynamic_dims(record.inputs)
    return {name: known.get(name, max(8, limits.min_sequence)) for name in names}


def probe_dims(
    path: Path, record: GraphRecord, limits: FeedLimits, *, name: str = ""
) -> tuple[GraphRecord, list[str]]:
    """Run the graph at several sizes, and correct its dims on disk.

    `name` is what messages and notes call the file.

    Returns:
        The corrected record, and notes on what was changed and why.

    Raises:
        ExportError: ONNX Runtime cannot load the graph.
    """
    name = name or path.name
    session = _open(path, name)
    if any(spec.dtype in ("string", "bfloat16") for spec in record.inputs):
        return record, []
    base = base_sizes(record, limits)
    names = list(base)
    before = _run(session, record, base, limits)
    if isinstance(before, str):
        return record, [f"dims not probed: {name} does not run at {base} ({before})"]
    changes: dict[str, list[Dim]] = {
        spec.name: list(spec.dims) for spec in (*record.inputs, *record.outputs)
    }
    notes = []
    fixed: dict[str, int] = {}
    if {"height", "width"} <= set(names):
        other = {**base, "height": base["height"] + 32, "width": base["width"] + 64}
        if isinstance(_run(session, record, other, limits), str):
            fixed = {"height": base["height"], "width": base["width"]}
            size = f"{base['height']} × {base['width']}"
            notes.append(f"height and width are fixed at {size}: the model rejects other sizes")
    for spec in record.inputs:
        changes[spec.name] = [fixed.get(str(dim), dim) for dim in spec.dims]
    steps = {"height": 32, "width": 32}  # smaller steps can stay within one patch
    varied = {
        dim: _run(session, record, {**base, dim: base[dim] + steps.get(dim, 1)}, limits)
        for dim in names
        if dim not in fixed
    }
    for spec in record.outputs:
        changes[spec.name] = _output_dims(spec.name, spec.dims, before, varied, names)
    if changes != {s.name: list(s.dims) for s in (*record.inputs, *record.outputs)}:
        _set_interface_dims(path, changes)
    corrected = {
        "inputs": tuple(replace(spec, dims=tuple(changes[spec.name])) for spec in record.inputs),
        "outputs": tuple(replace(spec, dims=tuple(changes[spec.name])) for spec in record.outputs),
    }
    return record.model_copy(update=corrected), notes


def _set_interface_dims(path: Path, changes: Mapping[str, Sequence[Dim]]) -> None:
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


def _output_dims(
    output: str,
    dims: tuple[Dim, ...],
    before: Shapes,
    varied: Mapping[str, Shapes | str],
    names: list[str],
) -> list[Dim]:
    """Return the dims of an output: declared names of input dims, else what the runs show."""
    true: list[Dim] = []
    for axis, dim in enumerate(dims):
        follows = [
            name
            for name, after in varied.items()
            if not isinstance(after, str) and after[output][axis] != before[output][axis]
        ]
        declared = isinstance(dim, str) and dim != "" and set(dim_terms(dim)) <= set(names)
        if declared:
            true.append(dim)
        elif not follows:
            true.append(before[output][axis])
        elif follows == ["batch"] and before[output][axis] == _BASE["batch"]:
            true.append("batch")
        else:
            true.append(f"{output}_{_axis_name(axis, len(dims))}")
    return true


def _axis_name(axis: int, rank: int) -> str:
    """Name an axis: feature maps are (batch, channels, height, width), others have a sequence."""
    if rank == 4:
        return ("batch", "channels", "height", "width")[axis]
    return "sequence" if axis == 1 else f"dim_{axis}"


def _open(path: Path, name: str) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ExportError(f"{name} cannot be loaded by ONNX Runtime: {error}") from error


def _run(
    session: Any, record: GraphRecord, sizes: Mapping[str, int], limits: FeedLimits
) -> Shapes | str:
    """Return the output shapes at these sizes, or the message of the failure."""
    feeds = make_feeds(record.inputs, sizes, limits, seed=0)
    try:
        values = session.run([spec.name for spec in record.outputs], feeds)
    except Exception as error:
        return str(error)
    return {spec.name: v.shape for spec, v in zip(record.outputs, values, strict=True)}


def _specs(file: str, values: Iterable[Any]) -> tuple[TensorSpec, ...]:
    """Return the specs of inputs or outputs; raise ExportError if one does not fit a manifest."""
    found = []
    for value in values:
        element = value.type.tensor_type.elem_type
        dtype = _DTYPES.get(element) or onnx.TensorProto.DataType.Name(element).lower()
        found.append({"name": value.name, "dtype": dtype, "dims": _dims(value)})
    try:
        return _SPECS.validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        name = found[int(first["loc"][0])]["name"]
        raise ExportError(
            f"{file}: '{name[:40]}': {'.'.join(map(str, first['loc'][1:]))}: {first['msg']}.",
            do="Give the model's inputs and outputs shorter names and sizes that fit 32 bits.",
        ) from error


def _dims(value: Any) -> list[Dim]:
    shape = value.type.tensor_type.shape
    return [
        dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dim.dim_param
        for dim in shape.dim
    ]
