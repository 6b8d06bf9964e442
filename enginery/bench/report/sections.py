"""The sections of the report page, from the rows of the reports.

Figures may come from an artifact that somebody else made, so they are embedded as images, in which
browsers neither run scripts nor load resources. A damaged report of another stage is mentioned in
its section.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from enginery.bench.config import BenchConfig
from enginery.bench.report.summary import model_facts
from enginery.core.artifact.artifact import REPORTS, Artifact
from enginery.core.errors import ArtifactError
from enginery.core.json_file import read_document
from enginery.core.options import options_dict
from enginery.core.paths import resolve_inside
from enginery.core.table import Table, format_number
from enginery.reports.artifact import format_options, interface_rows, option_rows, stage_rows
from enginery.reports.base import Report, named_versions
from enginery.reports.benchmark import BenchResult, gpu_names
from enginery.reports.engines import BuildReport, engine_rows
from enginery.reports.layer_errors import FILE as LAYER_ERRORS
from enginery.reports.quantization import QuantizationReport
from enginery.reports.validation import ValidationReport

_MAX_FIGURE_BYTES = 4 * 2**20
"""Limit for a stored figure; the figures of this stage have 0.1 MB."""


@dataclass(frozen=True)
class Figure:
    """A figure on the page. If `svg` is empty, the caption gives the reason."""

    svg: str
    caption: str

    @property
    def address(self) -> str:
        """The figure as a `data:` URL."""
        from markupsafe import Markup

        # Base64 needs no escapes, and may contain what looks like a path.
        content = base64.b64encode(self.svg.encode()).decode()
        return Markup(f"data:image/svg+xml;base64,{content}")  # noqa: S704


@dataclass(frozen=True)
class Section:
    """A part of the page, laid out in the order of its fields."""

    title: str
    verdict: str = ""
    """`passed` or `failed`, beside the title; empty if there is nothing to pass."""
    lead: str = ""
    facts: Sequence[tuple[str, str]] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    folded: Sequence[Table] = ()
    """Tables that open with a click."""
    notes: Sequence[str] = ()


def page_sections(
    path: Path, artifact: Artifact | None, result: BenchResult | None, figures: Sequence[Figure]
) -> list[Section]:
    """Return the sections of a directory's page.

    Args:
        path: the directory, with the reports of other stages.
        artifact: the artifact; None for a benchmark in a directory of its own.
        result: the benchmark, if there is one.
        figures: those of the benchmark.
    """
    sections = _artifact_sections(artifact) if artifact else []
    reports: dict[str, Report | None] = {}
    kinds: dict[str, tuple[type[Report], Callable[[Any, Path], Section]]] = {
        "Validation": (ValidationReport, _validation),
        "Quantization": (QuantizationReport, _quantization),
        "Engines": (BuildReport, _engines),
    }
    for title, (kind, build) in kinds.items():
        try:
            reports[title] = report = kind.below(path)
        except ArtifactError as error:
            sections.append(Section(title, lead=error.message.replace(f"{path}/", "")))
            continue
        if report:
            sections.append(build(report, path))
    validation = cast("ValidationReport | None", reports.get("Validation"))
    if result:
        sections += _benchmark_sections(result, figures)
    return [_summary(artifact, validation, result), *sections]


def _summary(
    artifact: Artifact | None, validation: ValidationReport | None, result: BenchResult | None
) -> Section:
    """Return what a reader decides by: the models beside FP32, and the benchmark's summary."""
    rows = result.summary_rows() if result else []
    return Section(
        "Summary",
        verdict=artifact.validation_status() if artifact else "",
        lead=validation.summary if validation else "",
        facts=model_facts(artifact, validation, result),
        tables=[row for row in rows if isinstance(row, Table)],
        notes=[row for row in rows if isinstance(row, str)],
    )


def _artifact_sections(artifact: Artifact) -> list[Section]:
    manifest = artifact.manifest
    words = "Error of each layer against FP32 on the same inputs, in the order of the graph"
    return [
        Section(
            "Model",
            facts=list(artifact.facts().items()),
            tables=[Table("Inputs and outputs", interface_rows(manifest))],
        ),
        Section(
            "Stages",
            figures=_stored_figure(artifact.path, LAYER_ERRORS, words),
            tables=[Table("What was done", stage_rows(manifest))],
            folded=[Table("All options and tools", option_rows(manifest))],
            notes=[f"{stage.stage}: {note}" for stage in manifest.stages for note in stage.notes],
        ),
    ]


