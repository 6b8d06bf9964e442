"""What a comparison says: results of cases, notes, reasons for doubt, figures for the report.

>>> first = Findings(notes=("no tokens were decoded: only graphs decode here, not engines",))
>>> joined = join_findings([first, Findings(not_proven=("model.onnx: all inputs are alike",))])
>>> joined.notes == first.notes, len(joined.not_proven)
(True, 1)

Every comparison of the validate stage returns `Findings`, and the stage joins them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from enginery.core.accuracy import LabelMetrics
from enginery.core.errors import EngineryError, raise_system_error
from enginery.reports.base import ProviderRecord
from enginery.reports.validation import (
    AnswerMetrics,
    EmbeddingMetrics,
    GenerationMetrics,
    GraphCoverage,
    QuantizedAccuracy,
    RoundingMetrics,
    SideFileMetrics,
    ValidationCaseResult,
)
from enginery.reports.weights import LayerMetrics


@dataclass(frozen=True)
class Findings:
    """What one comparison, or several of them, have shown."""

    cases: tuple[ValidationCaseResult, ...] = ()
    notes: tuple[str, ...] = ()
    not_proven: tuple[str, ...] = ()
    """Reasons why agreement proves nothing."""
    coverage: tuple[GraphCoverage, ...] = ()
    rounding: tuple[RoundingMetrics, ...] = ()
    providers: list[ProviderRecord] | None = None
    """The providers that ran the graph."""
    side_files: SideFileMetrics | None = None
    embeddings: EmbeddingMetrics | None = None
    accuracy: QuantizedAccuracy | None = None
    labels: LabelMetrics | None = None
    layers: LayerMetrics | None = None
    answers: AnswerMetrics | None = None
    generation: GenerationMetrics | None = None

    @property
    def problems(self) -> list[str]:
        """What fails although each case passes: answers together, layers, and errors but rounding.

        Weights and files beside the graphs are not among them.
        """
        checks = (self.embeddings, self.accuracy, self.layers, *self.rounding)
        return [check.problem for check in checks if check is not None and check.problem]


def note_refusal(what: str, error: EngineryError) -> Findings:
    """Return a note that something was not compared, because of an error.

    Args:
        what: start of the note.
        error: it is raised again if it is the system's, which says nothing about the artifact.
    """
    raise_system_error(error)
    return Findings(notes=(f"{what}: {error.message}",))


def join_findings(parts: Iterable[Findings]) -> Findings:
    """Return all findings as one, in their order; of several figures but layers, the last."""
    joined: dict[str, Any] = {}
    for part in parts:
        for field in fields(Findings):
            value = getattr(part, field.name)
            if isinstance(value, tuple):
                joined[field.name] = (*joined.get(field.name, ()), *value)
            elif isinstance(value, LayerMetrics) and field.name in joined:
                joined[field.name] = joined[field.name].with_graph(value)
            elif value is not None:
                joined[field.name] = value
    return Findings(**joined)
