"""The validate stage: an artifact's outputs against PyTorch, over its shapes and on real inputs.

Takes an artifact; leaves `reports/validation.json` in it and a verdict in its manifest.

    >>> report = run(Artifact.open("minilm"), ValidateConfig())
    >>> report.passed, report.summary
    (True, '7 outputs agree with PyTorch; …')

The reference is the artifact's own source in FP32 with eager attention. PyTorch also runs at the
artifact's precision (FP64 for FP32): its own error on the same inputs is the noise floor that the
tolerance is scaled by. A quantized artifact is held to the budget that it was made with instead,
see `budget.py`. One model is in memory at a time. Engines are run at every corner of their own
profiles, and on what else fits these, see `engine_cases.py`.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from enginery.core.artifact import REPORTS, Artifact
from enginery.core.engine_record import engine_directories
from enginery.core.errors import ArtifactError, SourceError
from enginery.core.feeds import FeedLimits
from enginery.core.fingerprint import (
    Fingerprint,
    data_sha256,
    option_fields,
    runtime_version,
    tool_versions,
)
from enginery.core.home import enginery_home
from enginery.core.json_file import document_bytes
from enginery.core.manifest import Verdict
from enginery.core.model_files import ModelConfig
from enginery.core.precision import QuantizedTolerance
from enginery.core.progress import SILENT, Progress
from enginery.core.reports import CaseResult, OverallMetrics, ProviderRecord, ValidationReport
from enginery.core.source import ModelSource, resolve_record, resolve_source
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.providers.selection import choose_providers
from enginery.runtime.providers.specification import ProviderSpec, format_providers, parse_providers
from enginery.validate.budget import is_quantized
from enginery.validate.cases import LONGEST, profile_cases, profiles_by_graph, sweep_cases
from enginery.validate.claims import require_true_claims
from enginery.validate.compare import Limits, compare_graph
from enginery.validate.config import ValidateConfig, check_options
from enginery.validate.embeddings import EmbeddingComparison
from enginery.validate.engine_cases import reached_profiles, within_profiles
from enginery.validate.overall import OverallComparison
from enginery.validate.real_inputs import real_cases, require_use_for_data
from enginery.validate.reference import ask_pytorch
from enginery.validate.report import summarize

STAGE = "validate"
STAGE_VERSION = "4"
REPORT = f"{REPORTS}/{ValidationReport.FILE}"
TOOLS = ("torch", "transformers", "optimum-onnx", "numpy", "tokenizers", "pillow")

# What is trusted says nothing about the outputs.
_NOT_IN_KEY = ("trust_remote_code", "allow_pickle")


def fingerprint(artifact: Artifact, config: ValidateConfig) -> Fingerprint:
    """What the verdict depends on: the artifact's content, the options, the data, the tools.

    Raises:
        OptionError: an option cannot be used.
        SourceError: the reference cannot be found.
    """
    check_options(config)
    manifest = artifact.manifest
    fields = {
        "artifact": artifact.content_sha256(),
        "source": manifest.source.sha256,
        "task": manifest.task,
        "precision": manifest.precision,
        **option_fields({n: v for n, v in asdict(config).items() if n not in _NOT_IN_KEY}),
        "provider": format_providers(providers_of(config)),
        **runtime_version(),
        **tool_versions(TOOLS),
        "stage version": STAGE_VERSION,
    }
    if config.data:
        fields["data sha256"] = data_sha256(Path(config.data).expanduser())
    if config.reference:
        reference = resolve_source(config.reference, allow_pickle=config.allow_pickle)
        fields["reference sha256"] = reference.record.sha256
    if rule := Limits.of(artifact, config).rule:
        fields["quantization"] = rule
    if engines := _engines(artifact, config):
        fields["engines"] = engines
    if config.allow_fallback:
        # What runs then depends on the machine.
        chosen = choose_providers(providers_of(config), allow_fallback=True)
        fields["providers"] = ", ".join(provider.name for provider in chosen)
    return Fingerprint(STAGE, fields)


def providers_of(config: ValidateConfig) -> tuple[ProviderSpec, ...]:
    """The providers that the options, or the environment, ask for."""
    return parse_providers(config.provider, config.provider_option, default="cpu")


def _engines(artifact: Artifact, config: ValidateConfig) -> str:
    """The artifact's engines, where one of them would answer; its content's digest has none."""
    if not any(spec.name.startswith("tensorrt") for spec in providers_of(config)):
        return ""
    return ", ".join(path.name for path in engine_directories(artifact.path)) or "none"


def finished(artifact: Artifact, config: ValidateConfig) -> ValidationReport | None:
    """Return the report of an earlier validation on this machine that still holds, or None.

    An artifact from elsewhere can say anything of itself: its verdict is found anew.
    """
    verdict = artifact.manifest.verdict(STAGE)
    if verdict is None or verdict.key != fingerprint(artifact, config).key:
        return None
    try:
        written = document_bytes(artifact.path / REPORT)
        if not _note(verdict.key, written).exists():
            return None
        report = ValidationReport.from_json(written)
    except (OSError, ValueError):  # removed, damaged, or of another version
        return None
    return report if report.passed == verdict.passed else None


def run(
    artifact: Artifact, config: ValidateConfig, *, progress: Progress = SILENT
) -> ValidationReport:
    """Validates, writes the report, and marks the artifact. A failure is a report, not an error.

    Raises:
        OptionError: an option cannot be used.
        SourceError: the source is gone or has changed, or an imported artifact names none.
        ProviderError: the provider cannot be had, or does not load the graph.
        ShapeError: a profile does not fit.
        InputError: the data cannot be read, or nothing in the artifact takes them.
        ArtifactError: its graphs are not of the precision, or not quantized, as the manifest says.
    """
    started = time.monotonic()
    require_true_claims(artifact)
    key = fingerprint(artifact, config)
    reached = reached_profiles(artifact, providers_of(config), allow_fallback=config.allow_fallback)
    limits = Limits.of(artifact, config)
    source = _reference_source(artifact, config)
    feed_limits = FeedLimits.from_config(ModelConfig.read(artifact.path))
    require_use_for_data(artifact, config)
    manifest = artifact.manifest
    profiles = profiles_by_graph(manifest.graphs, config.profile, feed_limits)
    notes = []
    tokens = feed_limits.min_sequence == 1  # and not samples of audio
    if tokens and feed_limits.max_positions > LONGEST and not config.profile:
        notes.append(f"longest input compared: {LONGEST} of {feed_limits.max_positions} positions")
    embeddings = _embeddings(artifact, notes)
    overall = OverallComparison() if limits.overall_cosine is not None else None
    results: list[CaseResult] = []
    providers: list[ProviderRecord] = []
    for record in manifest.graphs:
        real, said = real_cases(artifact, record, config)
        promised = [*profiles[record.file], *reached[record.file]]
        cases, left_out = within_profiles(
            [
                *sweep_cases(record, feed_limits, seed=config.seed),
                *profile_cases(record, promised, feed_limits, seed=config.seed),
                *real,
            ],
            record,
            reached[record.file],
        )
        with tempfile.TemporaryDirectory(prefix="enginery-validate-") as scratch:
            answers = ask_pytorch(
                artifact, source, record, cases, Path(scratch), progress,
                noise=not is_quantized(artifact), trust_remote_code=config.trust_remote_code,
            )  # fmt: skip
            with OrtRunner(
                artifact,
                graph=record.file,
                providers=providers_of(config),
                allow_fallback=config.allow_fallback,
            ) as runner:
                providers = [
                    {"name": p.name, "reason": p.reason, "options": p.options}
                    for p in runner.providers
                ]
                limits = limits.where(runner.providers)
                results += compare_graph(
                    runner, record, cases, answers, limits,
                    embeddings=embeddings, overall=overall, progress=progress,
                )  # fmt: skip
        results += left_out
        notes.extend(note for note in (*said, *answers.notes) if note not in notes)
    least = limits.embedding_cosine
    pooled = embeddings.metrics(min_cosine=least, of_mean=bool(overall)) if embeddings else None
    together = overall.metrics(min_cosine=least) if overall else []
    notes.extend(_rule(limits, together))
    near = not (pooled and pooled.problem) and not any(found.problem for found in together)
    report = ValidationReport(
        passed=_all_passed(results) and near,
        summary=summarize(results, pooled, together),
        precision=manifest.precision,
        providers=providers,
        reference={"id": source.record.id, "revision": source.record.revision,
                   "sha256": source.record.sha256, "as": "PyTorch FP32, eager attention"},
        tolerance={**asdict(limits.tolerance), "max_abs_error set": limits.max_abs_error,
                   "min_cosine set": limits.min_cosine,
                   "overall cosine": limits.overall_cosine, "rule": limits.rule},
        cases=results,
        embeddings=pooled,
        overall=together,
        notes=notes,
        tools={**runtime_version(), **tool_versions(TOOLS)},
        seconds=round(time.monotonic() - started, 3),
    )  # fmt: skip
    _mark(artifact, key, report)
    return report


def _embeddings(artifact: Artifact, notes: list[str]) -> EmbeddingComparison | None:
    try:
        return EmbeddingComparison.of(artifact)
    except (ArtifactError, SourceError) as error:
        notes.append(f"no pooled embeddings were compared: {error.message}")
        return None


def _rule(limits: Limits, together: Sequence[OverallMetrics]) -> list[str]:
    """What an artifact was held to where that is not its precision's own tolerance, in words."""
    if not limits.rule or not isinstance(limits.tolerance, QuantizedTolerance):
        return [limits.rule] if limits.rule else []
    if not together:
        return [
            f"no real inputs were compared: made-up ones alone say little of {limits.rule}; they "
            f"are held to a cosine of {limits.tolerance.min_cosine:g}"
        ]
    return [f"{limits.rule}; {limits.tolerance.min_cosine:g} on any one input"]


