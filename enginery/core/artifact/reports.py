"""The content of the files in `reports/`, which stages write and the model card and the page read.

    report = ValidationReport.read(Path("minilm/reports/validation.json"))
    report.summary    # '23 outputs agree with PyTorch; largest error 1.4e-06 of 1.1e-05 …'

Reports may come with an untrusted artifact, so values are checked strictly against the types below:
`"1"` is not a number. Unknown members are ignored, because a later version may write more. JSON has
neither NaN nor infinities: both are written as null, and null is read as NaN if a number is
expected.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NotRequired, Self

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import REPORTS, Count
from enginery.core.errors import ArtifactError
from enginery.core.json_file import json_bytes, parse_json, read_document
from enginery.core.paths import resolve_inside


def _null_is_nan(value: Any) -> Any:
    return math.nan if value is None else value


Number = Annotated[float, BeforeValidator(_null_is_nan)]
"""A float that may be NaN (not measured) or infinite (no limit)."""
Interval = tuple[float, float]
"""(lower end, upper end)."""


@dataclass(frozen=True)
class Report:
    """Base class of a JSON file in `reports/`."""

    FILE: ClassVar[str]
    """File name, without `reports/`."""

    def to_json(self) -> bytes:
        """Return the content of the file, with null for NaN and infinities."""
        return json_bytes(asdict(self))

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Parse the content of the file.

        Raises:
            ValueError: the content is not JSON, a member is missing, or a member has a wrong type;
                the message has the member, what was found and what was expected.
        """
        parse_json(content)  # raises ValueError for deeply nested content
        try:
            return TypeAdapter(cls).validate_json(content, strict=True)
        except ValidationError as error:
            raise ValueError(_first_problem(error)) from error

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a report.

        Raises:
            ArtifactError: the file cannot be read or is invalid; the message has the file, the
                member, what was found and what was expected.
        """
        try:
            return cls.from_json(read_document(file))
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else error
            raise ArtifactError(
                f"{file} cannot be read: {problem}.", do="Make it again, or remove it."
            ) from error

    @classmethod
    def of(cls, artifact: Artifact) -> Self | None:
        """Read the report that an artifact's manifest records; return None if it records none.

        Raises:
            ArtifactError: as `read` does.
        """
        file = artifact.report(cls.FILE)
        return cls.read(file) if file else None

    @classmethod
    def below(cls, path: Path) -> Self | None:
        """Read the report of the artifact at `path`; return None if it has none.

        Raises:
            ArtifactError: the path contains a symbolic link, or the report is invalid.
        """
        file = resolve_inside(path, f"{REPORTS}/{cls.FILE}", what=str(path))
        return cls.read(file) if file.is_file() else None


def _first_problem(error: ValidationError) -> str:
    """Describe pydantic's first problem: `cases.0.graph: found 3, expected a valid string`."""
    problem = error.errors()[0]
    where = ".".join(map(str, problem["loc"])) or "the document"
    if problem["type"] == "missing":
        return f"{where} is missing"
    if problem["type"] == "json_invalid":
        return f"it is not valid JSON: {problem['msg'].partition(': ')[2]}"
    found = json.dumps(problem["input"], default=str)
    found = found if len(found) <= 60 else f"{found[:60]}…"
    return f"{where}: found {found}, expected {problem['msg'].removeprefix('Input should be ')}"


# Shared by several reports


@with_config(ConfigDict(extra="allow"))
class ProviderRecord(TypedDict):
    """An execution provider and the reason why it was used."""

    name: str
    reason: str
    options: NotRequired[dict[str, Any]]


@dataclass(frozen=True)
class LabelAccuracy:
    """How many labelled rows a classifier has right."""

    name: str
    """`PyTorch`, `this artifact`, or an artifact of a benchmark."""
    right: Count
    rows: Count
    interval: Interval
    """Confidence interval of the accuracy, at 95 %."""

    @property
    def accuracy(self) -> float:
        """Share of rows, 0 to 1."""
        return self.right / self.rows if self.rows else math.nan

    def describe(self) -> str:
        """Return `91.4 % (88.7 to 93.5 %)`."""
        low, high = self.interval
        return f"{100 * self.accuracy:.1f} % ({100 * low:.1f} to {100 * high:.1f} %)"


@dataclass(frozen=True)
class AccuracyChange:
    """The rows that one classifier has right and another one has not."""

    name: str
    base: str
    broken: Count
    """Rows that the base has right and this one wrong."""
    repaired: Count
    """Rows that the base has wrong and this one right."""
    difference: float
    """Accuracy less that of the base."""
    interval: Interval
    """Confidence interval of the difference, at 95 %."""

    def describe(self) -> str:
        """Return `-0.4 % (-1.7 to 0.9 %)`."""
        low, high = self.interval
        return f"{100 * self.difference:+.1f} % ({100 * low:+.1f} to {100 * high:+.1f} %)"


