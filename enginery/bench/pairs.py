"""Who is told beside whom: pairs of contenders that a person would hold against one another.

>>> comparisons(rounds.turns, plans, BenchConfig())[0].words
'1.21 times as fast (1.18 to 1.24)'

PyTorch and Optimum run once, for the first artifact; PyTorch stands for the model, so that our
runner of every artifact is told beside it. Else a pair is of one artifact, or of two of our
runners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from enginery.bench.config import OURS, BenchConfig
from enginery.bench.contenders import Plan
from enginery.bench.statistics import compare
from enginery.core.reports import Comparison


def comparisons(
    turns: Mapping[str, Sequence[Sequence[float]]], plans: Mapping[str, Plan], config: BenchConfig
) -> list[Comparison]:
    """Everyone beside PyTorch, and beside our runner; each pair that `belong` holds, once."""
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
    """Whether two contenders are of one artifact, two of our runners, or ours beside PyTorch."""
    if one.subject == other.subject:
        return True
    stands = [plan.kind == OURS or plan.kind.startswith("pytorch") for plan in (one, other)]
    return all(stands)
