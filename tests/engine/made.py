"""Fake engines for tests, laid out as the build stage writes them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from enginery.core.artifact.artifact import Artifact, commit_artifact
from enginery.core.artifact.engine_record import (
    ENGINE_FILE,
    ENGINES,
    EngineRecord,
    graph_sha256,
    plan_name,
    wrapper_name,
)
from enginery.core.artifact.fingerprint import Fingerprint
from enginery.engine.ep_context import write_wrapper

LAYER = {
    "name": "one",
    "kind": "gemm",
    "precision": "fp32",
    "type": "gemm",
    "inputs": ["fp32"],
    "constants": [],
    "outputs": ["fp32"],
    "nodes": [],
    "tactic": "",
}
PLAN = b"vtrt" + bytes(range(200))


def engine_record(artifact: Artifact, *, plan: bytes = PLAN, **changes: Any) -> EngineRecord:
    """Return the record of an engine of the artifact's first graph (RTX 1.7.1, 8.9)."""
    graph = artifact.manifest.graphs[0]
    values: dict[str, Any] = {
        "flavor": "tensorrt-rtx",
        "tensorrt": "1.7.1.116",
        "capabilities": ("8.9",),
        "profiles": ("batch=1:2:4,sequence=1:16:64",),
        "graph": graph.file,
        "graph_sha256": graph_sha256(graph, artifact.manifest.files),
        "plan": plan_name(graph.file),
        "plan_sha256": hashlib.sha256(plan).hexdigest(),
        "plan_size_bytes": len(plan),
        "wrapper": wrapper_name(graph.file),
        "inputs": graph.inputs,
        "outputs": graph.outputs,
        "layers": {"gemm fp32": 1},
        "layer_list": "layers.json",
        "fused_attentions": 0,
        "activation_bytes": 1,
        "weights_bytes": 1,
        "seconds": 0.1,
        "peak_rss_bytes": 1,
        "warnings": (),
        "options": {},
    }
    values |= changes
    fields = {
        "graph": values["graph_sha256"],
        "capabilities": ",".join(values["capabilities"]) or "portable",
        "profiles": "; ".join(values["profiles"]) or "none",
        "salt": json.dumps(changes, default=str),
    }
    key = Fingerprint(values["flavor"], fields).key
    return EngineRecord(**{"fields": fields, "key": key, **values})


def write_engine(directory: Path, record: EngineRecord, *, plan: bytes = PLAN) -> Path:
    """Write the complete directory of one engine."""
    directory.mkdir(parents=True)
    (directory / record.plan).write_bytes(plan)
    (directory / record.layer_list).write_text(json.dumps([LAYER]), encoding="utf-8")
    write_wrapper(directory, record)
    (directory / ENGINE_FILE).write_bytes(record.to_bytes())
    return directory


def with_engines(source: Artifact, out: Path, *engines: dict[str, Any]) -> Artifact:
    """Copy the artifact and add an engine for each dict of changes to `engine_record`."""
    shutil.copytree(source.path, out)
    for changes in engines:
        record = engine_record(source, **changes)
        write_engine(out / ENGINES / record.directory_name, record)
    commit_artifact(out, source.manifest)
    return Artifact.open(out)