@dataclass(frozen=True)
class LabelMetrics:
    """Accuracy of several classifiers on the same labelled rows."""

    column: str
    """The column of the labels."""
    accuracies: list[LabelAccuracy]
    changes: list[AccuracyChange]
    """Changes from the first of the classifiers to each other one."""

    def table(self) -> list[dict[str, str]]:
        """Return a row for each classifier."""
        changes = {change.name: change for change in self.changes}
        rows = []
        for found in self.accuracies:
            change = changes.get(found.name)
            rows.append(
                {
                    "model": found.name,
                    "rows": str(found.rows),
                    "accuracy": found.describe(),
                    "difference": change.describe() if change else "–",
                    "right → wrong": str(change.broken) if change else "–",
                    "wrong → right": str(change.repaired) if change else "–",
                }
            )
        return rows


# validation.json


@dataclass(frozen=True)
class OutputMetrics:
    """Comparison of one output of one case with the reference; NaN for what was not measured."""

    output: str
    shape: tuple[Count, ...]
    max_abs: Number
    p99_abs: Number
    max_rel: Number
    """Largest absolute error divided by the largest magnitude of the reference."""
    cosine: Number
    argmax_agreement: Number
    """Share of rows with the same argmax. Ties within twice the limit count as agreement. 1.0 for
    outputs that are not logits."""
    nonfinite: Count
    """Number of elements that are NaN or infinite on one side only."""
    noise_floor: Number
    """The reference's own largest error at this precision on the same inputs."""
    limit: Number
    """Largest absolute error that passes; infinite for no limit, which is read back as NaN."""
    cosine_limit: Number
    """Smallest cosine that passes; -1 if the output is no larger than the noise, so that its
    direction means nothing."""
    problem: str
    """Reason of the failure; empty if it passes."""
    rms_error: Number = math.nan
    """Root mean square of the error."""
    rms_limit: Number = math.nan
    """Largest root mean square of the error that passes."""
    constant_ratio: float | None = None
    """Error of the best constant, as a multiple of the limit. Up to 1, an output that ignores its
    inputs would pass as well. None if unknown."""

    @property
    def passed(self) -> bool:
        return not self.problem

    @property
    def limit_ratio(self) -> float:
        """Error as a multiple of its limit, for ranking; failures rank above all that passes.

        Without a limit on the absolute error, 1 - cosine is used.
        """
        if not math.isfinite(self.max_abs) or self.nonfinite:
            return math.inf
        if math.isfinite(self.limit):
            error, limit = self.max_abs, self.limit
        else:
            error, limit = 1.0 - self.cosine, 1.0 - self.cosine_limit
        ratio = error / limit if limit else math.inf
        ratio = 0.0 if error == 0 else ratio
        return 1.0 + ratio if self.problem else ratio


@dataclass(frozen=True)
class ValidationCaseResult:
    """Result of one case on one graph."""

    graph: str
    name: str
    kind: str
    shapes: dict[str, list[Count]]
    """Input name -> shape."""
    outputs: list[OutputMetrics]
    problem: str
    """Reason why nothing could be compared; empty otherwise."""
    skipped: str = ""
    """Reason why the case was skipped: the reference rejects it, or it fits no engine."""

    @property
    def passed(self) -> bool:
        return not self.problem and all(output.passed for output in self.outputs)


@dataclass(frozen=True)
class EmbeddingMetrics:
    """Comparison of pooled sentence embeddings with the reference's."""

    sentences: Count
    min_cosine: Number
    mean_cosine: Number
    neighbour_agreement: Number
    """Share of sentences whose nearest neighbour is the same one, or ties with it."""
    problem: str = ""
    """Reason of the failure; empty if they pass."""


@dataclass(frozen=True)
class GenerationMetrics:
    """Comparison of generated tokens with those of PyTorch's own `generate`."""

    what: str
    """`sentences`, `rows`, `images` or `made-up prompts`."""
    inputs: Count
    steps: Count
    """Tokens of the longest text that greedy search of PyTorch generates."""
    generated_steps: Count
    """Tokens of all of them."""
    compared_steps: Count
    """Greedy tokens that are equal, up to the first of each input that is not."""
    equal: Count
    """Inputs whose greedy tokens are all equal."""
    parted: Count
    """Inputs whose greedy tokens part from PyTorch's where that is allowed."""
    beams: Count
    """Beams of beam search."""
    beams_equal: Count
    """Inputs for which beam search finds the same tokens."""
    agreement: Number
    """Share of steps with the same best token, with PyTorch's tokens forced; near ties count."""
    failed: Count
    """Searches, texts and options that fail."""

    def describe(self) -> str:
        """Return `8 inputs × 32 steps equal PyTorch's greedy search token for token; …`."""
        whole = self.generated_steps == self.inputs * self.steps
        inputs = f"{self.inputs} inputs × {'' if whole else 'up to '}{self.steps} steps"
        if self.equal == self.inputs:
            greedy = f"{inputs} equal PyTorch's greedy search token for token"
        else:
            greedy = (
                f"{self.equal} of {inputs} equal PyTorch's greedy search, {self.parted} part where "
                f"that is allowed ({self.compared_steps} of {self.generated_steps} tokens "
                f"compared); best token the same in {self.agreement:.1%} of steps with PyTorch's "
                "tokens"
            )
        equal = "equal"
        if self.beams_equal < self.inputs:
            equal = f"equal for {self.beams_equal} of {self.inputs}"
        failed = f"; {self.failed} failures" if self.failed else ""
        return f"{greedy}; beam {self.beams} {equal}{failed}"


