"""Tolerance of a quantized artifact: how close its outputs must be to PyTorch's.

PyTorch has no arithmetic of this kind whose error could serve as a noise floor. Instead, the
tolerance follows from the budget that the quantize stage met: the mean cosine of the outputs on
held-out rows of the calibration data.

- Over all real inputs together, the shortfall of each output (1 - cosine) may be at most 10 times
  that of the budget, or 4 times with the user's own data. For pooled embeddings the same limit
  applies to their mean cosine.
- No budget permits less than 0.95 over all real inputs; only the user can, with --min-cosine.
- Each single case needs a cosine of 0.5, random token ids and noise images included, on which the
  ranges were not calibrated.
- Every value must be finite, and every shape and dtype correct. There is no limit on the absolute
  error or on changed argmaxes; the report counts them.

The limits were measured with a budget of 0.998, which requires 0.98 on the built-in inputs and
0.992 on the user's. Correct artifacts: all-MiniLM-L6-v2 in INT8 has 0.9935 on the built-in
sentences (in ten languages; it was calibrated on English) and 0.9976 on sentences similar to the
calibration data; five tiny models with random weights have 0.985 to 0.999. On random ids MiniLM has
0.926 at the longest length, and a tiny classifier 0.74. MiniLM with one fault, on the built-in
sentences and on sentences similar to the calibration data:

    a weight's scale doubled             0.909 to 0.962    0.919 to 0.971
    a weight's sign flipped              0.588 to 0.942    0.521 to 0.952
    a weight of zeros                    0.947             0.955
    two weights swapped                  0.506 to 0.867    0.470 to 0.769
    one activation clipped at a quarter  0.961 to 0.970    0.971 to 0.975
    all activations clipped at half      0.219             0.104
    ranges from made-up ids              0.942             0.935

The cosine does not detect a weight's zero point that is off by one (0.987 to 0.994), nor an
activation whose scale is twice as large. TensorRT rejects the first; the second is no worse than
a different calibration.
"""

from __future__ import annotations

from dataclasses import dataclass

from enginery.core.artifact.artifact import REPORTS, Artifact
from enginery.core.artifact.manifest import StageRecord
from enginery.core.artifact.reports import QuantizationReport
from enginery.core.errors import ArtifactError, OptionError
from enginery.core.tolerance import Tolerance

BUILTIN_SLACK = 10.0
"""Factor for built-in inputs, whose languages and images differ from the calibration data."""
DATA_SLACK = 4.0
"""Factor for the user's own data, which resemble what the artifact is used for."""

MIN_COSINE = 0.95
"""Minimum for every budget, because the artifact's author wrote it."""

_REPORT = f"{REPORTS}/quantization.json"


@dataclass(frozen=True)
class QuantizationBudget:
    """Cosine that the quantize stage required, or else the one it measured."""

    scheme: str
    cosine: float
    """Mean cosine on held-out rows of the calibration data."""
    source: str
    """Origin of the cosine, in words."""
    min_shortfall: float
    """Shortfall (1 - cosine) that rounding to the artifact's precision alone permits."""

    def min_cosine(self, *, own_data: bool) -> float:
        """Return the minimum cosine over all real inputs together."""
        return max(self._by_slack(own_data=own_data), MIN_COSINE)

    def _by_slack(self, *, own_data: bool) -> float:
        slack = DATA_SLACK if own_data else BUILTIN_SLACK
        return 1.0 - slack * max(1.0 - self.cosine, self.min_shortfall)

    def describe(self, *, own_data: bool) -> str:
        """Describe the limit in words."""
        slack = DATA_SLACK if own_data else BUILTIN_SLACK
        least = self.min_cosine(own_data=own_data)
        if least > self._by_slack(own_data=own_data):
            return (
                f"{self.scheme}: over all real inputs a cosine of at least {least:.4f}; "
                f"{self.source}, would permit less, but only --min-cosine can"
            )
        return (
            f"{self.scheme}: over all real inputs a cosine of at least {least:.4f}, a shortfall of "
            f"{slack:g} times that of {self.source}"
        )


def is_quantized(artifact: Artifact) -> bool:
    """Return True if the quantize stage made the artifact, with any scheme."""
    return _quantize_record(artifact) is not None


def quantization_budget(artifact: Artifact) -> QuantizationBudget:
    """Return the budget that the quantize stage met for this artifact.

    It is the cosine in the stage's options. If the budget was an accuracy, a cosine of 0 or less,
    or was not met, it is the measured cosine.

    Raises:
        OptionError: the options have no cosine, and neither has the stage's report.
        ArtifactError: the artifact is not quantized.
    """
    stage = _quantize_record(artifact)
    if stage is None:
        raise ArtifactError(f"{artifact.path} is not quantized, so it has no budget.")
    promised, measured = _promised_cosine(stage), _measured_cosine(artifact)
    cosines = [cosine for cosine in (promised, measured) if cosine is not None]
    if not cosines:
        raise OptionError(
            f"{artifact.path} is quantized, but its accuracy is not recorded: its budget is not a "
            f"cosine, and {artifact.path / _REPORT} has no measured cosine.",
            do="Set the minimum cosine to PyTorch's outputs: --min-cosine 0.95.",
        )
    cosine = min(cosines)  # a budget that was not met does not count
    return QuantizationBudget(
        scheme=str(stage.options.get("scheme", "quantized")),
        cosine=cosine,
        source=f"{'its budget' if cosine == promised else 'the measured cosine'} of {cosine:.4f}",
        min_shortfall=1.0 - Tolerance.for_precision(artifact.manifest.precision).min_cosine,
    )


def _quantize_record(artifact: Artifact) -> StageRecord | None:
    return next((s for s in reversed(artifact.manifest.stages) if s.stage == "quantize"), None)


def _promised_cosine(stage: StageRecord) -> float | None:
    if stage.options.get("accuracy_budget") or stage.options.get("label_column"):
        return None
    cosine = stage.options.get("min_cosine")
    return float(cosine) if isinstance(cosine, int | float) and 0 < cosine <= 1 else None


def _measured_cosine(artifact: Artifact) -> float | None:
    """Return the mean cosine in the stage's report; None if missing, or if ranges were reused."""
    try:
        report = QuantizationReport.of(artifact)
    except ArtifactError:
        return None
    accuracy = report.accuracy if report else None
    return accuracy.cosine if accuracy and -1 <= accuracy.cosine <= 1.000001 else None
