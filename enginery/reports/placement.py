"""The providers of a graph's nodes, as reports have them."""

from __future__ import annotations

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from enginery.core.artifact.manifest import Count
from enginery.core.table import NOTHING, Row
from enginery.runtime.providers.known import short_name

_MAX_OPS = 6
"""Number of op types that are listed; the most frequent come first."""


class PlacedProvider(TypedDict):
    """The part of a graph that one provider runs."""

    name: str
    nodes: Count
    for_shapes: Count
    multiply_adds: Count
    op_types: dict[str, Count]


class FallbackNode(TypedDict):
    """A compute node that runs on the CPU although another provider was requested."""

    name: str
    op_type: str
    multiply_adds: Count


class PlacementRecord(TypedDict):
    """Providers of the nodes of a graph, from `Placement.as_json`."""

    providers: list[PlacedProvider]
    copies: list[str]
    multiply_adds_counted: bool
    fallen: list[FallbackNode]


def provider_rows(placement: PlacementRecord) -> list[Row]:
    """Return a row for each provider, with its nodes and multiply-adds."""
    total = sum(part["multiply_adds"] for part in placement["providers"])
    counted = placement["multiply_adds_counted"]
    rows = []
    for part in placement["providers"]:
        ops = [f"{count} {op}" for op, count in part["op_types"].items()]
        more = f" and {len(ops) - _MAX_OPS} more kinds" if len(ops) > _MAX_OPS else ""
        rows.append(
            {
                "provider": short_name(part["name"]),
                "nodes": str(part["nodes"]),
                "for shapes": str(part["for_shapes"]),
                "multiply-adds": f"{part['multiply_adds']:,}" if counted else NOTHING,
                "share": f"{part['multiply_adds'] / total:.1%}" if total else NOTHING,
                "ops": ", ".join(ops[:_MAX_OPS]) + more,
            }
        )
    return rows


def fallback_rows(placement: PlacementRecord) -> list[Row]:
    """Return the compute nodes that run on the CPU although another provider was requested."""
    counted = placement["multiply_adds_counted"]
    return [
        {
            "node": node["name"] or "unnamed",
            "op": node["op_type"],
            "multiply-adds": f"{node['multiply_adds']:,}" if counted else NOTHING,
        }
        for node in placement["fallen"]
    ]
