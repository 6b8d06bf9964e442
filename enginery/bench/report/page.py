"""The HTML report of an artifact, with its figures.

    write_report(Path("minilm"))  # PosixPath('minilm/reports/report.html')

The input is a directory with `manifest.json`, `reports/benchmark.json` or both. The page is written
to `reports/report.html`, and the figures are written beside it as SVG files.

The page is self-contained: it loads no scripts, fonts or network resources. The template engine
escapes all text, and the paths that options and reports name become the names of their files.
Figures may come from an artifact that somebody else made, so they are embedded as images, in which
browsers neither run scripts nor load resources, and the page's content security policy forbids both
as well. A damaged report of another stage is mentioned on the page; a damaged benchmark is an
error.
"""

from __future__ import annotations

import base64
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PureWindowsPath
from typing import TYPE_CHECKING, Any, TypeVar

from enginery.bench.config import BenchConfig
from enginery.bench.report.curves import FIGURES, draw_figures, height_of
from enginery.bench.report.summary import model_facts
from enginery.core.artifact.artifact import MANIFEST, REPORTS, Artifact
from enginery.core.artifact.manifest import Manifest
from enginery.core.errors import ArtifactError
from enginery.core.figures import NOT_DRAWN, can_draw, figure_svg
from enginery.core.json_file import read_document
from enginery.core.options import options_dict
from enginery.core.paths import resolve_inside
from enginery.core.table import Table, format_number
from enginery.core.temporary import write_atomically
from enginery.reports.artifact import (
    format_options,
    interface_rows,
    option_rows,
    stage_rows,
)
from enginery.reports.base import Report, named_versions
from enginery.reports.benchmark import BenchResult, gpu_names
from enginery.reports.engines import BuildReport, engine_rows
from enginery.reports.layer_errors import FILE as LAYER_ERRORS
from enginery.reports.quantization import QuantizationReport
from enginery.reports.validation import ValidationReport

PAGE = f"{REPORTS}/report.html"
_TEMPLATES = Path(__file__).parent / "templates"
_WIDTH = 4.8
"""Width of a figure in inches: on a screen of 360 pixels, its text is still 9 pixels high."""
_MAX_FIGURE_BYTES = 4 * 2**20
"""Limit for a stored figure; the figures of this stage have 0.1 MB."""
_NODES = ("exclude", "keep_fp32")
"""Options with names of nodes, which may look like paths."""

if TYPE_CHECKING:
    from jinja2 import Environment

AnyReport = TypeVar("AnyReport", bound=Report)


def write_report(path: Path) -> Path:
    """Write the page of a directory and return its path.

    Raises:
        ArtifactError: the directory is not an artifact and has no benchmark, or one of the two is
            damaged.
    """
    result = BenchResult.below(path)
    has_manifest = (path / MANIFEST).is_file() or result is None
    artifact = Artifact.open(path) if has_manifest else None
    try:
        drawn = _draw_figures(result) if result else {}
        figures = {f"{REPORTS}/{name}.svg": figure.svg.encode() for name, figure in drawn.items()}
        page = _page(path, artifact, result, list(drawn.values())).encode()
    except (ArithmeticError, LookupError, ValueError) as error:  # e.g. an empty list of backends
        raise ArtifactError(
            f"{path / REPORTS / BenchResult.FILE} is inconsistent: {error!r}.",
            do="Measure again: enginery bench",
        ) from error
    files = {PAGE: page, **figures}
    store_reports(path, files, replacing_figures=result is not None)
    return path / PAGE


def store_reports(path: Path, files: Mapping[str, bytes], *, replacing_figures: bool) -> None:
    """Write files into `reports/` of an artifact or of a plain directory.

    An artifact records them in its manifest.

    Args:
        path: the artifact or directory.
        files: path in the directory, such as `reports/benchmark.json`, -> content.
        replacing_figures: remove the figures of an earlier benchmark; those of other stages stay.

    Raises:
        ArtifactError: the artifact cannot be opened, or one of its paths contains a symbolic link.
    """
    figures = [f"{REPORTS}/{name}.svg" for name in FIGURES] if replacing_figures else []
    removed = [name for name in figures if name not in files]
    if (path / MANIFEST).is_file():
        Artifact.open(path).annotate(reports=files, removed=removed)
        return
    (path / REPORTS).mkdir(parents=True, exist_ok=True)
    for name in removed:
        (path / name).unlink(missing_ok=True)
    for name, content in files.items():
        write_atomically(path / name, content)


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


def _draw_figures(result: BenchResult) -> dict[str, Figure]:
    """Return name -> figure of a benchmark; empty if matplotlib is not installed."""
    if not can_draw():
        return {}
    return {
        name: Figure(figure_svg(draw, width=_WIDTH, height=height_of(name, result)), caption)
        for name, (caption, draw) in draw_figures(result).items()
    }


