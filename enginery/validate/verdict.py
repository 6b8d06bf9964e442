"""Decide from the results of all comparisons whether an artifact passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.model.feeds import FeedLimits
from enginery.core.tolerance import QuantizedTolerance
from enginery.reports.validation import (
    QuantizedAccuracy,
    ValidationCaseResult,
)
from enginery.reports.weights import WeightMetrics
from enginery.validate.cases.positions import longest_compared
from enginery.validate.compare import (
    ComparisonLimits,
)


def all_passed(cases: Sequence[ValidationCaseResult]) -> bool:
    """Return True if every case passed and every graph was compared on at least one."""
    graphs = {case.graph for case in cases}
    compared = {case.graph for case in cases if case.outputs}
    return bool(graphs) and graphs == compared and all(case.passed for case in cases)


def excuse_weights(
    weights: WeightMetrics, artifact: Artifact, *, agrees: bool
) -> tuple[WeightMetrics, list[str]]:
    """Return the weights without differences that are harmless or permitted, and notes.

    Args:
        weights: how the weights compare.
        artifact: the artifact.
        agrees: all outputs agree.
    """
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


def longest_proved(
    graphs: Sequence[GraphRecord], results: Sequence[ValidationCaseResult], limits: FeedLimits
) -> tuple[int | None, list[str]]:
    """Return the longest input that agreed, None if the model takes no longer one, and notes."""
    longest = longest_compared(graphs, results)
    if longest is None or limits.min_sequence > 1:  # samples of audio
        return None, []
    if longest < limits.max_positions:
        return longest, [f"longest input compared: {longest} of {limits.max_positions} positions"]
    return (longest if limits.position_limit is None else None), []


def describe_rule(limits: ComparisonLimits, accuracy: QuantizedAccuracy | None) -> list[str]:
    """Describe the limits, if they are not those of the artifact's precision."""
    if not limits.rule or not isinstance(limits.tolerance, QuantizedTolerance):
        return [limits.rule] if limits.rule else []
    if accuracy is None:
        return [
            f"no real inputs were compared, so this was not checked: {limits.rule}; generated "
            f"inputs need a cosine of {limits.tolerance.min_cosine:g}"
        ]
    return [f"{limits.rule}; a cosine of at least {limits.tolerance.min_cosine:g} on any one input"]
