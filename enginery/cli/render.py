"""Results as plain rows for people and JSON for programs; the console shows them.

>>> show.run_rows(result)
[{'stage': 'export', 'result': 'made', 'time': '5.2 s', …}]
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from enginery.cli.console import human_bytes
from enginery.core.artifact.artifact import Artifact
from enginery.core.store.store import StoreEntry
from enginery.runtime.providers.known import short_name

if TYPE_CHECKING:
    from enginery.api import RunResult
    from enginery.cli.demo import Answer
    from enginery.core.artifact.reports import OutputMetrics, ValidationCaseResult, ValidationReport
    from enginery.stages import StageResult

Row = dict[str, str]

_NOTHING = "–"


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
    for verdict in manifest.verdicts:
        said = "passed" if verdict.passed else "failed"
        facts[verdict.stage] = f"{said} {verdict.finished}: {verdict.summary}"
    return _facts(facts)


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
    rows = []
    for stage in artifact.manifest.stages:
        took = f"{stage.seconds:.1f} s, peak memory {human_bytes(stage.peak_rss_bytes)}"
        facts = {
            stage.stage: f"finished {stage.finished}, took {took}",
            "options": ", ".join(f"{name}={value}" for name, value in stage.options.items()),
            "tools": ", ".join(f"{name} {version}" for name, version in stage.tools.items()),
            "key": stage.key,
        }
        rows += _facts(facts) + [{"what": "note", "value": note} for note in stage.notes]
    return rows


def file_rows(artifact: Artifact) -> list[Row]:
    """Every file, by content."""
    return [
        {"file": name, "size": human_bytes(file.size_bytes), "sha256": f"{file.sha256[:16]}…"}
        for name, file in artifact.manifest.files.items()
    ]


def report_json(report: ValidationReport) -> Any:
    """The report as `reports/validation.json` has it."""
    return json.loads(report.to_json())


def validation_tables(report: ValidationReport, *, every: bool) -> dict[str, list[Row]]:
    """For each graph, its outputs against PyTorch.

    Args:
        report: what was found.
        every: a row for each case and output; else the worst case of each output, where outputs
            that differ by a layer's number count as one, and the cases that could not be compared.
    """
    tables: dict[str, list[Row]] = {}
    for graph in dict.fromkeys(case.graph for case in report.cases):
        cases = [case for case in report.cases if case.graph == graph]
        pairs = [(case, output) for case in cases for output in case.outputs]
        if not every:
            kinds: dict[str, list[tuple[ValidationCaseResult, OutputMetrics]]] = {}
            for pair in pairs:
                kinds.setdefault(_kind(pair[1].output), []).append(pair)
            pairs = [max(found, key=lambda pair: pair[1].limit_ratio) for found in kinds.values()]
        rows = [
            {
                "output": output.output if every else _kind(output.output),
                "input" if every else "worst input": f"{case.kind}: {case.name}",
                "max abs error": f"{output.max_abs:.1e}",
                "allowed": _limit(output),
                "cosine": f"{output.cosine:.6f}",
                "verdict": _verdict(output),
            }
            for case, output in pairs
        ]
        blank = dict.fromkeys(("max abs error", "allowed", "cosine"), _NOTHING)
        rows += [
            {
                "output": _NOTHING,
                "input" if every else "worst input": f"{case.kind}: {case.name}",
                **blank,
                "verdict": case.problem or f"skipped: {case.skipped}",
            }
            for case in cases
            if case.problem or (every and case.skipped)
        ]
        if rows:
            tables[graph] = rows
    return tables


def _kind(output: str) -> str:
    """`present.*.decoder.key` for `present.11.decoder.key`."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", output)


def _verdict(output: OutputMetrics) -> str:
    """One word where the row's own numbers say the rest."""
    return "failed" if output.max_abs > output.limit else output.problem or "ok"


def _limit(output: OutputMetrics) -> str:
    """The largest error allowed; a quantized graph is held to its cosine alone."""
    return f"{output.limit:.1e}" if math.isfinite(output.limit) else _NOTHING