def _validation(report: ValidationReport, _: Path) -> Section:
    reference = report.reference_name
    source = (
        f"{report.reference.get('as', 'PyTorch')} of {report.reference.get('id', 'the source')}"
    )
    tables = report.tables()
    if report.labels:
        title = (
            f"Accuracy on the labels in '{report.labels.column}', with 95 % confidence intervals"
        )
        tables.append(Table(title, report.labels.rows()))
    tables += [
        Table("Weights that differ", report.weights.different_rows()),
        Table(f"Weights that are none of {reference}'s", report.weights.untraced_rows()),
    ]
    tables += [
        Table(
            f"Sizes of {coverage.graph} at effort {report.effort}: those compared with {reference} "
            "+ batches whose rows equal the same rows run alone",
            coverage.grid(),
        )
        for coverage in report.coverage
    ]
    return Section(
        "Validation",
        verdict="passed" if report.passed else "failed",
        lead=report.summary,
        facts=[("reference", source), *report.facts()],
        tables=tables,
        notes=report.notes,
    )


def _quantization(report: QuantizationReport, path: Path) -> Section:
    facts = [("scheme", report.scheme)]
    if report.calibration:
        facts += [
            ("calibration", report.calibration.inputs),
            ("method", report.calibration.method),
        ]
    if report.multiply_adds:
        share = format_number(report.multiply_adds.share, ".1%")
        facts.append(("multiply-adds quantized", share))
    if report.search:
        facts.append(("budget", report.search.budget))
    return Section(
        "Quantization",
        lead=report.summary,
        facts=facts,
        figures=_stored_figure(path, "quantization.svg", "Accuracy against the quantized share"),
        folded=[Table("Measured combinations", report.mix_rows())],
        notes=report.notes,
    )


def _engines(report: BuildReport, path: Path) -> Section:
    return Section(
        "Engines",
        lead=report.summary,
        figures=_stored_figure(
            path, "lengths.svg", "Lengths of the data and the profiles' buckets"
        ),
        tables=[Table("Engines", engine_rows(report.engines))],
        folded=[Table("All layers", report.layer_rows())],
        notes=report.notes,
    )


def _benchmark_sections(result: BenchResult, figures: Sequence[Figure]) -> list[Section]:
    machine, changed = result.machine, _changed_options(result)
    confidence = float(result.options.get("confidence", BenchConfig.confidence))
    environment = {
        "processor": f"{machine['cpu']}, {machine['physical_cores']} cores, "
        f"{machine['usable_cpus']} CPUs usable",
        "CPU flags": ", ".join(machine["cpu_flags"]) or "unknown",
        "memory": f"{machine['memory_bytes'] / 1e9:,.1f} GB",
        "GPU": gpu_names(machine) or machine["no_gpu"],
        "driver": machine["driver"] or "none",
        "system": f"{machine['system']}, Python {machine['python']}",
        "versions": named_versions(machine["tools"]),
    }
    return [
        Section(
            "Speed",
            lead="All backends read inputs from host memory and write outputs to host memory. Each "
            "runs in its own process, and they take turns in rounds. Intervals are confidence "
            f"intervals of the median at {confidence:.0%}; ratios are paired by round. A ratio is "
            "unclear if its interval is wider than the ratio itself.",
            facts=[("changed options", changed)] if changed else [],
            figures=figures,
            tables=result.speed_tables(),
            folded=[Table("Comparison", result.comparison_rows())],
            notes=result.lines()[1:],
        ),
        Section(
            "Environment",
            facts=list(environment.items()),
            tables=result.environment_tables(),
        ),
    ]


def _changed_options(result: BenchResult) -> str:
    """Return the options of the benchmark that are not the defaults; empty if none."""
    defaults = options_dict(BenchConfig())
    changed = {n: v for n, v in result.options.items() if v != defaults.get(n)}
    return format_options(changed) if changed else ""


def _stored_figure(path: Path, name: str, words: str) -> list[Figure]:
    """Return the figure of another stage, or an empty list."""
    try:
        file = resolve_inside(path, f"{REPORTS}/{name}", what=str(path))
        if not file.exists():
            return []
        svg = read_document(file, max_bytes=_MAX_FIGURE_BYTES)
    except (ArtifactError, OSError) as error:
        problem = error.strerror if isinstance(error, OSError) else error.message
        return [Figure("", f"{REPORTS}/{name} cannot be read: {problem}")]
    return [Figure(svg.decode(errors="replace"), words)]
