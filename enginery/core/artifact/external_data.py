"""Find the ONNX external data of a graph: the files that hold its weights.

    external_data_files(Path("large/model.onnx"))    # ['model.onnx_data']

All files must be in the directory of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from enginery.core.errors import ArtifactError, SourceError
from enginery.core.extras import require_packages
from enginery.core.json_file import require_regular_file
from enginery.core.paths import resolve_inside


def load_graph(path: Path) -> Any:
    """Return the `onnx.ModelProto` of a file without its external data, whatever its size.

    Raises:
        SourceError: the file is not an ONNX model.
        MissingPackageError: onnx is not installed.
    """
    require_packages(f"Reading {path}", "onnx", extra="export")
    import onnx

    try:
        require_regular_file(path)
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's own error types differ between its versions
        raise SourceError(f"{path} is not an ONNX model: {error}") from error
    if not model.graph.node and not model.graph.output:
        raise SourceError(f"{path} is not an ONNX model: it has no nodes and no outputs.")
    return model


def external_data_files(path: Path, model: Any = None) -> list[str]:
    """Return the external data files of a graph, relative to its directory.

    Raises:
        SourceError: a file is missing, or lies outside the directory of the graph.
    """
    model = load_graph(path) if model is None else model
    names = dict.fromkeys(entry.value for entry in _locations(model.graph))
    for name in names:
        try:
            target = resolve_inside(path.parent, name, what="the directory of the model")
        except ArtifactError as error:
            raise SourceError(
                f"{path}: its external data: {error.message}",
                do="A model may name only files in its own directory; do not trust this one.",
            ) from None
        if not target.is_file():
            raise SourceError(f"{path}: its external data '{name}' is missing.")
    return list(names)


def rename_external_data(model: Any, names: Mapping[str, str]) -> None:
    """Replace the names of external data files in an `onnx.ModelProto`: old name -> new name."""
    for entry in _locations(model.graph):
        entry.value = names[entry.value]


def _locations(graph: Any) -> Iterator[Any]:
    """Yield the entry `location` of every external tensor."""
    for tensor in _tensors(graph):
        if tensor.data_location == tensor.EXTERNAL:
            yield from (entry for entry in tensor.external_data if entry.key == "location")


def _tensors(graph: Any) -> Iterator[Any]:
    """Yield every stored tensor: initializers, and constants in nodes and subgraphs."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            if attribute.HasField("g"):
                yield from _tensors(attribute.g)
            for subgraph in attribute.graphs:
                yield from _tensors(subgraph)
