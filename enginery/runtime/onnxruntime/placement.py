"""Find out which provider runs which nodes of a graph, and how much of the work that is.

    placement = read_placement(artifact.model, choose_providers(["cuda"]), feeds)
    placement.share("cuda")    # 1.0
    placement.notes            # ('12 copies between the devices in each run', …)

ONNX Runtime records the assignment (`session.record_ep_graph_assignment_info`) when it partitions
the graph, so a fused node counts once. Copies between devices are inserted later, so they are read
from a run under the profiler. A separate session is opened for this, because recording would slow
down the start of the one that serves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from enginery.core.errors import InputError, MissingPackageError, ProviderError
from enginery.core.scratch import temporary_directory
from enginery.core.trust.resource_limits import read_sizes
from enginery.runtime.onnxruntime.multiply_adds import (
    SHAPE_OPS,
    NodeWork,
    profile_multiply_adds,
    profiled_run,
)
from enginery.runtime.onnxruntime.session import new_session, run_limits
from enginery.runtime.providers.known import CPU, full_name, short_name
from enginery.runtime.providers.selection import Provider

RECORD = "session.record_ep_graph_assignment_info"
"""Session option of ONNX Runtime that records the assignment."""

_COPIES = ("MemcpyFromHost", "MemcpyToHost")
_CONTROL = ("If", "Loop", "Scan")
WAITING = ("RemovePadding",)  # for the number of tokens, the size of its output
_SHOWN = 5
# A fused node is named after one of the nodes that it replaces: `…/MatMulAddFusion`.
_FUSED = "/"


@dataclass(frozen=True)
class PlacedNode:
    """A node, after ONNX Runtime's first optimizations, and the provider that runs it."""

    name: str
    op_type: str
    domain: str
    provider: str
    """ONNX Runtime's name."""
    multiply_adds: int
    """Multiply-adds on the feeds; 0 if they were not counted."""
    for_shapes: bool
    """True if it computes shapes, which belongs on the CPU; see `SHAPE_OPS`."""


@dataclass(frozen=True)
class Placement:
    """Providers of the nodes of a graph."""

    head: str
    """ONNX Runtime's name of the requested provider."""
    nodes: tuple[PlacedNode, ...]
    copies: tuple[str, ...] = ()
    """Names of the nodes that copy between devices in a run."""
    counted: bool = False
    """True if multiply-adds were counted."""
    warnings: tuple[str, ...] = ()
    """Reasons why multiply-adds were not counted."""

    @property
    def providers(self) -> tuple[str, ...]:
        """Providers that run a node, the requested one first."""
        return tuple(dict.fromkeys([self.head, *(node.provider for node in self.nodes)]))

    @property
    def fallen(self) -> tuple[PlacedNode, ...]:
        """Compute nodes that run on the CPU although another provider was requested."""
        if self.head == CPU:
            return ()
        return tuple(n for n in self.nodes if n.provider == CPU and not n.for_shapes)

    def share(self, provider: str) -> float:
        """Return a provider's share of the multiply-adds, 0 to 1; 0 if they were not counted."""
        total = sum(node.multiply_adds for node in self.nodes)
        name = full_name(provider)
        done = sum(node.multiply_adds for node in self.nodes if node.provider == name)
        return done / total if total else 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user, without full stops."""
        notes = list(self.warnings)
        if fallen := self.fallen:
            names = ", ".join(
                f"{node.name or 'unnamed'} ({node.op_type})" for node in fallen[:_SHOWN]
            )
            more = f" and {len(fallen) - _SHOWN} more" if len(fallen) > _SHOWN else ""
            work = f", {self.share(CPU):.1%} of the multiply-adds" if self.counted else ""
            nodes = "1 compute node is" if len(fallen) == 1 else f"{len(fallen)} compute nodes are"
            notes.append(f"{nodes} on the CPU under {short_name(self.head)}{work}: {names}{more}")
        if self.copies:
            copies = "1 copy" if len(self.copies) == 1 else f"{len(self.copies)} copies"
            notes.append(f"{copies} between the devices in each run")
        return tuple(notes)

    def uncapturable(self) -> tuple[PlacedNode, ...]:
        """Return the nodes that prevent capturing a run as a CUDA graph.

        These are control flow, nodes that wait for a size, and compute nodes on other providers;
        shapes may be computed on the CPU.
        Source: onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html, "Using CUDA
        Graphs".
        """
        return tuple(
            node
            for node in self.nodes
            if node.op_type in (*_CONTROL, *WAITING)
            or (node.provider != self.head and not node.for_shapes)
        )

    def as_json(self) -> dict[str, Any]:
        """Return the placement as plain JSON values."""
        return {
            "head": self.head,
            "providers": [{"name": name, **self._figures(name)} for name in self.providers],
            "copies": list(self.copies),
            "multiply_adds_counted": self.counted,
            "fallen": [asdict(node) for node in self.fallen],
            "notes": list(self.notes),
        }

    def _figures(self, provider: str) -> dict[str, Any]:
        here = [node for node in self.nodes if node.provider == provider]
        return {
            "nodes": len(here),
            "for_shapes": sum(node.for_shapes for node in here),
            "multiply_adds": sum(node.multiply_adds for node in here),
            "op_types": dict(Counter(node.op_type for node in here).most_common()),
        }


def read_placement(
    model: Path, providers: Sequence[Provider], feeds: Mapping[str, NDArray[Any]] | None = None
) -> Placement:
    """Open a session and return which provider runs which nodes.

    Args:
        model: path of an ONNX file.
        providers: result of `choose_providers`; the first is the requested one.
        feeds: an array for each input, to count multiply-adds and copies; None to count neither.

    Raises:
        ProviderError: the session cannot be opened, a provider did not register, or this ONNX
            Runtime does not record the assignment.
        InputError: the graph fails on the feeds.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.add_session_config_entry(RECORD, "1")
    # The assignment is known once a session is open; counting takes a run, too.
    if feeds is None:
        session = new_session(model, providers, options)
        return placement_from_session(session, providers[0].name)
    opened: list[Any] = []

    def open_session() -> Any:
        opened.append(new_session(model, providers, options))
        return opened[0]

    with temporary_directory("placement") as scratch:
        try:
            events = profiled_run(
                open_session,
                options,
                feeds,
                scratch,
                limits=lambda: run_limits(read_sizes(model)[0], providers[0], feeds),
            )
        except ProviderError:
            raise
        except Exception as error:  # ONNX Runtime raises many unrelated types
            raise InputError(f"the graph fails on the feeds: {error}") from error
    placed = placement_from_session(opened[0], providers[0].name)
    placed = replace(placed, copies=find_copies(events))
    # A placement without counts is worth more than none.
    try:
        return add_multiply_adds(placed, profile_multiply_adds(model, feeds))
    except (InputError, MissingPackageError) as error:
        warning = f"multiply-adds are not counted: {error}"
        return replace(placed, warnings=(*placed.warnings, warning))


