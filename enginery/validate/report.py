"""Summary of a validation in one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence

from enginery.reports.validation import (
    OutputMetrics,
    QuantizedAccuracy,
    ValidationCaseResult,
    ValidationReport,
)
from enginery.reports.weights import WeightMetrics

OUTSIDE_PROFILES = "outside the profiles of all engines: "
"""Start of the reason why a case was skipped that fits no engine."""


def find_unproven(
    cases: Sequence[ValidationCaseResult], reference: str = "PyTorch", *, own_data: bool = False
) -> list[str]:
    """Return reasons why agreement with the reference proves nothing; empty if it proves something.

    Cases that fit no engine do not count: nothing is built for them. With `own_data`, real cases
    are the user's: if they were compared, it does not matter how many generated ones were rejected.
    """
    reasons = []
    for graph in dict.fromkeys(case.graph for case in cases):
        tried = [
            case
            for case in cases
            if case.graph == graph and not case.skipped.startswith(OUTSIDE_PROFILES)
        ]
        rejected = [case for case in tried if case.skipped]
        # Where the user's own inputs were compared, refused ones that are made up say little.
        has_user_data = own_data and any(case.kind == "real" and case.outputs for case in tried)
        if 2 * len(rejected) > len(tried) and not has_user_data:
            reasons.append(
                f"{graph}: {reference} rejects {len(rejected)} of {len(tried)} inputs "
                f"({rejected[0].skipped}); give others with --data"
            )
        by_output: dict[str, list[OutputMetrics]] = {}
        for case in tried:
            for output in case.outputs:
                by_output.setdefault(output.output, []).append(output)
        for name, outputs in by_output.items():
            # One input whose error a constant would exceed is enough to prove something.
            ratios = [o.constant_ratio for o in outputs if o.constant_ratio is not None]
            # A constant would be within all limits, so that agreement says nothing.
            if ratios and max(ratios) <= 1:
                remedy = (
                    "the inputs of --data do not change that: give some whose outputs differ more, "
                    "or set a smaller limit with --max-abs-error"
                    if has_user_data
                    else "give other inputs with --data"
                )
                reasons.append(
                    f"{graph}, {name}: the same values for every input would pass, because they "
                    f"differ by less than the allowed error ({max(ratios):.2g} of it); {remedy}"
                )
    return reasons


def summarize(report: ValidationReport) -> str:
    """Summarize a report in one sentence: the worst failure, or the largest error."""
    cases, weights, name = report.cases, report.weights, report.reference_name
    compared = [case for case in cases if not case.skipped]
    # The order of the checks: what makes the later figures meaningless comes first.
    for graph in dict.fromkeys(case.graph for case in cases):
        if not any(case.graph == graph for case in compared):
            reason = next(case.skipped for case in cases if case.graph == graph)
            return f"{graph} could not be compared on any input: {reason}"
    # Report differing outputs first: they locate a fault better than a differing answer.
    answer_kinds = ("answer", "generation")
    texts = [case for case in compared if case.kind in answer_kinds and case.problem]
    if broken := [case for case in compared if case.problem and case not in texts]:
        return _describe_broken(broken, len(compared))
    pairs = [(case, output) for case in compared for output in case.outputs]
    if not pairs:
        return "nothing could be compared"
    case, output = max(pairs, key=lambda pair: pair[1].limit_ratio)
    where = f"{output.output} on {case.kind} '{case.name}'"
    if len({case.graph for case in cases}) > 1:
        where = f"{case.graph}, {where}"
    if failed := sum(not output.passed for _, output in pairs):
        return (
            f"{failed} of {len(pairs)} outputs differ from {name}; worst: {where}, {output.problem}"
        )
    if texts:
        return _describe_broken(texts, len(compared))
    accuracy = report.accuracy
    if accuracy and accuracy.problem:
        return (
            f"the answers to {accuracy.found.rows} real inputs differ from {name}'s: "
            f"{accuracy.problem}"
        )
    if report.embeddings and report.embeddings.problem:
        return f"pooled embeddings differ from {name}'s: {report.embeddings.problem}"
    # Outputs agree, so a weight that differs is one that the inputs hardly reach.
    if weights.differences:
        return describe_weights(weights, name)
    if other := [share for share in report.rounding if share.problem]:
        worst = max(other, key=lambda share: share.other_share)
        return f"{worst.graph}, {worst.output} differs from {name}: {worst.problem}"
    if report.layers and report.layers.problem:
        return f"a layer is less accurate than quantize has measured: {report.layers.problem}"
    if report.not_proven:
        more = len(report.not_proven) - 1
        others = f" (and {more} more reasons)" if more else ""
        return f"not proven: {report.not_proven[0]}{others}"
    # Inputs that no engine takes were skipped by choice, and are no refusal of the reference.
    outside = sum(case.skipped.startswith(OUTSIDE_PROFILES) for case in cases)
    rejected = len(cases) - len(compared) - outside
    return (
        f"{len(pairs)} outputs agree with {name}; {_nearest_to_fail(output, where, accuracy)}"
        + (f"; {rejected} inputs skipped that {name} rejects" if rejected else "")
        + (f"; {outside} inputs skipped that fit no engine" if outside else "")
        + (f"; generation: {report.generation.describe()}" if report.generation else "")
        + f"; weights: {weights.describe()}"
    )


def _describe_broken(broken: Sequence[ValidationCaseResult], compared: int) -> str:
    case = broken[0]
    more = f" ({len(broken)} of {compared} inputs fail)" if len(broken) > 1 else ""
    return f"{case.graph}, {case.kind} '{case.name}': {case.problem}{more}"


def describe_weights(weights: WeightMetrics, reference: str = "PyTorch") -> str:
    """Describe the weights that differ in one sentence, with the first of them."""
    first = weights.differences[0]
    name = first.parameter or first.weight
    more = len(weights.differences) - 1
    others = f" ({more} more weights differ)" if more else ""
    return f"a weight differs from {reference}'s: {name} in {first.graph}: {first.problem}{others}"


def _nearest_to_fail(output: OutputMetrics, where: str, accuracy: QuantizedAccuracy | None) -> str:
    if accuracy is not None:
        return (
            f"mean cosine {accuracy.found.cosine:.4f} over {accuracy.found.rows} real inputs, at "
            f"least {accuracy.cosine_limit:.4f} expected"
        )
    if math.isfinite(output.limit):
        return f"largest error {output.max_abs:.2g} of {output.limit:.2g} allowed ({where})"
    return f"cosine {output.cosine:.4f}, at least {output.cosine_limit:.4f} expected ({where})"
