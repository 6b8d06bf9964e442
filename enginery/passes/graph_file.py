"""Graphs between disk and memory, with weights of any size.

    >>> model = read_graph(artifact.model)
    >>> data_files = write_graph(model, directory / "model.onnx")

Weights outside the file are read when they are needed, and written one at a time.
"""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import onnx_ir as ir

from enginery.core.errors import ExportError, SourceError
from enginery.core.external_data import external_data_files, load_graph

# A protobuf message ends at 2 GB, and while it is written the weights are in memory twice.
_INSIDE_BYTES = 256 << 20
_OUTSIDE_BYTES = 64 << 20


def read_graph(path: Path) -> ir.Model:
    """The graph of a file; external weights stay on disk until they are read.

    Raises:
        SourceError: the file is not ONNX, or its external data are missing.
    """
    # Graphs have cycles: one that was read before is still in memory, and its files are mapped.
    gc.collect()
    proto = load_graph(path)
    for name in external_data_files(path, proto):
        if (links := (path.parent / name).stat().st_nlink) > 1:
            raise SourceError(
                f"{path.parent / name} has {links} hard links, and onnx-ir reads no external data "
                "that other names lead to.",
                do=f"Make it a file of its own: cp {name} copy && mv copy {name}",
            )
    model = ir.from_proto(proto)
    ir.external_data.set_base_dir(model.graph, path.resolve().parent)
    _load_constants(model)
    return model


def _load_constants(model: ir.Model) -> None:
    """Read the tensors of Constant nodes, which exporters of large models put outside, too.

    `ir.save` moves initializers alone: a constant would go on pointing into the file it came from.
    """
    for graph in model.graphs():
        for node in graph:
            for name, attribute in list(node.attributes.items()):
                tensor = attribute.value
                if isinstance(tensor, ir.ExternalTensor):
                    inside = ir.tensor(np.array(tensor.numpy()), name=tensor.name)
                    node.attributes[name] = ir.AttrTensor(name, inside)


def externalize_weights(path: Path, folder: Path) -> Path:
    """The same graph with its weights outside the file, written to `folder` unless they are.

    Who loads a graph with its weights inside holds them two or three times over.
    """
    model = read_graph(path)
    inside = sum(
        value.const_value.nbytes
        for graph in model.graphs()
        for value in graph.initializers.values()
        if value.const_value is not None and not isinstance(value.const_value, ir.ExternalTensor)
    )
    if inside <= _OUTSIDE_BYTES:
        return path
    target = folder / path.name
    folder.mkdir(parents=True, exist_ok=True)
    write_graph(model, target, max_inline_bytes=0)
    return target


def weight_bytes(model: ir.Model) -> int:
    """The size of all initializers, in bytes."""
    return sum(
        value.const_value.nbytes
        for graph in model.graphs()
        for value in graph.initializers.values()
        if value.const_value is not None
    )


def write_graph(
    model: ir.Model, path: Path, *, max_inline_bytes: int = _INSIDE_BYTES
) -> tuple[str, ...]:
    """Writes the graph; weights go to `model.onnx.data` beside it when they are large.

    Args:
        model: stays as it is; it may read from files, but not from those that are written.
        path: the ONNX file.
        max_inline_bytes: up to this size weights are stored inside the file.

    Returns:
        The names of the external data files, of which there is at most one.
    """
    if weight_bytes(model) <= max_inline_bytes:
        ir.external_data.load_to_model(model)
        ir.save(model, path)
        return ()
    data = f"{path.name}.data"
    ir.save(model, path, external_data=data)
    return (data,)


def check_graph(path: Path) -> None:
    """Raises ExportError unless the file is valid ONNX with consistent types.

    Graphs with ops of another domain are checked as far as ONNX knows them.
    """
    import onnx

    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"{path.name} is not valid ONNX: {error}") from error
