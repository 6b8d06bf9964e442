"""Whether ways of running fit the providers that are asked for, before anything is opened.

    >>> require_fit(parse_wishes("cpu"), cuda_graph=True)
    ProviderError: cuda_graph is set, and cpu has no CUDA graphs. …

Takes a wish as `parse_wishes` reads it. `OrtRunner` asks this itself, others to fail before they
begin. What in a graph keeps it from being captured is said when it is opened: see
`cuda_graph.with_cuda_graph`.
"""

from __future__ import annotations

from collections.abc import Sequence

from enginery.core.errors import OptionError, ProviderError
from enginery.runtime.providers.names import CUDA, TENSORRT, TENSORRT_RTX
from enginery.runtime.providers.specification import ProviderWish

CUDA_GRAPH_OPTIONS = {
    CUDA: ("enable_cuda_graph", "1"),
    TENSORRT: ("trt_cuda_graph_enable", "True"),
    TENSORRT_RTX: ("enable_cuda_graph", "1"),
}
"""The providers that have CUDA graphs, each with its option for them and the value that is on."""
_OFF = ("0", "False")


def has_cuda_graphs(provider: str) -> bool:
    """Whether a provider, by ONNX Runtime's name, can record runs as CUDA graphs."""
    return provider in CUDA_GRAPH_OPTIONS


def require_fit(
    wishes: Sequence[ProviderWish],
    *,
    io_binding: bool = True,
    cuda_graph: bool = False,
    shrink_arena: bool = False,
) -> None:
    """Passes what can run together; the arguments are those of `OrtRunner`.

    Raises:
        ProviderError: `cuda_graph`, and the provider that is meant, the first, has none.
        OptionError: `cuda_graph` without the buffers that it is recorded on, or with an arena that
            gives the recorded memory back; or a provider's own option for CUDA graphs is set.
    """
    for wish in wishes:
        option, _ = CUDA_GRAPH_OPTIONS.get(wish.full_name, ("", ""))
        if wish.options.get(option, _OFF[0]) not in _OFF:
            raise OptionError(
                f"option '{option}' for {wish.name} is set by itself: a CUDA graph is recorded on "
                "bound buffers, a graph for each shape, and only where every node is the "
                "provider's.",
                do="Leave it out, and pass --cuda-graph (cuda_graph=True in Python).",
            )
    if not cuda_graph:
        return
    if not has_cuda_graphs(wishes[0].full_name):
        raise ProviderError(
            f"cuda_graph is set, and {wishes[0].name} has no CUDA graphs.",
            do="Leave it out, or run on cuda, tensorrt or tensorrt-rtx.",
        )
    if not io_binding:
        raise OptionError(
            "cuda_graph is set and io_binding is not: a CUDA graph replays on bound buffers.",
            do="Leave one of them out.",
        )
    if shrink_arena:
        raise OptionError(
            "cuda_graph and shrink_arena are both set: a CUDA graph replays in the arena's memory, "
            "which shrinking gives back.",
            do="Leave one of them out.",
        )
