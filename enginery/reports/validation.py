"""The report of validate, `reports/validation.json`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from enginery.core.accuracy import AccuracyMetrics, LabelMetrics, Number
from enginery.core.artifact.manifest import Count
from enginery.core.table import NOTHING, Row, Table, format_number
from enginery.reports.base import ProviderRecord, Report, format_cosine_limit
from enginery.reports.weights import LayerMetrics, WeightMetrics
from enginery.runtime.providers.known import short_name

_LISTED_WEIGHTS = 3
"""Weights that are named below the tables; the report has all."""


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
    def verdict(self) -> str:
        """One word if the numbers explain it, else the problem."""
        return "failed" if self.max_abs > self.limit else self.problem or "ok"

    @property
    def kind(self) -> str:
        """The output without the layer's number: `present.*.key` for `present.11.key`."""
        return re.sub(r"(?<=\.)\d+(?=\.)", "*", self.output)

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

    def describe(self) -> str:
        """Return `cosine at least 0.999987, nearest neighbour the same for 100%`."""
        return (
            f"cosine at least {self.min_cosine:.6f}, nearest neighbour the same for "
            f"{self.neighbour_agreement:.0%}"
        )


@dataclass(frozen=True)
class AnswerMetrics:
    """Comparison of the answers to raw inputs with those that a user of transformers gets."""

    reference: str
    """Who answered: `transformers' text-classification pipeline`."""
    inputs: Count
    compared: Count
    """Inputs that both sides answered: each alone, and all in one batch."""
    failed: Count
    """Inputs with another answer."""
    largest_difference: Number
    """Of two scores, or of two numbers of a vector or an output."""
    refused: list[str]
    """Inputs that the artifact refuses with an error, and the error."""
    rejected: list[str]
    """Inputs that the reference rejects, and its error."""
    is_around_graph: bool = False
    """True if PyTorch computed the graph's outputs, as for FP16 and INT8: then the answers prove
    the tokenizer, the processor and what makes answers of outputs."""

    def describe(self) -> str:
        """Return `8 raw inputs, alone and in a batch: answers equal those of …`."""
        how = ", with PyTorch in the graph's place" if self.is_around_graph else ""
        equal = f"{self.compared} raw inputs, alone and in a batch{how}: answers equal those of "
        if self.failed:
            equal = f"{self.failed} of {self.compared} raw inputs have other answers than those of "
        return (
            f"{equal}{self.reference} (largest difference {self.largest_difference:.2g})"
            + (f"; {len(self.refused)} refused with an error" if self.refused else "")
            + (f"; {len(self.rejected)} that the reference rejects" if self.rejected else "")
        )


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
class SideFileDifference:
    """A file beside the graphs that has another effect than the source's."""

    file: str
    key: str
    """The key of a JSON file; empty for the whole file."""
    problem: str

    def describe(self) -> str:
        """Return `tokenizer_config.json, do_lower_case: false, but true in the source`."""
        return f"{self.file}{', ' if self.key else ''}{self.key}: {self.problem}"


@dataclass(frozen=True)
class SideFileMetrics:
    """Comparison of tokenizer, processor, configuration, labels and pooling with the source's."""

    compared: list[str]
    """The files that are equal in content or in effect."""
    differences: list[SideFileDifference]
    not_compared: list[str]
    """Reasons why a file was not compared."""

    @property
    def problem(self) -> str:
        """The first difference, in words; empty if there is none."""
        return self.differences[0].describe() if self.differences else ""

    def describe(self) -> str:
        """Return `5 are the source's, in content or in effect`."""
        if not self.differences:
            return f"{len(self.compared)} are the source's, in content or in effect"
        files = dict.fromkeys(difference.file for difference in self.differences)
        return f"{', '.join(files)} not the source's; {len(self.compared)} others are"


