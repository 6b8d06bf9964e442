"""The validate stage: compare an artifact's outputs with its source's, over shapes and real inputs.

It writes `reports/validation.json` and a verdict in the manifest. The reference is the artifact's
source in PyTorch, in FP32 with eager attention, or the .onnx file that it was imported from. The
reference also runs at the artifact's precision (PyTorch in FP64 for FP32): its error on the same
inputs is the noise floor, from which the tolerance is derived. A quantized artifact is checked
against its budget instead (`metrics/budget.py`), and without its quantization like any other
(`weights/unrounded.py`). Engines run at every corner of their profiles and on all other inputs
that fit (`cases/engines.py`). Graphs with a cache decode several tokens (`decoding.py`). Answers to
raw inputs are compared with those of transformers' own pipelines (`answers.py`, `generation.py`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from enginery.core.artifact.artifact import REPORTS, Artifact
from enginery.core.artifact.engine_record import engine_directories
from enginery.core.artifact.fingerprint import (
    Fingerprint,
    option_fields,
    stage_fingerprint,
    stage_tools,
)
from enginery.core.artifact.inputs import InputFiles
from enginery.core.artifact.manifest import Verdict
from enginery.core.datasets.labels import require_classifier
from enginery.core.errors import ArtifactError, SourceError
from enginery.core.home import enginery_home
from enginery.core.json_file import read_document
from enginery.core.model.feeds import FeedLimits
from enginery.core.model.random_numbers import random_notes
from enginery.core.model.source import resolve_source
from enginery.core.progress import SILENT, Progress
from enginery.core.python_environment import OWN_ENVIRONMENT, PythonEnvironment
from enginery.core.scratch import temporary_directory
from enginery.core.shapes import Profile, profiles_by_graph
from enginery.core.trust.onnx_structure import read_structure
from enginery.reports.validation import ValidationReport
from enginery.reports.weights import WeightMetrics
from enginery.runtime.providers.selection import choose_providers
from enginery.runtime.providers.specification import format_providers
from enginery.validate.cases.decisions import find_decisions
from enginery.validate.cases.engines import reachable_profiles
from enginery.validate.cases.real_inputs import check_data_usable, real_cases
from enginery.validate.compare import ComparisonLimits, RealAnswers
from enginery.validate.config import ValidateConfig, check_options
from enginery.validate.context import ValidationContext, providers_of
from enginery.validate.declared_precision import check_declared_precision
from enginery.validate.embeddings import EmbeddingComparison
from enginery.validate.findings import Findings, join_findings, note_refusal
from enginery.validate.generation import compare_generation
from enginery.validate.graph import LAYERS, GraphSubject, compare_graph
from enginery.validate.labels import LabelComparison
from enginery.validate.quantized_answers import AnswerComparison
from enginery.validate.reference import Reference
from enginery.validate.side_files import compare_side_files
from enginery.validate.verdict import longest_proved, make_report

STAGE = "validate"
STAGE_VERSION = "30"
REPORT = f"{REPORTS}/{ValidationReport.FILE}"
TOOLS = ("torch", "transformers", "optimum-onnx", "numpy", "tokenizers", "pillow")
_FRAMEWORKS = TOOLS[:3]
"""Those that the PyTorch model runs with, which may be in another environment."""


def fingerprint(artifact: Artifact, config: ValidateConfig) -> Fingerprint:
    """Return the cache key: the artifact's content, the options, the data and the tools.

    Raises:
        OptionError: an option is invalid.
        SourceError: the reference cannot be found.
        OptionError: there is no such interpreter as `python` names, or it is too old.
    """
    check_options(config)
    manifest = artifact.manifest
    inputs = {
        "artifact": artifact.content_sha256(),
        "source": manifest.source.sha256,
        "task": manifest.task,
        "precision": manifest.describe_precision(),
    }
    if rule := ComparisonLimits.of(artifact, config).rule:
        inputs["quantization"] = rule
    if engines := _engines(artifact, config):
        inputs["engines"] = engines
    if config.allow_fallback:
        # The providers that run then depend on the machine.
        chosen = choose_providers(providers_of(config), allow_fallback=True)
        inputs["chosen providers"] = ", ".join(provider.name for provider in chosen)
    contents = {"providers": format_providers(providers_of(config))}
    if config.reference:
        reference = resolve_source(config.reference, allow_pickle=config.allow_pickle)
        contents["reference"] = reference.record.sha256
    options = option_fields(config, **contents)
    return stage_fingerprint(STAGE, STAGE_VERSION, inputs, options, _tools(artifact, config))


def _find_environment(artifact: Artifact, config: ValidateConfig) -> PythonEnvironment:
    """Return the environment that runs PyTorch; this one's if the reference is an .onnx file."""
    is_onnx = artifact.manifest.source.kind == "onnx"
    is_file = config.reference.endswith(".onnx") if config.reference else is_onnx
    return OWN_ENVIRONMENT if is_file else PythonEnvironment.find(config.python)


