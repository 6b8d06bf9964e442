"""How near the answers of a quantized artifact must be to PyTorch's, where the user does not say.

    >>> quantization_budget(Artifact.open("minilm-int8")).describe(own_data=False)
    'int8: over all real inputs a cosine of at least 0.9800, which falls short of 1 by 10 times …'

PyTorch has no such arithmetic whose error could be a noise floor. But the quantize stage held a
budget when it made the artifact, the mean cosine of its answers on held-out rows of the calibration
data, and the answers must keep near it on other inputs, too:

- over all real inputs together, the cosine of each output may fall short of 1 by at most 10 times
  as much as the budget; 4 times, where the user gives data. Pooled embeddings are held to the same,
  by their mean cosine.
- no budget allows less than 0.95 over all real inputs; only the user does, with --min-cosine.
- a single case must keep a cosine of 0.5, made-up token ids and pixels of noise included: ranges
  were calibrated on neither.
- every value must be finite, and every shape and type right. An absolute error has no limit, and a
  largest score may be another one: how many are is in the report.

Measured with the budget of 0.998, so that built-in inputs need 0.98 and the user's 0.992. Right
artifacts: all-MiniLM-L6-v2 in INT8 has 0.9935 on the built-in sentences (in ten languages; it was
calibrated on English) and 0.9976 on sentences like those that it was calibrated on; five tiny
models with random weights have 0.985 to 0.999. On made-up ids MiniLM has 0.926 at the longest, and
a tiny classifier 0.74. MiniLM with one fault, on the built-in sentences and on those like the
calibration's:

    a weight's scale doubled             0.909 to 0.962    0.919 to 0.971
    a weight's sign flipped              0.588 to 0.942    0.521 to 0.952
    a weight of zeros                    0.947             0.955
    two weights swapped                  0.506 to 0.867    0.470 to 0.769
    one activation clipped at a quarter  0.961 to 0.970    0.971 to 0.975
    all activations clipped at half      0.219             0.104
    ranges from made-up ids              0.942             0.935

What no cosine shows: a weight's zero point off by one (0.987 to 0.994), or an activation's step
twice as coarse. TensorRT refuses the first, and the second is no further off than another
calibration.
"""

from __future__ import annotations

from dataclasses import dataclass

from enginery.core.artifact import REPORTS, Artifact
from enginery.core.errors import ArtifactError, OptionError
from enginery.core.manifest import StageRecord
from enginery.core.precision import Tolerance
from enginery.core.reports import QuantizationReport

BUILTIN_SLACK = 10.0
"""For the built-in inputs: other languages and other images than those of the calibration."""
DATA_SLACK = 4.0
"""For inputs that the user gives, which are like those that the artifact is for."""

LEAST_COSINE = 0.95
"""No artifact may allow itself less: its budget is what its author wrote."""

_REPORT = f"{REPORTS}/quantization.json"


@dataclass(frozen=True)
class Budget:
    """What the quantize stage allowed, or else what it measured."""

    scheme: str
    cosine: float
    """On inputs of the calibration data that calibrated nothing."""
    source: str
    """Where the cosine is from, in words."""
    least_shortfall: float
    """Of 1: what rounding to the artifact's precision alone may cost."""

    def min_cosine(self, *, own_data: bool) -> float:
        """Return the least cosine over all real inputs together."""
        return max(self._by_slack(own_data=own_data), LEAST_COSINE)

    def _by_slack(self, *, own_data: bool) -> float:
        slack = DATA_SLACK if own_data else BUILTIN_SLACK
        return 1.0 - slack * max(1.0 - self.cosine, self.least_shortfall)

    def describe(self, *, own_data: bool) -> str:
        """The rule in words."""
        slack = DATA_SLACK if own_data else BUILTIN_SLACK
        least = self.min_cosine(own_data=own_data)
        if least > self._by_slack(own_data=own_data):
            return (
                f"{self.scheme}: over all real inputs a cosine of at least {least:.4f}; "
                f"{self.source}, would allow less, which only --min-cosine does"
            )
        return (
            f"{self.scheme}: over all real inputs a cosine of at least {least:.4f}, which falls "
            f"short of 1 by {slack:g} times as much as {self.source}"
        )


def is_quantized(artifact: Artifact) -> bool:
    """Whether the quantize stage made it, whatever the scheme."""
    return _quantize_record(artifact) is not None


def quantization_budget(artifact: Artifact) -> Budget:
    """What the quantize stage promised of this artifact.

    That is the cosine that it was asked to hold. Where it was asked to hold something else
    (accuracy), nothing (a cosine of 0 or less), or was not able to, it is what it measured.

    Raises:
        OptionError: it promised no cosine, and its report is gone or has none.
        ArtifactError: it is not quantized.
    """
    stage = _quantize_record(artifact)
    if stage is None:
        raise ArtifactError(f"{artifact.path} is not quantized, and has no such budget.")
    promised, measured = _promised(stage), _measured(artifact)
    cosines = [cosine for cosine in (promised, measured) if cosine is not None]
    if not cosines:
        raise OptionError(
            f"{artifact.path} is quantized, and nothing says how near it was when it was made: its "
            f"budget is no cosine, and {artifact.path / _REPORT} has no measured one.",
            do="Say how far outputs may lie from PyTorch's: --min-cosine 0.95.",
        )
    cosine = min(cosines)  # a budget that was not held is none
    return Budget(
        scheme=str(stage.options.get("scheme", "quantized")),
        cosine=cosine,
        source=f"{'its budget of' if cosine == promised else 'what was measured,'} {cosine:.4f}",
        least_shortfall=1.0 - Tolerance.for_precision(artifact.manifest.precision).min_cosine,
    )


def _quantize_record(artifact: Artifact) -> StageRecord | None:
    return next((s for s in reversed(artifact.manifest.stages) if s.stage == "quantize"), None)


def _promised(stage: StageRecord) -> float | None:
    if stage.options.get("accuracy_budget") or stage.options.get("label_column"):
        return None
    cosine = stage.options.get("min_cosine")
    return float(cosine) if isinstance(cosine, int | float) and 0 < cosine <= 1 else None


def _measured(artifact: Artifact) -> float | None:
    """The mean cosine in the stage's report; None where that is gone, or ranges were reused."""
    try:
        report = QuantizationReport.of(artifact)
    except ArtifactError:
        return None
    accuracy = report.accuracy if report else None
    return accuracy.cosine if accuracy and -1 <= accuracy.cosine <= 1.000001 else None
