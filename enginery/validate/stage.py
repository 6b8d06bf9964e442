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
from contextlib import suppress
from dataclasses import asdict, replace
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
from enginery.core.errors import (
    ArtifactError,
    SourceError,
)
from enginery.core.home import enginery_home
from enginery.core.json_file import read_document
from enginery.core.model.feeds import FeedLimits
from enginery.core.model.onnx_structure import (
    keeping_structures,
    random_notes,
    read_structure,
)
from enginery.core.model.source import resolve_source
from enginery.core.progress import SILENT, Progress
from enginery.core.python_environment import OWN_ENVIRONMENT, PythonEnvironment
from enginery.core.shapes import profiles_by_graph
from enginery.core.temporary import temporary_directory
from enginery.reports.validation import (
    ValidationCaseResult,
    ValidationReport,
)
from enginery.runtime.decoder_graphs import has_fixed_cache
from enginery.runtime.providers.selection import choose_providers
from enginery.runtime.providers.specification import format_providers
from enginery.validate.cases.engines import reachable_profiles, split_by_profiles
from enginery.validate.cases.real_inputs import check_data_usable
from enginery.validate.compare import (
    ComparisonLimits,
)
from enginery.validate.config import ValidateConfig, check_options
from enginery.validate.declared_precision import check_declared_precision
from enginery.validate.embeddings import EmbeddingComparison
from enginery.validate.graph import ArtifactComparison, providers_of
from enginery.validate.labels import LabelComparison
from enginery.validate.metrics.budget import LayerExpectation
from enginery.validate.quantized_answers import AnswerComparison
from enginery.validate.reference import Reference
from enginery.validate.report import find_unproven, summarize
from enginery.validate.side_files import compare_side_files
from enginery.validate.verdict import all_passed, describe_rule, excuse_weights, longest_proved

STAGE = "validate"
STAGE_VERSION = "27"
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
    with inputs.unchanged(), keeping_structures():
        with inputs.recording():
            artifact.check_files()
            key = fingerprint(artifact, config)
        report, longest = _compare(artifact, config, inputs, progress)
    _save_verdict(artifact, key, report, longest)
    return report


def _compare(
    artifact: Artifact, config: ValidateConfig, read_files: InputFiles, progress: Progress
) -> tuple[ValidationReport, int | None]:
    """Return the report, and the longest input that was compared."""
    started = time.monotonic()
    check_declared_precision(artifact)
    # Checked first: providers that cannot be used would make a run of PyTorch useless.
    reached = reachable_profiles(
        artifact, providers_of(config), allow_fallback=config.allow_fallback
    )
    chosen = choose_providers(providers_of(config), allow_fallback=config.allow_fallback)
    # CUDA multiplies FP32 in TensorFloat-32 by default, whose tolerance then applies.
    limits = ComparisonLimits.of(artifact, config).where(chosen)
    if config.label_column:
        require_classifier(artifact, config.data, config.label_column)
    with read_files.recording():
        reference = Reference.of(artifact, config).with_noise(limits.tolerance.precision)
    feed_limits = FeedLimits.from_artifact(artifact)
    check_data_usable(artifact, config)
    manifest = artifact.manifest
    # A graph with a cache of fixed size is compared by what it decodes.
    graphs = [record for record in manifest.graphs if not has_fixed_cache(record)]
    inputs = {record.file: record.inputs for record in graphs}
    profiles = profiles_by_graph(inputs, config.profile, feed_limits.max_sizes)
    notes = []
    environment = _find_environment(artifact, config)
    if not environment.is_own:
        notes.append(f"PyTorch ran in another environment: {environment.describe()}")
    for record in manifest.graphs:
        notes += random_notes(read_structure(artifact.path / record.file).op_types(), record.file)
    embeddings = _embeddings(artifact, notes)
    answers = AnswerComparison.of(artifact) if limits.accuracy else None
    labels = LabelComparison()
    results: list[ValidationCaseResult] = []
    with temporary_directory("validate") as scratch:
        comparison = ArtifactComparison(
            reference,
            config,
            feed_limits,
            embeddings,
            answers,
            _layer_limits(artifact, config, limits),
            labels,
            scratch,
            progress,
        )
        # Inputs reach few rows of an embedding, so every weight is compared, too, without a run.
        weights = comparison.weights = comparison.compare_weights()
        with progress.task("comparing the files beside the graphs"):
            side_files = compare_side_files(reference, scratch)
        for record in graphs:
            # Engines are checked at the corners of their own profiles, too, where errors show.
            promised = [*profiles[record.file], *reached[record.file]]
            all_cases, more_notes = comparison.make_cases(record, promised)
            cases, left_out = split_by_profiles(all_cases, record, reached[record.file])
            graph_results = comparison.run(record, cases, promised, reached[record.file], limits)
            results += graph_results
            results += left_out
            notes += more_notes
        results += comparison.decode(limits, engines=any(reached.values()))
    pooled = embeddings.metrics(min_cosine=limits.embedding_cosine) if embeddings else None
    accuracy = answers.metrics(limits.accuracy) if answers and limits.accuracy else None
    notes = [*dict.fromkeys([*notes, *comparison.notes]), *describe_rule(limits, accuracy)]
    # Agreement proves nothing if a constant would pass, or if the reference rejects most inputs.
    not_proven = [
        *comparison.idle,
        *find_unproven(results, reference.name, own_data=bool(config.data)),
    ]
    longest, more_notes = longest_proved(graphs, results, feed_limits)
    notes += more_notes
    checks = (pooled, accuracy, comparison.layers, *comparison.rounding)
    failures = [check.problem for check in checks if check is not None and check.problem]
    agrees = all_passed(results) and not failures and not not_proven
    weights, more_notes = excuse_weights(weights, artifact, agrees=agrees)
    notes += more_notes
    report = ValidationReport(
        passed=agrees
        and not weights.differences
        and not weights.problem
        and not side_files.differences,
        summary="",
        precision=manifest.describe_precision(),
        providers=comparison.providers,
        reference={
            "id": reference.source.record.id,
            "revision": reference.source.record.revision,
            "sha256": reference.source.record.sha256,
            "as": reference.description,
            "name": reference.name,
        },
        tolerance={
            **asdict(limits.tolerance),
            "max_abs_error set": limits.max_abs_error,
            "min_cosine set": limits.min_cosine,
            "rule": limits.rule,
        },
        cases=results,
        embeddings=pooled,
        accuracy=accuracy,
        weights=weights,
        rounding=comparison.rounding,
        layers=comparison.layers,
        labels=labels.metrics(config.label_column, reference.name),
        generation=comparison.generation,
        side_files=side_files,
        answers=comparison.raw_answers,
        not_proven=not_proven,
        effort=config.effort,
        coverage=comparison.coverage,
        notes=notes,
        tools=_tools(artifact, config),
        seconds=round(time.monotonic() - started, 3),
    )
    return replace(report, summary=summarize(report)), longest


def _layer_limits(
    artifact: Artifact, config: ValidateConfig, limits: ComparisonLimits
) -> LayerExpectation | None:
    """Return what quantize has measured for each layer; None if that is not a limit."""
    if limits.accuracy is None or limits.accuracy.scheme == "dynamic":
        return None
    return LayerExpectation.of(artifact, own_data=bool(config.data))


def _embeddings(artifact: Artifact, notes: list[str]) -> EmbeddingComparison | None:
    try:
        return EmbeddingComparison.of(artifact)
    except (ArtifactError, SourceError) as error:
        notes.append(f"no pooled embeddings were compared: {error.message}")
        return None


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
