"""The validate stage: an artifact's outputs against PyTorch, over its shapes and on real inputs.

Takes an artifact; leaves `reports/validation.json` in it and a verdict in its manifest.

    >>> report = run(Artifact.open("minilm"), ValidateConfig())
    >>> report.passed, report.summary
    (True, '7 outputs agree with PyTorch; …')

The reference is the artifact's own source in FP32 with eager attention. PyTorch also runs at the
artifact's precision (FP64 for FP32): its own error on the same inputs is the noise floor that the
tolerance is scaled by. One runner is in memory at a time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact import REPORTS, Artifact
from enginery.core.errors import EngineryError, InputError, OptionError, SourceError
from enginery.core.feeds import FeedLimits, Feeds
from enginery.core.fingerprint import (
    Fingerprint,
    option_fields,
    runtime_version,
    sha256_of,
    tool_versions,
)
from enginery.core.manifest import GraphRecord, Verdict
from enginery.core.precision import Tolerance, roundoff
from enginery.core.progress import SILENT, Progress
from enginery.core.source import ModelSource, read_json, resolve_record, resolve_source
from enginery.runtime.ort import OrtRunner
from enginery.runtime.providers import parse_providers
from enginery.validate.cases import (
    LONGEST,
    Case,
    parse_profiles,
    profile_cases,
    sweep_cases,
    valid_positions,
)
from enginery.validate.config import ValidateConfig
from enginery.validate.embeddings import compare_embeddings
from enginery.validate.metrics import OutputMetrics, measure, noise_floor
from enginery.validate.real_inputs import real_cases
from enginery.validate.report import CaseResult, EmbeddingMetrics, ValidationReport, summarize

STAGE = "validate"
STAGE_VERSION = "1"
REPORT = f"{REPORTS}/validation.json"
TOOLS = ("torch", "transformers", "optimum-onnx")

# PyTorch at which precision shows the error of an artifact of each precision.
_NOISE_PRECISION = {"fp32": "fp64", "fp16": "fp16", "bf16": "bf16"}

Outputs = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class _Expected:
    """PyTorch's answer to one case."""

    outputs: Outputs
    floors: dict[str, float]
    problem: str = ""


def fingerprint(artifact: Artifact, config: ValidateConfig) -> Fingerprint:
    """What the verdict depends on: the artifact's content, the options, the data, the tools."""
    data = Path(config.data).expanduser() if config.data else None
    names = sorted(p for p in data.rglob("*") if p.is_file()) if data and data.is_dir() else []
    files = names or ([data] if data and data.is_file() else [])
    return Fingerprint(
        STAGE,
        {
            "artifact": artifact.content_sha256(),
            **option_fields(asdict(config)),
            **{f"data {path.name}": sha256_of(path) for path in files},
            **runtime_version(),
            **tool_versions(TOOLS),
            "stage version": STAGE_VERSION,
        },
    )


def finished(artifact: Artifact, config: ValidateConfig) -> ValidationReport | None:
    """The report of an earlier validation that still holds, or None."""
    verdict = artifact.manifest.verdict(STAGE)
    report = artifact.path / REPORT
    if verdict is None or verdict.key != fingerprint(artifact, config).key or not report.is_file():
        return None
    return ValidationReport.from_json(report.read_bytes())


