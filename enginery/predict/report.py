"""What a run did, in rows for people and as JSON for programs.

>>> report.table()[0]
{'what': 'rows', 'value': '10,000 in, 9,998 answered, 2 bad'}
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Counts:
    """Sums over rows: of a window, of a part, of a run.

    >>> Counts(rows=2, tokens=14) + Counts(rows=1, tokens=5)
    Counts(rows=3, bad_rows=0, truncated=0, tokens=19, padded_tokens=0, …)
    """

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
    """Tokenizing, as the clock went for the thread that waited for it."""
    run_seconds: float = 0.0
    """Of the session, summed over batches that run side by side."""

    def __add__(self, other: Counts) -> Counts:
        names = [field.name for field in fields(self)]
        return Counts(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True)
class PredictReport:
    """One run of predict, those that were killed before it included."""

    output: str
    task: str
    worked: bool
    """False where the output was there, whole and of the same."""
    counts: Counts
    resumed_rows: int
    """Rows that an earlier run had finished."""
    first_bad: str
    """The first bad row and what is wrong with it; empty where there is none."""
    workers: int
    providers: tuple[str, ...]
    notes: tuple[str, ...]
    boot_seconds: float
    """Until the first batch went to the session, imports of this process not included; on Ray until
    the first window came back."""
    total_seconds: float
    """Of this run."""
    peak_rss_bytes: int
    """Of this process."""
    size_bytes: int
    """Of the output."""
    sha256: str
    """Of the output: a byte that is changed later is noticed by the next run."""
    fingerprint: dict[str, str]
    key: str

    @property
    def bad_rows(self) -> int:
        return self.counts.bad_rows

    @property
    def phrases_per_second(self) -> float:
        """Rows of this run over its time, boot and writing included."""
        rows = self.counts.rows - self.resumed_rows
        return rows / self.total_seconds if self.total_seconds and self.worked else 0.0

    @property
    def padding_ratio(self) -> float:
        """Padded to real tokens; 1 is no padding. 0 for images."""
        return self.counts.padded_tokens / self.counts.tokens if self.counts.tokens else 0.0

    @property
    def inference_seconds(self) -> float:
        """Of the session, divided by the workers that it was shared by."""
        return self.counts.run_seconds / self.workers

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            **asdict(self),
            "providers": list(self.providers),
            "notes": list(self.notes),
            "inference_seconds": self.inference_seconds,
            "phrases_per_second": self.phrases_per_second,
            "padding_ratio": self.padding_ratio,
        }

    @classmethod
    def from_json(cls, found: dict[str, Any], *, worked: bool) -> PredictReport:
        """Reads what `as_json` made; raises KeyError or TypeError for anything else."""
        names = cls.__dataclass_fields__
        values = {name: found[name] for name in names}
        return cls(
            **{
                **values,
                "counts": Counts(**found["counts"]),
                "providers": tuple(found["providers"]),
                "notes": tuple(found["notes"]),
                "worked": worked,
            }
        )

    def table(self) -> list[dict[str, str]]:
        """Rows of a table of facts, `what` and `value`."""
        counts = self.counts
        good = counts.rows - counts.bad_rows
        facts = {
            "rows": f"{counts.rows:,} in, {good:,} answered, {counts.bad_rows:,} bad",
        }
        if self.resumed_rows:
            facts["of an earlier run"] = f"{self.resumed_rows:,} rows"
        if self.first_bad:
            facts["first bad row"] = self.first_bad
        if counts.truncated:
            facts["cut"] = f"{counts.truncated:,} texts longer than the model takes"
        facts["boot"] = f"{self.boot_seconds:.2f} s"
        facts["encode"] = f"{counts.encode_seconds:.2f} s"
        facts["inference"] = f"{self.inference_seconds:.2f} s, {self.workers} at a time"
        facts["total"] = f"{self.total_seconds:.2f} s"
        facts["peak memory"] = f"{self.peak_rss_bytes / 2**20:.0f} MiB"
        facts["phrases/s"] = f"{self.phrases_per_second:,.1f}"
        if self.padding_ratio:
            facts["padded to real tokens"] = f"{self.padding_ratio:.3f}"
        return [{"what": what, "value": value} for what, value in facts.items()]


def sidecar(output: Path) -> Path:
    """Where a finished output's report is: `out.parquet.json`, beside `out.parquet`."""
    return output.with_name(f"{output.name}.json")