def report_lines(report: ValidationReport) -> list[str]:
    """What the tables of a validation do not say."""
    lines = [provider_line(report)] if report.providers else []
    lines += [
        f"{o.output} over {o.inputs} real inputs: cosine {o.cosine:.4f}, at least "
        f"{o.cosine_limit:.4f} expected"
        for o in report.overall
    ]
    if report.embeddings:
        found = report.embeddings
        lines.append(
            f"embeddings of {found.sentences} sentences: cosine at least {found.min_cosine:.6f}, "
            f"nearest neighbour the same for {found.neighbour_agreement:.0%}"
        )
    if skipped := [case for case in report.cases if case.skipped]:
        lines.append(f"skipped: {len(skipped)} inputs that PyTorch rejects or no engine takes")
    lines.extend(f"note: {note}" for note in report.notes)
    lines.append(f"{'passed' if report.passed else 'failed'}: {report.summary}")
    return lines


def provider_line(report: ValidationReport) -> str:
    """`provider: cpu (requested)`, with the choice's reason."""
    chosen = (f"{short_name(p['name'])} ({p['reason']})" for p in report.providers)
    return f"provider: {', '.join(chosen)}"


def made_rows(result: RunResult) -> list[Row]:
    """What a run made, of what, and where."""
    manifest = result.artifact.manifest
    revision = f" at {manifest.source.revision[:12]}" if manifest.source.revision else ""
    opsets = ", ".join(dict.fromkeys(f"opset {graph.opset}" for graph in manifest.graphs))
    size = sum(file.size_bytes for file in manifest.files.values())
    return _facts(
        {
            "model": f"{manifest.source.id}{revision}",
            "made": f"ONNX for {manifest.task}, {manifest.precision}, {opsets}, "
            f"{human_bytes(size)}",
            "where": str(result.artifact.path),
        }
    )


def run_rows(result: RunResult) -> list[Row]:
    """One row a stage: what came of it, how long it took, how far outputs are from PyTorch."""
    rows = [_stage_row(stage) for stage in result.stages]
    blank = dict.fromkeys(("time", "max abs error", "allowed", "cosine", "provider"), _NOTHING)
    return rows + [{"stage": name, "result": "refused", **blank} for name in result.refused]


_DONE = {"bench": "measured", "predict": "answered", "publish": "published"}
"""What a stage did; the others made something, or checked it."""


def _stage_row(stage: StageResult) -> Row:
    report = stage.report
    done = _DONE.get(stage.stage, "made")
    if report is not None or stage.stage == "lint":
        done = "passed" if stage.passed else "failed"
    worst = report.worst() if report else None
    cosines = [o.cosine for case in report.cases for o in case.outputs] if report else []
    names = [short_name(provider["name"]) for provider in report.providers] if report else []
    return {
        "stage": stage.stage,
        "result": done if stage.worked else f"{done} earlier",
        "time": f"{stage.seconds:.1f} s",
        "max abs error": f"{worst[1].max_abs:.1e}" if worst else _NOTHING,
        "allowed": _limit(worst[1]) if worst else _NOTHING,
        "cosine": f"{min(cosines):.6f}" if cosines else _NOTHING,
        "provider": ", ".join(names) or _NOTHING,
    }


def run_json(result: RunResult, answers: Sequence[Answer], made: Sequence[Any]) -> dict[str, Any]:
    """A run for programs, with what its stages made as their commands say it."""
    return {
        "artifact": str(result.artifact.path),
        "passed": result.passed,
        "stages": [
            {
                "stage": stage.stage,
                "worked": stage.worked,
                "seconds": round(stage.seconds, 3),
                "report": report_json(stage.report) if stage.report else None,
                "result": each,
            }
            for stage, each in zip(result.stages, made, strict=True)
        ],
        "refused": list(result.refused),
        "answers": [answer.as_json() for answer in answers],
    }


def store_rows(entries: Sequence[StoreEntry]) -> list[Row]:
    """One row an artifact or an engine."""
    return [
        {
            "name": entry.path.name,
            "kind": entry.kind.removesuffix("s"),
            "source": _source(entry) or _NOTHING,
            "size": human_bytes(entry.size_bytes),
            "used": f"{datetime.fromtimestamp(entry.used, UTC):%Y-%m-%d}",
            "state": f"damaged: {entry.problem}" if entry.problem else _state(entry),
        }
        for entry in entries
    ]


def store_json(entries: Sequence[StoreEntry]) -> list[dict[str, Any]]:
    """The same for programs."""
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
    """An artifact's model, and an engine's graph by its content: it may be in many artifacts."""
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


def _facts(facts: dict[str, str]) -> list[Row]:
    return [{"what": name, "value": value} for name, value in facts.items()]