def run(
    artifact: Artifact, config: ValidateConfig, *, progress: Progress = SILENT
) -> ValidationReport:
    """Validates, writes the report, and marks the artifact. A failure is a report, not an error.

    Raises:
        SourceError: the source is gone or has changed, or an imported artifact names none.
        ProviderError: the provider cannot be had, or does not load the graph.
        ShapeError, InputError: a profile or the data do not fit.
    """
    started = time.monotonic()
    key = fingerprint(artifact, config)
    source = _reference_source(artifact, config)
    settings = read_json(artifact.path / "config.json")
    limits = FeedLimits.from_config(settings)
    notes = []
    if limits.max_positions > LONGEST and not config.profile:
        notes.append(f"longest input compared: {LONGEST} of {limits.max_positions} positions")
    cases: list[CaseResult] = []
    embeddings: EmbeddingMetrics | None = None
    providers: list[dict[str, Any]] = []
    for record in artifact.manifest.graphs:
        made = _cases_for(artifact, record, limits, config)
        expected, said = _reference_outputs(artifact, source, record, made, progress)
        notes.extend(note for note in said if note not in notes)
        with OrtRunner(
            artifact,
            graph=record.file,
            providers=parse_providers(config.provider),
            allow_fallback=config.allow_fallback,
        ) as runner:
            providers = [asdict(provider) for provider in runner.providers]
            actual = _run_cases(runner, made, expected, record, progress)
        compared = [
            _compare(artifact, record, case, found, expected[case.name], config)
            for case, found in zip(made, actual, strict=True)
        ]
        cases.extend(compared)
        real = [
            (case.make(), found, expected[case.name].outputs)
            for case, found in zip(made, actual, strict=True)
            if case.kind == "real" and not isinstance(found, str)
        ]
        embeddings = embeddings or compare_embeddings(artifact, real)
    report = ValidationReport(
        passed=bool(cases) and _all_passed(cases),
        summary=summarize(cases),
        precision=artifact.manifest.precision,
        providers=providers,
        reference={"id": source.record.id, "revision": source.record.revision,
                   "sha256": source.record.sha256, "as": "PyTorch FP32, eager attention"},
        tolerance=asdict(_tolerance(artifact, config)),
        cases=cases,
        embeddings=embeddings,
        notes=notes,
        tools={**runtime_version(), **tool_versions(TOOLS)},
        seconds=round(time.monotonic() - started, 3),
    )  # fmt: skip
    _mark(artifact, key, report)
    return report