@dataclass(frozen=True)
class RoundingMetrics:
    """How much of an output's error does not come from rounding to the artifact's precision."""

    graph: str
    output: str
    other_share: float
    """Squared error of the graph without rounding, by that of the graph."""
    problem: str


@dataclass(frozen=True)
class WeightDifference:
    """A weight of a graph that is not what the reference's makes it."""

    graph: str
    weight: str
    """Its name in the graph."""
    parameter: str
    """The reference's name; empty if unknown."""
    elements: Count
    differing: Count
    max_abs: Number
    """Largest absolute difference of an element."""
    cosine: Number
    """Between the rows that differ and the reference's."""
    problem: str
    """Where it differs, by how much, and what that means."""
    factor: Number = math.nan
    """The one number that the whole parameter is multiplied by; NaN if there is none."""

    @property
    def may_be_undone(self) -> bool:
        """True if the graph may undo the difference elsewhere, which its outputs then show.

        An exporter may multiply the query's weight by the scale of the attention. A table of
        embeddings does not count, because most inputs read few of its rows; a factor near 1 does
        not either, because the outputs may not show it.
        """
        return abs(math.log(self.factor)) > math.log(1.9) if self.factor > 0 else False


@dataclass(frozen=True)
class UntracedWeight:
    """A weight of a graph that could not be traced to a parameter, such as a constant mask."""

    graph: str
    weight: str
    shape: tuple[Count, ...]
    dtype: str
    """As numpy names it."""


@dataclass(frozen=True)
class WeightMetrics:
    """Comparison of all weights of all graphs with the reference's, without running them."""

    elements: Count
    """Of all weights and float constants."""
    compared: Count
    """Elements of those that were traced to a parameter, and compared one by one."""
    kinds: dict[str, Count]
    """Elements by what was expected: as is, transposed, fp16, quantized, folded, …"""
    differences: list[WeightDifference]
    untraced: list[UntracedWeight]
    """The largest of those that were not traced."""
    unused: list[str]
    """Parameters that no graph has."""

    def without_undone(self) -> WeightMetrics:
        """Return the metrics of a graph whose outputs agree with the reference's.

        A difference that it undoes elsewhere is then none.
        """
        kept = [found for found in self.differences if not found.may_be_undone]
        undone = sum(found.elements for found in self.differences if found.may_be_undone)
        kinds = {**self.kinds, "different": self.kinds.get("different", 0) - undone}
        if not undone:
            return self
        kinds["scaled"] = kinds.get("scaled", 0) + undone
        return replace(self, differences=kept, kinds=kinds)

    def describe(self) -> str:
        """Return `99.8 % of 22.6 M elements compared in full`."""
        share = self.compared / self.elements if self.elements else 0.0
        # Not 100 % if anything is left.
        shown = 100.0 if share == 1 else min(99.99, 100 * share)
        return f"{shown:.4g} % of {self.elements / 1e6:.3g} M elements compared in full"


@dataclass(frozen=True)
class GraphCoverage:
    """The batch sizes and lengths that one graph ran at; a length is 0 if no dim is padded."""

    graph: str
    dim: str
    """The dim whose length is meant, such as `sequence`; empty if none is padded."""
    compared: list[tuple[Count, Count]]
    """(batch, length) of the cases that were compared with the reference."""
    consistent: list[tuple[Count, Count]]
    """(batch, length) of padded batches whose rows equal the same rows run alone."""
    deviating: list[tuple[Count, Count]]
    """(batch, length) of those whose rows do not; the worst of them are in `compared`, too."""
    reason: str = ""
    """Reason why rows were not run alone."""

    def describe(self, reference: str = "PyTorch") -> str:
        """Describe the coverage in one line."""
        compared = f"{self.graph}: {len(self.compared)} sizes compared with {reference}"
        if self.reason:
            return f"{compared}; batches not compared with rows alone ({self.reason})"
        batches = [batch for batch, _ in self.consistent]
        if not batches:
            return compared
        lengths = [length for _, length in self.consistent]
        span = f", {self.dim} up to {max(lengths)}" if self.dim else ""
        return (
            f"{compared}; in {len(batches)} more (batch up to {max(batches)}{span}) rows equal "
            "those run alone"
        )

    def grid(self) -> list[dict[str, str]]:
        """Return a table of the sizes: a row for each range of batch sizes, a column of lengths.

        `2 + 40` means that two sizes were compared with the reference, and that in 40 others rows
        equal those run alone.
        """
        every = [*self.compared, *self.consistent, *self.deviating]
        lengths = _ranges([length for _, length in every])
        rows = []
        for batch in _ranges([batch for batch, _ in every]):
            row = {"batch": _range_name(batch)}
            for length in lengths:
                counts = [
                    sum(size[0] in batch and size[1] in length for size in sizes)
                    for sizes in (self.compared, self.consistent, self.deviating)
                ]
                cell = " + ".join(str(count) for count in counts[:2]) if any(counts[:2]) else "–"
                row[f"{self.dim} {_range_name(length)}" if self.dim else "sizes"] = (
                    f"{cell}, {counts[2]} deviate" if counts[2] else cell
                )
            rows.append(row)
        return rows


