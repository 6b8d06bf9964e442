"""Test cases at the lengths where a model begins to do something else, and at its longest.

A model may attend to a window, compute positions in another way, or switch its attention at a
length that config.json names. Both sides of each such length run, and the longest input that this
machine can compare: eager attention needs memory for the square of the length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from enginery.core.artifact.manifest import GraphRecord
from enginery.core.model.feeds import FeedLimits, make_feeds
from enginery.core.shapes import dynamic_dims
from enginery.reports.validation import ValidationCaseResult
from enginery.validate.cases.sweep import LONGEST, ValidationCase, sweep_sizes
from enginery.validate.config import Effort

_LENGTH = re.compile(r"window|block|chunk|local|original_max|position|stride|segment|bucket")
"""Keys of config.json whose numbers may be lengths."""
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
_THRESHOLDS = 6
"""Number of such lengths that are compared, the shortest first."""
_OPERATIONS = {"quick": 2e10, "normal": 2e11, "thorough": 1e13}
"""Effort -> multiplications of one case: 200 billion take a core about ten seconds."""
_SCORES_BYTES = 512 << 20
"""Size of a layer's attention scores, and of the logits of all positions."""


@dataclass(frozen=True)
class CaseCost:
    """The model's size, and how much time a case may take."""

    elements: int
    """Number of the model's weights."""
    effort: Effort

    def allows(self, length: int) -> bool:
        """Return True if an input of such a length does not take too long."""
        return 2 * self.elements * length <= _OPERATIONS[self.effort]


def threshold_cases(
    record: GraphRecord,
    limits: FeedLimits,
    settings: Mapping[str, Any],
    cost: CaseCost,
    *,
    rows: int = 1,
    seed: int,
) -> list[ValidationCase]:
    """Return cases on both sides of each length in config.json, and of the longest affordable one.

    Args:
        record: the graph.
        limits: limits on its inputs.
        settings: the content of config.json.
        cost: how long a case may take.
        rows: number of rows.
        seed: random seed for the inputs.
    """
    names = dynamic_dims(record.inputs)
    if limits.min_sequence > 1 or not any("sequence" in name for name in names):
        return []
    longest = limits.max_positions
    heads = max(_numbers(settings, _HEADS), default=16)

    def affordable(length: int) -> bool:
        bytes_ = 4 * rows * max(heads * length * length, limits.vocab_size * length)
        return bytes_ <= _SCORES_BYTES and cost.allows(rows * length)

    thresholds = [n for n in sorted(set(_lengths(settings))) if 8 <= n < longest]
    lengths = [n for length in thresholds[:_THRESHOLDS] for n in (length, length + 1)]
    if longest > LONGEST:
        lengths.append(next((n for n in _longest_first(longest) if affordable(n)), LONGEST))
    cases = []
    for length in sorted({n for n in lengths if affordable(n)} - {min(longest, LONGEST)}):
        sizes = _sizes(names, limits, rows=rows, length=length)
        make = partial(make_feeds, record.inputs, sizes, limits, seed=seed)
        cases.append(ValidationCase(f"{length} tokens", "sweep", make))
    return cases


def longest_compared(
    graphs: Sequence[GraphRecord], results: Sequence[ValidationCaseResult]
) -> int | None:
    """Return the longest input that agreed in every graph of tokens; None without such graphs."""
    longest = []
    for record in graphs:
        dims = {spec.name: spec.dims for spec in record.inputs}
        if not any("sequence" in str(dim) for listed in dims.values() for dim in listed):
            continue
        sizes = [
            size
            for case in results
            if case.graph == record.file and case.outputs and case.passed
            for name, shape in case.shapes.items()
            for dim, size in zip(dims.get(name, ()), shape, strict=False)
            if "sequence" in str(dim)  # one of past and new tokens is their sum
        ]
        longest.append(max(sizes, default=0))
    return min(longest, default=None)


def _longest_first(longest: int) -> Iterator[int]:
    yield longest
    length = 1 << (longest - 1).bit_length()
    while length > LONGEST:
        length //= 2
        yield length


def _sizes(names: Sequence[str], limits: FeedLimits, *, rows: int, length: int) -> dict[str, int]:
    """Return the sizes of dims for a number of positions, half of them past if there is a past."""
    sizes = sweep_sizes(names, limits, batch=rows, sequence=length)
    past = length // 2 if any(name.startswith("past_") for name in names) else 0
    for name in names:
        if name.startswith("past_"):
            sizes[name] = past
        elif "sequence" in name:
            sizes[name] = length if name.startswith("encoder_") else length - past
    return sizes


def _lengths(settings: Any, key: str = "") -> Iterator[int]:
    """Yield the numbers that may be lengths: of keys that say so, in the file and its parts."""
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            yield from _lengths(value, name)
    elif isinstance(settings, list):
        for value in settings:
            yield from _lengths(value, key)
    elif isinstance(settings, int) and not isinstance(settings, bool) and _LENGTH.search(key):
        yield settings


def _numbers(settings: Mapping[str, Any], names: Sequence[str]) -> Iterator[int]:
    parts = [settings, *(value for value in settings.values() if isinstance(value, Mapping))]
    for part in parts:
        yield from (part[name] for name in names if isinstance(part.get(name), int))
