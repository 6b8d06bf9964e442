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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from enginery.core.model.random_numbers import random_notes
from enginery.core.paths import list_tree
from enginery.core.shapes import (
    Dim,
    TensorSpec,
    canonical_dim,
    dim_terms,
    dynamic_dims,
    is_batch,
    resolve_dim,
)
from enginery.core.trust.onnx_structure import ELEMENT_TYPES
from enginery.export.padding import GraphSession, measure_padding
from enginery.runtime.image.processor import PIXEL_MASK

_READABLE = re.compile(r"^[a-z][a-z0-9_]*$")

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

_ROWS, _SMALL, _WAVEFORM = 2, 8, 256
_CHANNELS = "channels"

_SPECS = TypeAdapter(tuple[TensorSpec, ...])


@dataclass(frozen=True)
class TracedInputs:
    """What an exporter has traced a graph with."""

    shapes: Shapes = field(default_factory=dict)
    """Shape of each input."""
    fixed: frozenset[str] = frozenset()
    """Dims of which the model rejects other sizes, although its graph may take them."""


@dataclass
class ExportedModel:
    """The graphs that an exporter has written, before they are checked."""

    files: list[str]
    """The ONNX files, relative to the staging directory."""
    task: str
    model_type: str
    library: str
    traced: dict[str, TracedInputs] = field(default_factory=dict)
    """The inputs that each file was traced with; empty if nothing is known of them."""
    config: ModelConfig = field(default_factory=ModelConfig)
    """The model's config.json, with the image size of its processor if it has none."""
    notes: list[str] = field(default_factory=list)
    from_registry: bool = False
    """True if the outputs were chosen for the model type, as Optimum's registry does: they may be
    others than the task's."""
    length_limit: int | None = None
    """Longest input, in tokens, for which the graphs do what the model does; None for its own."""
    exporter: str = ""
    """The exporter that `auto` stands for, or that the options name; empty for an .onnx file."""
    imported: str = ""
    """The name of the .onnx file that was imported, for messages; empty for other models."""


def list_graphs(directory: Path) -> list[str]:
    """Return the relative paths of all ONNX files below a directory, sorted.

    Raises:
        OSError: a directory cannot be listed.
    """
    graphs = [path for path in list_tree(directory) if path.suffix == ".onnx"]
    return sorted(path.relative_to(directory).as_posix() for path in graphs)


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
        model = name_dims(path)
        check_exported_graph(path, model, name=name)
        record = record_graph(path, out, model, name=name)
        precisions.append(float_precision(path, model))
        op_types = list(_op_types(model.graph, *model.functions))
        draws = random_notes(op_types, name)
        del model  # else its weights would be in memory beside those of the probing session
        traced = exported.traced.get(path.name, TracedInputs())
        samples = sample_sizes(record, traced.shapes)
        fixed = {dim: size for dim, size in samples.items() if dim in traced.fixed | {_CHANNELS}}
        record = fix_dims(path, record, fixed)
        if precisions[-1] == "bf16":
            notes = [f"{name} did not run: ONNX Runtime has no BF16 kernels on the CPU"]
        else:
            session = open_session(path, name)
            record, notes = probe_dims(path, record, limits, samples, name=name, session=session)
            # Dynamic INT8 takes its scales from the whole batch, with any padding.
            if "generation" not in exported.task and "DynamicQuantizeLinear" not in op_types:
                graph = GraphSession(session, record, precisions[-1])
                padding, padding_notes = measure_padding(graph, out, limits)
                record = record.model_copy(update={"padding": padding})
                notes += padding_notes
            del session
        if exported.imported:
            usual = {dim: size for dim, size in samples.items() if dim in ("height", "width")}
            usual = {dim: usual[dim] for dim in dynamic_dims(record.inputs) if dim in usual}
            record = record.model_copy(update={"sample_sizes": {**record.sample_sizes, **usual}})
        notes += [_fixed_note(dim, fixed[dim]) for dim in sorted(traced.fixed & set(fixed))]
        notes += draws
        records.append(record)
        exported.notes.extend(notes)
    exported.notes.extend(_check_task(exported, records))
    return records, precisions[0]