@dataclass(frozen=True)
class RoundingMetrics:
    """How much of an output's error does not come from rounding to the artifact's precision."""

    graph: str
    output: str
    other_share: float
    """Squared error of the graph without rounding, by that of the graph."""
    problem: str


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
        compared = f"{len(self.compared)} sizes compared with {reference}"
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

    def grid(self) -> list[Row]:
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
                cell = (
                    " + ".join(str(count) for count in counts[:2]) if any(counts[:2]) else NOTHING
                )
                row[f"{self.dim} {_range_name(length)}" if self.dim else "sizes"] = (
                    f"{cell}, {counts[2]} deviate" if counts[2] else cell
                )
            rows.append(row)
        return rows


def _ranges(sizes: Sequence[int]) -> list[range]:
    """Return the ranges 1, 2–3, 4–7, 8–15, … that the sizes fall into."""
    lengths = {size.bit_length() for size in sizes}
    return [range(1 << (bits - 1), 1 << bits) if bits else range(1) for bits in sorted(lengths)]


def _range_name(sizes: range) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]}–{sizes[-1]}"


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

    def describe(self) -> str:
        """Return `mean cosine 0.9708, at least 0.9635 expected; smallest 0.9100`."""
        worst = self.worst_cosine_limit
        return (
            f"mean cosine {self.found.cosine:.4f}, at least {self.cosine_limit:.4f} expected; "
            f"smallest {self.found.worst_cosine:.4f}"
            + (f", at least {worst:.4f} expected" if worst is not None else "")
        )


class ErrorUse(TypedDict):
    """The largest error of a validation beside the one that is allowed."""

    found: str
    """Such as `mean cosine 0.9708`."""
    allowed: str
    """Such as `at least 0.9635`."""
    share: float
    """The error by the allowed one; above 1 it fails."""


@dataclass(frozen=True, repr=False)
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
    side_files: SideFileMetrics | None = None
    """The files beside the graphs, compared with the source's."""
    answers: AnswerMetrics | None = None
    """For artifacts that do not generate, unless there is nothing to compare with."""
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

    def rows(self, *, every: bool = False) -> list[Table | str]:
        """Return the tables and, below them, the lines of text."""
        return [*self.tables(every=every), *self.lines()]

    def tables(self, *, every: bool = False) -> list[Table]:
        """Return a table for each graph: its outputs beside the reference's.

        Args:
            every: True for a row per case and output. False for the worst case of each output,
                where outputs that differ only in a layer's number are one, and the cases that could
                not be compared.
        """
        tables = []
        for graph in dict.fromkeys(case.graph for case in self.cases):
            cases = [case for case in self.cases if case.graph == graph]
            rows = _output_rows(cases, every=every)
            if rows:
                tables.append(Table(f"{graph} against {self.reference_name}", rows))
        return tables

    def headline(self) -> Row:
        """Return the largest error, the cosine and the accuracy as columns of a run's table.

        The cosine of a quantized graph is the mean over real inputs.
        """
        row = {"provider": ", ".join(short_name(provider["name"]) for provider in self.providers)}
        if worst := self.worst():
            row["max abs error"] = f"{worst[1].max_abs:.1e}"
            row["allowed"] = format_number(worst[1].limit, ".1e")
            cosines = [output.cosine for case in self.cases for output in case.outputs]
            row["cosine"] = f"{min(cosines):.6f}"
        if self.accuracy:
            row["cosine"] = f"{self.accuracy.found.cosine:.6f}"
            row["at least"] = format_cosine_limit(self.accuracy.cosine_limit)
        if self.labels:
            reference, measured = self.labels.accuracies
            row["accuracy"] = f"{measured.accuracy:.1%} ({reference.name} {reference.accuracy:.1%})"
        return row

    def facts(self) -> list[tuple[str, str]]:
        """Return what was compared beside the outputs, as (label, value)."""
        facts = []
        if self.providers:
            chosen = (f"{short_name(p['name'])} ({p['reason']})" for p in self.providers)
            facts.append(("provider", ", ".join(chosen)))
        if self.accuracy:
            rows = self.accuracy.found.rows
            facts.append((f"over {rows} real inputs", self.accuracy.describe()))
        if self.embeddings:
            sentences = self.embeddings.sentences
            facts.append((f"embeddings of {sentences} sentences", self.embeddings.describe()))
        if self.labels:
            facts += [(f"accuracy of {a.name}", a.describe()) for a in self.labels.accuracies]
            facts += [
                (
                    "difference",
                    f"{change.describe()}; {change.broken} rows right → wrong, "
                    f"{change.repaired} wrong → right",
                )
                for change in self.labels.changes
            ]
        if self.answers:
            facts.append(("answers", self.answers.describe()))
        if self.generation:
            facts.append(("generation", self.generation.describe()))
        facts += [(graph.graph, graph.describe(self.reference_name)) for graph in self.coverage]
        if self.layers:
            facts.append(("layers", self.layers.describe()))
        facts.append(("weights", self.weights.describe()))
        if self.side_files:
            facts.append(("side files", self.side_files.describe()))
        return facts

    def lines(self) -> list[str]:
        """Return the facts, the first weights that differ, the notes and the verdict."""
        lines = [f"{label}: {value}" for label, value in self.facts()]
        lines += [
            f"weight {weight.weight} of {weight.graph} differs: {weight.parameter}: "
            f"{weight.problem}"
            for weight in self.weights.differences[:_LISTED_WEIGHTS]
        ]
        if self.side_files:
            differences = self.side_files.differences
            lines += [f"side file differs: {d.describe()}" for d in differences]
            lines += [f"side file not compared: {why}" for why in self.side_files.not_compared]
        if self.weights.untraced:
            names = [weight.weight for weight in self.weights.untraced[:_LISTED_WEIGHTS]]
            lines.append(f"weights that are none of {self.reference_name}'s: {', '.join(names)}")
        if skipped := sum(bool(case.skipped) for case in self.cases):
            rejecting = f"{self.reference_name} rejects"
            lines.append(f"skipped: {skipped} inputs that {rejecting} or no engine takes")
        lines += [f"note: {note}" for note in self.notes]
        if len(self.not_proven) > 1:  # the summary has one
            lines += [f"not proven: {reason}" for reason in self.not_proven]
        return [*lines, f"{'passed' if self.passed else 'failed'}: {self.summary}"]