def _tools(artifact: Artifact, config: ValidateConfig) -> dict[str, str]:
    """Return the versions of what a validation works with."""
    environment = _find_environment(artifact, config)
    return {**stage_tools(TOOLS), **environment.versions(_FRAMEWORKS)}


def _engines(artifact: Artifact, config: ValidateConfig) -> str:
    """Return the names of engines that may run. The digest of the artifact does not cover them."""
    if not any(spec.name.startswith("tensorrt") for spec in providers_of(config)):
        return ""
    return ", ".join(path.name for path in engine_directories(artifact.path)) or "none"


def find_finished(artifact: Artifact, config: ValidateConfig) -> ValidationReport | None:
    """Return the report of an earlier validation on this machine if it is still valid, or None.

    Verdicts in artifacts from elsewhere are not trusted; those artifacts are validated again.
    """
    verdict = artifact.manifest.verdict(STAGE)
    if verdict is None or verdict.key != fingerprint(artifact, config).key:
        return None
    try:
        written = read_document(artifact.path / REPORT)
        if not _verdict_marker(verdict.key, written).exists():
            return None
        report = ValidationReport.from_json(written)
    except (OSError, ValueError):  # removed, damaged, or of another version
        return None
    return report if report.passed == verdict.passed else None


def run(
    artifact: Artifact, config: ValidateConfig, *, progress: Progress = SILENT
) -> ValidationReport:
    """Validate an artifact and write the report and the verdict. A failure is not an exception.

    Raises:
        OptionError: an option is invalid, or the artifact does not classify labelled texts.
        SourceError: the source is missing or has changed, or does not fit the artifact.
        ProviderError: the provider is not available, or cannot load the graph.
        ShapeError: a profile does not fit.
        InputError: the data cannot be read, or no graph takes them.
        ArtifactError: the graphs do not have the precision that the manifest declares, or a file
            was altered.
    """
    inputs = InputFiles()
    with inputs.unchanged():
        with inputs.recording():
            artifact.check_files()
            key = fingerprint(artifact, config)
        report, longest = _validate(artifact, config, inputs, progress)
    _save_verdict(artifact, key, report, longest)
    return report


def _validate(
    artifact: Artifact, config: ValidateConfig, read_files: InputFiles, progress: Progress
) -> tuple[ValidationReport, int | None]:
    """Return the report, and the longest input that agreed."""
    started = time.monotonic()
    check_declared_precision(artifact)
    # Checked first: providers that cannot be used would make a run of PyTorch useless.
    engines = reachable_profiles(
        artifact, providers_of(config), allow_fallback=config.allow_fallback
    )
    with temporary_directory("validate") as scratch:
        context = _make_context(artifact, config, read_files, scratch, progress)
        weights, findings = _compare(context, engines)
    report = make_report(context, weights, findings, _tools(artifact, config), started=started)
    return report, longest_proved(context, report.cases)


