"""Compare one graph with the reference: as it is, without rounding, and layer by layer."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from enginery.core.accuracy import LayerError
from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import EngineryError, InputError, ProviderError, raise_system_error
from enginery.core.json_file import read_json
from enginery.core.model.files import ModelConfig
from enginery.core.shapes import Profile
from enginery.core.tolerance import QuantizedTolerance, Tolerance
from enginery.reports.validation import ValidationCaseResult
from enginery.reports.weights import WeightMetrics
from enginery.runtime.graph_roles import input_graph
from enginery.runtime.onnxruntime.placement import read_placement
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions
from enginery.runtime.onnxruntime.tracing import GraphTracer
from enginery.runtime.providers.known import CPU, CUDA, TENSORRT, TENSORRT_RTX, short_name
from enginery.runtime.providers.selection import Provider
from enginery.runtime.text.tokenizer import TextTokenizer
from enginery.validate.answers import compare_answers
from enginery.validate.cases.decisions import Decisions
from enginery.validate.cases.engines import split_by_profiles
from enginery.validate.cases.positions import CaseCost, threshold_cases
from enginery.validate.cases.rungs import run_on_rungs
from enginery.validate.cases.sweep import ValidationCase, profile_cases, sweep_cases
from enginery.validate.compare import (
    ComparisonLimits,
    GraphComparison,
    RealAnswers,
    Run,
    outside_calibrated_ranges,
)
from enginery.validate.consistency import ConsistencyScan, judge_decisions, scan_notes
from enginery.validate.context import ValidationContext
from enginery.validate.findings import Findings, join_findings, note_refusal
from enginery.validate.reference import ReferenceRun
from enginery.validate.rounding import compare_rounding, derived_record

_RANDOM = "random"
"""Folder of the graphs that take random numbers."""
LAYERS = "layers"
"""Folder of the graphs with each layer in FP32, which the comparison of weights writes."""


@dataclass(frozen=True)
class GraphSubject:
    """A graph to compare, and what its inputs follow from."""

    record: GraphRecord
    real: Sequence[ValidationCase]
    """Its real inputs."""
    decisions: Decisions
    """What it decides from sizes and ids."""
    profiles: Sequence[Profile]
    """Shape profiles, whose bounds are run in any case."""
    engines: Sequence[Profile]
    """Profiles of the engines that run it; empty without engines."""


def compare_graph(
    context: ValidationContext,
    subject: GraphSubject,
    weights: WeightMetrics,
    real_answers: RealAnswers,
) -> Findings:
    """Compare a graph; if its weights are known, the graph without rounding as well."""
    record, manifest = subject.record, context.artifact.manifest
    all_cases = _make_cases(context, subject, weights.elements)
    cases, left_out = split_by_profiles(all_cases, record, subject.engines)
    unrounded = context.unrounded(record)
    # A quantized graph has no noise floor in PyTorch, but the one without quantization has.
    noise = unrounded is not None or not manifest.is_quantized
    reference = context.run_reference(record, "cases", cases, noise=noise)
    graph = _Graph(context, subject, cases, reference)
    own = graph.compare_own(real_answers)
    parts = [Findings(notes=tuple(subject.decisions.notes)), own]
    if graph.is_simulated([provider["name"] for provider in own.providers or ()]):
        parts.append(graph.compare_simulated())
    if unrounded is not None:
        all_exact = _all_exact(record, weights)
        parts.append(graph.compare_unrounded(unrounded, own.cases, all_exact=all_exact))
    elif manifest.precision != "fp32":
        parts.append(
            _note(
                f"{record.file} was not compared without rounding: it is quantized dynamically, or "
                "not enough of its weights were traced"
            )
        )
    parts += [
        graph.compare_layers(),
        Findings(cases=tuple(left_out), notes=tuple(reference.notes)),
    ]
    for outputs in ("cases", "scan", "raw", _RANDOM):  # they may take gigabytes
        shutil.rmtree(context.scratch / outputs, ignore_errors=True)
    return join_findings(parts)


def _make_cases(
    context: ValidationContext, subject: GraphSubject, elements: int
) -> list[ValidationCase]:
    """Return the inputs to compare a graph on; the model has so many weights."""
    record, limits, seed = subject.record, context.feed_limits, context.config.seed
    # The cosine of a few scores in one row would mean little.
    quantized = context.artifact.manifest.is_quantized
    rows = 2 if quantized else 1
    thresholds = threshold_cases(
        record,
        limits,
        read_json(context.artifact.path / ModelConfig.FILE),
        CaseCost(elements, context.config.effort),
        rows=rows,
        seed=seed,
    )
    return [
        *sweep_cases(record, limits, seed=seed, longest_rows=rows),
        *thresholds,
        *subject.decisions.cases(record, limits, quantized=quantized, seed=seed),
        *profile_cases(record, subject.profiles, limits, seed=seed),
        *subject.real,
    ]


@dataclass(frozen=True)
class _FedGraph:
    """A graph that runs, and its inputs."""

    path: Path
    record: GraphRecord
    cases: Sequence[ValidationCase]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Graph:
    """A graph, its inputs, and what the reference makes of them."""

    context: ValidationContext
    subject: GraphSubject
    cases: Sequence[ValidationCase]
    reference: ReferenceRun

    @property
    def record(self) -> GraphRecord:
        return self.subject.record

    @property
    def path(self) -> Path:
        return self.context.artifact.path / self.record.file

    @property
    def is_compared_unquantized(self) -> bool:
        """True for a quantized graph that is compared without quantization as well."""
        quantized = self.context.artifact.manifest.is_quantized
        return quantized and self.context.unrounded(self.record) is not None

    @property
    def outside(self) -> str:
        """Which generated inputs no calibration has seen; empty for none."""
        if not self.is_compared_unquantized:
            return ""
        return outside_calibrated_ranges(self.record, self.cases)

    @property
    def limits(self) -> ComparisonLimits:
        return replace(self.context.limits, generated_outside_ranges=bool(self.outside))

    def is_simulated(self, providers: Collection[str]) -> bool:
        """Return True if a copy rounds every value, because these providers compute in FP32.

        On the CPU, ONNX Runtime computes FP16 in FP32, which hides values beyond 65504.
        """
        precision = self.context.artifact.manifest.float_precision
        return precision == "fp16" and set(providers) == {CPU}

    def compare_own(self, real_answers: RealAnswers) -> Findings:
        """Compare the graph itself: its outputs, its batches, its answers, and where it runs."""
        context, record = self.context, self.record
        fed = _FedGraph(self.path, record, self.cases)
        if not self.subject.engines:
            # With draws of its own, it would differ from PyTorch as much as two runs of PyTorch do.
            fed = self._feed_random_numbers(fed.path, record)
        artifact = context.artifact
        if fed.path != self.path:
            manifest = artifact.manifest.model_copy(update={"graphs": (fed.record,)})
            artifact = Artifact(context.scratch / _RANDOM, manifest)
        # Spinning threads would take the cores between the runs, where most of the time goes.
        options = RunnerOptions(spinning=False, ladder=True)
        with context.open_runner(record.file, options, artifact) as runner:
            outputs = self._compare_outputs(runner, fed, real_answers)
            parts = [
                outputs,
                compare_answers(context, record, runner, outputs.cases),
                _check_placement(self.path, record.file, runner.providers),
            ]
        return join_findings([Findings(notes=fed.notes), *parts])

    def _compare_outputs(
        self, runner: OrtRunner, fed: _FedGraph, real_answers: RealAnswers
    ) -> Findings:
        """Compare the outputs of each case, and batches with rows alone."""
        context, file = self.context, self.record.file
        quantized = context.artifact.manifest.is_quantized
        pad_left = runner.ladder is not None and _pads_left(context.artifact, self.record)
        run = run_on_rungs(runner, context.feed_limits, pad_left=pad_left)
        if self.record is not input_graph(context.artifact.manifest.graphs):
            # Of an encoder with a decoder, the answers are the encoder's outputs.
            real_answers = replace(real_answers, answers=None)
        comparison = GraphComparison(self.reference, self.limits, real_answers, context.progress)
        results = comparison.compare(run, fed.record, fed.cases)
        if quantized and not self.is_compared_unquantized:
            results = judge_decisions(results)
        note = (
            f"{file}: {self.outside} are outside the calibrated ranges, so with them only the "
            "graph without quantization has a limit"
        )
        names = [provider.name for provider in runner.providers]
        own = Findings(
            cases=tuple(results),
            notes=(note,) if self.outside else (),
            providers=[
                {"name": p.name, "reason": p.reason, "options": p.options} for p in runner.providers
            ],
        )
        # Batches differ more clearly without quantization, and overflow only if simulated.
        if self.is_compared_unquantized or self.is_simulated(names):
            return own
        engines = self.subject.engines
        return join_findings(
            [own, self._scan(run, fed.record, comparison, results, engines=engines)]
        )

    def compare_simulated(self) -> Findings:
        """Compare an FP16 graph that rounds every value on the CPU, too."""
        path = self._write_simulated()
        derived = derived_record(self.record, "with every value in FP16", fp32_outputs=True)
        # Answers are those of the artifact's own graph, which were collected.
        comparison = GraphComparison(self.reference, self.limits, progress=self.context.progress)
        scans = not self.is_compared_unquantized
        findings = self._compare_derived(derived, path, comparison, scans=scans)
        path.unlink()
        return findings

    def _write_simulated(self) -> Path:
        from enginery.passes.cast.simulation import simulate_low_precision  # imports onnx, slowly
        from enginery.passes.ir.graph_file import read_graph, write_graph

        path = self.context.scratch / "simulated" / self.record.file
        path.parent.mkdir(parents=True, exist_ok=True)
        model = read_graph(self.path)
        simulate_low_precision(model)
        write_graph(model, path)
        return path

    def compare_unrounded(
        self, path: Path, rounded: Sequence[ValidationCaseResult], *, all_exact: bool
    ) -> Findings:
        """Compare the graph without rounding, which hides every fault that does less than it does.

        Args:
            path: its file.
            rounded: the results of the artifact's graph, those for the cases first.
            all_exact: all of its weights are the reference's.
        """
        manifest = self.context.artifact.manifest
        quantized = manifest.is_quantized
        change = "without quantization" if quantized else "in FP32"
        derived = derived_record(self.record, change, fp32_outputs=not quantized)
        limits = ComparisonLimits(Tolerance.for_precision(manifest.float_precision))
        comparison = GraphComparison(self.reference, limits, progress=self.context.progress)
        try:
            # Without quantization, batches differ more clearly; else they were scanned before.
            exact = self._compare_derived(derived, path, comparison, scans=quantized)
        except ProviderError as error:
            return note_refusal(f"{derived.file} was not compared", error)
        # Both begin with the results for the same inputs; those of the scan follow.
        count = len(self.cases)
        shares = compare_rounding(
            self.record.file, rounded[:count], exact.cases[:count], all_exact=all_exact
        )
        return join_findings([exact, Findings(rounding=tuple(shares))])

    def _compare_derived(
        self, derived: GraphRecord, path: Path, comparison: GraphComparison, *, scans: bool
    ) -> Findings:
        """Compare a graph that was made from the artifact's, on the CPU; if `scans`, batches, too.

        The results for the cases come first.

        Raises:
            ProviderError: ONNX Runtime cannot load the graph.
        """
        fed = self._feed_random_numbers(path, derived)
        outputs = [spec.name for spec in fed.record.outputs]
        with GraphTracer(fed.path, outputs, optimized=True) as run:
            results = comparison.compare(run, fed.record, fed.cases)
            parts = [Findings(cases=tuple(results), notes=fed.notes)]
            if scans:
                parts.append(self._scan(run, fed.record, comparison, results))
        return join_findings(parts)

    def _scan(
        self,
        run: Run,
        record: GraphRecord,
        comparison: GraphComparison,
        compared: Sequence[ValidationCaseResult],
        engines: Sequence[Profile] = (),
    ) -> Findings:
        """Compare batches with their rows alone, and those that differ with the reference.

        The graph that runs may be made from the artifact's, and have another record.
        """
        context = self.context
        scan = ConsistencyScan(
            run,
            record,
            context.feed_limits,
            engines=engines,
            decisions=self.subject.decisions,
            seed=context.config.seed,
        )
        shapes = scan.shapes(context.config.effort, self.subject.profiles)
        scanned = scan.run(shapes, comparison)
        quantized = isinstance(comparison.limits.tolerance, QuantizedTolerance)
        confirmed = scan.confirm(
            scanned,
            comparison,
            lambda cases: context.run_reference(self.record, "scan", cases, noise=not quantized),
        )
        results = [*compared, *confirmed]
        name = self.reference.name
        notes = scan_notes(self.record, scanned, results, name, quantized=quantized)
        return Findings(
            cases=tuple(confirmed),
            notes=tuple(notes),
            coverage=(scan.coverage(results, scanned),),
        )

    def _feed_random_numbers(self, path: Path, record: GraphRecord) -> _FedGraph:
        """Return a graph that takes PyTorch's random numbers; the graph itself if it draws none."""
        plain = _FedGraph(path, record, self.cases)
        if not any(expected.random for expected in self.reference.outputs):
            return plain
        from enginery.validate.random_numbers import give_random_numbers  # imports onnx, slowly

        directory = self.context.scratch / _RANDOM
        result = give_random_numbers(path, record, self.cases, self.reference, directory)
        if isinstance(result, str):
            note = f"{record.file}: PyTorch has drawn other random numbers: {result}"
            return replace(plain, notes=(note,))
        note = f"{record.file} was compared on the random numbers that PyTorch drew"
        return _FedGraph(result.path, result.record, result.cases, (note,))

    def compare_layers(self) -> Findings:
        """Compare each layer of a statically quantized graph with FP32's, on real inputs."""
        context, file = self.context, self.record.file
        if context.limits.layers is None:
            return Findings()
        from enginery.passes.qdq.layer_errors import MAX_ROWS, measure_layer_errors  # onnx, slowly

        limits = context.limits.layers.of_graph(file)
        several = len(context.artifact.manifest.graphs) > 1
        skipped = f"no single layer{f' of {file}' if several else ''} was compared with FP32"
        path = context.scratch / LAYERS / file
        real = [case.make for case in self.cases if case.kind == "real"]
        if not real:
            return _note(f"{skipped}: no real inputs were compared on this graph")
        if not limits.measured:
            return _note(f"{skipped}: quantize has not measured them")
        errors: dict[str, LayerError] = {}
        notes: tuple[str, ...] = ()
        if path.exists():
            # As many rows as quantize measures, evenly spread.
            every = -(-context.config.rows // MAX_ROWS) if context.config.data else 1
            fused = context.artifact.manifest.precision == "int8"
            try:
                with context.progress.task(f"layers, {file}"):
                    errors = measure_layer_errors(path, real[::every], fused=fused)
            except (InputError, ProviderError) as error:
                notes = (f"{skipped}: {error.message}",)
        return Findings(notes=notes, layers=limits.compare(errors))


def _check_placement(path: Path, file: str, providers: Sequence[Provider]) -> Findings:
    """Report nodes that the CPU runs for another provider, as it runs all for a wrong device.

    NVIDIA's providers are left out: another session takes their memory, or builds an engine.
    """
    head = providers[0]
    if head.name in (CPU, CUDA, TENSORRT, TENSORRT_RTX):
        return Findings()
    try:
        placement = read_placement(path, providers)
    except ProviderError as error:
        return note_refusal(f"{file}: its placement is not known", error)
    if any(node.provider == head.name for node in placement.nodes):
        return Findings(notes=tuple(f"{file}: {note}" for note in placement.notes))
    name = short_name(head.name)
    options = ", ".join(f"{name}.{key}={value}" for key, value in head.options.items())
    reason = f"{file}: {name} runs none of its nodes, so the answers are the CPU's"
    return Findings(not_proven=(f"{reason}; check {options}" if options else reason,))


def _all_exact(record: GraphRecord, weights: WeightMetrics) -> bool:
    """Return True if all weights of a graph that were rounded were traced."""
    rounded = ("float16", "bfloat16")
    return not any(w.graph == record.file and w.dtype in rounded for w in weights.untraced)


def _pads_left(artifact: Artifact, record: GraphRecord) -> bool:
    """Return True if a graph's texts are padded on the left; False without a tokenizer."""
    try:
        return TextTokenizer.open(artifact.path).for_graph(record).pad_left
    except EngineryError as error:
        raise_system_error(error)
        return False


def _note(note: str) -> Findings:
    return Findings(notes=(note,))
