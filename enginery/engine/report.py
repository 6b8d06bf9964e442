"""What a build made, what it left out, and what its profiles cover, as numbers.

>>> report = make_report(engines, earlier, left_out, requested, fields)
>>> report.summary
'2 engines, 1 of them from the store; model.onnx for 8.9: 46 layers, 2 fused attentions, …'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import cast

from enginery.core.engine import Engine
from enginery.core.reports import BuildReport, BuiltEngine
from enginery.engine.build import GraphCoverage
from enginery.engine.request import Requested

NOT_RUN = "no engine of this package has been run on a GPU yet"
_FIRST_PROFILE = (
    "ONNX Runtime reaches the first profile of an engine alone; without --no-engine-per-profile "
    "each has an engine of its own"
)


def make_report(
    engines: Sequence[tuple[Engine, bool]],
    earlier: Sequence[Engine],
    left_out: Sequence[GraphCoverage],
    requested: Requested,
    fields: Mapping[str, str],
) -> BuildReport:
    """Return the report of what the stage found.

    Args:
        engines: those that were asked for, and whether each was built now.
        earlier: the artifact's other engines, of builds before this one.
        left_out: graphs that have no engine, with the reasons.
        requested: what was asked for.
        fields: of the stage's fingerprint.
    """
    said = [_built(engines), *(_words(engine) for engine, _ in engines)]
    said += [f"{graph.graph} has no engine: {graph.refused[0]}" for graph in left_out]
    summary = "; ".join(said)
    profiles = {request.graph.file: request.checked for request in requested.requests}
    notes = [note for found in profiles.values() for note in (*found.warnings, *found.notes)]
    if any(len(engine.record.profiles) > 1 for engine, _ in engines):
        notes.append(_FIRST_PROFILE)
    if requested.buckets:
        notes.append(f"profiles from data: {requested.buckets}")
    notes += [
        f"{graph.graph} stays ONNX: ONNX Runtime would run TensorRT on the {graph.partitions} "
        "parts that it takes, building them as it loads"
        for graph in left_out
    ]
    notes = [*dict.fromkeys(notes), NOT_RUN]
    return BuildReport(
        summary=summary,
        notes=notes,
        engines=[
            cast(
                "BuiltEngine",
                {"directory": e.name, "from_store": not built, **e.record.model_dump(mode="json")},
            )
            for e, built in engines
        ],
        earlier_engines=[engine.name for engine in earlier],
        left_out=[asdict(graph) for graph in left_out],
        profiles={graph: asdict(found) for graph, found in profiles.items()},
        lengths=asdict(requested.buckets) if requested.buckets else None,
        fields=dict(fields),
    )


def _built(engines: Sequence[tuple[Engine, bool]]) -> str:
    cached = sum(not built for _, built in engines)
    from_store = f", {cached} of them from the store" if cached else ""
    return f"{len(engines)} engine{'' if len(engines) == 1 else 's'}{from_store}"


def _words(engine: Engine) -> str:
    record = engine.record
    targets = ", ".join(record.capabilities) or "every GPU from 8.0 on"
    return (
        f"{record.graph} for {targets}: {sum(record.layers.values())} layers, "
        f"{record.fused_attentions} fused attentions, plan of {record.plan_size_bytes} bytes"
    )
