"""What a validation found, in one sentence.

>>> summarize(report.cases, report.embeddings, report.overall)
'23 outputs agree with PyTorch; largest error 1.4e-06 of 1.1e-05 allowed (…)'
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from enginery.core.reports import CaseResult, EmbeddingMetrics, OutputMetrics, OverallMetrics

UNTAKEN = "no engine takes it: "
"""What the reason of a case starts with that is outside the profiles of the engines."""


def summarize(
    cases: list[CaseResult],
    embeddings: EmbeddingMetrics | None = None,
    overall: Sequence[OverallMetrics] = (),
) -> str:
    """One sentence: what is wrong and where it is worst, or the largest error of all."""
    compared = [case for case in cases if not case.skipped]
    for graph in dict.fromkeys(case.graph for case in cases):
        if not any(case.graph == graph for case in compared):
            reason = next(case.skipped for case in cases if case.graph == graph)
            return f"{graph} could not be compared at all: {reason}"
    if broken := [case for case in compared if case.problem]:
        case = broken[0]
        more = f" ({len(broken)} of {len(compared)} inputs fail)" if len(broken) > 1 else ""
        return f"{case.graph}, {case.kind} '{case.name}': {case.problem}{more}"
    pairs = [(case, output) for case in compared for output in case.outputs]
    if not pairs:
        return "nothing could be compared"
    case, output = max(pairs, key=lambda pair: pair[1].badness)
    where = f"{output.output} on {case.kind} '{case.name}'"
    if len({case.graph for case in cases}) > 1:
        where = f"{case.graph}, {where}"
    if failed := sum(not output.passed for _, output in pairs):
        return (
            f"{failed} of {len(pairs)} outputs differ from PyTorch; "
            f"worst: {where}, {output.problem}"
        )
    if far := [found for found in overall if found.problem]:
        least = min(far, key=lambda found: found.cosine - found.cosine_limit)
        return f"{least.output} differs from PyTorch's: {least.problem}"
    if embeddings and embeddings.problem:
        return f"pooled embeddings differ from PyTorch's: {embeddings.problem}"
    untaken = sum(case.skipped.startswith(UNTAKEN) for case in cases)
    rejected = len(cases) - len(compared) - untaken
    return (
        f"{len(pairs)} outputs agree with PyTorch; {_nearest_to_fail(output, where, overall)}"
        + (f"; {rejected} inputs skipped that PyTorch itself rejects" if rejected else "")
        + (f"; {untaken} inputs skipped that no engine takes" if untaken else "")
    )


def _nearest_to_fail(output: OutputMetrics, where: str, overall: Sequence[OverallMetrics]) -> str:
    if overall:
        least = min(overall, key=lambda found: found.cosine - found.cosine_limit)
        return (
            f"cosine {least.cosine:.4f} over {least.inputs} real inputs, at least "
            f"{least.cosine_limit:.4f} expected ({least.output})"
        )
    if math.isfinite(output.limit):
        return f"largest error {output.max_abs:.2g} of {output.limit:.2g} allowed ({where})"
    return f"cosine {output.cosine:.4f}, at least {output.cosine_limit:.4f} expected ({where})"
