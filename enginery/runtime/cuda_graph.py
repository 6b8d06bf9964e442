"""Whether a graph can be captured as a CUDA graph, and the provider's option for it.

    >>> with_cuda_graph([artifact.model], choose_providers(["cuda"]))[0].options
    {'enable_cuda_graph': '1'}

ONNX Runtime refuses as well, without a word on which node it is. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from enginery.core.errors import ProviderError
from enginery.runtime.placement import read_placement
from enginery.runtime.provider_names import CUDA, TENSORRT, TENSORRT_RTX, short_name
from enginery.runtime.providers import Provider

_CUDA_GRAPH = {
    CUDA: {"enable_cuda_graph": "1"},
    TENSORRT: {"trt_cuda_graph_enable": "True"},
    TENSORRT_RTX: {"enable_cuda_graph": "1"},
}
_SHOWN = 5


def with_cuda_graph(paths: Sequence[Path], providers: Sequence[Provider]) -> list[Provider]:
    """The providers, the first with its option for CUDA graphs.

    Args:
        paths: the ONNX files of the sessions.
        providers: as `choose_providers` gives them.

    Raises:
        ProviderError: the first provider has no CUDA graphs, or nodes keep them from being made;
            the message names them. Or a file cannot be loaded.
    """
    head, *below = providers
    if head.name not in _CUDA_GRAPH:
        raise ProviderError(
            f"cuda_graph is set, and {short_name(head.name)} has no CUDA graphs.",
            do="Leave it out, or run on cuda, tensorrt or tensorrt-rtx.",
        )
    for path in paths:
        if nodes := read_placement(path, providers).uncapturable():
            named = ", ".join(
                f"{node.name or 'unnamed'} ({node.op_type} on {short_name(node.provider)})"
                for node in nodes[:_SHOWN]
            )
            more = f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
            raise ProviderError(
                f"{path.name} cannot be captured as a CUDA graph: {named}{more}.",
                do="Every node has to be the provider's, without If, Loop and Scan: leave "
                "cuda_graph out.",
            )
    return [replace(head, options={**head.options, **_CUDA_GRAPH[head.name]}), *below]
