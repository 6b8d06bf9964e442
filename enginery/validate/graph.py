"""Compare one graph with the reference: as it is, without rounding, and layer by layer."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from enginery.core.accuracy import LayerError
from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import (
    ArtifactError,
    EngineryError,
    InputError,
    ProviderError,
)
from enginery.core.json_file import read_json
from enginery.core.model.feeds import FeedLimits
from enginery.core.model.files import ModelConfig
from enginery.core.progress import Progress
from enginery.core.shapes import Profile
from enginery.core.tolerance import QuantizedTolerance, Tolerance
from enginery.reports.base import ProviderRecord
from enginery.reports.validation import (
    AnswerMetrics,
    GenerationMetrics,
    GraphCoverage,
    RoundingMetrics,
    ValidationCaseResult,
)
from enginery.reports.weights import LayerMetrics, WeightMetrics
from enginery.runtime.decoder_graphs import DecoderGraphs, input_graph
from enginery.runtime.onnxruntime.placement import read_placement
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions
from enginery.runtime.onnxruntime.tracing import GraphTracer
from enginery.runtime.providers.known import CPU, CUDA, TENSORRT, TENSORRT_RTX, short_name
from enginery.runtime.providers.selection import Provider
from enginery.runtime.providers.specification import ProviderSpec, parse_providers
from enginery.runtime.text.tokenizer import TextTokenizer
from enginery.validate.answers import compare_answers
from enginery.validate.cases.decisions import Decisions, find_decisions
from enginery.validate.cases.positions import CaseCost, threshold_cases
from enginery.validate.cases.real_inputs import real_cases
from enginery.validate.cases.rungs import run_on_rungs
from enginery.validate.cases.sweep import (
    ValidationCase,
    profile_cases,
    sweep_cases,
)
from enginery.validate.compare import (
    ComparisonLimits,
    GraphComparison,
    RealAnswers,
    outside_calibrated_ranges,
)
from enginery.validate.config import ValidateConfig
from enginery.validate.consistency import ConsistencyScan, judge_decisions, scan_notes
from enginery.validate.decoding import (
    PromptLengths,
    Run,
    compare_decoding,
    find_prompts,
    make_sequences,
    scanned_length,
    usable_decoders,
)
from enginery.validate.embeddings import EmbeddingComparison
from enginery.validate.generation import (
    GeneratedTexts,
    GenerationRefusedError,
    generate_reference,
)
from enginery.validate.labels import LabelComparison
from enginery.validate.metrics.budget import LayerExpectation
from enginery.validate.quantized_answers import AnswerComparison
from enginery.validate.reference import Reference, ReferenceRun, run_reference
from enginery.validate.rounding import compare_rounding, derived_record

if TYPE_CHECKING:
    from enginery.validate.random_numbers import GivenNumbers

_RANDOM = "random"
"""Folder of the graphs that take random numbers."""


def providers_of(config: ValidateConfig) -> tuple[ProviderSpec, ...]:
    """Return the providers from the options or the environment."""
    return parse_providers(config.providers, config.provider_option, default="cpu")


@dataclass
class ArtifactComparison:
    """The comparison of an artifact's graphs with the reference, one after the other."""

    reference: Reference
    config: ValidateConfig
    feed_limits: FeedLimits
    embeddings: EmbeddingComparison | None
    answers: AnswerComparison | None
    layer_limits: LayerExpectation | None
    """None unless the artifact is statically quantized, and the user has set no limit."""
    labels: LabelComparison
    scratch: Path
    """Directory for the reference's outputs and for graphs without rounding."""
    progress: Progress
    decisions: Decisions = field(default_factory=Decisions)
    """What the graph that is compared now decides from sizes and ids."""
    lengths: set[int] = field(default_factory=set)
    """Lengths at which any graph begins to do something else."""
    providers: list[ProviderRecord] = field(default_factory=list)
    """The providers that ran the last graph."""
    coverage: list[GraphCoverage] = field(default_factory=list)
    rounding: list[RoundingMetrics] = field(default_factory=list)
    weights: WeightMetrics | None = None
    generation: GenerationMetrics | None = None
    layers: LayerMetrics | None = None
    raw_answers: AnswerMetrics | None = None
    notes: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    """Graphs of which the requested provider runs nothing, in words."""

    def compare_weights(self) -> WeightMetrics:
        """Compare the weights; write graphs without rounding, and with each layer in FP32."""
        from enginery.validate.weights.compare import compare_weights  # imports onnx, slowly

        return compare_weights(
            self.reference.artifact,
            self.reference.open_weights,
            unrounded=self.scratch,
            layers=self.scratch / "layers" if self.layer_limits else None,
            progress=self.progress,
        )

    def make_cases(
        self, record: GraphRecord, profiles: Sequence[Profile]
    ) -> tuple[list[ValidationCase], list[str]]:
        """Return the inputs to compare a graph on, and notes on real ones.

        Args:
            record: the graph.
            profiles: shape profiles, whose bounds are run in any case.
        """
        artifact, limits, seed = self.reference.artifact, self.feed_limits, self.config.seed
        # The cosine of a few scores in one row would mean little.
        quantized = artifact.manifest.is_quantized
        rows = 2 if quantized else 1
        thresholds = threshold_cases(
            record,
            limits,
            read_json(artifact.path / ModelConfig.FILE),
            CaseCost(self.weights.elements if self.weights else 0, self.config.effort),
            rows=rows,
            seed=seed,
        )
        real, notes = real_cases(artifact, record, self.config)
        cases = [
            *sweep_cases(record, limits, seed=seed, longest_rows=rows),
            *thresholds,
            *self.find_decisions(record).cases(record, limits, quantized=quantized, seed=seed),
            *profile_cases(record, profiles, limits, seed=seed),
            *real,
        ]
        return cases, notes

    def find_decisions(self, record: GraphRecord) -> Decisions:
        """Find the sizes and ids at which the next graph changes what it does."""
        path = self.reference.artifact.path / record.file
        self.decisions = find_decisions(path, record, self.feed_limits)
        self.notes += self.decisions.notes
        self.lengths |= {
            size
            for sizes in self.decisions.sizes
            for dim, size in sizes.items()
            if "sequence" in dim
        }
        return self.decisions

    def run(
        self,
        record: GraphRecord,
        cases: Sequence[ValidationCase],
        profiles: Sequence[Profile],
        engines: Sequence[Profile],
        limits: ComparisonLimits,
    ) -> list[ValidationCaseResult]:
        """Compare one graph, and if its weights are known, also the graph without rounding.

        Args:
            record: the graph.
            cases: the inputs.
            profiles: shape profiles, whose bounds are run in any case.
            engines: profiles of the engines that run the graph.
            limits: the tolerances.
        """
        artifact, config = self.reference.artifact, self.config
        quantized, unrounded = artifact.manifest.is_quantized, self.scratch / record.file
        exists = unrounded.exists()
        # A quantized graph has no noise floor in PyTorch, but the one without quantization has.
        reference = self._run_reference(record, "cases", cases, noise=exists or not quantized)
        runnable, run_record, run_cases = artifact, record, cases
        path = artifact.path / record.file
        # With draws of its own, it would differ from PyTorch as much as two runs of PyTorch do.
        fed_graph = None if engines else self._give_random_numbers(path, record, cases, reference)
        if fed_graph:
            run_record, run_cases = fed_graph.record, fed_graph.cases
            manifest = artifact.manifest.model_copy(update={"graphs": (run_record,)})
            runnable = Artifact(self.scratch / _RANDOM, manifest)
        with OrtRunner(
            runnable,
            # Spinning threads would take the cores between the runs, where most of the time goes.
            RunnerOptions(spinning=False, ladder=True),
            graph=record.file,
            providers=providers_of(config),
            allow_fallback=config.allow_fallback,
        ) as runner:
            run = run_on_rungs(
                runner,
                self.feed_limits,
                pad_left=runner.ladder is not None and _pads_left(artifact, record),
            )
            self.providers = [
                {"name": p.name, "reason": p.reason, "options": p.options} for p in runner.providers
            ]
            outside = outside_calibrated_ranges(record, cases) if quantized and exists else ""
            if outside:
                self.notes.append(
                    f"{record.file}: {outside} are outside the calibrated ranges, so with them "
                    "only the graph without quantization has a limit"
                )
            # Of an encoder with a decoder, the answers are the encoder's outputs.
            has_answers = record is input_graph(artifact.manifest.graphs)
            comparison = GraphComparison(
                reference,
                replace(limits, generated_outside_ranges=bool(outside)),
                RealAnswers(self.embeddings, self.answers if has_answers else None, self.labels),
                self.progress,
            )
            results = comparison.compare(run, run_record, run_cases)
            if quantized and not exists:
                results = judge_decisions(results)
            # On the CPU, ONNX Runtime computes FP16 in FP32, which hides values beyond 65504.
            simulated = artifact.manifest.float_precision == "fp16" and _on_cpu(runner.providers)
            # Batches differ more clearly without quantization, and overflow only if simulated.
            if not (quantized and exists) and not simulated:
                scan = ConsistencyScan(
                    run,
                    run_record,
                    self.feed_limits,
                    engines=engines,
                    decisions=self.decisions,
                    seed=config.seed,
                )
                results += self._scan(record, scan, profiles, comparison, results)
            results += self._compare_answers(record, runner, limits, results)
            self._check_placement(record, runner.providers)
        if simulated:
            path = self._write_simulated(record)
            other = derived_record(record, "with every value in FP16", fp32_outputs=True)
            scanned = None if quantized and exists else profiles
            # Its answers are those of the artifact's own graph, which were collected.
            without_answers = replace(comparison, real_answers=RealAnswers())
            results += self._compare_derived(record, other, path, cases, scanned, without_answers)
            path.unlink()
        if exists:
            results += self._compare_unrounded(record, cases, profiles, reference, results)
        elif artifact.manifest.precision != "fp32":
            self.notes.append(
                f"{record.file} was not compared without rounding: it is quantized dynamically, or "
                "not enough of its weights were traced"
            )
        if self.layer_limits is not None:
            self._compare_layers(record, cases, self.layer_limits)
        self.notes += reference.notes
        for outputs in ("cases", "scan", "raw", _RANDOM):  # they may take gigabytes
            shutil.rmtree(self.scratch / outputs, ignore_errors=True)
        return results

    def _compare_answers(
        self,
        record: GraphRecord,
        runner: OrtRunner,
        limits: ComparisonLimits,
        results: Sequence[ValidationCaseResult],
    ) -> list[ValidationCaseResult]:
        """Compare the answers to raw inputs; return a case for each that differs."""
        outcome = compare_answers(
            self.reference, record, runner, limits, results, self.scratch / "raw"
        )
        self.raw_answers = outcome.metrics
        if outcome.not_compared:
            self.notes.append(f"answers: not compared: {outcome.not_compared}")
        return outcome.cases

    def _compare_unrounded(
        self,
        record: GraphRecord,
        cases: Sequence[ValidationCase],
        profiles: Sequence[Profile],
        reference: ReferenceRun,
        rounded: Sequence[ValidationCaseResult],
    ) -> list[ValidationCaseResult]:
        """Compare the graph without rounding, which hides every fault that does less than it does.

        Args:
            record: the artifact's graph.
            cases: the inputs.
            profiles: shape profiles, whose bounds are scanned in any case.
            reference: its outputs for these inputs.
            rounded: the results of the artifact's graph, those for these inputs first.
        """
        manifest = self.reference.artifact.manifest
        quantized = manifest.is_quantized
        change = "without quantization" if quantized else "in FP32"
        other = derived_record(record, change, fp32_outputs=not quantized)
        limits = ComparisonLimits(Tolerance.for_precision(manifest.float_precision))
        try:
            exact = self._compare_derived(
                record,
                other,
                self.scratch / record.file,
                cases,
                # Without quantization, batches differ more clearly; else they were scanned before.
                profiles if quantized else None,
                GraphComparison(reference, limits, progress=self.progress),
            )
        except ProviderError as error:
            self.notes.append(f"{other.file} was not compared: {error.message}")
            return []
        self.rounding += compare_rounding(
            record.file,
            # Both begin with the results for the same inputs; those of the scan follow.
            rounded[: len(cases)],
            exact[: len(cases)],
            all_exact=self._all_exact(record),
        )
        return exact

    def _check_placement(self, record: GraphRecord, providers: Sequence[Provider]) -> None:
        """Report nodes that the CPU runs for another provider, as it runs all for a wrong device.

        NVIDIA's providers are left out: another session takes their memory, or builds an engine.
        """
        head = providers[0]
        if head.name in (CPU, CUDA, TENSORRT, TENSORRT_RTX):
            return
        try:
            placement = read_placement(self.reference.artifact.path / record.file, providers)
        except ProviderError as error:
            self.notes.append(f"{record.file}: its placement is not known: {error.message}")
            return
        if any(node.provider == head.name for node in placement.nodes):
            self.notes += [f"{record.file}: {note}" for note in placement.notes]
            return
        name = short_name(head.name)
        options = ", ".join(f"{name}.{key}={value}" for key, value in head.options.items())
        self.idle.append(
            f"{record.file}: {name} runs none of its nodes, so the answers are the CPU's"
            + (f"; check {options}" if options else "")
        )

    def _give_random_numbers(
        self,
        path: Path,
        record: GraphRecord,
        cases: Sequence[ValidationCase],
        reference: ReferenceRun,
    ) -> GivenNumbers | None:
        """Return a graph that takes PyTorch's random numbers; None if it draws none, or others."""
        if not any(expected.random for expected in reference.outputs):
            return None
        from enginery.validate.random_numbers import give_random_numbers  # imports onnx, slowly

        result = give_random_numbers(path, record, cases, reference, self.scratch / _RANDOM)
        if isinstance(result, str):
            self.notes.append(f"{record.file}: PyTorch has drawn other random numbers: {result}")
            return None
        self.notes.append(f"{record.file} was compared on the random numbers that PyTorch drew")
        return result

    def _compare_layers(
        self, record: GraphRecord, cases: Sequence[ValidationCase], limits: LayerExpectation
    ) -> None:
        """Compare each layer of a statically quantized graph with FP32's, on real inputs."""
        from enginery.passes.qdq.layer_errors import MAX_ROWS, measure_layer_errors  # onnx, slowly

        limits = limits.of_graph(record.file)
        several = len(self.reference.artifact.manifest.graphs) > 1
        skipped = f"no single layer{f' of {record.file}' if several else ''} was compared with FP32"
        path = self.scratch / "layers" / record.file
        real = [case.make for case in cases if case.kind == "real"]
        if not limits.measured or not real:
            why = (
                "quantize has not measured them"
                if real
                else "no real inputs were compared on this graph"
            )
            self.notes.append(f"{skipped}: {why}")
            return
        errors: dict[str, LayerError] = {}
        if path.exists():
            # As many rows as quantize measures, evenly spread.
            every = -(-self.config.rows // MAX_ROWS) if self.config.data else 1
            fused = self.reference.artifact.manifest.precision == "int8"
            try:
                with self.progress.task(f"layers, {record.file}"):
                    errors = measure_layer_errors(path, real[::every], fused=fused)
            except (InputError, ProviderError) as error:
                self.notes.append(f"{skipped}: {error.message}")
        self.layers = limits.compare(errors)

    def _write_simulated(self, record: GraphRecord) -> Path:
        """Write an FP16 graph that rounds every value on the CPU, too."""
        from enginery.passes.cast.simulation import simulate_low_precision  # imports onnx, slowly
        from enginery.passes.ir.graph_file import read_graph, write_graph

        path = self.scratch / "simulated" / record.file
        path.parent.mkdir(parents=True, exist_ok=True)
        model = read_graph(self.reference.artifact.path / record.file)
        simulate_low_precision(model)
        write_graph(model, path)
        return path

    def _compare_derived(
        self,
        record: GraphRecord,
        derived: GraphRecord,
        path: Path,
        cases: Sequence[ValidationCase],
        scanned: Sequence[Profile] | None,
        comparison: GraphComparison,
    ) -> list[ValidationCaseResult]:
        """Compare a graph that was made from the artifact's, on the CPU.

        Args:
            record: the artifact's graph.
            derived: the other.
            path: the other's file.
            cases: the inputs.
            scanned: shape profiles, whose bounds are scanned in any case; None for no scan.
            comparison: the reference's outputs for these inputs, and the tolerances.

        Returns:
            The results, those for these inputs first.

        Raises:
            ProviderError: ONNX Runtime cannot load the graph.
        """
        fed_graph = self._give_random_numbers(path, derived, cases, comparison.reference)
        if fed_graph:
            path, derived, cases = fed_graph.path, fed_graph.record, fed_graph.cases
        outputs = [spec.name for spec in derived.outputs]
        with GraphTracer(path, outputs, optimized=True) as run:
            results = comparison.compare(run, derived, cases)
            if scanned is not None:
                scan = ConsistencyScan(
                    run, derived, self.feed_limits, decisions=self.decisions, seed=self.config.seed
                )
                results += self._scan(record, scan, scanned, comparison, results)
            return results

    def _all_exact(self, record: GraphRecord) -> bool:
        """Return True if all weights that were rounded were traced."""
        untraced = self.weights.untraced if self.weights else []
        rounded = ("float16", "bfloat16")
        return not any(w.graph == record.file and w.dtype in rounded for w in untraced)

    def _scan(
        self,
        record: GraphRecord,
        scan: ConsistencyScan,
        profiles: Sequence[Profile],
        comparison: GraphComparison,
        compared: Sequence[ValidationCaseResult],
    ) -> list[ValidationCaseResult]:
        """Compare batches with their rows alone, and those that differ with the reference."""
        shapes = scan.shapes(self.config.effort, profiles)
        scanned = scan.run(shapes, comparison)
        quantized = isinstance(comparison.limits.tolerance, QuantizedTolerance)
        run_again = partial(self._run_reference, record, "scan", noise=not quantized)
        confirmed = scan.confirm(scanned, comparison, run_again)
        self.coverage.append(scan.coverage([*compared, *confirmed], scanned))
        name = comparison.reference.name
        self.notes += scan_notes(
            record, scanned, [*compared, *confirmed], name, quantized=quantized
        )
        return confirmed

    def decode(self, limits: ComparisonLimits, *, engines: bool) -> list[ValidationCaseResult]:
        """Compare decoders with a cache over several tokens, and generated texts with PyTorch's."""
        artifact, config = self.reference.artifact, self.config
        decoders = DecoderGraphs.find_all(artifact.manifest.graphs)
        obstacle = "only graphs decode here, not engines" if engines else ""
        if self.reference.is_onnx:
            obstacle = f"{self.reference.name} keeps no cache"
        if decoders and obstacle:
            self.notes.append(f"no tokens were decoded: {obstacle}")
            return []

        def open_runner(file: str) -> OrtRunner:
            return OrtRunner(
                artifact,
                # Every step has other shapes, so that bound buffers would never be used again.
                RunnerOptions(io_binding=False, spinning=False),
                graph=file,
                providers=providers_of(config),
                allow_fallback=config.allow_fallback,
            )

        texts: GeneratedTexts | None = None
        notes: list[str] = []
        refused: list[ValidationCaseResult] = []
        try:
            texts, notes = generate_reference(
                artifact,
                config,
                self.feed_limits,
                self.reference.open_pytorch,
                self.scratch,
                self.progress,
            )
        except GenerationRefusedError as error:
            refused = [error.case()]
        self.notes += notes
        usable, notes = usable_decoders(decoders)
        self.notes += notes
        sequences = []
        if usable:
            more = self._find_prompts(usable, open_runner)
            sequences += make_sequences(usable[0], self.feed_limits, seed=config.seed, more=more)
        if texts:
            sequences.append(texts.sequences())
        results, notes = compare_decoding(
            usable,
            sequences,
            limits,
            run_reference=lambda record, cases: self._run_reference(
                record, "decoding", cases, noise=not artifact.manifest.is_quantized
            ),
            open_runner=open_runner,
            progress=self.progress,
        )
        self.notes += notes
        results += refused
        if texts:
            # Their limits say how close two logits must be for either to be chosen.
            forced = [case for case in results if case.kind == "generation"]
            try:
                generated, self.generation = texts.compare(forced, open_runner, self.progress)
            except ArtifactError as error:
                self.notes.append(f"not generated: {error.message}")
            else:
                results += generated
        return results

    def _find_prompts(
        self,
        decoders: Sequence[DecoderGraphs],
        open_runner: Callable[[str], AbstractContextManager[Run]],
    ) -> list[tuple[int, int]]:
        """Return rows and lengths of prompts that a decoder runs otherwise than token by token."""
        artifact, limits = self.reference.artifact, self.feed_limits
        prompts: list[tuple[int, int]] = []
        for graphs in decoders:
            length = scanned_length(self.config.effort, limits, artifact.path / graphs.later.file)
            with self.progress.task(f"prompts at once and token by token, {graphs.later.file}"):
                prompts += find_prompts(
                    graphs,
                    limits,
                    open_runner,
                    PromptLengths(length, special=self.lengths),
                    precision=artifact.manifest.precision,
                    seed=self.config.seed,
                )
            if length < limits.max_positions:
                self.notes.append(
                    f"{graphs.later.file}: prompts were compared with single tokens up to "
                    f"{length} of {limits.max_positions} positions"
                )
        return prompts

    def _run_reference(
        self,
        record: GraphRecord,
        directory: str,
        cases: Sequence[ValidationCase],
        *,
        noise: bool,
    ) -> ReferenceRun:
        return run_reference(
            self.reference,
            record,
            cases,
            self.scratch / directory,
            progress=self.progress,
            noise=noise,
        )


def _pads_left(artifact: Artifact, record: GraphRecord) -> bool:
    """Return True if a graph's texts are padded on the left; False without a tokenizer."""
    try:
        return TextTokenizer.open(artifact.path).for_graph(record).pad_left
    except EngineryError:
        return False


def _on_cpu(providers: Sequence[Provider]) -> bool:
    """Return True if only the CPU runs a graph."""
    return {provider.name for provider in providers} == {CPU}