def name_dims(path: Path) -> Any:
    """Give every dim its canonical name, and save the file.

    The only batch of a graph is `batch`, even if the exporter calls it `image_batch`.

    Returns:
        The `onnx.ModelProto` as it is now on disk, without external data.
    """
    model = load_graph(path)
    values = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    for value in values:
        for dim in value.type.tensor_type.shape.dim:
            name = canonical_dim(dim.dim_param) if dim.dim_param else ""
            if name and not dim_terms(name):
                dim.dim_value = resolve_dim(name, {})
            elif name:
                dim.dim_param = name
    batches = {
        term
        for value in model.graph.input
        for dim in value.type.tensor_type.shape.dim
        for term in dim_terms(dim.dim_param)
        if is_batch(term)
    }
    if len(batches) == 1:
        for value in values:
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param in batches:
                    dim.dim_param = "batch"
    onnx.save(model, str(path))
    return model


def sample_sizes(record: GraphRecord, shapes: Shapes) -> dict[str, int]:
    """Return the sizes of a graph's dynamic dims in the inputs that it was traced with."""
    return {
        dim: size
        for spec in record.inputs
        if spec.name in shapes and len(shapes[spec.name]) == len(spec.dims)
        for dim, size in zip(spec.dims, shapes[spec.name], strict=True)
        if isinstance(dim, str) and dim_terms(dim) == [dim]
    }


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
    check_tensors(name, model)
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


def check_tensors(name: str, model: Any) -> None:
    """Raise ExportError if an input or output of a graph is a sequence, a map or another container.

    Args:
        name: what the message calls the file.
        model: the `onnx.ModelProto`.
    """
    for role, values in (("input", model.graph.input), ("output", model.graph.output)):
        for value in values:
            kind = value.type.WhichOneof("value")
            if kind in ("tensor_type", None):  # the checker reports one without a type
                continue
            producer = next((n.op_type for n in model.graph.node if value.name in n.output), "")
            raise ExportError(
                f"{name}: the {role} '{value.name}' is {_CONTAINERS[kind]}, expected a tensor.",
                do=_CONTAINER_REMEDIES.get(
                    producer,
                    f"Change the file so that this {role} is a tensor: take SequenceConstruct, "
                    "SplitToSequence or Optional out, or return the tensors one by one.",
                ),
            )


_CONTAINERS = {
    "sequence_type": "a sequence",
    "optional_type": "an optional",
    "map_type": "a map",
    "sparse_tensor_type": "a sparse tensor",
    "opaque_type": "an opaque value",
}
"""Kind of a type -> its name for messages."""
_CONTAINER_REMEDIES = {
    "ZipMap": "Convert the model again without ZipMap: with skl2onnx, "
    "to_onnx(model, X, options={'zipmap': False}); with onnxmltools, "
    "convert_…(model, …, zipmap=False). The output is then a tensor of probabilities.",
}
"""Operator that makes a container -> what to do."""


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


def _op_types(*graphs: Any) -> Iterator[str]:
    """Yield the op types of ONNX's own domain in graphs or functions, and in their subgraphs."""
    for node in (node for graph in graphs for node in graph.node):
        if not node.domain:
            yield node.op_type
        for attribute in node.attribute:
            yield from _op_types(attribute.g, *attribute.graphs)


def _check_task(exported: ExportedModel, records: Sequence[GraphRecord]) -> list[str]:
    """Raise ExportError if the graphs do not fit the task or have no batch dim; return notes."""
    notes = []
    task_outputs = _TASK_OUTPUTS.get(exported.task)
    outputs = [spec.name for record in records for spec in record.outputs]
    if task_outputs and not any(name in task_outputs for name in outputs):
        if not exported.from_registry:
            raise ExportError(
                f"the task {exported.task} needs the output {' or '.join(task_outputs)}, "
                f"but the graph has {', '.join(outputs)}."
            )
        notes.append(
            f"the outputs {', '.join(outputs)} are not those of {exported.task}; they are tensors"
        )
    batched = [any(map(is_batch, dynamic_dims(record.inputs))) for record in records]
    # A part of a generator can have rows of another kind, such as MusicGen's codebooks.
    enough = any(batched) if exported.from_registry else all(batched)
    if not enough and exported.from_registry and exported.task == "text-to-audio":
        notes.append("the graphs take one text at a time, as Optimum exports SpeechT5")
    elif not enough and exported.task != "unknown":
        record = records[batched.index(False)]
        raise ExportError(
            f"{exported.imported or record.file}: no input has a dynamic dim 'batch'; "
            f"found {'; '.join(str(spec) for spec in record.inputs)}."
        )
    return notes


