"""Rows of an artifact: what it is, its graphs, the stages that made it and its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import Manifest, StageRecord
from enginery.core.table import NOTHING, Row, fact_rows, human_bytes
from enginery.reports.base import named_versions


def artifact_rows(artifact: Artifact) -> list[Row]:
    """Return what the artifact is: its source, task, precision, size and verdicts."""
    return fact_rows(artifact.facts().items())


def summary_rows(artifact: Artifact) -> list[Row]:
    """Return the artifact in three rows: its model, what was made of it, and its path."""
    manifest = artifact.manifest
    opsets = ", ".join(dict.fromkeys(f"opset {graph.opset}" for graph in manifest.graphs))
    facts = {
        "model": f"{manifest.source.id}{_revision(manifest)}",
        "made": f"ONNX for {manifest.task}, {manifest.describe_precision()}, {opsets}, "
        f"{_size(manifest)}",
        "where": str(artifact.path),
    }
    return fact_rows(facts.items())


def _revision(manifest: Manifest) -> str:
    revision = manifest.source.revision
    return f" at {revision[:12]}" if revision else ""


def _size(manifest: Manifest) -> str:
    return human_bytes(sum(file.size_bytes for file in manifest.files.values()))


def interface_rows(manifest: Manifest) -> list[Row]:
    """Return the inputs and outputs of every graph."""
    return [
        {
            "graph": graph.file,
            "direction": direction,
            "name": spec.name,
            "dtype": spec.dtype,
            "shape": ", ".join(str(dim) for dim in spec.dims) or "scalar",
        }
        for graph in manifest.graphs
        for direction, specs in (("in", graph.inputs), ("out", graph.outputs))
        for spec in specs
    ]


def stage_rows(manifest: Manifest) -> list[Row]:
    """Return a row for each stage, with the options that are not the defaults."""
    return [
        {
            "stage": stage.stage,
            "changed options": format_options(
                {name: stage.options.get(name) for name in stage.changed_options}
            ),
            "time, memory": f"{stage.seconds:.1f} s, {human_bytes(stage.peak_rss_bytes)}",
            "finished": stage.finished.replace("T", " ").replace("+00:00", " UTC"),
        }
        for stage in manifest.stages
    ]


def option_rows(manifest: Manifest) -> list[Row]:
    """Return a row for each stage, with all options and the versions of its tools."""
    return [
        {
            "stage": stage.stage,
            "options": format_options(stage.options),
            "tools": named_versions(stage.tools),
        }
        for stage in manifest.stages
    ]


def stage_facts(stage: StageRecord, *, every: bool = False) -> list[Row]:
    """Return when a stage finished, its time and memory, and its notes.

    Args:
        stage: the stage.
        every: True for options, tools and cache key, too.
    """
    took = f"{stage.seconds:.1f} s, peak memory {human_bytes(stage.peak_rss_bytes)}"
    facts = [(stage.stage, f"finished {stage.finished}, took {took}")]
    if every:
        tools = named_versions(stage.tools) or NOTHING
        facts += [("options", format_options(stage.options)), ("tools", tools), ("key", stage.key)]
    return fact_rows([*facts, *(("note", note) for note in stage.notes)])


def file_rows(manifest: Manifest) -> list[Row]:
    """Return every file with its size and hash."""
    return [
        {"file": name, "size": human_bytes(file.size_bytes), "sha256": f"{file.sha256[:16]}…"}
        for name, file in manifest.files.items()
    ]


def format_options(options: Mapping[str, Any]) -> str:
    """Return options in one line.

    >>> format_options({"opset": 20, "task": "", "fixed": False}), format_options({})
    ("opset=20, task='', fixed=false", 'none')
    """
    return ", ".join(f"{name}={_plain(value)}" for name, value in options.items()) or "none"


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value or "''"
    return json.dumps(value, ensure_ascii=False)