def _ranges(sizes: Sequence[int]) -> list[range]:
    """Return the ranges 1, 2–3, 4–7, 8–15, … that the sizes fall into."""
    found = {size.bit_length() for size in sizes}
    return [range(1 << (bits - 1), 1 << bits) if bits else range(1) for bits in sorted(found)]


def _range_name(sizes: range) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]}–{sizes[-1]}"


@dataclass(frozen=True)
class AccuracyMetrics:
    """Accuracy of one graph relative to a reference, on held-out rows."""

    rows: Count
    cosine: float
    """Mean over rows; with several outputs, the lowest of their means."""
    worst_cosine: float
    """Lowest cosine of any row."""
    neighbour_agreement: float | None
    """Share of embeddings whose nearest neighbour is the same; None for other models."""
    argmax_agreement: float | None
    """Share of positions with the same argmax; None for embeddings."""
    label_accuracy: float | None
    """Share of rows whose argmax is the correct label; None without labels."""
    deviation: float | None = field(default=None, kw_only=True)
    """Standard deviation of the cosine over rows; None for one row."""
    box_f1: float | None = field(default=None, kw_only=True)
    """F1 of a detector's boxes, those of the reference being the right ones; None for other models
    and if neither finds any."""


@dataclass(frozen=True)
class QuantizedAccuracy:
    """The answers of a quantized graph on all real inputs, beside those that are expected."""

    found: AccuracyMetrics
    expected: AccuracyMetrics | None
    """On the same inputs, or on held-out rows of the calibration data; None if not recorded."""
    cosine_limit: Number
    worst_cosine_limit: Number | None
    neighbours_limit: Number | None
    problem: str = ""
    """Reason of the failure; empty if it passes."""


@dataclass(frozen=True)
class LayerError:
    """Error of one quantized layer's output against the layer in FP32, on the same inputs."""

    rows: Count
    error: Number
    """Mean over rows of the length of the difference by the length of the FP32 output."""
    deviation: Number | None
    """Standard deviation over rows; None for one row."""

    @classmethod
    def of(cls, errors: Sequence[float]) -> Self:
        """Return the error of a layer from those of its rows."""
        if not errors:
            return cls(0, math.nan, None)
        mean = math.fsum(errors) / len(errors)
        if len(errors) == 1 or not math.isfinite(mean):
            return cls(len(errors), mean, None)
        squares = math.fsum((error - mean) ** 2 for error in errors)
        return cls(len(errors), mean, math.sqrt(squares / (len(errors) - 1)))


@dataclass(frozen=True)
class LayerComparison:
    """Error of one quantized layer beside the error that quantize has measured."""

    layer: str
    error: Number
    expected: Number
    """Measured by quantize: on the same inputs, or on held-out rows of the calibration data."""
    limit: Number
    """Largest error that passes."""

    @property
    def passed(self) -> bool:
        return self.error <= self.limit

    @property
    def limit_ratio(self) -> float:
        """Error as a multiple of its limit; infinite if it is not finite."""
        ratio = self.error / self.limit if self.limit else math.inf
        return ratio if math.isfinite(ratio) else math.inf

    def describe(self) -> str:
        """Return `1.9 % off FP32, 1.1 % when quantized, at most 1.2 % expected`."""
        error = f"{100 * self.error:.2g} %" if math.isfinite(self.error) else "no finite error"
        return (
            f"{error} off FP32, {100 * self.expected:.2g} % measured by quantize, at most "
            f"{100 * self.limit:.2g} % expected"
        )


@dataclass(frozen=True)
class LayerMetrics:
    """The outputs of a statically quantized graph's layers, each with FP32's on the same input."""

    rows: Count
    """Of real inputs."""
    layers: list[LayerComparison]
    missing: list[str]
    """Layers that quantize has measured, but whose weight or bias was not traced."""

    @property
    def worst(self) -> LayerComparison | None:
        """The layer with the largest error in units of its limit."""
        return max(self.layers, key=lambda layer: layer.limit_ratio, default=None)

    @property
    def problem(self) -> str:
        """Describe the layers that fail, with the worst of them; empty if all pass."""
        failed = [layer for layer in self.layers if not layer.passed]
        if not failed or self.worst is None:
            return ""
        more = f" ({len(failed)} of {len(self.layers)} layers fail)" if len(failed) > 1 else ""
        return f"{self.worst.layer}: {self.worst.describe()}{more}"

    def describe(self) -> str:
        """Describe the comparison in one line."""
        every = len(self.layers) + len(self.missing)
        if self.worst is None:
            return f"0 of {every} compared with FP32"
        return (
            f"{len(self.layers)} of {every} compared with FP32 over {self.rows} rows; nearest to "
            f"its limit: {self.worst.layer}, {self.worst.describe()}"
        )