def base_sizes(
    record: GraphRecord, limits: FeedLimits, samples: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return small sizes of a graph's dynamic dims, at which most models run.

    Those that the graph was traced with are preferred; there are always two rows.
    """
    preferred = {**limits.sizes, **(samples or {})}

    def size(name: str) -> int:
        rows = limits.rows(name, _ROWS)
        return preferred.get(name, max(_SMALL, limits.min_sequence)) if rows is None else rows

    return {name: size(name) for name in dynamic_dims(record.inputs)}


def probe_dims(
    path: Path,
    record: GraphRecord,
    limits: FeedLimits,
    samples: Mapping[str, int] | None = None,
    *,
    name: str = "",
    session: Any = None,
) -> tuple[GraphRecord, list[str]]:
    """Run the graph at several sizes, and correct its dims on disk.

    A dim of which the graph takes only one size is fixed, except those of rows and texts.

    Args:
        path: the ONNX file.
        record: its record.
        limits: limits on its inputs.
        samples: sizes that the graph was traced with.
        name: what messages and notes call the file.
        session: the file as ONNX Runtime has loaded it; None to load it.

    Returns:
        The corrected record, and notes on what was changed and why.

    Raises:
        ExportError: ONNX Runtime cannot load the graph.
    """
    name = name or path.name
    session = session or open_session(path, name)
    if any(spec.dtype in ("string", "bfloat16") for spec in record.inputs):
        return record, []
    base = base_sizes(record, limits, samples)
    before = _run(session, record, base, limits)
    fixed: dict[str, int] = {}
    if isinstance(before, str) and any(spec.dims[:1] == (1,) for spec in record.inputs):
        # Other inputs of SpeechT5's decoder have one row, so its cache has one, too.
        fixed = {dim: 1 for dim in base if is_batch(dim)}
        base |= fixed
        before = _run(session, record, base, limits)
    if isinstance(before, str):
        return record, [f"dims not probed: {name} does not run at {base} ({before})"]

    def run(**sizes: int) -> Shapes | str:
        return _run(session, record, base | sizes, limits)

    notes = [_fixed_note(dim, size) for dim, size in fixed.items()]
    if {"height", "width"} <= set(base):
        other = run(height=base["height"] + 32, width=base["width"] + 64)
        if isinstance(other, str):
            fixed |= {"height": base["height"], "width": base["width"]}
            size = f"{base['height']} × {base['width']}"
            notes.append(f"height and width are fixed at {size}: the model rejects other sizes")
    free = _free_dims(record.inputs)
    varied: dict[str, Shapes | str] = {}
    steps: dict[str, tuple[int, int]] = {}
    for dim in base:
        if dim in fixed:
            continue
        other_size, varied[dim] = _vary(run, dim, base[dim])
        steps[dim] = base[dim], other_size
        if isinstance(varied[dim], str) and dim not in free:
            fixed[dim] = base[dim]
            notes.append(_fixed_note(dim, base[dim]))
    varied = {dim: after for dim, after in varied.items() if dim not in fixed}
    outputs = {s.name: _output_dims(s.name, s.dims, before, varied, steps) for s in record.outputs}
    record = fix_dims(path, record, fixed, outputs)
    small = max(_SMALL, limits.min_sequence)
    natural = {
        dim: base[dim]
        for dim in varied
        if dim not in limits.sizes and not is_batch(dim)
        if (base[dim] > small and isinstance(run(**{dim: small}), str))
        or not (dim in free or (dim == "sequence" and limits.min_sequence > 1))
    }
    return record.model_copy(update={"sample_sizes": natural}), notes


def _vary(run: Callable[..., Shapes | str], dim: str, size: int) -> tuple[int, Shapes | str]:
    """Run a graph at another size of one dim; the last message if it rejects all."""
    if dim in ("height", "width"):
        sizes = [size + 32, size - 32]  # smaller steps can stay within one patch
    elif is_batch(dim):
        sizes = [size + 1, size - 1, 2 * size]  # a detector takes some texts for each image
    elif size >= _WAVEFORM:
        sizes = [2 * size, size // 2, size + 1, size - 1]  # many samples make one position
    else:
        sizes = [size + 1, size - 1]
    shapes: Shapes | str = ""
    for varied in sizes:
        if varied > 0 and not isinstance(shapes := run(**{dim: varied}), str):
            return varied, shapes
    return size, shapes


def _fixed_note(dim: str, size: int) -> str:
    return f"{dim} is fixed at {size}: the model rejects other sizes"


def _free_dims(inputs: Sequence[TensorSpec]) -> set[str]:
    """Return the dims of rows and of texts: positions of integers, of a cache, of an encoder."""
    dims = [dim for spec in inputs for dim in spec.dims[:1]]
    integers = [spec for spec in inputs if spec.dtype.startswith(("int", "bool"))]
    integers = [spec for spec in integers if spec.name != PIXEL_MASK]
    dims += [dim for spec in integers for dim in spec.dims[1:2]]
    dims += [
        dim
        for spec in inputs
        if spec.name.startswith(("past_key_values", "encoder_", "inputs_embeds"))
        for dim in spec.dims
    ]
    return {term for dim in dims for term in dim_terms(dim)}


def fix_dims(
    path: Path,
    record: GraphRecord,
    fixed: Mapping[str, int],
    outputs: Mapping[str, Sequence[Dim]] | None = None,
) -> GraphRecord:
    """Set dims to sizes, and those of outputs as given, on disk and in the record."""
    changes = {
        spec.name: [fixed.get(dim, dim) if isinstance(dim, str) else dim for dim in spec.dims]
        for spec in (*record.inputs, *record.outputs)
    } | dict(outputs or {})
    if changes != {s.name: list(s.dims) for s in (*record.inputs, *record.outputs)}:
        _set_dims(path, changes, fixed)
    corrected = {
        kind: tuple(replace(spec, dims=tuple(changes[spec.name])) for spec in specs)
        for kind, specs in (("inputs", record.inputs), ("outputs", record.outputs))
    }
    return record.model_copy(update=corrected)


def _set_dims(path: Path, changes: Mapping[str, Sequence[Dim]], fixed: Mapping[str, int]) -> None:
    """Set the dims of the inputs and outputs in `changes`, and fixed ones of values inside."""
    model = load_graph(path)
    for value in [*model.graph.input, *model.graph.output, *model.graph.value_info]:
        dims = value.type.tensor_type.shape.dim
        new = changes.get(value.name, [fixed.get(dim.dim_param) for dim in dims])
        for dim, size in zip(dims, new, strict=True):
            if isinstance(size, int):
                dim.dim_value = size
            elif size is not None:
                dim.dim_param = size
    onnx.save(model, str(path))


def _output_dims(
    output: str,
    dims: tuple[Dim, ...],
    before: Shapes,
    varied: Mapping[str, Shapes | str],
    steps: Mapping[str, tuple[int, int]],
) -> list[Dim]:
    """Return the dims of an output: declared names of input dims, else what the runs show.

    Args:
        output: its name.
        dims: its declared dims.
        before: the shapes of the first run.
        varied: the shapes of the run in which a dim had another size, or why it failed.
        steps: the sizes of these dims in both runs.
    """
    true: list[Dim] = []
    unknown = any(isinstance(after, str) for after in varied.values())
    for axis, dim in enumerate(dims):
        later = {
            name: after[output][axis]
            for name, after in varied.items()
            if not isinstance(after, str)
        }
        follows = [name for name, size in later.items() if size != before[output][axis]]
        declared = isinstance(dim, str) and dim != "" and set(dim_terms(dim)) <= set(varied)
        if declared and is_batch(str(dim)) and not unknown:
            declared = dim in follows
        if declared:
            true.append(dim)
        elif not follows and not unknown:
            true.append(before[output][axis])
        elif "batch" in follows and all(map(is_batch, follows)) and before[output][axis] == _ROWS:
            true.append("batch")
        elif (
            not unknown
            and len(follows) == 1
            and (before[output][axis], later[follows[0]]) == steps[follows[0]]
        ):
            true.append(follows[0])
        else:
            true.append(f"{output}_{_axis_name(axis, len(dims))}")
    return true


def _axis_name(axis: int, rank: int) -> str:
    """Name an axis: feature maps are (batch, channels, height, width), others have a sequence."""
    if rank == 4:
        return ("batch", "channels", "height", "width")[axis]
    return "sequence" if axis == 1 else f"dim_{axis}"


def open_session(path: Path, name: str) -> Any:
    """Load a graph for the CPU as it is, without optimizations.

    Raises:
        ExportError: ONNX Runtime cannot load it.
    """
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
    specs = []
    for value in values:
        element = value.type.tensor_type.elem_type
        dtype = ELEMENT_TYPES.get(element)
        if dtype is None:
            raise ExportError(
                f"{file}: '{value.name[:40]}' has the element type {element}, which ONNX does not "
                "define.",
                do="The file is faulty or malicious: export the model again.",
            )
        specs.append({"name": value.name, "dtype": dtype, "dims": _dims(value)})
    try:
        return _SPECS.validate_python(specs)
    except ValidationError as error:
        first = error.errors()[0]
        name = specs[int(first["loc"][0])]["name"]
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
