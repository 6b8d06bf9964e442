"""Render results: rows of tables for people, JSON documents for programs.

Every function returns plain rows or JSON values, which `Console` prints; `show_…` print them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from enginery.cli.console import human_bytes
from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.engine_record import (
    EngineRecord,
    describe_products,
    engine_directories,
)
from enginery.core.errors import BadRowsError
from enginery.core.options import options_dict
from enginery.core.store.store import StoreEntry
from enginery.reports.quantization import QuantizationReport
from enginery.runtime.providers.known import short_name

if TYPE_CHECKING:
    from enginery.api import RunResult
    from enginery.cli.console import Console
    from enginery.cli.demo import SamplePrediction
    from enginery.core.artifact.manifest import StageRecord
    from enginery.reports.validation import OutputMetrics, ValidationCaseResult, ValidationReport
    from enginery.stages import StageResult

Row = dict[str, str]

_NOTHING = "–"
_PORTABLE = "portable"


def artifact_rows(artifact: Artifact) -> list[Row]:
    """Return what the artifact is: its source, task, precision, size and verdicts."""
    manifest = artifact.manifest
    source = manifest.source
    revision = f" at {source.revision[:12]}" if source.revision else ""
    size = sum(file.size_bytes for file in manifest.files.values())
    facts = {
        "source": f"{source.id}{revision} (sha256 {source.sha256[:12]}…)",
        "task": manifest.task,
        "model type": manifest.model_type,
        "precision": manifest.describe_precision(),
        "target": manifest.target,
        "graphs": ", ".join(f"{g.file} (opset {g.opset})" for g in manifest.graphs),
        "size": human_bytes(size),
    }
    for verdict in manifest.verdicts:
        said = "passed" if verdict.passed else "failed"
        facts[verdict.stage] = f"{said} {verdict.finished}: {verdict.summary}"
    return _facts(facts)


def artifact_json(artifact: Artifact, engines: Sequence[Engine] | None = None) -> dict[str, Any]:
    """Return the manifest with the artifact's path, and the record of each engine if given."""
    found = {"path": str(artifact.path), **artifact.manifest.model_dump(mode="json")}
    return found if engines is None else found | {"engines": [_record_json(e) for e in engines]}


def show_new_artifact(console: Console, artifact: Artifact, done: str) -> None:
    """Print an artifact that a stage has made, and that stage."""
    console.json(artifact_json(artifact))
    console.table(f"{done} to {artifact.path}", artifact_rows(artifact))
    stage = artifact.manifest.stages[-1]
    console.table("Made by", [stage_row(stage), *note_rows(stage)])


def interface_rows(artifact: Artifact) -> list[Row]:
    """Return the inputs and outputs of every graph."""
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
    """Return the stages that made the artifact, with options and tools."""
    rows = []
    for stage in artifact.manifest.stages:
        facts = {
            "options": ", ".join(f"{name}={value}" for name, value in stage.options.items()),
            "tools": ", ".join(f"{name} {version}" for name, version in stage.tools.items()),
            "key": stage.key,
        }
        rows += [stage_row(stage), *_facts(facts), *note_rows(stage)]
    return rows


def stage_row(stage: StageRecord) -> Row:
    """Return when a stage finished, its time and memory."""
    took = f"{stage.seconds:.1f} s, peak memory {human_bytes(stage.peak_rss_bytes)}"
    return {"what": stage.stage, "value": f"finished {stage.finished}, took {took}"}


def note_rows(stage: StageRecord) -> list[Row]:
    """Return the notes of a stage."""
    return [{"what": "note", "value": note} for note in stage.notes]


def file_rows(artifact: Artifact) -> list[Row]:
    """Return every file with its size and hash."""
    return [
        {"file": name, "size": human_bytes(file.size_bytes), "sha256": f"{file.sha256[:16]}…"}
        for name, file in artifact.manifest.files.items()
    ]


def report_json(report: ValidationReport) -> Any:
    """Return the report as `reports/validation.json` has it."""
    return json.loads(report.to_json())


