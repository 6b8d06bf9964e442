"""Determine which dims of a graph are dynamic by running it at several sizes.

The dims that a tracer declares are not reliable. It leaves height and width of an image model
dynamic although the position embeddings only fit one size, and declares the size of a feature map
as a constant although it depends on that of the image. So the graph runs once at small base sizes,
and once more for each dynamic dim, with only that dim changed. An output dim that changes is
dynamic, and one that never changes is a constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ExportError
from enginery.core.model.feeds import FeedLimits, make_feeds
from enginery.core.shapes import Dim, dim_terms, dynamic_dims
from enginery.export.graphs import set_interface_dims

Shapes = dict[str, tuple[int, ...]]


def probe_dims(
    path: Path, record: GraphRecord, limits: FeedLimits
) -> tuple[GraphRecord, list[str]]:
    """Run the graph at several sizes, and correct its dims on disk.

    Returns:
        The corrected record, and notes on what was changed and why.

    Raises:
        ExportError: ONNX Runtime cannot load the graph.
    """
    session = _open(path)
    if any(spec.dtype in ("string", "bfloat16") for spec in record.inputs):
        return record, []
    names = dynamic_dims(record.inputs)
    base = _base_sizes(names, limits)
    before = _run(session, record, base, limits)
    if isinstance(before, str):
        return record, [f"dims not probed: {path.name} does not run at {base} ({before})"]
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
    varied = {
        name: _run(session, record, {**base, name: base[name] + _step(name)}, limits)
        for name in names
        if name not in fixed
    }
    for spec in record.outputs:
        changes[spec.name] = _output_dims(spec.name, spec.dims, before, varied, names)
    if changes != {s.name: list(s.dims) for s in (*record.inputs, *record.outputs)}:
        set_interface_dims(path, changes)
    corrected = {
        "inputs": tuple(replace(spec, dims=tuple(changes[spec.name])) for spec in record.inputs),
        "outputs": tuple(replace(spec, dims=tuple(changes[spec.name])) for spec in record.outputs),
    }
    return record.model_copy(update=corrected), notes


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


_BASE = {"batch": 2}


def _base_sizes(names: list[str], limits: FeedLimits) -> dict[str, int]:
    known = {**limits.sizes, **_BASE}
    return {name: known.get(name, max(8, limits.min_sequence)) for name in names}


def _step(name: str) -> int:
    return 32 if name in ("height", "width") else 1


def _open(path: Path) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ExportError(f"{path.name} cannot be loaded by ONNX Runtime: {error}") from error


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