class ErrorUse(TypedDict):
    """The largest error of a validation beside the one that is allowed."""

    found: str
    """Such as `mean cosine 0.9708`."""
    allowed: str
    """Such as `at least 0.9635`."""
    share: float
    """The error by the allowed one; above 1 it fails."""


@dataclass(frozen=True)
class ValidationReport(Report):
    """The content of `reports/validation.json`."""

    FILE = "validation.json"

    passed: bool
    summary: str
    precision: str
    providers: list[ProviderRecord]
    reference: dict[str, str]
    """The source: `id`, `revision`, `sha256`, `as`, how it was run, and `name`, for messages."""
    tolerance: dict[str, Any]
    cases: list[ValidationCaseResult]
    embeddings: EmbeddingMetrics | None
    weights: WeightMetrics
    effort: str
    """The option of the validation."""
    coverage: list[GraphCoverage]
    """The batch sizes and lengths that ran, for each graph."""
    notes: list[str]
    tools: dict[str, str]
    seconds: float
    accuracy: QuantizedAccuracy | None = None
    """For a quantized artifact, on all real inputs together."""
    not_proven: list[str] = field(default_factory=list)
    """Reasons why agreement with the reference proves nothing; such a report has not passed."""
    rounding: list[RoundingMetrics] = field(default_factory=list)
    """For FP16, BF16 and quantized artifacts whose weights were traced."""
    layers: LayerMetrics | None = None
    """For a statically quantized artifact, on all real inputs together."""
    labels: LabelMetrics | None = None
    """Accuracy of the reference and of the artifact; None without labels."""
    generation: GenerationMetrics | None = None
    """For artifacts that generate text."""
    schema_version: Count = field(default=1)

    @property
    def reference_name(self) -> str:
        """`PyTorch`, or `the source file` for an artifact that was imported from .onnx."""
        return self.reference.get("name", "PyTorch")

    def worst(self) -> tuple[ValidationCaseResult, OutputMetrics] | None:
        """Return the case and output with the largest error in units of its limit."""
        pairs = [(case, output) for case in self.cases for output in case.outputs]
        return max(pairs, key=lambda pair: pair[1].limit_ratio, default=None)

    def error_use(self) -> ErrorUse | None:
        """Return how much of the allowed error is used; None if nothing was compared.

        A quantized artifact is judged by its mean cosine, others by their worst output.
        """
        worst = self.worst()
        if self.accuracy:
            return _cosine_use(
                "mean cosine", self.accuracy.found.cosine, self.accuracy.cosine_limit
            )
        if worst is None or not math.isfinite(worst[1].max_abs):
            return None
        output = worst[1]
        if not math.isfinite(output.limit):
            return _cosine_use("smallest cosine", output.cosine, output.cosine_limit)
        share = output.max_abs / output.limit if output.limit else float(output.max_abs > 0)
        return {
            "found": f"largest error {output.max_abs:.1e}",
            "allowed": f"at most {output.limit:.1e}",
            "share": share,
        }


def _cosine_use(name: str, cosine: float, limit: float) -> ErrorUse | None:
    """Return the distance of a cosine from 1 beside the allowed one; None if either is unknown."""
    if not math.isfinite(cosine) or not math.isfinite(limit) or limit >= 1:
        return None
    share = (1 - cosine) / (1 - limit)
    return {"found": f"{name} {cosine:.4f}", "allowed": f"at least {limit:.4f}", "share": share}


# quantization.json


@dataclass(frozen=True)
class MixAccuracy(AccuracyMetrics):
    """Accuracy of one combination of quantized layers."""

    left_out: Count
    """Number of layers that are not quantized."""
    share: float
    """Quantized share of the multiply-adds, 0 to 1."""


@dataclass(frozen=True)
class LayerCounts:
    """Number of layers that could be quantized, and of those that were."""

    quantized: Count
    all: Count


@dataclass(frozen=True)
class CalibrationRecord:
    """The calibration: its data and its method."""

    inputs: str
    kind: str
    method: str


@dataclass(frozen=True)
class MultiplyAdds:
    """Multiply-adds of the graph for one input, and the quantized shares of them."""

    counted: str
    """Description of what is counted."""
    positions: Count
    all: Count
    attention: Count
    share: float
    share_with_attention: float


@dataclass(frozen=True)
class SearchRecord:
    """How the quantized layers were chosen."""

    budget: str
    about: str
    """`cosine`, `agreement`, `accuracy` or `boxes`."""
    reference: float
    allowed: float
    simulated: AccuracyMetrics
    effects: dict[str, Number]
    """Layer -> loss of accuracy when only that layer is quantized."""
    curve: list[MixAccuracy]
    """Measured combinations, from the smallest quantized share to the largest."""


