"""What was done to some rows, for a part's line in the journal and for the report.

>>> Counts(rows=2, tokens=14) + Counts(rows=1, tokens=5)
Counts(rows=3, bad_rows=0, truncated=0, tokens=19, padded_tokens=0, …)
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Counts:
    """Sums over rows."""

    rows: int = 0
    bad_rows: int = 0
    """Rows without an answer; their `error` says why."""
    truncated: int = 0
    """Texts that were cut because they have more tokens than the model takes."""
    tokens: int = 0
    """Special tokens included, padding not."""
    padded_tokens: int = 0
    """What the session was given."""
    encode_seconds: float = 0.0
    """Tokenizing, as the clock went for the thread that asked."""
    run_seconds: float = 0.0
    """Of the session, summed over batches that run side by side."""

    def __add__(self, other: Counts) -> Counts:
        names = [field.name for field in fields(self)]
        return Counts(**{name: getattr(self, name) + getattr(other, name) for name in names})
