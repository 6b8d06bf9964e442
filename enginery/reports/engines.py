"""The report of build, `reports/engines.json`, and rows of engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, cast

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from enginery.core.artifact.engine import Engine
from enginery.core.artifact.engine_record import describe_products
from enginery.core.artifact.manifest import Count
from enginery.core.table import NOTHING, Row, fact_rows, human_bytes
from enginery.reports.base import Report

_ANY_GPU = "8.0 and above"
"""The GPUs of a plan that was built for no compute capability in particular."""


@with_config(ConfigDict(extra="allow"))
class BuiltEngine(TypedDict):
    """The record of an engine with its directory; see `EngineRecord` for the other members."""

    directory: str
    from_store: NotRequired[bool]
    graph: NotRequired[str]
    capabilities: list[str]
    profiles: list[str]
    layers: dict[str, Count]
    plan_size_bytes: Count


def built_engine(engine: Engine, *, from_store: bool = False) -> BuiltEngine:
    """Return an engine as the report has it."""
    record = engine.record.model_dump(mode="json")
    return cast("BuiltEngine", {"directory": engine.name, "from_store": from_store, **record})


@dataclass(frozen=True, repr=False)
class BuildReport(Report):
    """The content of `reports/engines.json`."""

    FILE = "engines.json"

    summary: str
    notes: list[str]
    engines: list[BuiltEngine]
    earlier_engines: list[str] = field(default_factory=list)
    """The artifact's other engines, from earlier builds."""
    left_out: list[dict[str, Any]] = field(default_factory=list)
    """Graphs without an engine, with reasons."""
    profiles: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, Any] | None = None
    """Length buckets of the data that the profiles were made from."""
    fields: dict[str, str] = field(default_factory=dict)
    """Fields of the stage's fingerprint."""

    def layer_rows(self) -> list[Row]:
        """Return the layers of each engine, by kind and precision."""
        return [
            {"engine": engine["directory"], **row}
            for engine in self.engines
            for row in layer_count_rows(engine["layers"])
        ]


def engine_rows(engines: Sequence[BuiltEngine]) -> list[Row]:
    """Return a row for each engine."""
    return [
        {
            "engine": engine["directory"],
            "graph": engine.get("graph", NOTHING),
            "GPUs": _gpus(engine["capabilities"]),
            "profiles": "; ".join(engine["profiles"]) or "fixed shapes",
            "layers": str(sum(engine["layers"].values())),
            "multiplied in": describe_products(engine["layers"]) or NOTHING,
            "plan": human_bytes(engine["plan_size_bytes"]),
        }
        for engine in engines
    ]


def layer_count_rows(layers: Mapping[str, int]) -> list[Row]:
    """Return the number of layers of each kind and precision, the most frequent first."""
    counts = sorted(layers.items(), key=lambda pair: -pair[1])
    return [{"layers": name, "count": str(count)} for name, count in counts]


def engine_facts(engine: Engine) -> list[Row]:
    """Return what an engine is, its inputs and outputs, and the time and memory of its build."""
    record = engine.record
    facts = {
        "flavor": f"{record.flavor}, TensorRT {record.tensorrt}",
        "GPUs": _gpus(record.capabilities),
        "graph": f"{record.graph} (sha256 {record.graph_sha256[:12]}…)",
        "plan": f"{record.plan}, {human_bytes(record.plan_size_bytes)} "
        f"(sha256 {record.plan_sha256[:12]}…)",
        "wrapper": record.wrapper,
    }
    if record.gpu.name:
        facts["built on"] = f"{record.gpu.name}, driver {record.gpu.driver}"
    if record.hardware_compatibility != "none":
        facts["hardware compatibility"] = record.hardware_compatibility
    facts |= {f"profile {n}": profile for n, profile in enumerate(record.profiles, start=1)}
    facts |= {f"input {spec.name}": str(spec).partition(": ")[2] for spec in record.inputs}
    facts |= {f"output {spec.name}": str(spec).partition(": ")[2] for spec in record.outputs}
    facts |= {
        "layers": f"{sum(record.layers.values())}"
        + (f", of {len(record.profiles)} profiles" if len(record.profiles) > 1 else ""),
        "fused attentions": str(record.fused_attentions),
        "device memory": f"{human_bytes(record.weights_bytes)} weights, "
        f"{human_bytes(record.activation_bytes)} activations at the largest shapes",
        "built in": f"{record.seconds:.1f} s, peak memory {human_bytes(record.peak_rss_bytes)}",
        "key": record.key,
    }
    facts |= {f"warning {n}": text for n, text in enumerate(record.warnings, start=1)}
    return fact_rows(facts.items())


def layer_rows(engine: Engine, *, every: bool) -> list[Row]:
    """Return the layers in the order in which they run.

    Args:
        engine: the engine.
        every: True for all layers; False for GEMMs, convolutions and attentions.
    """
    return [
        {
            "layer": layer.name,
            "kind": layer.kind,
            "precision": layer.precision,
            "takes": ", ".join([*layer.inputs, *layer.constants]) or NOTHING,
            "gives": ", ".join(layer.outputs) or NOTHING,
            "ONNX nodes": ", ".join(layer.nodes) or NOTHING,
        }
        for layer in engine.layers()
        if every or layer.kind != "other"
    ]


def _gpus(capabilities: Sequence[str]) -> str:
    return ", ".join(capabilities) or _ANY_GPU