@dataclass(frozen=True)
class EngineTrial:
    """Results of one trial engine; the engine itself is discarded."""

    capability: str
    tensorrt: str
    profiles: tuple[str, ...]
    layers: dict[str, Count]
    """Kind and precision, such as `gemm int8` -> number of engine layers."""
    quantized_layers: Count
    """Number of quantized layers that the engine multiplies in INT8 or FP8."""
    not_quantized: tuple[str, ...]
    """Quantized layers that run in another precision, or whose kernel the engine does not name."""
    fused_attentions: Count
    plan_bytes: Count
    seconds: float
    graph: str
    """The graph's file."""


@dataclass(frozen=True)
class QuantizationReport(Report):
    """The content of `reports/quantization.json`; dynamic quantization sets only a few members."""

    FILE = "quantization.json"

    summary: str
    scheme: str
    notes: list[str]
    fields: dict[str, str]
    """Fields of the stage's fingerprint."""
    residual: str = ""
    """Precision of the rest of the graph; empty for dynamic quantization."""
    per_channel: bool | None = None
    layers: LayerCounts | None = None
    quantized_layers: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Layers that are not quantized -> reason."""
    fp32_nodes: dict[str, str] = field(default_factory=dict)
    """Nodes that stay in FP32 because they exceed the range of FP16 -> reason."""
    calibration: CalibrationRecord | None = None
    activations: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Activation -> scale and smoothing; the vectors are in ranges.json."""
    engines: list[EngineTrial] = field(default_factory=list)
    multiply_adds: MultiplyAdds | None = None
    """None if the ranges were reused, like the two members below."""
    search: SearchRecord | None = None
    accuracy: AccuracyMetrics | None = None
    builtin: AccuracyMetrics | None = None
    """On built-in texts or images, which `validate` compares with its own measurement; None if the
    model takes neither."""
    layer_errors: dict[str, LayerError] = field(default_factory=dict)
    """Layer -> error of its output on held-out rows; empty if the ranges were reused, and for
    dynamic quantization."""
    builtin_layer_errors: dict[str, LayerError] = field(default_factory=dict)
    """The same on built-in texts or images; empty if the model takes neither."""
    encoder_accuracy: AccuracyMetrics | None = None
    """Of a model with two graphs, the encoder's; `accuracy` and `search` are the decoder's."""
    layers_by_graph: dict[str, list[str]] = field(default_factory=dict)
    """Graph -> its quantized layers; empty for dynamic quantization."""
    products: dict[str, dict[str, Count]] = field(default_factory=dict)
    """Dynamic quantization: graph -> op type -> number of integer nodes."""


# engines.json


@with_config(ConfigDict(extra="allow"))
class BuiltEngine(TypedDict):
    """The record of an engine with its directory; see `EngineRecord` for the other members."""

    directory: str
    from_store: NotRequired[bool]
    capabilities: list[str]
    profiles: list[str]
    layers: dict[str, Count]
    plan_size_bytes: Count


@dataclass(frozen=True)
class BuildReport(Report):
    """The content of `reports/engines.json`."""

    FILE = "engines.json"

    summary: str
    notes: list[str]
    engines: list[BuiltEngine]
    earlier_engines: list[str] = field(default_factory=list)
    """The artifact's other engines, from earlier builds."""
    left_out: list[dict[str, Any]] = field(default_factory=list)
    """Graphs without an engine, with reasons."""
    profiles: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, Any] | None = None
    """Length buckets of the data that the profiles were made from."""
    fields: dict[str, str] = field(default_factory=dict)
    """Fields of the stage's fingerprint."""


# benchmark.json


@dataclass(frozen=True)
class Advice:
    """A finding about speed, and what to do about it."""

    rule: str
    finding: str
    evidence: str
    remedy: str


@dataclass(frozen=True)
class Latency:
    """Latency of one contender at one shape, in milliseconds."""

    runs: Count
    rounds: Count
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float | None
    """None for fewer than 100 runs."""
    median_ms: float
    """Median of the medians of the rounds."""
    interval_ms: Interval | None
    """Confidence interval of `median_ms`; None if there were too few rounds."""

    @property
    def half_width(self) -> float:
        """Half the width of the interval divided by the median; infinite without an interval."""
        if self.interval_ms is None:
            return math.inf
        return (self.interval_ms[1] - self.interval_ms[0]) / 2 / self.median_ms


@dataclass(frozen=True)
class Comparison:
    """Speedup of one contender over another at one shape, from the rounds that both ran."""

    contender: str
    base: str
    speedup: float
    """Latency of the base divided by that of the contender; above 1, the contender is faster."""
    interval: Interval | None
    """Confidence interval of the speedup; None if there were too few rounds."""
    different: bool
    """True if the interval lies on one side of 1, beyond the smallest relevant difference."""
    words: str

    def speedup_of(self, contender: str) -> tuple[float, Interval | None]:
        """Return the speedup of either contender over the other one, with its interval."""
        if contender == self.contender:
            return self.speedup, self.interval
        inverse = (1 / self.interval[1], 1 / self.interval[0]) if self.interval else None
        return 1 / self.speedup, inverse


