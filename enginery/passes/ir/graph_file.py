"""Read, write and check ONNX files with weights of any size.

External weights are read when they are needed, and written one at a time.
"""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import onnx_ir as ir

from enginery.core.artifact.external_data import external_data_files, load_graph
from enginery.core.errors import ExportError, SourceError
from enginery.passes.ir.op_types import register_onnxruntime_operators

# A protobuf message is limited to 2 GB, and writing it holds the weights in memory twice.
_INSIDE_BYTES = 256 << 20
_OUTSIDE_BYTES = 64 << 20


def read_graph(path: Path) -> ir.Model:
    """Read the graph of a file; external weights stay on disk until they are used.

    Raises:
        SourceError: the file is not ONNX, or its external data is missing or hard-linked.
    """
    # Graphs contain reference cycles: an earlier one may still be in memory with its files mapped.
    gc.collect()
    proto = load_graph(path)
    for name in external_data_files(path, proto):
        if (links := (path.parent / name).stat().st_nlink) > 1:
            raise SourceError(
                f"{path.parent / name} has {links} hard links, and onnx-ir reads external data "
                "only from a file with one.",
                do=f"Replace it with a copy: cp {name} copy && mv copy {name}",
            )
    model = ir.from_proto(proto)
    ir.external_data.set_base_dir(model.graph, path.resolve().parent)
    _load_constants(model)
    return model


def _load_constants(model: ir.Model) -> None:
    """Load the external tensors of Constant nodes, which exporters of large models write.

    `ir.save` only moves initializers: a constant would still point into the original file.
    """
    for graph in model.graphs():
        for node in graph:
            for name, attribute in list(node.attributes.items()):
                tensor = attribute.value
                if isinstance(tensor, ir.ExternalTensor):
                    inside = ir.tensor(np.array(tensor.numpy()), name=tensor.name)
                    node.attributes[name] = ir.AttrTensor(name, inside)


def externalize_weights(path: Path, folder: Path) -> Path:
    """Return a file of the graph with external weights, written to `folder` if needed.

    Loading a graph with inline weights takes two to three times their memory.
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
    """Return the size of all initializers in bytes."""
    return sum(
        value.const_value.nbytes
        for graph in model.graphs()
        for value in graph.initializers.values()
        if value.const_value is not None
    )


def write_graph(
    model: ir.Model, path: Path, *, max_inline_bytes: int = _INSIDE_BYTES
) -> tuple[str, ...]:
    """Write the graph; large weights go to `model.onnx.data` beside it.

    Args:
        model: the graph, which is not changed. Its external data must not be in the files written.
        path: the ONNX file.
        max_inline_bytes: weights up to this total size are stored inside the file.

    Returns:
        The names of the external data files: none or one.
    """
    if weight_bytes(model) <= max_inline_bytes:
        ir.external_data.load_to_model(model)
        ir.save(model, path)
        return ()
    data = f"{path.name}.data"
    ir.save(model, path, external_data=data)
    return (data,)


def check_graph(path: Path) -> None:
    """Raise ExportError unless the file is valid ONNX with consistent types.

    Ops of other domains are not checked: ONNX has no schemas for them.
    """
    import onnx

    register_onnxruntime_operators()
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"{path.name} is not valid ONNX: {error}") from error
