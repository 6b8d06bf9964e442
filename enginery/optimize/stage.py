"""The optimize stage: from an FP32 artifact to an artifact optimized for CUDA, TensorRT or the CPU.

The result has cast or fused graphs, the same side files, and `reports/optimization.json`. If a
graph's outputs stay too far from FP32, the artifact gets a failed verdict: later stages reject it,
and the report names the node at which the outputs diverge.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from enginery.core.artifact.artifact import REPORTS, Artifact, commit_artifact, staging
from enginery.core.artifact.external_data import load_graph
from enginery.core.artifact.fingerprint import (
    Fingerprint,
    option_fields,
    stage_fingerprint,
    stage_tools,
)
from enginery.core.artifact.manifest import GraphRecord, Manifest, StageRecord, Verdict
from enginery.core.errors import OptionError
from enginery.core.progress import SILENT, Progress
from enginery.core.scratch import temporary_directory
from enginery.core.shapes import TensorSpec
from enginery.core.subprocess import peak_rss_bytes
from enginery.optimize.config import OptimizeConfig, check_options
from enginery.optimize.graphs import OptimizedGraphs, optimize_graphs, require_low_nodes
from enginery.optimize.guard import GuardRecord, describe_origin
from enginery.reports.base import Report
from enginery.reports.layer_errors import save_layer_errors

STAGE = "optimize"
STAGE_VERSION = "11"
"""Incremented when the same inputs yield another artifact; part of the fingerprint."""
TOOLS = ("onnx", "onnx-ir", "onnxscript", "numpy", "tokenizers")


@dataclass(frozen=True, repr=False)
class OptimizationReport(Report):
    """The content of `reports/optimization.json`, which no other stage reads."""

    FILE = "optimization.json"

    passed: bool
    summary: str
    target: str
    precision: str
    notes: list[str]
    graphs: list[GuardRecord]
    """One record for each graph that was cast."""
    seconds: float
    schema_version: int = field(default=1)


REPORT = f"{REPORTS}/{OptimizationReport.FILE}"


def fingerprint(artifact: Artifact, config: OptimizeConfig) -> Fingerprint:
    """Compute the fingerprint from the artifact's content, the options, the data and the tools.

    Raises:
        OptionError: an option is invalid.
    """
    check_options(config)
    config = config.resolved()
    return stage_fingerprint(
        STAGE,
        STAGE_VERSION,
        {
            "artifact": artifact.content_sha256(),
            "precision of the artifact": artifact.manifest.precision,
        },
        option_fields(config),
        stage_tools(TOOLS),
    )


def run(
    artifact: Artifact,
    config: OptimizeConfig,
    out: Path,
    *,
    key: Fingerprint | None = None,
    progress: Progress = SILENT,
) -> Artifact:
    """Optimize every graph and write the artifact to `out`; on an error nothing is written.

    If a graph's outputs are too far from FP32, the artifact is written with a failed verdict.

    Args:
        artifact: the FP32 artifact.
        config: the options.
        out: the directory of the new artifact.
        key: the result of `fingerprint`; computed if None.
        progress: receives progress messages.

    Raises:
        RejectedArtifactError: the artifact has failed a check.
        OptionError: an option is invalid or does not suit the artifact.
        ExportError: a graph cannot be fused or cast, or has ops that TensorRT does not support.
        InputError: the data cannot be read, or a graph fails on it.
    """
    started = time.monotonic()
    artifact.require_passed(allow_failed=config.allow_failed)
    key = key or fingerprint(artifact, config)
    config = config.resolved()
    if artifact.manifest.precision != "fp32":
        raise OptionError(
            f"{artifact.path} is {artifact.manifest.precision} already; optimize requires fp32.",
            do="Optimize the FP32 artifact from which it was made.",
        )
    with (
        staging(out, key.inputs) as directory,
        temporary_directory("optimize") as scratch,
    ):
        artifact.copy_side_files(directory)
        optimized = optimize_graphs(artifact, config, directory, scratch, progress=progress)
        require_low_nodes(artifact, config, optimized.records)
        report = OptimizationReport(
            passed=optimized.passed,
            summary=optimized.problem
            or summarize(config.target, config.precision, optimized.records),
            target=config.target,
            precision=config.precision,
            notes=optimized.notes,
            graphs=optimized.records,
            seconds=round(time.monotonic() - started, 3),
        )
        (directory / REPORTS).mkdir()
        (directory / REPORT).write_bytes(report.to_json())
        save_layer_errors(
            directory / REPORTS,
            {name: e for record in report.graphs for name, e in record.layer_errors.items()},
            meaning="relative error, with that of earlier layers",
        )
        stage = StageRecord.of(
            key,
            config,
            started=started,
            tools=stage_tools(TOOLS),
            # Graphs are fused in a process of their own.
            peak_rss_bytes=max(peak_rss_bytes(), optimized.peak_rss_bytes),
            notes=optimized.notes,
        )
        # A failed check is a verdict, not an error: the report says where the outputs diverge.
        verdict = Verdict.of(key, passed=report.passed, summary=report.summary, report=REPORT)
        commit_artifact(
            directory, _manifest(artifact, config, optimized, directory, stage, verdict)
        )
    progress.say(f"optimize: {report.summary}")
    return Artifact.open(out)


def summarize(target: str, precision: str, records: list[GuardRecord]) -> str:
    """Return one sentence on the first failure, or on the precision and the largest error."""
    failed = [record for record in records if not record.passed]
    if failed:
        return failed[0].describe()
    fp32_nodes = sum(len(record.islands) for record in records)
    if not records:
        return f"{precision} for {target}"
    agreements = [agreement for record in records for agreement in record.agreements]
    worst = max(agreements, key=lambda a: a.max_abs / a.limit if a.limit else 0.0, default=None)
    summary = (
        f"{precision} for {target}, {fp32_nodes} nodes kept in FP32 for their range"
        f"{describe_origin(records)}"
    )
    return f"{summary}; {worst.describe()}" if worst else summary


def _manifest(
    artifact: Artifact,
    config: OptimizeConfig,
    optimized: OptimizedGraphs,
    directory: Path,
    stage: StageRecord,
    verdict: Verdict,
) -> Manifest:
    graphs = tuple(
        _graph_record(record, directory, optimized) for record in artifact.manifest.graphs
    )
    return artifact.manifest.model_copy(
        update={
            "precision": config.precision,
            "target": config.target,
            "graphs": (*graphs, *optimized.added),
            "stages": (*artifact.manifest.stages, stage),
            # Verdicts on the source artifact do not apply to this one.
            "verdicts": (verdict,),
        }
    )


def _graph_record(record: GraphRecord, directory: Path, optimized: OptimizedGraphs) -> GraphRecord:
    """Return the record with the opset, the types and a further output of the new file."""
    model = load_graph(directory / record.file)
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in (*model.graph.input, *model.graph.output)
    }

    def typed(spec: TensorSpec) -> TensorSpec:
        return replace(spec, dtype=_DTYPES.get(types[spec.name], spec.dtype))

    outputs = [typed(spec) for spec in record.outputs]
    if answer := optimized.answers.get(record.file):
        outputs.append(answer)
    return record.model_copy(
        update={
            # That of the file: preparing the graph may have changed it.
            "opset": next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx")),
            "inputs": tuple(typed(spec) for spec in record.inputs),
            "outputs": tuple(outputs),
            "data_files": optimized.data_files.get(record.file, ()),
        }
    )


# onnx.TensorProto's numbers for the types that inputs and outputs can have after this stage.
_DTYPES = {1: "float32", 10: "float16", 16: "bfloat16"}
