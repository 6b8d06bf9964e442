"""Fold the findings of all comparisons into the report, and decide whether the artifact passes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from enginery.core.artifact.artifact import Artifact
from enginery.core.tolerance import QuantizedTolerance
from enginery.reports.validation import (
    QuantizedAccuracy,
    ValidationCaseResult,
    ValidationReport,
)
from enginery.reports.weights import WeightMetrics
from enginery.validate.cases.positions import longest_compared
from enginery.validate.compare import ComparisonLimits
from enginery.validate.context import ValidationContext
from enginery.validate.findings import Findings
from enginery.validate.report import find_unproven, summarize


def make_report(
    context: ValidationContext,
    weights: WeightMetrics,
    findings: Findings,
    tools: Mapping[str, str],
    *,
    started: float,
) -> ValidationReport:
    """Return the report of a validation that has started at a time of `time.monotonic`."""
    limits, reference, config = context.limits, context.reference, context.config
    # Agreement proves nothing if a constant would pass, or if the reference rejects most inputs.
    not_proven = [
        *findings.not_proven,
        *find_unproven(findings.cases, reference.name, own_data=bool(config.data)),
    ]
    agrees = all_passed(findings.cases) and not findings.problems and not not_proven
    weights, excuses = _excuse_weights(context.artifact, weights, agrees=agrees)
    side_files = findings.side_files
    report = ValidationReport(
        passed=agrees
        and not weights.differences
        and not weights.problem
        and not (side_files and side_files.differences),
        summary="",
        precision=context.artifact.manifest.describe_precision(),
        providers=findings.providers or [],
        reference={
            "id": reference.source.record.id,
            "revision": reference.source.record.revision,
            "sha256": reference.source.record.sha256,
            "as": reference.description,
            "name": reference.name,
        },
        tolerance={
            **asdict(limits.tolerance),
            "max_abs_error set": limits.max_abs_error,
            "min_cosine set": limits.min_cosine,
            "rule": limits.rule,
        },
        cases=list(findings.cases),
        embeddings=findings.embeddings,
        accuracy=findings.accuracy,
        weights=weights,
        rounding=list(findings.rounding),
        layers=findings.layers,
        labels=findings.labels,
        generation=findings.generation,
        side_files=side_files,
        answers=findings.answers,
        not_proven=not_proven,
        effort=config.effort,
        coverage=list(findings.coverage),
        notes=[
            *dict.fromkeys(findings.notes),
            *_describe_rule(limits, findings.accuracy),
            *_describe_longest(context, findings.cases),
            *excuses,
        ],
        tools=dict(tools),
        seconds=round(time.monotonic() - started, 3),
    )
    return replace(report, summary=summarize(report))


def all_passed(cases: Sequence[ValidationCaseResult]) -> bool:
    """Return True if every case passed and every graph was compared on at least one."""
    graphs = {case.graph for case in cases}
    compared = {case.graph for case in cases if case.outputs}
    return bool(graphs) and graphs == compared and all(case.passed for case in cases)


def _excuse_weights(
    artifact: Artifact, weights: WeightMetrics, *, agrees: bool
) -> tuple[WeightMetrics, list[str]]:
    """Return the weights without differences that are harmless or permitted, and notes."""
    notes = []
    if weights.lost and _may_leave_out(artifact):
        notes.append(f"left out, as the export's allow_unused says: {', '.join(weights.lost)}")
        weights = replace(weights, lost=[])
    # If all outputs agree, a parameter multiplied by one factor is undone elsewhere in the graph.
    if agrees and not artifact.manifest.is_quantized:
        weights = weights.without_undone()
    return weights, notes


def _may_leave_out(artifact: Artifact) -> bool:
    """Return True if the model was exported without some of its checkpoint's tensors, knowingly."""
    stages = artifact.manifest.stages
    return any(s.stage == "export" and s.options.get("allow_unused") is True for s in stages)


def longest_proved(context: ValidationContext, cases: Sequence[ValidationCaseResult]) -> int | None:
    """Return the longest input that agreed; None if the model takes no longer one."""
    limits = context.feed_limits
    longest = longest_compared(context.graphs, cases)
    if longest is None or limits.min_sequence > 1:  # samples of audio
        return None
    return longest if longest < limits.max_positions or limits.position_limit is None else None


def _describe_longest(
    context: ValidationContext, cases: Sequence[ValidationCaseResult]
) -> list[str]:
    longest, positions = longest_proved(context, cases), context.feed_limits.max_positions
    if longest is None or longest >= positions:
        return []
    return [f"longest input compared: {longest} of {positions} positions"]


def _describe_rule(limits: ComparisonLimits, accuracy: QuantizedAccuracy | None) -> list[str]:
    """Describe the limits, if they are not those of the artifact's precision."""
    if not limits.rule or not isinstance(limits.tolerance, QuantizedTolerance):
        return [limits.rule] if limits.rule else []
    if accuracy is None:
        return [
            f"no real inputs were compared, so this was not checked: {limits.rule}; generated "
            f"inputs need a cosine of {limits.tolerance.min_cosine:g}"
        ]
    return [f"{limits.rule}; a cosine of at least {limits.tolerance.min_cosine:g} on any one input"]