def _mark(artifact: Artifact, key: Fingerprint, report: ValidationReport) -> None:
    verdict = Verdict.of(key, passed=report.passed, summary=report.summary, report=REPORT)
    written = report.to_json()
    artifact.annotate(verdict, written)
    note = _note(verdict.key, written)
    with suppress(OSError):  # a store that is read-only: it is validated again the next time
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()


def _note(key: str, report: bytes) -> Path:
    """Return the file in the store that says that a report was written here."""
    return enginery_home() / "verdicts" / hashlib.sha256(key.encode() + report).hexdigest()


def _reference_source(artifact: Artifact, config: ValidateConfig) -> ModelSource:
    """The PyTorch model to compare with; the artifact's own, unless it has none."""
    if config.reference:
        return resolve_source(config.reference, allow_pickle=config.allow_pickle)
    if artifact.manifest.source.kind == "onnx":
        raise SourceError(
            f"{artifact.path} was imported from an .onnx file, which has no PyTorch model.",
            do="Name the model it came from with --reference MODEL.",
        )
    return resolve_record(artifact.manifest.source, allow_pickle=config.allow_pickle)


def _all_passed(cases: Sequence[CaseResult]) -> bool:
    """Every case passed, and every graph was compared on at least one."""
    graphs = {case.graph for case in cases}
    compared = {case.graph for case in cases if case.outputs}
    return bool(graphs) and graphs == compared and all(case.passed for case in cases)