def validation_tables(report: ValidationReport, *, every: bool) -> dict[str, list[Row]]:
    """Return the table of each graph: its outputs against the reference.

    Args:
        report: the report.
        every: True for a row per case and output. False for the worst case of each output, where
            outputs that differ only in a layer's number are one, and the cases that could not be
            compared.
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
        by_cosine = any(not math.isfinite(output.limit) for _, output in pairs)
        rows = [
            {
                "output": output.output if every else _kind(output.output),
                "input" if every else "worst input": f"{case.kind}: {case.name}",
                "max abs error": f"{output.max_abs:.1e}",
                "allowed": _limit(output),
                "cosine": f"{output.cosine:.6f}",
                **({"at least": _least(output.cosine_limit)} if by_cosine else {}),
                "verdict": _verdict(output),
            }
            for case, output in pairs
        ]
        columns = ("max abs error", "allowed", "cosine", *(("at least",) if by_cosine else ()))
        blank = dict.fromkeys(columns, _NOTHING)
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
    """Return `present.*.decoder.key` for `present.11.decoder.key`."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", output)


def _verdict(output: OutputMetrics) -> str:
    """Return one word if the row's numbers explain it, else the problem."""
    return "failed" if output.max_abs > output.limit else output.problem or "ok"


def _limit(output: OutputMetrics) -> str:
    """Return the allowed error; for a quantized graph, which has only a cosine limit, a dash."""
    return f"{output.limit:.1e}" if math.isfinite(output.limit) else _NOTHING


def _least(cosine: float) -> str:
    """Return the smallest cosine that is allowed, rounded down; a dash if there is no limit."""
    return f"{math.floor(cosine * 1e6) / 1e6:.6f}" if cosine > -1 else _NOTHING


_LISTED_WEIGHTS = 3
"""Weights that are named below the tables of a validation; the report has all."""


def report_lines(report: ValidationReport) -> list[str]:
    """Return the lines below the tables of a validation: provider, totals, notes, verdict."""
    lines = [provider_line(report)] if report.providers else []
    if accuracy := report.accuracy:
        found = accuracy.found
        worst = accuracy.worst_cosine_limit
        lines.append(
            f"over {found.rows} real inputs: mean cosine {found.cosine:.4f}, at least "
            f"{accuracy.cosine_limit:.4f} expected; smallest {found.worst_cosine:.4f}"
            + (f", at least {worst:.4f} expected" if worst is not None else "")
        )
    if pooled := report.embeddings:
        lines.append(
            f"embeddings of {pooled.sentences} sentences: cosine at least {pooled.min_cosine:.6f}, "
            f"nearest neighbour the same for {pooled.neighbour_agreement:.0%}"
        )
    if labels := report.labels:
        lines += [f"accuracy of {each.name}: {each.describe()}" for each in labels.accuracies]
        lines += [
            f"difference: {change.describe()}; {change.broken} rows right → wrong, "
            f"{change.repaired} wrong → right"
            for change in labels.changes
        ]
    if report.generation:
        lines.append(f"generation: {report.generation.describe()}")
    lines.extend(coverage.describe(report.reference_name) for coverage in report.coverage)
    if report.layers:
        lines.append(f"layers: {report.layers.describe()}")
    weights = report.weights
    lines.append(f"weights: {weights.describe()}")
    lines += [
        f"weight {differing.weight} of {differing.graph} differs: {differing.parameter}: "
        f"{differing.problem}"
        for differing in weights.differences[:_LISTED_WEIGHTS]
    ]
    if weights.untraced:
        names = [untraced.weight for untraced in weights.untraced[:_LISTED_WEIGHTS]]
        lines.append(f"weights that are none of {report.reference_name}'s: {', '.join(names)}")
    if skipped := [case for case in report.cases if case.skipped]:
        rejecting = f"{report.reference_name} rejects"
        lines.append(f"skipped: {len(skipped)} inputs that {rejecting} or no engine takes")
    lines.extend(f"note: {note}" for note in report.notes)
    if len(report.not_proven) > 1:  # the summary has one
        lines.extend(f"not proven: {reason}" for reason in report.not_proven)
    lines.append(f"{'passed' if report.passed else 'failed'}: {report.summary}")
    return lines


