"""Accuracy that is expected of a quantized artifact: what the quantize stage has measured.

PyTorch has no arithmetic of this kind whose error could serve as a noise floor. Instead:

- **On built-in inputs**, the quantize stage has measured the same graph on the same inputs, with
  the FP32 graph as the reference. So 1 - cosine may be at most 1.25 times as large, on average over
  the rows, and 1.5 times for the worst of them; two more of the nearest neighbours may differ.
- **On the user's data**, it has measured held-out rows of the calibration data. The mean of
  1 - cosine may be as large as that of the budget, or as the upper confidence bound (99.9 %, one
  side) for the mean of as many rows like those, whichever is larger.
- **Without these measurements**, 10 times the shortfall of the budget or of the measured cosine on
  built-in inputs, and 4 times on the user's data.

The outputs of single layers are compared with the same layers in FP32, on the same input
(`passes/qdq/layer_errors.py`), and with what the stage has measured in the same way:

- **On built-in inputs**, the error of a layer may be 1.1 times as large.
- **On the user's data**, 1.5 times as large, or the upper confidence bound as above, at 99.9 % for
  all layers together, whichever is larger. The inputs of a layer differ from one kind of text to
  another, which the bound does not know.

No measurement permits a mean cosine below 0.95, because the artifact's author wrote it; only
--min-cosine does. Each single case needs a cosine of 0.5, random token ids included. Noise in place
of images, sounds and caches is outside the ranges that were calibrated, so there the graph without
quantization has limits instead. Every value must be finite, and every shape and dtype correct.
There is no limit on the absolute error or on changed argmaxes; the report counts them. Faults
beside the quantization are found without it, see `weights/unrounded.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist

from enginery.core.accuracy import AccuracyMetrics, LayerError
from enginery.core.artifact.artifact import REPORTS, Artifact
from enginery.core.artifact.manifest import StageRecord
from enginery.core.errors import ArtifactError, OptionError, raise_system_error
from enginery.core.precision import roundoff
from enginery.core.tolerance import MIN_MEAN_COSINE, Tolerance
from enginery.reports.quantization import QuantizationReport
from enginery.reports.weights import LayerComparison, LayerMetrics

_MEAN_SLACK, _WORST_SLACK = 1.25, 1.5
"""Factors for 1 - cosine on the inputs that the quantize stage has measured as well. The FP32 graph
differs from PyTorch in its last bits, so some activations round to another number."""
_LAYER_SLACK, _LAYER_DATA_SLACK = 1.1, 1.5
"""Factors for the error of a layer. Rewritten graphs were seen at 1.02 on the same inputs. MiniLM,
calibrated on sentences of docstrings, was seen at 1.05 on other such sentences, 1.1 on Markdown and
on six sentences in one text, 1.2 on a license, 1.5 on the first four words of a sentence; at 2.9 in
other languages, whose embeddings miss the budget. Twice an activation's scale gives 1.6 to 1.8."""
_NEIGHBOURS = 2
_CONFIDENCE = 0.999
_BUILTIN_SLACK, _DATA_SLACK = 10.0, 4.0
"""Factors for inputs that have not been measured. Built-in ones are in other languages than most
calibration data; the user's own resemble what the artifact is used for."""

_REPORT = f"{REPORTS}/quantization.json"


@dataclass(frozen=True)
class AccuracyLimits:
    """What the answers to all real inputs together must reach; None for no limit."""

    cosine: float
    """For the mean over rows."""
    worst_cosine: float | None = None
    neighbours: float | None = None
    """Share of embeddings whose nearest neighbour is the same."""