def placement_from_session(session: Any, head: str) -> Placement:
    """Return the assignment recorded by a session, which was opened with `RECORD` set to 1.

    Nodes that compute shapes are recognized here only by their op type; `add_multiply_adds` also
    checks sizes and types.

    Raises:
        ProviderError: the session has no record.
    """
    get_assignment = getattr(session, "get_provider_graph_assignment_info", None)
    try:
        parts = list(get_assignment()) if get_assignment else []
    except Exception as error:  # ONNX Runtime raises if the option was not set
        raise ProviderError(f"the session has not recorded its placement: {error}") from error
    if not parts:
        raise ProviderError(
            "the session has not recorded its placement.",
            do=f"Open it with the session option {RECORD}=1, in ONNX Runtime 1.24 or newer.",
        )
    nodes = tuple(
        PlacedNode(node.name, node.op_type, node.domain, part.ep_name, 0, node.op_type in SHAPE_OPS)
        for part in parts
        for node in part.get_nodes()
    )
    return Placement(head, nodes)


def add_multiply_adds(placement: Placement, work: Mapping[str, NodeWork]) -> Placement:
    """Return the placement with the multiply-adds of nodes, which are found by name.

    A fused node gets the multiply-adds of the node that it is named after. A warning reports those
    of nodes that were not found.
    """
    unmatched = {name: node for name, node in work.items() if node.multiply_adds}
    nodes = []
    for node in placement.nodes:
        name = node.name
        # A node that was fused twice has two such endings.
        while name not in work and _FUSED in name:
            name = name.rpartition(_FUSED)[0]
        node_work = work.get(name)
        if node_work is None:
            nodes.append(node)
            continue
        # Each node's work counts once, even if several placed nodes bear its name.
        counted_work = unmatched.pop(name, None)
        count = counted_work.multiply_adds if counted_work else 0
        nodes.append(replace(node, multiply_adds=count, for_shapes=node_work.for_shapes))
    warnings = placement.warnings
    if missed := sum(node.multiply_adds for node in unmatched.values()):
        total = sum(node.multiply_adds for node in work.values())
        share = f"{missed / total:.1%} of the multiply-adds are in nodes that were renamed"
        warnings = (*warnings, share)
    return replace(placement, nodes=tuple(nodes), counted=True, warnings=warnings)


def find_copies(events: Iterable[tuple[str, Mapping[str, Any]]]) -> tuple[str, ...]:
    """Return the names of the nodes in a profiled run that copy between devices."""
    copies = (name for name, event in events if event.get("op_name") in _COPIES)
    return tuple(dict.fromkeys(copies))