def is_clear_ratio(ratio: float, interval: Interval | None) -> bool:
    """Return True if a ratio's interval is known and no wider than the ratio itself.

    >>> is_clear_ratio(1.9, (1.7, 2.1)), is_clear_ratio(1.9, (0.9, 3.0)), is_clear_ratio(1.9, None)
    (True, False, False)
    """
    return interval is not None and interval[1] - interval[0] <= ratio


def format_ratio(ratio: float) -> str:
    """Format a ratio with two decimals, below 0.1 with two significant digits.

    >>> format_ratio(1.869), format_ratio(22.3), format_ratio(0.0418)
    ('1.87x', '22.30x', '0.042x')
    """
    return f"{ratio:.2f}x" if ratio >= 0.1 else f"{ratio:.2g}x"


def describe_ratio(ratio: float, interval: Interval | None) -> str:
    """Return a ratio, or its interval if that is wider than the ratio itself.

    >>> describe_ratio(1.9, (1.7, 2.1)), describe_ratio(1.9, (0.9, 3.0)), describe_ratio(1.9, None)
    ('1.90x', '0.90x to 3.00x', 'unclear')
    """
    if interval is None:
        return "unclear"
    low, high = map(format_ratio, interval)
    return format_ratio(ratio) if is_clear_ratio(ratio, interval) else f"{low} to {high}"


class PlacedProvider(TypedDict):
    """The part of a graph that one provider runs."""

    name: str
    nodes: Count
    for_shapes: Count
    multiply_adds: Count
    op_types: dict[str, Count]


class FallbackNode(TypedDict):
    """A compute node that runs on the CPU although another provider was requested."""

    name: str
    op_type: str
    multiply_adds: Count


class PlacementRecord(TypedDict):
    """Providers of the nodes of a graph, from `Placement.as_json`."""

    providers: list[PlacedProvider]
    copies: list[str]
    multiply_adds_counted: bool
    fallen: list[FallbackNode]


@with_config(ConfigDict(extra="allow"))
class ContenderFacts(TypedDict, total=False):
    """Facts about the session of a contender; some contenders have additional members."""

    placement: PlacementRecord
    no_placement: str
    """Reason why the placement is unknown."""
    provider_options: dict[str, dict[str, str]]
    profiles: list[str]
    convolutions: Count | None
    device: str


@dataclass(frozen=True)
class ContenderRecord:
    """One contender of the benchmark: a target in one backend."""

    name: str
    kind: str
    label: str
    subject: str
    providers: list[ProviderRecord]
    tools: dict[str, str]
    start_seconds: float
    """Start of the process, before loading: Python and the imports of the benchmark itself."""
    load_seconds: float
    """Loading of the model, including the imports that it needs."""
    peak_rss_bytes: Count
    """Peak host memory of its process, over all shapes."""
    device_memory_bytes: Count | None
    """Largest GPU memory of its process measured after a round; None if unknown."""
    device_memory: str
    """Reason why the GPU memory is unknown; empty otherwise."""
    facts: ContenderFacts
    notes: list[str]

    @property
    def placement(self) -> PlacementRecord | None:
        """Providers of the nodes; None if unknown."""
        return self.facts.get("placement")


class CopyTimes(TypedDict):
    """Median times of the parts of a run on a GPU, in milliseconds, and the share of copies."""

    in_ms: float
    device_ms: float
    out_ms: float
    share: float


@dataclass(frozen=True)
class Measurement:
    """One contender at one shape."""

    contender: str
    first_ms: float
    """Time of the very first run at the shape."""
    warm_up_runs: Count
    settled: bool
    """True if the warm-up ended because the times were stable."""
    latency: Latency
    inputs_per_second: float
    tokens_per_second: float | None
    """Including padding; None if the inputs are not tokens."""
    joules_per_run: float | None = None
    copies: CopyTimes | None = None
    notes: list[str] = field(default_factory=list)
    """Peculiarities of this shape: it ran without a CUDA graph."""


@dataclass(frozen=True)
class BenchCase:
    """All contenders at one shape."""

    sizes: dict[str, Count]
    rows: Count
    tokens: Count | None
    measurements: list[Measurement]
    comparisons: list[Comparison]
    problems: dict[str, str]
    """Contenders that could not run this shape -> reason."""
    unknown: dict[str, str]
    """Metrics that the GPU did not report -> reason."""
    rounds_ended: str

    @property
    def shape(self) -> str:
        """`batch=1, sequence=16`."""
        return ", ".join(f"{name}={size}" for name, size in self.sizes.items())


@dataclass(frozen=True)
class ImageTimes:
    """Times of one image, by contender."""

    file: str
    shape: list[Count]
    """Shape of the graph's input."""
    first_ms: dict[str, float]
    """First run, in the first pass over the folder; a new shape may take longer."""
    median_ms: dict[str, float]
    """Median over the later passes."""


