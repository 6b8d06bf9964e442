"""Choose which pairs of contenders the report compares.

>>> comparisons(rounds.turns, plans, BenchConfig())[0].words
'1.21 times as fast (1.18 to 1.24)'

PyTorch and Optimum run once, for the first artifact. PyTorch represents the model, so the runner of
every artifact is compared with it. All other pairs are of one artifact, or of two runners of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from enginery.bench.backends.plan import Plan
from enginery.bench.config import OURS, BenchConfig
from enginery.bench.measurement.statistics import compare
from enginery.core.artifact.reports import Comparison


def comparisons(
    turns: Mapping[str, Sequence[Sequence[float]]], plans: Mapping[str, Plan], config: BenchConfig
) -> list[Comparison]:
    """Compare every contender with PyTorch and with our runner; each pair of `belong` once."""
    bases = [name for name in turns if plans[name].kind == "pytorch"]
    bases += [name for name in turns if plans[name].kind == OURS]
    found: dict[frozenset[str], Comparison] = {}
    for base in bases:
        for name in turns:
            pair = frozenset((base, name))
            if name == base or pair in found or not belong(plans[name], plans[base]):
                continue
            found[pair] = compare(
                turns[base],
                turns[name],
                confidence=config.confidence,
                smallest=config.smallest_difference,
                names=(name, base),
            )
    return list(found.values())


def belong(one: Plan, other: Plan) -> bool:
    """Return True for two contenders of one artifact, two of our runners, or ours and PyTorch."""
    if one.subject == other.subject:
        return True
    stands = [plan.kind == OURS or plan.kind.startswith("pytorch") for plan in (one, other)]
    return all(stands)
