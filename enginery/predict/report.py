"""Report of a predict run, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from enginery.core.errors import BadRowsError
from enginery.core.table import Table, fact_rows


@dataclass
class Counts:
    """Totals of a window, a part or a run.

    >>> total = Counts(rows=2, tokens=14) + Counts(rows=1, tokens=5)
    >>> total.rows, total.tokens
    (3, 19)
    """

    rows: int = 0
    bad_rows: int = 0
    """Number of rows without a prediction; their `error` gives the reason."""
    truncated: int = 0
    """Number of texts that were truncated to the model's maximum length."""
    tokens: int = 0
    """Number of tokens with special tokens, without padding."""
    padded_tokens: int = 0
    """Number of tokens with padding, including rows that only fill a batch."""
    encode_seconds: float = 0.0
    """Wall time of tokenizing, in seconds."""
    run_seconds: float = 0.0
    """Time of all session runs, in seconds; the times of concurrent batches add up."""

    def __add__(self, other: Counts) -> Counts:
        names = [field.name for field in fields(self)]
        return Counts(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class PredictReport:
    """Report of a run, including the interrupted runs that it resumed."""

    output: str
    """Path of the output."""
    task: str
    worked: bool = True
    """False if the output was up to date, so that nothing ran."""
    counts: Counts
    resumed_rows: int = 0
    """Number of rows that an earlier run had finished."""
    first_bad: str = ""
    """The first bad row and its problem; empty if there is none."""
    workers: int = 1
    providers: tuple[str, ...]
    notes: tuple[str, ...] = ()
    start_seconds: float
    """Time until the first batch ran, without imports."""
    total_seconds: float = 0.0
    """Time of this run, without the runs that it resumes; 0 until the output is complete."""
    peak_rss_bytes: int = 0
    """Peak memory of this process."""
    size_bytes: int = 0
    """Size of the output."""
    sha256: str = ""
    """Digest of the output, with which the next run finds out if it was changed."""
    fingerprint: dict[str, str]
    key: str

    @property
    def bad_rows(self) -> int:
        return self.counts.bad_rows

    @property
    def rows_per_second(self) -> float:
        """Throughput of this run in rows per second, start and writing included."""
        rows = self.counts.rows - self.resumed_rows
        return rows / self.total_seconds if self.total_seconds and self.worked else 0.0

    @property
    def padding_ratio(self) -> float:
        """Ratio of padded tokens to tokens: 1 means no padding; 0 for images."""
        return self.counts.padded_tokens / self.counts.tokens if self.counts.tokens else 0.0

    @property
    def inference_seconds(self) -> float:
        """Session time per worker, in seconds."""
        return self.counts.run_seconds / self.workers

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            **asdict(self),
            "inference_seconds": self.inference_seconds,
            "rows_per_second": self.rows_per_second,
            "padding_ratio": self.padding_ratio,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any], *, worked: bool) -> PredictReport:
        """Return the report from the JSON of `as_json`.

        Raises:
            KeyError, TypeError: it is not such a report.
        """
        names = cls.__dataclass_fields__
        values = {name: document[name] for name in names}
        return cls(
            **{
                **values,
                "counts": Counts(**document["counts"]),
                "providers": tuple(document["providers"]),
                "notes": tuple(document["notes"]),
                "worked": worked,
            }
        )

    def rows(self) -> list[Table | str]:
        """Return a table of facts: counts, times, memory."""
        counts = self.counts
        predicted_rows = counts.rows - counts.bad_rows
        bad = f"{counts.bad_rows:,} without a result"
        facts = {"rows": f"{counts.rows:,} read, {predicted_rows:,} predicted, {bad}"}
        if self.resumed_rows:
            facts["from an earlier run"] = f"{self.resumed_rows:,} rows"
        if self.first_bad:
            facts["first bad row"] = self.first_bad
        if counts.truncated:
            facts["truncated"] = f"{counts.truncated:,} texts"
        facts["start"] = f"{self.start_seconds:.2f} s"
        facts["encode"] = f"{counts.encode_seconds:.2f} s"
        facts["inference"] = f"{self.inference_seconds:.2f} s, {self.workers} at a time"
        facts["total"] = f"{self.total_seconds:.2f} s"
        facts["peak memory"] = f"{self.peak_rss_bytes / 2**20:.0f} MiB"
        if self.worked:
            facts["rows/s"] = f"{self.rows_per_second:,.1f}"
        if self.padding_ratio:
            facts["padding ratio"] = f"{self.padding_ratio:.3f}"
        return [Table(f"Predicted {self.output}", fact_rows(facts.items()))]

    def require_answers(self) -> None:
        """Raise BadRowsError if there are rows without a result."""
        if self.bad_rows:
            raise BadRowsError(
                f"{self.bad_rows:,} of {self.counts.rows:,} rows have no result; the first: "
                f"{self.first_bad.rstrip('.')}.",
                do=f"See the column error in {self.output}.",
            )


def sidecar(output: Path) -> Path:
    """Return the path of an output's report: `out.parquet.json` for `out.parquet`."""
    return output.with_name(f"{output.name}.json")