@dataclass(frozen=True)
class AccuracyExpectation:
    """What the quantize stage promised and measured."""

    scheme: str
    own_data: bool
    """True for the user's data, False for built-in inputs."""
    budget: float | None
    """The mean cosine that the stage had to reach; None if it was another budget."""
    measured: AccuracyMetrics | None
    """On built-in inputs, or on held-out rows for the user's data; None if not measured there."""
    cosine: float
    """The budget or the measured cosine on held-out rows, whichever is lower."""
    min_shortfall: float
    """Shortfall (1 - cosine) that rounding to the artifact's precision alone permits."""

    @property
    def shortfall(self) -> float:
        """Shortfall of the budget."""
        return max(1.0 - self.cosine, self.min_shortfall)

    def limits(self, rows: int) -> AccuracyLimits:
        """Return the limits for a number of rows."""
        computed = self._limits(rows)
        return AccuracyLimits(
            max(computed.cosine, MIN_MEAN_COSINE), computed.worst_cosine, computed.neighbours
        )

    def _limits(self, rows: int) -> AccuracyLimits:
        measured = self.measured
        if measured is None or (self.own_data and measured.deviation is None):
            slack = _DATA_SLACK if self.own_data else _BUILTIN_SLACK
            return AccuracyLimits(1.0 - slack * self.shortfall)
        if self.own_data:
            bound = 1.0 - measured.cosine + _confidence_width(measured, rows)
            promised = 0.0 if self.budget is None else 1.0 - self.budget
            return AccuracyLimits(1.0 - max(bound, promised, self.min_shortfall))
        neighbours = measured.neighbour_agreement
        return AccuracyLimits(
            1.0 - _MEAN_SLACK * (1.0 - measured.cosine) - self.min_shortfall,
            1.0 - _WORST_SLACK * (1.0 - measured.worst_cosine) - self.min_shortfall,
            None if neighbours is None else neighbours - _NEIGHBOURS / max(measured.rows, 1),
        )

    def describe(self) -> str:
        """Describe where the limits come from."""
        measured = self.measured
        if measured is None or (self.own_data and measured.deviation is None):
            slack = _DATA_SLACK if self.own_data else _BUILTIN_SLACK
            return (
                f"{self.scheme}: over all real inputs, 1 - cosine may be {slack:g} times that of "
                f"the promised or measured cosine of {self.cosine:.4f}"
            )
        if self.own_data:
            budget = f", or the budget of {self.budget:.4f}" if self.budget is not None else ""
            return (
                f"{self.scheme}: over all real inputs, a mean cosine within the confidence bound "
                f"of the {measured.cosine:.4f} on {measured.rows} held-out rows{budget}"
            )
        return (
            f"{self.scheme}: on these inputs quantize measured a mean cosine of "
            f"{measured.cosine:.4f} and at least {measured.worst_cosine:.4f}; 1 - cosine may "
            f"be {_MEAN_SLACK:g} and {_WORST_SLACK:g} times as large"
        )


def _confidence_width(
    measured: AccuracyMetrics | LayerError, rows: int, confidence: float = _CONFIDENCE
) -> float:
    """Return how far the mean of so many rows may be above the measured one, by chance alone."""
    # The standard error of the difference of two means, over n and m rows: s * sqrt(1/n + 1/m).
    error = (measured.deviation or 0.0) * math.sqrt(1 / max(measured.rows, 1) + 1 / max(rows, 1))
    return NormalDist().inv_cdf(confidence) * error