def provider_line(report: ValidationReport) -> str:
    """Return the line `provider: cpu (requested)`, with the reason of the choice."""
    chosen = (f"{short_name(p['name'])} ({p['reason']})" for p in report.providers)
    return f"provider: {', '.join(chosen)}"


def made_rows(result: RunResult) -> list[Row]:
    """Return the results of a run: the model, the artifact and its path."""
    manifest = result.artifact.manifest
    revision = f" at {manifest.source.revision[:12]}" if manifest.source.revision else ""
    opsets = ", ".join(dict.fromkeys(f"opset {graph.opset}" for graph in manifest.graphs))
    size = sum(file.size_bytes for file in manifest.files.values())
    return _facts(
        {
            "model": f"{manifest.source.id}{revision}",
            "made": f"ONNX for {manifest.task}, {manifest.describe_precision()}, {opsets}, "
            f"{human_bytes(size)}",
            "where": str(result.artifact.path),
        }
    )


def run_rows(result: RunResult) -> list[Row]:
    """Return one row per stage: result, time, and the largest difference from the reference.

    The cosines of quantize, and of the validation of a quantized graph, are means over real inputs.
    """
    rows = [_stage_row(stage) for stage in result.stages]
    columns = ("time", "max abs error", "allowed", "cosine", "at least", "accuracy", "provider")
    blank = dict.fromkeys(columns, _NOTHING)
    rows += [{"stage": name, "result": "refused", **blank} for name in result.refused]
    empty = {
        name for name in ("at least", "accuracy") if all(row[name] == _NOTHING for row in rows)
    }
    return [{name: row[name] for name in row if name not in empty} for row in rows]


_DONE = {"bench": "measured", "predict": "answered", "publish": "published"}
"""The result of a stage in one word; all others are `made`, or `passed` and `failed`."""


def _stage_row(stage: StageResult) -> Row:
    report = stage.report
    done = _DONE.get(stage.stage, "made")
    if report is not None or stage.stage == "lint":
        done = "passed" if stage.passed else "failed"
    worst = report.worst() if report else None
    cosine = _stage_cosine(stage)
    names = [short_name(provider["name"]) for provider in report.providers] if report else []
    return {
        "stage": stage.stage,
        "result": done if stage.worked else f"{done} earlier",
        "time": f"{stage.seconds:.1f} s",
        "max abs error": f"{worst[1].max_abs:.1e}" if worst else _NOTHING,
        "allowed": _limit(worst[1]) if worst else _NOTHING,
        "cosine": f"{cosine[0]:.6f}" if cosine else _NOTHING,
        "at least": _least(cosine[1]) if cosine else _NOTHING,
        "accuracy": _stage_accuracy(stage),
        "provider": ", ".join(names) or _NOTHING,
    }


def _stage_cosine(stage: StageResult) -> tuple[float, float] | None:
    """Return the cosine that a stage has measured, and the smallest that is allowed."""
    if stage.stage == "quantize" and (made := QuantizationReport.of(stage.artifact)):
        search, accuracy = made.search, made.accuracy
        least = search.reference - search.allowed if search and search.about == "cosine" else -1.0
        return (accuracy.cosine, least) if accuracy else None
    if stage.report is None:
        return None
    if compared := stage.report.accuracy:
        return compared.found.cosine, compared.cosine_limit
    found = [o.cosine for case in stage.report.cases for o in case.outputs]
    return (min(found), -1.0) if found else None  # its limit is that of the error


def _stage_accuracy(stage: StageResult) -> str:
    """Return the share of labels that the artifact and its reference have right, if measured."""
    if stage.stage == "quantize" and (made := QuantizationReport.of(stage.artifact)):
        if made.search and made.search.about == "accuracy" and made.accuracy:
            return f"{made.accuracy.label_accuracy:.1%} (FP32 {made.search.reference:.1%})"
    elif stage.report and (labels := stage.report.labels):
        reference, found = labels.accuracies
        return f"{found.accuracy:.1%} ({reference.name} {reference.accuracy:.1%})"
    return _NOTHING