@dataclass(frozen=True)
class ImagesResult:
    """A folder of images, each run alone at its own size."""

    folder: str
    images: list[ImageTimes]
    shapes: Count
    """Number of distinct shapes."""
    prepare_ms: float
    """Median time to read and scale an image; not part of the other times."""
    first_total_ms: dict[str, float]
    totals: dict[str, Latency]
    """Times of the later passes, each over all images."""
    comparisons: list[Comparison]
    passes: Count
    layout: Literal["first", "last"] = "first"
    """Position of the channels in the shapes: before height and width, or after them."""
    problems: dict[str, str] = field(default_factory=dict)
    """Contenders that could not run the images -> reason."""


@dataclass(frozen=True)
class Padding:
    """Padding of the texts of a file at one batch size."""

    batch: Count
    in_order: float
    """Share of tokens that are padding, with texts in the order of the file."""
    sorted: float
    """The same with texts sorted by length."""


@with_config(ConfigDict(extra="allow"))
class GpuName(TypedDict):
    """A GPU of the machine; see `runtime.providers.gpus.Gpu` for the other members."""

    name: str


@with_config(ConfigDict(extra="allow"))
class Machine(TypedDict):
    """The machine of the benchmark; values that could not be read are empty or 0."""

    cpu: str
    physical_cores: Count
    usable_cpus: Count
    cpu_flags: list[str]
    load: float | None
    """Load average over the last minute, before the benchmark."""
    memory_bytes: Count
    system: str
    python: str
    gpus: list[GpuName]
    no_gpu: str
    """Reason why there is no GPU."""
    driver: str
    tools: dict[str, str]


@with_config(ConfigDict(extra="allow"))
class SubjectRecord(TypedDict):
    """The measured artifact or graph."""

    name: str
    path: str
    graph: str
    graph_sha256: str
    source: str
    task: str
    precision: str
    target: str
    size_bytes: NotRequired[Count]
    """Size of the graph with its weights. Missing for an .onnx file, like the next members."""
    verdict: NotRequired[str]
    """Of its validation: `passed`, `failed` or `none`."""
    error: NotRequired[ErrorUse]
    """Missing if it was not validated."""


@dataclass(frozen=True)
class BenchResult(Report):
    """The content of `reports/benchmark.json`."""

    FILE = "benchmark.json"

    subjects: list[SubjectRecord]
    machine: Machine
    options: dict[str, Any]
    fields: dict[str, str]
    """Fields of the fingerprint, which tell whether the result still holds."""
    contenders: list[ContenderRecord]
    left_out: dict[str, str]
    """Contenders of `auto` that could not run -> reason."""
    cases: list[BenchCase]
    images: ImagesResult | None
    padding: list[Padding]
    advice: list[Advice]
    unknown: dict[str, str]
    """Metrics that could not be measured on this machine -> reason."""
    notes: list[str]
    finished: str
    """Time in UTC, ISO 8601."""
    seconds: float
    labels: LabelMetrics | None = None
    """Accuracy of each artifact; None without labels."""
    schema_version: Literal[1] = field(default=1)

    def contender(self, name: str) -> ContenderRecord:
        """Return the record of one contender; raise KeyError if there is none."""
        return {record.name: record for record in self.contenders}[name]


def named_versions(tools: dict[str, str]) -> str:
    """Join names and versions.

    >>> named_versions({"torch": "2.13.0", "onnxruntime": "1.31.1"})
    'torch 2.13.0, onnxruntime 1.31.1'
    """
    return ", ".join(f"{tool} {version}" for tool, version in tools.items())


def gpu_names(machine: Machine) -> str:
    """Return the names of the machine's GPUs; empty if there are none."""
    return ", ".join(gpu["name"] for gpu in machine["gpus"])


def worst_by_output(
    cases: Sequence[ValidationCaseResult],
) -> list[tuple[ValidationCaseResult, OutputMetrics]]:
    """Return the case with the largest error for each output of each graph."""
    worst: dict[tuple[str, str], tuple[ValidationCaseResult, OutputMetrics]] = {}
    for case in cases:
        for output in case.outputs:
            key = (case.graph, output.output)
            if key not in worst or output.limit_ratio > worst[key][1].limit_ratio:
                worst[key] = (case, output)
    return list(worst.values())


@dataclass(frozen=True)
class Reports:
    """The reports of an artifact; None for those that it lacks."""

    validation: ValidationReport | None
    quantization: QuantizationReport | None
    benchmark: BenchResult | None
    benchmark_sha256: str
    """sha256 of the file; empty without a benchmark."""

    @classmethod
    def of(cls, artifact: Artifact) -> Self:
        """Read the reports that the manifest records.

        Raises:
            ArtifactError: one of them is damaged.
        """
        measured = artifact.manifest.reports.get(f"{REPORTS}/{BenchResult.FILE}")
        return cls(
            ValidationReport.of(artifact),
            QuantizationReport.of(artifact),
            BenchResult.of(artifact),
            measured.sha256 if measured else "",
        )
