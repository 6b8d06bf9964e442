"""Engines as plain rows for people and JSON for programs; the console shows them.

>>> show_engines.list_rows(engines_of(artifact))
[{'engine': 'tensorrt-rtx-sm89-3f2a91c04be7d815', 'graph': 'model.onnx', 'GPUs': '8.9', …}]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from enginery.cli.console import human_bytes
from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.engine_record import EngineRecord, engine_directories

Row = dict[str, str]

_PORTABLE = "portable"
_NOT_RUN = "not on a GPU by this project yet"


def engines_of(artifact: Artifact) -> list[Engine]:
    """The engines of an opened artifact, by name; raises ArtifactError for a damaged one."""
    return [Engine.open(path) for path in engine_directories(artifact.path)]


def artifact_json(artifact: Artifact, engines: Sequence[Engine]) -> dict[str, Any]:
    """The manifest with the artifact's path, and the record of each engine."""
    return {
        "path": str(artifact.path),
        **artifact.manifest.model_dump(mode="json"),
        "engines": [_record_json(engine) for engine in engines],
    }


def engine_json(engine: Engine) -> dict[str, Any]:
    """The record of an engine with its path and all of its layers."""
    return {
        **_record_json(engine),
        "all_layers": [asdict(layer) for layer in engine.layers()],
    }


def _record_json(engine: Engine) -> dict[str, Any]:
    return {"path": str(engine.path), **engine.record.model_dump(mode="json")}


def list_rows(engines: Sequence[Engine]) -> list[Row]:
    """One row an engine."""
    return [
        {
            "engine": engine.name,
            "graph": engine.record.graph,
            "GPUs": _targets(engine.record),
            "profiles": "; ".join(engine.record.profiles) or "fixed shapes",
            "layers": str(sum(engine.record.layers.values())),
            "multiplied in": _multiplied(engine.record),
            "plan": human_bytes(engine.record.plan_size_bytes),
        }
        for engine in engines
    ]


def engine_rows(engine: Engine) -> list[Row]:
    """What an engine is, what it takes, and what it took to build it."""
    record = engine.record
    facts = {
        "flavor": f"{record.flavor}, TensorRT {record.tensorrt}",
        "GPUs": _targets(record),
        "graph": f"{record.graph} (sha256 {record.graph_sha256[:12]}…)",
        "plan": f"{record.plan}, {human_bytes(record.plan_size_bytes)} "
        f"(sha256 {record.plan_sha256[:12]}…)",
        "wrapper": record.wrapper,
    }
    if record.gpu.name:
        facts["built on"] = f"{record.gpu.name}, driver {record.gpu.driver}"
    if record.hardware_compatibility != "none":
        facts["hardware compatibility"] = record.hardware_compatibility
    if record.version_compatible:
        facts["version compatible"] = "yes"
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
        "run": _NOT_RUN,
    }
    facts |= {f"warning {n}": text for n, text in enumerate(record.warnings, start=1)}
    return [{"what": name, "value": value} for name, value in facts.items()]


def count_rows(engine: Engine) -> list[Row]:
    """How many layers there are of each kind and precision, the most frequent first."""
    counts = sorted(engine.record.layers.items(), key=lambda pair: -pair[1])
    return [{"layers": name, "count": str(count)} for name, count in counts]


def layer_rows(engine: Engine, *, every: bool) -> list[Row]:
    """The layers in the order that they run.

    Args:
        engine: whose they are.
        every: all of them; else those that multiply: GEMMs, convolutions and attentions.
    """
    return [
        {
            "layer": layer.name,
            "kind": layer.kind,
            "precision": layer.precision,
            "takes": ", ".join([*layer.inputs, *layer.constants]) or "–",
            "gives": ", ".join(layer.outputs) or "–",
            "ONNX nodes": ", ".join(layer.nodes) or "–",
        }
        for layer in engine.layers()
        if every or layer.kind != "other"
    ]


def build_notes(artifact: Artifact) -> list[str]:
    """What the newest build said besides its summary."""
    builds = [stage for stage in artifact.manifest.stages if stage.stage == "build"]
    return list(builds[-1].notes[1:]) if builds else []


def _targets(record: EngineRecord) -> str:
    return ", ".join(record.capabilities) or _PORTABLE


def _multiplied(record: EngineRecord) -> str:
    """`24 gemm int8, 6 attention fp16`."""
    counts = {n: c for n, c in record.layers.items() if not n.startswith("other")}
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "–"