def _page(
    path: Path, artifact: Artifact | None, result: BenchResult | None, drawn: Sequence[Figure]
) -> str:
    manifest = artifact.manifest if artifact else None
    validation, no_validation = _read(ValidationReport, path)
    quantization, no_quantization = _read(QuantizationReport, path)
    engines, no_engines = _read(BuildReport, path)
    layer_errors = _stored_figure(
        path,
        LAYER_ERRORS,
        "Error of each layer against FP32 on the same inputs, in the order of the graph",
    )
    sections = [_summary(artifact, validation, result)]
    if artifact:
        sections += _artifact_sections(artifact, [] if quantization else layer_errors)
    if validation:
        sections.append(_validation(validation))
    if quantization:
        curve = _stored_figure(path, "quantization.svg", "Accuracy against the quantized share")
        sections.append(_quantization(quantization, curve + layer_errors))
    if engines:
        lengths = "Lengths of the data and the profiles' buckets"
        sections.append(_engines(engines, _stored_figure(path, "lengths.svg", lengths)))
    sections += [
        Section(title, lead=problem)
        for title, problem in (
            ("Validation", no_validation),
            ("Quantization", no_quantization),
            ("Engines", no_engines),
        )
        if problem
    ]
    if result:
        sections += _benchmark_sections(result, drawn)
    subjects = result.subjects if result else []
    described = (
        (manifest.task, manifest.describe_precision(), f"for {manifest.target}") if manifest else ()
    )
    return (
        _environment(_local_paths(path, manifest, result))
        .get_template("page.html")
        .render(
            style=(_TEMPLATES / "page.css").read_text(encoding="utf-8"),
            title=manifest.source.name if manifest else ", ".join(s["name"] for s in subjects),
            subtitle=", ".join(described or dict.fromkeys(s["precision"] for s in subjects)),
            sections=sections,
        )
    )


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


def _artifact_sections(artifact: Artifact, figures: list[Figure]) -> list[Section]:
    manifest = artifact.manifest
    return [
        Section(
            "Model",
            facts=list(artifact.facts().items()),
            tables=[Table("Inputs and outputs", interface_rows(manifest))],
        ),
        Section(
            "Stages",
            figures=figures,
            tables=[Table("What was done", stage_rows(manifest))],
            folded=[Table("All options and tools", option_rows(manifest))],
            notes=[f"{stage.stage}: {note}" for stage in manifest.stages for note in stage.notes],
        ),
    ]


def _validation(report: ValidationReport) -> Section:
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


def _quantization(report: QuantizationReport, figures: list[Figure]) -> Section:
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
        figures=figures,
        folded=[Table("Measured combinations", report.mix_rows())],
        notes=report.notes,
    )


def _engines(report: BuildReport, figures: list[Figure]) -> Section:
    return Section(
        "Engines",
        lead=report.summary,
        figures=figures,
        tables=[Table("Engines", engine_rows(report.engines))],
        folded=[Table("All layers", report.layer_rows())],
        notes=report.notes,
    )


def _benchmark_sections(result: BenchResult, drawn: Sequence[Figure]) -> list[Section]:
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
            figures=drawn,
            tables=result.speed_tables(),
            folded=[Table("Comparison", result.comparison_rows())],
            notes=[*result.lines()[1:], *([] if can_draw() else [NOT_DRAWN])],
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


def _environment(local_paths: re.Pattern[str]) -> Environment:
    """Return the template engine, which escapes text and shortens paths of this machine."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def shorten(value: Any) -> Any:
        if not isinstance(value, str) or isinstance(value, Markup):
            return value
        return local_paths.sub(lambda match: _last_part(match[0]), value)

    return Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shorten,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _local_paths(
    path: Path, manifest: Manifest | None, result: BenchResult | None
) -> re.Pattern[str]:
    """Return a pattern of paths on the machine that made the reports, or that writes the page.

    It matches the paths that options and reports name, the home, current and temporary directories,
    and all that is below them.
    """
    paths = [str(path.absolute()), str(Path.home()), str(Path.cwd()), tempfile.gettempdir()]
    if manifest:
        paths += [manifest.source.id, *_strings([stage.options for stage in manifest.stages])]
    if result:
        subjects = [[subject["path"], subject["source"]] for subject in result.subjects]
        images = result.images.folder if result.images else ""
        paths += _strings([subjects, images, result.options])
    absolute = {text for text in paths if _is_absolute(text)}
    alternatives = "|".join(re.escape(text) for text in sorted(absolute, key=len, reverse=True))
    below = r"(?:[/\\][^\s/\\'\",;:()<>]+)*"
    return re.compile(rf"(?<![\w./\\-])(?:file://)?(?:{alternatives})(?![\w-]){below}")


def _strings(value: Any) -> Iterator[str]:
    """Yield every string in nested lists and objects of options, names of nodes aside."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if name not in _NODES:
                yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _is_absolute(text: str) -> bool:
    """Return True for a path from the root, of more than one part."""
    path = PureWindowsPath(text) if "\\" in text else PurePath(text)
    return path.is_absolute() and len(path.parts) > 1


def _last_part(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def _read(kind: type[AnyReport], path: Path) -> tuple[AnyReport | None, str]:
    """Return a stage's report, or None and the problem; the problem is empty if there is none."""
    try:
        return kind.below(path), ""
    except ArtifactError as error:
        return None, error.message.replace(f"{path}/", "")


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