def run_json(
    result: RunResult, samples: Sequence[SamplePrediction], made: Sequence[Any]
) -> dict[str, Any]:
    """Return a run as JSON values; `made` has the results of its stages as JSON values."""
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
        "answers": [sample.as_json() for sample in samples],
    }


def store_rows(entries: Sequence[StoreEntry]) -> list[Row]:
    """Return one row per entry of the store."""
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


def engine_list_rows(engines: Sequence[Engine]) -> list[Row]:
    """Return one row per engine."""
    return [
        {
            "engine": engine.name,
            "graph": engine.record.graph,
            "GPUs": _targets(engine.record),
            "profiles": "; ".join(engine.record.profiles) or "fixed shapes",
            "layers": str(sum(engine.record.layers.values())),
            "multiplied in": describe_products(engine.record.layers) or "–",
            "plan": human_bytes(engine.record.plan_size_bytes),
        }
        for engine in engines
    ]


def engine_rows(engine: Engine) -> list[Row]:
    """Return what an engine is, its inputs and outputs, and the time and memory of its build."""
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
    }
    facts |= {f"warning {n}": text for n, text in enumerate(record.warnings, start=1)}
    return [{"what": name, "value": value} for name, value in facts.items()]


def layer_count_rows(engine: Engine) -> list[Row]:
    """Return the number of layers of each kind and precision, the most frequent first."""
    counts = sorted(engine.record.layers.items(), key=lambda pair: -pair[1])
    return [{"layers": name, "count": str(count)} for name, count in counts]


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
            "takes": ", ".join([*layer.inputs, *layer.constants]) or "–",
            "gives": ", ".join(layer.outputs) or "–",
            "ONNX nodes": ", ".join(layer.nodes) or "–",
        }
        for layer in engine.layers()
        if every or layer.kind != "other"
    ]


def stage_notes(artifact: Artifact, stage: str) -> list[str]:
    """Return the notes of the newest run of a stage, without the first, which the tables have."""
    runs = [record for record in artifact.manifest.stages if record.stage == stage]
    return list(runs[-1].notes[1:]) if runs else []


def _targets(record: EngineRecord) -> str:
    return ", ".join(record.capabilities) or _PORTABLE


# Results of stages that make no artifact


def result_json(stage: str, made: Any) -> Any:
    """Return a stage's result as JSON values; None for a stage that makes an artifact."""
    if stage == "lint":
        return {"graphs": [report.as_json() for report in made]}
    if stage == "bench":
        return json.loads(made.to_json())
    if stage == "predict":
        return made.as_json()
    if stage in ("publish", "export-triton", "export-kserve"):
        return options_dict(made)
    return None


def show_result(console: Console, stage: str, made: Any) -> None:
    """Print a stage's result; nothing for a stage that makes an artifact."""
    if stage == "lint":
        for report in made:
            console.table(report.path, report.rows())
            console.line(report.summary)
    elif stage == "bench":
        from enginery.bench.report.rows import lines, tables

        for title, rows in tables(made).items():
            console.table(title, rows)
        for line in lines(made):
            console.line(line)
    elif stage == "predict":
        console.table(f"Predicted {made.output}", made.table())
    elif stage == "publish":
        console.line(made.url)
    elif stage == "export-triton":
        console.line(f"wrote {made.path}: {', '.join(made.models)}")
    elif stage == "export-kserve":
        console.line(f"wrote {made.path}: InferenceService {made.name}, model {made.model}")


def require_answers(made: Any) -> None:
    """Raise BadRowsError if a PredictReport has rows without a result."""
    if made.bad_rows:
        raise BadRowsError(
            f"{made.bad_rows:,} of {made.counts.rows:,} rows have no result; the first: "
            f"{made.first_bad.rstrip('.')}.",
            do=f"See the column error in {made.output}.",
        )


def _facts(facts: dict[str, str]) -> list[Row]:
    return [{"what": name, "value": value} for name, value in facts.items()]
