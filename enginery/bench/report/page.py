"""The report of an artifact: one page and its figures, from whatever is in it.

Takes a directory with `manifest.json`, `reports/benchmark.json` or both; leaves
`reports/report.html` and the figures as SVG beside it.

>>> write_report(Path("minilm"))
PosixPath('minilm/reports/report.html')

The page needs nothing else: no network, no script, no font. Everything is escaped by the template
engine. A figure may come from somebody else's artifact: it is in the page as an image, in which no
browser runs or loads anything, and the page's content security policy forbids the same. A report
that is damaged is said to be, and is no reason to make no page; that of the bench, which the page
is mostly about, is an error.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from enginery.bench.report.curves import FIGURES, caption, draw_figures, height_of
from enginery.bench.report.rows import Row, lines, tables
from enginery.core.artifact.artifact import MANIFEST, REPORTS, Artifact
from enginery.core.artifact.manifest import Manifest
from enginery.core.artifact.reports import (
    BenchResult,
    BuildReport,
    QuantizationReport,
    Report,
    ValidationReport,
    gpu_names,
    named_versions,
    worst_by_output,
)
from enginery.core.artifact.staging import write_atomically
from enginery.core.errors import ArtifactError
from enginery.core.figures import NOT_DRAWN, can_draw, figure_svg
from enginery.core.json_file import read_document
from enginery.core.paths import resolve_inside

PAGE = f"{REPORTS}/report.html"
_TEMPLATES = Path(__file__).parent / "templates"
_WIDTH = 4.8
"""Inches: on a telephone of 360 pixels the figure's text is still 9 pixels high."""
_MAX_FIGURE_BYTES = 4 * 2**20
"""Of a figure that lies in the artifact; those that are drawn here have 0.1 MB."""
_SHORT = 38
_NOTHING = "–"

AnyReport = TypeVar("AnyReport", bound=Report)


def write_report(path: Path) -> Path:
    """Make the page anew from what is there, and return its path.

    Raises:
        ArtifactError: the directory is no artifact and has no benchmark, or a file is damaged.
    """
    result = BenchResult.below(path)
    has_manifest = (path / MANIFEST).is_file() or result is None
    manifest = Artifact.open(path).manifest if has_manifest else None
    try:
        drawn = draw_bench_figures(result) if result else {}
        files = {PAGE: _page(path, manifest, result, drawn).encode(), **drawn}
    except (ArithmeticError, LookupError, ValueError) as error:  # as of an empty list of contenders
        raise ArtifactError(
            f"{path / REPORTS / BenchResult.FILE} contradicts itself: {error!r}.",
            do="Measure again: enginery bench",
        ) from error
    store_reports(path, files, replacing_figures=result is not None)
    return path / PAGE


def store_reports(path: Path, files: Mapping[str, bytes], *, replacing_figures: bool) -> None:
    """Write files below `reports/` of an artifact, which records them, or of a plain directory.

    Args:
        path: the artifact or directory.
        files: content by name, `reports/benchmark.json`.
        replacing_figures: remove an earlier benchmark's figures; what other stages drew stays.

    Raises:
        ArtifactError: the artifact cannot be opened, or a path of it leads through a link.
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


def draw_bench_figures(result: BenchResult) -> dict[str, bytes]:
    """Return a benchmark's figures as SVG, by file name; none where matplotlib is missing."""
    if not can_draw():
        return {}
    return {
        f"{REPORTS}/{name}.svg": figure_svg(
            draw, width=_WIDTH, height=height_of(name, result)
        ).encode()
        for name, draw in draw_figures(result).items()
    }


def _page(
    path: Path, manifest: Manifest | None, result: BenchResult | None, drawn: Mapping[str, bytes]
) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"gpus": gpu_names, "number": _number, "versions": named_versions}
    environment.tests["narrow"] = _is_narrow
    validation, no_validation = _read(ValidationReport, path)
    quantization, no_quantization = _read(QuantizationReport, path)
    engines, no_engines = _read(BuildReport, path)
    subject = result.subjects[0] if result and not manifest else None
    return environment.get_template("page.html").render(
        style=(_TEMPLATES / "page.css").read_text(encoding="utf-8"),
        title=subject["name"] if subject else manifest.source.name if manifest else "",
        subject=subject,
        manifest=manifest,
        validation=validation,
        quantization=quantization,
        engines=engines,
        result=result,
        problems={
            "Validation": no_validation,
            "Quantization": no_quantization,
            "Engines": no_engines,
        },
        interface=_interface_rows(manifest) if manifest else [],
        stages=_stage_rows(manifest) if manifest else [],
        outputs=_output_rows(validation) if validation else [],
        mixes=_mix_rows(quantization) if quantization else [],
        engine_rows=_engine_rows(engines) if engines else [],
        tables=tables(result) if result else {},
        notes=[*lines(result)[1:], *([] if can_draw() else [NOT_DRAWN])] if result else [],
        drawn=[
            Figure(svg.decode(), caption(Path(file).stem, result)) for file, svg in drawn.items()
        ]
        if result
        else [],
        curve=_stored_figure(path, "quantization.svg", "Accuracy against the quantized share"),
        lengths=_stored_figure(
            path, "lengths.svg", "Lengths of the data and the profiles' buckets"
        ),
    )