@dataclass(frozen=True)
class LayerExpectation:
    """What the quantize stage has measured for each layer."""

    own_data: bool
    """True for the user's data, False for built-in inputs."""
    measured: dict[str, LayerError]
    """Layer -> its error on built-in inputs, or on held-out rows for the user's data."""
    rounding: float
    """Error that another rounding of the artifact's floats may add."""
    by_graph: dict[str, list[str]] = field(default_factory=dict)
    """Graph -> its layers; empty if nothing is recorded."""

    @classmethod
    def of(cls, artifact: Artifact, *, own_data: bool) -> LayerExpectation:
        """Read what is recorded; nothing if the stage has not measured layers."""
        report = _read_report(artifact)
        errors: dict[str, LayerError] = {}
        if report is not None:
            errors = report.layer_errors if own_data else report.builtin_layer_errors
        finite = {
            name: measured for name, measured in errors.items() if math.isfinite(measured.error)
        }
        by_graph = report.layers_by_graph if report else {}
        return cls(own_data, finite, roundoff(artifact.manifest.float_precision), by_graph)

    def of_graph(self, file: str) -> LayerExpectation:
        """Return what is known of the layers of one graph."""
        names = self.by_graph.get(file, self.measured)
        return replace(self, measured={n: e for n, e in self.measured.items() if n in names})

    def compare(self, errors: Mapping[str, LayerError]) -> LayerMetrics:
        """Compare the errors of layers with those that were measured."""
        rows = max((error.rows for error in errors.values()), default=0)
        layers = [
            LayerComparison(name, errors[name].error, measured.error, self._limit(measured, rows))
            for name, measured in self.measured.items()
            if name in errors
        ]
        return LayerMetrics(rows, layers, [name for name in self.measured if name not in errors])

    def _limit(self, measured: LayerError, rows: int) -> float:
        if not self.own_data:
            return _LAYER_SLACK * measured.error + self.rounding
        # Bonferroni: any of all layers exceeds its bound as rarely as a single one would.
        confidence = 1 - (1 - _CONFIDENCE) / len(self.measured)
        bound = measured.error + _confidence_width(measured, rows, confidence)
        return max(_LAYER_DATA_SLACK * measured.error, bound) + self.rounding


def accuracy_expectation(artifact: Artifact, *, own_data: bool) -> AccuracyExpectation:
    """Return what the quantize stage recorded for this artifact.

    Raises:
        OptionError: the stage's options have no cosine, and its report no measured one.
        ArtifactError: the artifact is not quantized.
    """
    stage = _quantize_record(artifact)
    if stage is None:
        raise ArtifactError(f"{artifact.path} is not quantized, so it has no budget.")
    promised, report = _promised_cosine(stage), _read_report(artifact)
    # Of an encoder with a decoder, the answers to real inputs are the encoder's outputs.
    held_out = _usable((report.encoder_accuracy or report.accuracy) if report else None)
    builtin = _usable(report.builtin if report else None)
    recorded = [promised, *(accuracy.cosine for accuracy in (held_out,) if accuracy)]
    cosines = [cosine for cosine in recorded if cosine is not None]
    measured = held_out if own_data else builtin
    if not cosines and measured is None:
        raise OptionError(
            f"{artifact.path} is quantized, but its accuracy is not recorded: its budget is not a "
            f"cosine, and {artifact.path / _REPORT} has no measured cosine.",
            do="Set the minimum cosine to PyTorch's outputs: --min-cosine 0.95.",
        )
    return AccuracyExpectation(
        scheme=str(stage.options.get("scheme", "quantized")),
        own_data=own_data,
        budget=promised,
        measured=measured,
        # A budget that was not met does not count.
        cosine=min(cosines) if cosines else measured.cosine if measured else 1.0,
        min_shortfall=1.0 - Tolerance.for_precision(artifact.manifest.float_precision).min_cosine,
    )


def _quantize_record(artifact: Artifact) -> StageRecord | None:
    return next((s for s in reversed(artifact.manifest.stages) if s.stage == "quantize"), None)


def _promised_cosine(stage: StageRecord) -> float | None:
    if stage.options.get("accuracy_budget") or stage.options.get("label_column"):
        return None
    cosine = stage.options.get("min_cosine")
    return float(cosine) if isinstance(cosine, int | float) and 0 < cosine <= 1 else None


def _read_report(artifact: Artifact) -> QuantizationReport | None:
    try:
        return QuantizationReport.of(artifact)
    except ArtifactError as error:
        raise_system_error(error)
        return None


def _usable(metrics: AccuracyMetrics | None) -> AccuracyMetrics | None:
    """Return a measurement, or None if its cosines are not between -1 and 1."""
    # Rounding may lift a cosine above 1 a little.
    if metrics is None or not all(
        -1 <= c <= 1.000001 for c in (metrics.cosine, metrics.worst_cosine)
    ):
        return None
    return metrics