def _output_rows(cases: Sequence[ValidationCaseResult], *, every: bool) -> list[Row]:
    """Return the rows of one graph: those of its outputs, then those of cases without any."""
    pairs = [(case, output) for case in cases for output in case.outputs]
    if not every:
        kinds: dict[str, list[tuple[ValidationCaseResult, OutputMetrics]]] = {}
        for pair in pairs:
            kinds.setdefault(pair[1].kind, []).append(pair)
        pairs = [max(group, key=lambda pair: pair[1].limit_ratio) for group in kinds.values()]
    heading = "input" if every else "worst input"
    by_cosine = any(not math.isfinite(output.limit) for _, output in pairs)
    rows = []
    for case, output in pairs:
        row = {
            "output": output.output if every else output.kind,
            heading: f"{case.kind}: {case.name}",
            "max abs error": f"{output.max_abs:.1e}",
            "allowed": format_number(output.limit, ".1e"),
            "cosine": f"{output.cosine:.6f}",
        }
        if by_cosine:
            row["at least"] = format_cosine_limit(output.cosine_limit)
        rows.append({**row, "verdict": output.verdict})
    columns = ("max abs error", "allowed", "cosine", *(("at least",) if by_cosine else ()))
    return rows + [
        {
            "output": NOTHING,
            heading: f"{case.kind}: {case.name}",
            **dict.fromkeys(columns, NOTHING),
            "verdict": case.problem or f"skipped: {case.skipped}",
        }
        for case in cases
        if case.problem or (every and case.skipped)
    ]


def _cosine_use(name: str, cosine: float, limit: float) -> ErrorUse | None:
    """Return the distance of a cosine from 1 beside the allowed one; None if either is unknown."""
    if not math.isfinite(cosine) or not math.isfinite(limit) or limit >= 1:
        return None
    share = (1 - cosine) / (1 - limit)
    return {"found": f"{name} {cosine:.4f}", "allowed": f"at least {limit:.4f}", "share": share}