def _read(kind: type[AnyReport], path: Path) -> tuple[AnyReport | None, str]:
    """Return a report, and why there is none; no words where none was made."""
    try:
        return kind.below(path), ""
    except ArtifactError as error:
        return None, error.message.replace(f"{path}/", "")


@dataclass(frozen=True)
class Figure:
    """An SVG in the page; without one, the caption says why."""

    svg: str
    caption: str

    @property
    def address(self) -> str:
        """Return the figure as a `data:` address."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg.encode()).decode()}"


def _stored_figure(path: Path, name: str, words: str) -> list[Figure]:
    """Return the figure that another stage left, if it is there."""
    try:
        file = resolve_inside(path, f"{REPORTS}/{name}", what=str(path))
        if not file.exists():
            return []
        svg = read_document(file, max_bytes=_MAX_FIGURE_BYTES)
    except (ArtifactError, OSError) as error:
        problem = error.strerror if isinstance(error, OSError) else error.message
        return [Figure("", f"{REPORTS}/{name} cannot be read: {problem}")]
    return [Figure(svg.decode(errors="replace"), words)]


# Rows of tables; those of the bench are in rows.py


def _interface_rows(manifest: Manifest) -> list[Row]:
    return [
        {
            "graph": graph.file,
            "direction": direction,
            "name": spec.name,
            "type": spec.dtype,
            "shape": ", ".join(str(dim) for dim in spec.dims) or "scalar",
        }
        for graph in manifest.graphs
        for direction, specs in (("in", graph.inputs), ("out", graph.outputs))
        for spec in specs
    ]


def _stage_rows(manifest: Manifest) -> list[Row]:
    return [
        {
            "stage": stage.stage,
            "options": ", ".join(f"{name}={_plain(value)}" for name, value in stage.options.items())
            or "none",
            "tools": named_versions(stage.tools),
            "took": f"{stage.seconds:.1f} s, {stage.peak_rss_bytes / 1e6:,.0f} MB",
            "finished": stage.finished,
        }
        for stage in manifest.stages
    ]


def _output_rows(report: ValidationReport) -> list[Row]:
    """Return a row for each output's worst case, and one for each case without outputs."""
    rows = [
        {
            "output": out.output if case.graph == "model.onnx" else f"{case.graph}: {out.output}",
            "worst input": f"{case.kind}: {case.name}",
            "max abs error": _number(out.max_abs, ".1e"),
            "allowed": _number(out.limit, ".1e", "any"),
            "cosine": _number(out.cosine, ".6f"),
            "verdict": out.problem or "ok",
        }
        for case, out in worst_by_output(report.cases)
    ]
    blank = dict.fromkeys(("max abs error", "allowed", "cosine"), _NOTHING)
    return rows + [
        {
            "output": _NOTHING,
            "worst input": f"{case.kind}: {case.name}",
            **blank,
            "verdict": case.problem,
        }
        for case in report.cases
        if case.problem
    ]


def _mix_rows(report: QuantizationReport) -> list[Row]:
    curve = report.search.curve if report.search else []
    rows = []
    for point in curve:
        row = {
            "multiply-adds quantized": f"{point.share:.1%}",
            "mean cosine": _number(point.cosine, ".5f"),
        }
        if point.label_accuracy is not None:
            row["accuracy"] = f"{point.label_accuracy:.1%}"
        rows.append(row)
    return rows


def _engine_rows(report: BuildReport) -> list[Row]:
    return [
        {
            "engine": engine["directory"],
            "for": ", ".join(engine["capabilities"]) or "every GPU from 8.0 on",
            "profiles": "; ".join(engine["profiles"]) or "fixed shapes",
            "layers": ", ".join(f"{count} {kind}" for kind, count in engine["layers"].items()),
            "size": f"{engine['plan_size_bytes'] / 1e6:,.1f} MB",
        }
        for engine in report.engines
    ]


def _is_narrow(rows: Sequence[Row]) -> bool:
    """Return whether every cell is short: such a table is scrolled on a telephone, not folded."""
    return all(len(cell) <= _SHORT for row in rows for cell in row.values())


def _number(value: float | None, form: str, nothing: str = _NOTHING) -> str:
    return format(value, form) if value is not None and math.isfinite(value) else nothing


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value or "''"
    return json.dumps(value, ensure_ascii=False)
