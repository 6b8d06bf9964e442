"""Results as plain rows and JSON, for the console to show.

>>> show.run_rows(result)
[{'stage': 'export', 'artifact': …, 'time': '5.2 s', 'result': 'made'}]
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from enginery.console import human_bytes
from enginery.core.artifact import Artifact
from enginery.core.store import StoreEntry

if TYPE_CHECKING:
    from enginery.pipeline import RunResult
    from enginery.validate.report import ValidationReport

Row = dict[str, str]


def artifact_rows(artifact: Artifact) -> list[Row]:
    """What the artifact is."""
    manifest = artifact.manifest
    source = manifest.source
    revision = f" at {source.revision[:12]}" if source.revision else ""
    size = sum(file.size_bytes for file in manifest.files.values())
    facts = {
        "source": f"{source.id}{revision} (sha256 {source.sha256[:12]}…)",
        "task": manifest.task,
        "model type": manifest.model_type,
        "precision": manifest.precision,
        "target": manifest.target,
        "graphs": ", ".join(f"{g.file} (opset {g.opset})" for g in manifest.graphs),
        "size": human_bytes(size),
    }
    for stage in manifest.stages:
        facts[stage.stage] = (
            f"{stage.seconds:.1f} s, peak memory {human_bytes(stage.peak_rss_bytes)}"
        )
        facts.update({f"{stage.stage} note {i}": n for i, n in enumerate(stage.notes, start=1)})
    for verdict in manifest.verdicts:
        said = "passed" if verdict.passed else "failed"
        facts[verdict.stage] = f"{said}: {verdict.summary}"
    return [{"what": name, "value": value} for name, value in facts.items()]


def artifact_json(artifact: Artifact) -> dict[str, Any]:
    """The manifest, with the artifact's path."""
    return {"path": str(artifact.path), **artifact.manifest.model_dump(mode="json")}


def interface_rows(artifact: Artifact) -> list[Row]:
    """Inputs and outputs of every graph."""
    return [
        {
            "graph": graph.file,
            "direction": direction,
            "name": spec.name,
            "dtype": spec.dtype,
            "shape": ", ".join(str(dim) for dim in spec.dims),
        }
        for graph in artifact.manifest.graphs
        for direction, specs in (("in", graph.inputs), ("out", graph.outputs))
        for spec in specs
    ]


def stage_rows(artifact: Artifact) -> list[Row]:
    """How the artifact was made."""
    return [
        {
            "stage": stage.stage,
            "finished": stage.finished,
            "options": ", ".join(f"{k}={v}" for k, v in stage.options.items()),
            "tools": ", ".join(f"{k} {v}" for k, v in stage.tools.items()),
            "key": stage.key[:16],
        }
        for stage in artifact.manifest.stages
    ]


def file_rows(artifact: Artifact) -> list[Row]:
    """Every file, by content."""
    return [
        {"file": name, "size": human_bytes(file.size_bytes), "sha256": f"{file.sha256[:16]}…"}
        for name, file in artifact.manifest.files.items()
    ]


def report_json(report: ValidationReport) -> Any:
    """The report as `reports/validation.json` has it."""
    return json.loads(report.to_json())


def report_lines(report: ValidationReport) -> list[str]:
    """What the table of a validation does not say."""
    lines = [f"provider {provider['name']}: {provider['reason']}" for provider in report.providers]
    if report.embeddings:
        found = report.embeddings
        lines.append(
            f"embeddings of {found.sentences} sentences: cosine at least {found.min_cosine:.8f}, "
            f"nearest neighbour the same for {found.neighbour_agreement:.0%}"
        )
    lines.extend(f"note: {note}" for note in report.notes)
    lines.append(f"{'passed' if report.passed else 'failed'}: {report.summary}")
    return lines


def run_rows(result: RunResult) -> list[Row]:
    """One row a stage: what was made, where, how long it took, how far it is from PyTorch."""
    return [
        {
            "stage": stage.stage,
            "result": _stage_result(stage.report, worked=stage.worked),
            "time": f"{stage.seconds:.1f} s",
            "detail": stage.report.summary
            if stage.report
            else f"{result.artifact.manifest.task}, {result.artifact.manifest.precision}, "
            f"{human_bytes(result.artifact.model.stat().st_size)}: {result.artifact.path}",
        }
        for stage in result.stages
    ]


def _stage_result(report: ValidationReport | None, *, worked: bool) -> str:
    done = "made" if report is None else ("passed" if report.passed else "failed")
    return done if worked else f"{done} earlier"


def run_json(result: RunResult, answers: Sequence[Row]) -> dict[str, Any]:
    """A run for programs."""
    return {
        "artifact": str(result.artifact.path),
        "passed": result.passed,
        "stages": [
            {
                "stage": stage.stage,
                "worked": stage.worked,
                "seconds": round(stage.seconds, 3),
                "report": report_json(stage.report) if stage.report else None,
            }
            for stage in result.stages
        ],
        "answers": list(answers),
    }


def store_rows(entries: Sequence[StoreEntry]) -> list[Row]:
    """One row an artifact."""
    from datetime import UTC, datetime

    return [
        {
            "artifact": entry.path.name,
            "source": entry.artifact.manifest.source.id if entry.artifact else "",
            "size": human_bytes(entry.size_bytes),
            "used": datetime.fromtimestamp(entry.used, UTC).isoformat(timespec="seconds"),
            "state": _state(entry),
        }
        for entry in entries
    ]


def _state(entry: StoreEntry) -> str:
    if entry.artifact is None:
        return f"damaged: {entry.problem}"
    return "failed" if entry.artifact.failed() else "ok"
