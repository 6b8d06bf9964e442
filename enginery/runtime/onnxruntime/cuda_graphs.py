"""Decide what is recorded as a CUDA graph: which graphs of a model, and which of their runs.

    with_cuda_graph([(artifact.model, feeds)], choose_providers(["cuda"]))[0].options
    # {'enable_cuda_graph': '1'}

A graph can be recorded if every node can be. ONNX Runtime checks this as well, but its message does
not name the node. `CapturePolicy` then decides for each run of a shape; `DeviceBinding` records it.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from enginery.core.errors import InputError, ProviderError
from enginery.core.trust.onnx_structure import read_structure
from enginery.runtime.onnxruntime.placement import WAITING, Placement, read_placement
from enginery.runtime.providers.known import short_name
from enginery.runtime.providers.selection import Provider
from enginery.runtime.providers.specification import CUDA_GRAPH_OPTIONS, require_cuda_graphs

Key = tuple[tuple[int, ...], ...]
"""The shapes of a run's inputs, in the order of the graph's inputs."""

_SHOWN = 5
_COUNTED_SHAPES = 1024
NOT_RECORDED = "cannot use the graph capture feature"
"""In ONNX Runtime's error for a graph with nodes that prevent CUDA graphs."""


@dataclass(frozen=True)
class CaptureOptions:
    """Which runs of a `DeviceBinding` are recorded as CUDA graphs."""

    capture: bool = False
    """Record each bucket as a CUDA graph; the session must have the provider's option for it.
    Shapes beyond the number of buckets run without a CUDA graph; recorded ones are never
    discarded."""
    lenient: bool = False
    """Run without a CUDA graph what cannot be recorded: outputs of unknown shape, a shape that
    takes more than a sixteenth of `max_captured_bytes`, a failed recording, or more recordings of
    all threads than buckets. Otherwise they are errors."""
    capture_at: int = 1
    """The run of a shape that is recorded, from 1; those before it are not."""
    max_captured_bytes: float = math.inf
    """Maximum size of the buffers of recorded buckets; shapes beyond it run without a CUDA
    graph."""


@dataclass
class CaptureStatistics:
    """What the recording of CUDA graphs in one session took, and how many runs had none."""

    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Held by each run of the session's bindings: a replay writes to memory that another run may
    have got in the meantime."""
    graphs: int = 0
    """Number of graphs so far, which is the id of the last; that of a failed capture is not used
    again."""
    recorded: int = 0
    """Number of CUDA graphs; each thread records its own."""
    seconds: float = 0.0
    """Time that their first runs took."""
    buffer_bytes: int = 0
    """Size of their inputs and outputs on the device."""
    unrecorded_runs: int = 0
    """Number of runs without a CUDA graph."""


@dataclass(frozen=True)
class CaptureCandidate:
    """A combination of input shapes that is not recorded yet."""

    key: Key
    graphs: int
    """Number of combinations of shapes that the binding has recorded."""
    buffer_bytes: int
    """Size of its inputs, and of its outputs of known shape."""
    has_fixed_outputs: bool
    """True if the shapes of all outputs are known before the run."""


class CapturePolicy:
    """Decide which runs of a binding are recorded; the binding asks only if it captures."""

    def __init__(
        self, options: CaptureOptions, statistics: CaptureStatistics, *, max_graphs: int
    ) -> None:
        """Start without any runs.

        Args:
            options: those of the binding.
            statistics: those of the session, which several bindings may share.
            max_graphs: maximum number of combinations of shapes to record.
        """
        self._options = options
        self._statistics = statistics
        self._max_graphs = max_graphs
        self._runs: OrderedDict[Key, int] = OrderedDict()
        """Number of runs of shapes that are not recorded yet."""
        self._unrecordable: set[Key] = set()

    def has_room(self, candidate: CaptureCandidate) -> bool:
        """Return True if another shape can be recorded."""
        if candidate.graphs >= self._max_graphs or candidate.key in self._unrecordable:
            return False
        size, limit = candidate.buffer_bytes, self._options.max_captured_bytes
        # Shapes that are unknown before the run cannot have the fixed addresses of a recording.
        # A single shape may not take the memory that many smaller ones share, either.
        if self._options.lenient and (not candidate.has_fixed_outputs or size > limit / 16):
            return False
        return self._statistics.buffer_bytes + size <= limit

    def records_run(self, candidate: CaptureCandidate) -> bool:
        """Count a run of a shape, and return True if it is recorded."""
        if not self.has_room(candidate):
            return False
        if self._options.capture_at > 1:
            key = candidate.key
            # Moves the shape to the end, so that the first one is that which was not seen for
            # longest.
            self._runs[key] = self._runs.pop(key, 0) + 1
            # Clients choose the shapes: without a limit, the counts would grow as long as they send
            # new ones.
            if len(self._runs) > _COUNTED_SHAPES:
                self._runs.popitem(last=False)
            return self._runs[key] >= self._options.capture_at
        return True

    def thread_may_record(self) -> bool:
        """Return True if a thread may record a bucket that another may have recorded already.

        Each thread has its own graphs; all of them together have at most `max_graphs`.
        """
        return not self._options.lenient or self._statistics.recorded < self._max_graphs

    def forget_runs(self, key: Key) -> None:
        """Stop counting the runs of a shape, which has a graph now."""
        self._runs.pop(key, None)

    def refuse(self, key: Key) -> None:
        """Never record a shape again, because its recording has failed."""
        self._unrecordable.add(key)


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
    require_cuda_graphs(providers[0].name)
    for path, feeds in graphs:
        if reasons := capture_obstacles(path, providers, feeds):
            raise ProviderError(
                f"{path.name} cannot be captured as a CUDA graph: {'; '.join(reasons)}.",
                do="Every node must run on the provider, without If, Loop, Scan and copies between "
                "devices. Run without cuda_graph.",
            )
    return switched_on(providers)


def switched_on(providers: Sequence[Provider]) -> list[Provider]:
    """Return the providers, with the option for CUDA graphs added to the first one."""
    head, *below = providers
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