def _mark(artifact: Artifact, key: Fingerprint, report: ValidationReport) -> None:
    verdict = Verdict(
        stage=STAGE,
        key=key.key,
        fields=key.fields,
        passed=report.passed,
        summary=report.summary,
        report=REPORT,
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    artifact.annotate(verdict, report.to_json())


def _reference_source(artifact: Artifact, config: ValidateConfig) -> ModelSource:
    """The PyTorch model to compare with; the artifact's own, unless it has none."""
    if config.reference:
        return resolve_source(config.reference)
    if artifact.manifest.source.kind == "onnx":
        raise SourceError(
            f"{artifact.path} was imported from an .onnx file, which has no PyTorch model.",
            do="Name the model it came from with --reference MODEL.",
        )
    return resolve_record(artifact.manifest.source)


def _cases_for(
    artifact: Artifact, record: GraphRecord, limits: FeedLimits, config: ValidateConfig
) -> list[Case]:
    profiles = parse_profiles(config.profile)
    return [
        *sweep_cases(record, limits, seed=config.seed),
        *profile_cases(record, profiles, limits, seed=config.seed),
        *real_cases(artifact, record, config),
    ]


def _reference_outputs(
    artifact: Artifact,
    source: ModelSource,
    record: GraphRecord,
    cases: Sequence[Case],
    progress: Progress,
) -> tuple[dict[str, _Expected], list[str]]:
    """PyTorch's outputs in FP32, and its own error at the artifact's precision, by case name."""
    # Importing torch takes seconds; nothing before this needed it.
    from enginery.runtime.torch import TorchRunner

    precision = artifact.manifest.precision
    expected: dict[str, _Expected] = {}
    with (
        TorchRunner(source, artifact.manifest, graph=record.file) as reference,
        progress.task("PyTorch FP32", total=len(cases)) as advance,
    ):
        notes = list(reference.notes)
        for case in cases:
            try:
                expected[case.name] = _Expected(reference(case.make()), {})
            except InputError as error:
                expected[case.name] = _Expected({}, {}, problem=error.message)
            advance()
    noisy = _NOISE_PRECISION[precision]
    with (
        TorchRunner(source, artifact.manifest, graph=record.file, precision=noisy) as runner,
        progress.task(f"PyTorch {noisy.upper()}", total=len(cases)) as advance,
    ):
        for case in cases:
            wide = expected[case.name]
            feeds = case.make()
            try:
                other = runner(feeds) if not wide.problem else {}
                floors = {
                    name: noise_floor(other[name], value, valid_positions(feeds))
                    for name, value in wide.outputs.items()
                }
            except InputError as error:
                # Some operations have no kernel at this precision; a roundoff of the largest
                # value through a deep network stands in.
                notes.append(f"no noise floor at {noisy}: {error.message}")
                unit = roundoff(precision)
                floors = {n: 16 * unit * _largest(v) for n, v in wide.outputs.items()}
            expected[case.name] = replace(wide, floors=floors)
            advance()
    return _pool_floors(expected), notes


def _pool_floors(expected: dict[str, _Expected]) -> dict[str, _Expected]:
    """Each output's floor is its largest over all cases.

    On an output of two numbers, PyTorch is now and then right by luck.
    """
    pooled: dict[str, float] = {}
    for case in expected.values():
        for name, floor in case.floors.items():
            pooled[name] = max(floor, pooled.get(name, 0.0))
    return {name: replace(case, floors=pooled) for name, case in expected.items()}


def _run_cases(
    runner: OrtRunner,
    cases: Sequence[Case],
    expected: dict[str, _Expected],
    record: GraphRecord,
    progress: Progress,
) -> list[Outputs | str]:
    """The graph's outputs for each case, or the words of the failure."""
    found: list[Outputs | str] = []
    with progress.task(f"ONNX Runtime, {record.file}", total=len(cases)) as advance:
        for case in cases:
            if expected[case.name].problem:
                found.append("not run")
            else:
                try:
                    found.append(runner(case.make()))
                except EngineryError as error:
                    found.append(error.message)
            advance()
    return found


def _compare(
    artifact: Artifact,
    record: GraphRecord,
    case: Case,
    found: Outputs | str,
    expected: _Expected,
    config: ValidateConfig,
) -> CaseResult:
    feeds: Feeds = case.make()
    shapes = {name: list(array.shape) for name, array in feeds.items()}
    result = CaseResult(record.file, case.name, case.kind, shapes, outputs=[], problem="")
    if expected.problem:
        # A size that the model itself rejects is nobody's fault, unless a profile promises it.
        promised = case.kind != "sweep"
        return replace(result, problem=expected.problem if promised else "",
                       skipped="" if promised else expected.problem)  # fmt: skip
    if isinstance(found, str):
        return replace(result, problem=f"ONNX Runtime fails where PyTorch answers: {found}")
    missing = [spec.name for spec in record.outputs if spec.name not in expected.outputs]
    if len(missing) == len(record.outputs):
        return replace(result, problem=f"PyTorch has no output '{missing[0]}' to compare with")
    outputs: list[OutputMetrics] = []
    for spec in record.outputs:
        if spec.name in missing:
            continue
        limit = config.max_abs_error
        outputs.append(
            measure(
                spec.name,
                found[spec.name],
                expected.outputs[spec.name],
                dtype=spec.dtype,
                floor=expected.floors[spec.name],
                tolerance=_tolerance(artifact, config),
                max_abs_error=None if isinstance(limit, str) else limit,
                valid=valid_positions(feeds),
            )
        )
    return replace(result, outputs=outputs)


def _tolerance(artifact: Artifact, config: ValidateConfig) -> Tolerance:
    tolerance = Tolerance.for_precision(artifact.manifest.precision)
    if isinstance(config.min_cosine, str):
        return tolerance
    if not -1.0 <= config.min_cosine <= 1.0:
        raise OptionError(f"option 'min_cosine' is {config.min_cosine}, expected -1 to 1.")
    return replace(tolerance, min_cosine=config.min_cosine)


def _all_passed(cases: Sequence[CaseResult]) -> bool:
    """Every case passed, and every graph was compared on at least one."""
    graphs = {case.graph for case in cases}
    compared = {case.graph for case in cases if case.outputs}
    return graphs == compared and all(case.passed for case in cases)


def _largest(array: NDArray[Any]) -> float:
    return float(np.abs(array).max(initial=0.0))
