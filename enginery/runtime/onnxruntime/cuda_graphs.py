"""Whether a graph can be captured as a CUDA graph, and the provider's option for it.

    >>> with_cuda_graph([(artifact.model, feeds)], choose_providers(["cuda"]))[0].options
    {'enable_cuda_graph': '1'}

ONNX Runtime refuses as well, without a word on which node it is. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from enginery.core.errors import InputError, ProviderError
from enginery.runtime.onnxruntime.placement import Placement, read_placement
from enginery.runtime.providers.known import short_name
from enginery.runtime.providers.selection import Provider
from enginery.runtime.providers.specification import CUDA_GRAPH_OPTIONS, require_cuda_graphs

_SHOWN = 5


def with_cuda_graph(
    graphs: Sequence[tuple[Path, Mapping[str, NDArray[Any]]]], providers: Sequence[Provider]
) -> list[Provider]:
    """The providers, the first with its option for CUDA graphs.

    Args:
        graphs: the ONNX file of each session with an array for each of its inputs. One run on
            them tells arithmetic on shapes, which may be the CPU's, from the same ops on tensors,
            and shows the copies between the devices.
        providers: as `choose_providers` gives them.

    Raises:
        ProviderError: the first provider has no CUDA graphs, or nodes keep them from being made;
            the message names them. Or a file cannot be loaded.
    """
    head, *below = providers
    require_cuda_graphs(head.name)
    for path, feeds in graphs:
        if reasons := _reasons(_placed(path, providers, feeds)):
            raise ProviderError(
                f"{path.name} cannot be captured as a CUDA graph: {'; '.join(reasons)}.",
                do="Every node has to be the provider's, without If, Loop, Scan and copies between "
                "the devices: leave cuda_graph out.",
            )
    option, on = CUDA_GRAPH_OPTIONS[head.name]
    return [replace(head, options={**head.options, option: on}), *below]


def _placed(
    path: Path, providers: Sequence[Provider], feeds: Mapping[str, NDArray[Any]]
) -> Placement:
    try:
        return read_placement(path, providers, feeds)
    except InputError:
        # Made-up inputs do not fit every graph. Without a run nodes are told by their ops alone;
        # what that misses has a copy before or behind it, and ONNX Runtime refuses those.
        return read_placement(path, providers)


def _reasons(placement: Placement) -> list[str]:
    """What forbids a capture, by name."""
    nodes = [
        f"{node.name or 'unnamed'} ({node.op_type} on {short_name(node.provider)})"
        for node in placement.uncapturable()
    ]
    copies = [f"the copy {name}" for name in placement.copies]
    return [
        ", ".join(names[:_SHOWN])
        + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        for names in (nodes, copies)
        if names
    ]
