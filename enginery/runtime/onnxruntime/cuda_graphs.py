"""Check whether a graph can be captured as a CUDA graph, and switch capturing on.

    with_cuda_graph([(artifact.model, feeds)], choose_providers(["cuda"]))[0].options
    # {'enable_cuda_graph': '1'}

ONNX Runtime checks this as well, but its message does not name the node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from enginery.core.errors import InputError, ProviderError
from enginery.core.model.onnx_structure import read_structure
from enginery.runtime.onnxruntime.placement import WAITING, Placement, read_placement
from enginery.runtime.providers.known import short_name
from enginery.runtime.providers.selection import Provider
from enginery.runtime.providers.specification import CUDA_GRAPH_OPTIONS, require_cuda_graphs

_SHOWN = 5


def with_cuda_graph(
    graphs: Sequence[tuple[Path, Mapping[str, NDArray[Any]]]], providers: Sequence[Provider]
) -> list[Provider]:
    """Return the providers, with the option for CUDA graphs added to the first one.

    Args:
        graphs: (ONNX file, an array for each input) of each session. One run on them distinguishes
            arithmetic on shapes, which may run on the CPU, from the same ops on tensors, and finds
            the copies between devices.
        providers: result of `choose_providers`.

    Raises:
        ProviderError: the first provider has no CUDA graphs, nodes prevent the capture (the message
            names them), or a file cannot be loaded.
    """
    head, *below = providers
    require_cuda_graphs(head.name)
    for path, feeds in graphs:
        if reasons := capture_obstacles(path, providers, feeds):
            raise ProviderError(
                f"{path.name} cannot be captured as a CUDA graph: {'; '.join(reasons)}.",
                do="Every node must run on the provider, without If, Loop, Scan and copies between "
                "devices. Run without cuda_graph.",
            )
    option, on = CUDA_GRAPH_OPTIONS[head.name]
    return [replace(head, options={**head.options, option: on}), *below]


def capture_obstacles(
    path: Path, providers: Sequence[Provider], feeds: Mapping[str, NDArray[Any]]
) -> list[str]:
    """Return the names of nodes, and of copies between devices, that prevent a capture.

    Raises:
        ProviderError: the file cannot be loaded.
    """
    return _reasons(_placed(path, providers, feeds))


def waiting_nodes(path: Path) -> list[str]:
    """Return the nodes of a graph that wait for the GPU's result, which a capture cannot record."""
    nodes = read_structure(path).graph.nodes
    return [f"{n.name or 'unnamed'} ({n.op_type})" for n in nodes if n.op_type in WAITING][:_SHOWN]


def has_attention(path: Path) -> bool:
    """Return True if a graph has fused attention, or will have it after ONNX Runtime's fusions."""
    op_types = {node.op_type for node in read_structure(path).graph.nodes}
    return any("Attention" in name for name in op_types) or "Softmax" in op_types


def _placed(
    path: Path, providers: Sequence[Provider], feeds: Mapping[str, NDArray[Any]]
) -> Placement:
    try:
        return read_placement(path, providers, feeds)
    except InputError:
        # Synthetic inputs do not fit every graph. Without a run, nodes are judged by their op types
        # only. Nodes that this misses have copies around them, which ONNX Runtime rejects.
        return read_placement(path, providers)


def _reasons(placement: Placement) -> list[str]:
    """Return the names of nodes and copies that prevent a capture."""
    nodes = [
        f"{node.name or 'unnamed'} ({node.op_type} on {short_name(node.provider)})"
        for node in placement.uncapturable()
    ]
    copies = [f"copy {name}" for name in placement.copies]
    return [
        ", ".join(names[:_SHOWN])
        + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        for names in (nodes, copies)
        if names
    ]