def _make_context(
    artifact: Artifact,
    config: ValidateConfig,
    read_files: InputFiles,
    scratch: Path,
    progress: Progress,
) -> ValidationContext:
    """Find the reference and the limits, and check that the data can be compared."""
    chosen = choose_providers(providers_of(config), allow_fallback=config.allow_fallback)
    # CUDA multiplies FP32 in TensorFloat-32 by default, whose tolerance then applies.
    limits = ComparisonLimits.of(artifact, config).where(chosen)
    if config.label_column:
        require_classifier(artifact, config.data, config.label_column)
    with read_files.recording():
        reference = Reference.of(artifact, config).with_noise(limits.tolerance.precision)
    feed_limits = FeedLimits.from_artifact(artifact)
    check_data_usable(artifact, config)
    return ValidationContext(reference, config, limits, feed_limits, scratch, progress)


def _compare(
    context: ValidationContext, engines: Mapping[str, Sequence[Profile]]
) -> tuple[WeightMetrics, Findings]:
    """Return how the weights compare, and the findings of all other comparisons.

    The profiles are those of the engines that run each graph, by its file.
    """
    from enginery.validate.weights.compare import compare_weights  # imports onnx, slowly

    config, graphs, scratch = context.config, context.graphs, context.scratch
    inputs = {record.file: record.inputs for record in graphs}
    profiles = profiles_by_graph(inputs, config.profile, context.feed_limits.max_sizes)
    setting = _describe_setting(context)
    real_answers, obstacle = _open_real_answers(context)
    real = {record.file: real_cases(context.artifact, record, config) for record in graphs}
    parts = [setting, obstacle, *(Findings(notes=tuple(notes)) for _, notes in real.values())]
    # Inputs reach few rows of an embedding, so every weight is compared, too, without a run.
    weights = compare_weights(
        context.artifact,
        context.reference.open_weights,
        unrounded=scratch,
        layers=scratch / LAYERS if context.limits.layers else None,
        progress=context.progress,
    )
    with context.progress.task("comparing the files beside the graphs"):
        parts.append(Findings(side_files=compare_side_files(context.reference, scratch)))
    lengths: set[int] = set()
    for record in graphs:
        reached = engines[record.file]
        path = context.artifact.path / record.file
        decisions = find_decisions(path, record, context.feed_limits)
        # Engines are checked at the corners of their own profiles, too, where errors show.
        promised = [*profiles[record.file], *reached]
        subject = GraphSubject(record, real[record.file][0], decisions, promised, reached)
        parts.append(compare_graph(context, subject, weights, real_answers))
        lengths |= decisions.lengths
    parts.append(compare_generation(context, lengths, engines=any(engines.values())))
    column, name = config.label_column, context.reference.name
    parts.append(real_answers.findings(context.limits, label_column=column, reference=name))
    return weights, join_findings(parts)


def _describe_setting(context: ValidationContext) -> Findings:
    """Return notes on another environment, and on graphs that draw random numbers."""
    artifact, notes = context.artifact, []
    environment = _find_environment(artifact, context.config)
    if not environment.is_own:
        notes.append(f"PyTorch ran in another environment: {environment.describe()}")
    for record in artifact.manifest.graphs:
        notes += random_notes(read_structure(artifact.path / record.file).op_types(), record.file)
    return Findings(notes=tuple(notes))


def _open_real_answers(context: ValidationContext) -> tuple[RealAnswers, Findings]:
    """Return what collects the outputs of real inputs, and a note if no embeddings are pooled."""
    artifact, embeddings, notes = context.artifact, None, Findings()
    try:
        embeddings = EmbeddingComparison.of(artifact)
    except (ArtifactError, SourceError) as error:
        notes = note_refusal("no pooled embeddings were compared", error)
    answers = AnswerComparison.of(artifact) if context.limits.accuracy else None
    return RealAnswers(embeddings, answers, LabelComparison()), notes


def _save_verdict(
    artifact: Artifact, key: Fingerprint, report: ValidationReport, longest: int | None
) -> None:
    verdict = Verdict.of(
        key, passed=report.passed, summary=report.summary, report=REPORT, longest=longest
    )
    written = report.to_json()
    artifact.annotate(verdict, written)
    note = _verdict_marker(verdict.key, written)
    with suppress(OSError):  # a read-only store: the artifact is validated again next time
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()


def _verdict_marker(key: str, report: bytes) -> Path:
    """Return the path of the file in the store that marks a report as written on this machine."""
    return enginery_home() / "verdicts" / hashlib.sha256(key.encode() + report).hexdigest()
