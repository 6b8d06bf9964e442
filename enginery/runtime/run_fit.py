"""Whether ways of running fit the providers that are asked for, before anything is opened.

    >>> require_fit(parse_wishes("cpu"), cuda_graph=True)
    ProviderError: cuda_graph is set, and cpu has no CUDA graphs. …

Takes a wish as `parse_wishes` reads it. What a graph itself keeps from being captured is said when
it is opened: see `cuda_graph.with_cuda_graph`.
"""

from __future__ import annotations

from collections.abc import Sequence

from enginery.core.errors import OptionError, ProviderError
from enginery.runtime.provider_names import CUDA, TENSORRT, TENSORRT_RTX
from enginery.runtime.provider_wish import ProviderWish

_WITH_GRAPHS = (CUDA, TENSORRT, TENSORRT_RTX)


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
            gives the recorded memory back.
    """
    if not cuda_graph:
        return
    if wishes[0].full_name not in _WITH_GRAPHS:
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
