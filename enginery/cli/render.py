"""Lay out results: rows of tables for people, JSON documents for programs.

The rows of reports come from `enginery.reports`; `show` prints them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.engine_record import engine_directories
from enginery.core.store.store import StoreEntry
from enginery.core.table import NOTHING, Row, Table, human_bytes
from enginery.reports.artifact import artifact_rows, stage_facts
from enginery.reports.base import StageOutput
from enginery.reports.benchmark import BenchResult
from enginery.reports.quantization import QuantizationReport

if TYPE_CHECKING:
    from enginery.api import RunResult
    from enginery.cli.console import Console
    from enginery.cli.demo import SamplePrediction
    from enginery.stages import StageResult


def show(console: Console, rows: Iterable[Table | str]) -> None:
    """Print tables and lines of text."""
    for block in rows:
        if isinstance(block, Table):
            console.table(block.title, block.rows)
        else:
            console.line(block)


def show_output(console: Console, output: StageOutput) -> None:
    """Print what a stage returned: of a benchmark its summary, or with --verbose all tables."""
    if isinstance(output, BenchResult) and not console.verbose:
        show(console, output.summary_rows())
    else:
        show(console, output.rows())


def show_new_artifact(console: Console, artifact: Artifact, done: str) -> None:
    """Print an artifact that a stage has made, and that stage."""
    console.json(artifact_json(artifact))
    console.table(f"{done} to {artifact.path}", artifact_rows(artifact))
    console.table("Made by", stage_facts(artifact.manifest.stages[-1]))


def show_stages(console: Console, artifact: Artifact) -> None:
    """Print the stages that made the artifact, with options and tools."""
    stages = artifact.manifest.stages
    console.table("Stages", [row for stage in stages for row in stage_facts(stage, every=True)])


def artifact_json(artifact: Artifact, engines: Sequence[Engine] | None = None) -> dict[str, Any]:
    """Return the manifest with the artifact's path, and the record of each engine if given."""
    document = {"path": str(artifact.path), **artifact.manifest.model_dump(mode="json")}
    if engines is None:
        return document
    return document | {"engines": [_record_json(engine) for engine in engines]}


_MEASURED = ("max abs error", "allowed", "cosine", "at least", "accuracy", "provider")
"""Columns of what a check has measured."""


def run_rows(result: RunResult) -> list[Row]:
    """Return one row per stage: result, time, and the largest difference from the reference.

    The cosines of quantize, and of the validation of a quantized graph, are means over real inputs.
    """
    rows = [_stage_row(stage) for stage in result.stages]
    blank = dict.fromkeys(("time", *_MEASURED), NOTHING)
    rows += [{"stage": name, "result": "refused", **blank} for name in result.refused]
    empty = {name for name in ("at least", "accuracy") if all(row[name] == NOTHING for row in rows)}
    return [{name: row[name] for name in row if name not in empty} for row in rows]


_RESULTS = {"bench": "measured", "predict": "answered", "publish": "published"}
"""The result of a stage in one word; all others are `made`, or `passed` and `failed`."""


def _stage_row(stage: StageResult) -> Row:
    result = _RESULTS.get(stage.stage, "made")
    if stage.report is not None or stage.stage == "lint":
        result = "passed" if stage.passed else "failed"
    headline = stage.report.headline() if stage.report else {}
    if stage.stage == "quantize" and (report := QuantizationReport.of(stage.artifact)):
        headline = report.headline()
    return {
        "stage": stage.stage,
        "result": result if stage.worked else f"{result} earlier",
        "time": f"{stage.seconds:.1f} s",
        **{column: headline.get(column) or NOTHING for column in _MEASURED},
    }


def run_json(result: RunResult, samples: Sequence[SamplePrediction]) -> dict[str, Any]:
    """Return a run as JSON values."""
    return {
        "artifact": str(result.artifact.path),
        "passed": result.passed,
        "stages": [
            {
                "stage": stage.stage,
                "worked": stage.worked,
                "seconds": round(stage.seconds, 3),
                "report": stage.report.as_json() if stage.report else None,
                "result": None if stage.output is None else stage.output.as_json(),
            }
            for stage in result.stages
        ],
        "refused": list(result.refused),
        "answers": [sample.as_json() for sample in samples],
    }


def store_rows(entries: Sequence[StoreEntry]) -> list[Row]:
    """Return one row per entry of the store."""
    return [
        {
            "name": entry.path.name,
            "kind": entry.kind.removesuffix("s"),
            "source": _source(entry) or NOTHING,
            "size": human_bytes(entry.size_bytes),
            "used": f"{datetime.fromtimestamp(entry.used, UTC):%Y-%m-%d}",
            "state": f"damaged: {entry.problem}" if entry.problem else _state(entry),
        }
        for entry in entries
    ]


def store_json(entries: Sequence[StoreEntry]) -> list[dict[str, Any]]:
    """Return the entries of the store as JSON values."""
    return [
        {
            "path": str(entry.path),
            "kind": entry.kind.removesuffix("s"),
            "source": _source(entry),
            "size_bytes": entry.size_bytes,
            "used": datetime.fromtimestamp(entry.used, UTC).isoformat(timespec="seconds"),
            "state": _state(entry),
            "problem": entry.problem,
        }
        for entry in entries
    ]


def _source(entry: StoreEntry) -> str | None:
    """Return an artifact's model, or an engine's graph by content: many artifacts may share it."""
    if entry.artifact:
        return entry.artifact.manifest.source.id
    if entry.engine:
        record = entry.engine.record
        return f"{record.graph} (sha256 {record.graph_sha256[:12]}…)"
    return entry.graph.source if entry.graph else None


def _state(entry: StoreEntry) -> str:
    if entry.content is None:
        return "damaged"
    return "failed" if entry.artifact and entry.artifact.failed_verdict() else "ok"


# Engines


def open_engines(artifact: Artifact) -> list[Engine]:
    """Open the engines of an artifact, in the order of their names.

    Raises:
        ArtifactError: an engine is damaged.
    """
    return [Engine.open(path) for path in engine_directories(artifact.path)]


def engine_json(engine: Engine) -> dict[str, Any]:
    """Return the record of an engine with its path and all layers."""
    return {
        **_record_json(engine),
        "all_layers": [asdict(layer) for layer in engine.layers()],
    }


def _record_json(engine: Engine) -> dict[str, Any]:
    return {"path": str(engine.path), **engine.record.model_dump(mode="json")}


def stage_notes(artifact: Artifact, stage: str) -> list[str]:
    """Return the notes of the newest run of a stage, without the first, which the tables have."""
    runs = [record for record in artifact.manifest.stages if record.stage == stage]
    return list(runs[-1].notes[1:]) if runs else []
