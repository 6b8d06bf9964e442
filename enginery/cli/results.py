"""What stages returned that leave no artifact, shown alike by their commands and by `run`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from enginery.core.errors import BadRowsError
from enginery.core.options import options_dict

if TYPE_CHECKING:
    from enginery.cli.console import Console


def result_json(stage: str, made: Any) -> Any:
    """Return what a stage made for programs; None for a stage that makes an artifact."""
    if stage == "lint":
        return {"graphs": [report.as_json() for report in made]}
    if stage == "bench":
        return json.loads(made.to_json())
    if stage == "predict":
        return made.as_json()
    if stage in ("publish", "export-triton", "export-kserve"):
        return options_dict(made)
    return None


def show_result(console: Console, stage: str, made: Any) -> None:
    """Print what a stage made for people; nothing for a stage that makes an artifact."""
    if stage == "lint":
        for report in made:
            console.table(report.path, report.rows())
            console.line(report.summary)
    elif stage == "bench":
        from enginery.bench.report.rows import lines, tables

        for title, rows in tables(made).items():
            console.table(title, rows)
        for line in lines(made):
            console.line(line)
    elif stage == "predict":
        console.table(f"Predicted {made.output}", made.table())
    elif stage == "publish":
        console.line(made.url)
    elif stage == "export-triton":
        console.line(f"wrote {made.path}: {', '.join(made.models)}")
    elif stage == "export-kserve":
        console.line(f"wrote {made.path}: InferenceService {made.name}, model {made.model}")


def require_answers(made: Any) -> None:
    """Raise BadRowsError where a PredictReport has rows without an answer."""
    if made.bad_rows:
        raise BadRowsError(
            f"{made.bad_rows:,} of {made.counts.rows:,} rows have no answer; the first: "
            f"{made.first_bad.rstrip('.')}.",
            do=f"The column error in {made.output} says why.",
        )
