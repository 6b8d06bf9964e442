"""The HTML report of an artifact, with its figures.

    write_report(Path("minilm"))  # PosixPath('minilm/reports/report.html')

The input is a directory with `manifest.json`, `reports/benchmark.json` or both. The page is written
to `reports/report.html`, and the figures are written beside it as SVG files.

The page is self-contained: it loads no scripts, fonts or network resources. The template engine
escapes all text. Figures may come from an artifact that somebody else made, so they are embedded as
images, in which browsers neither run scripts nor load resources, and the page's content security
policy forbids both as well. A damaged report of another stage is mentioned on the page; a damaged
benchmark is an error.
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
    WeightMetrics,
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
"""Width of a figure in inches: on a screen of 360 pixels, its text is still 9 pixels high."""
_MAX_FIGURE_BYTES = 4 * 2**20
"""Limit for a stored figure; the figures of this stage have 0.1 MB."""
_SHORT = 38
"""Number of characters up to which a cell counts as short."""
_NOTHING = "–"

AnyReport = TypeVar("AnyReport", bound=Report)


def write_report(path: Path) -> Path:
    """Write the page of a directory and return its path.

    Raises:
        ArtifactError: the directory is not an artifact and has no benchmark, or one of the two is
            damaged.
    """
    result = BenchResult.below(path)
    has_manifest = (path / MANIFEST).is_file() or result is None
    manifest = Artifact.open(path).manifest if has_manifest else None
    try:
        drawn = draw_bench_figures(result) if result else {}
        files = {PAGE: _page(path, manifest, result, drawn).encode(), **drawn}
    except (ArithmeticError, LookupError, ValueError) as error:  # e.g. an empty list of backends
        raise ArtifactError(
            f"{path / REPORTS / BenchResult.FILE} is inconsistent: {error!r}.",
            do="Measure again: enginery bench",
        ) from error
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


def draw_bench_figures(result: BenchResult) -> dict[str, bytes]:
    """Return file name -> SVG of a benchmark's figures; empty if matplotlib is not installed."""
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
    weights = validation.weights if validation else None
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
        differing_weights=_differing_weights(weights) if weights else [],
        untraced_weights=_untraced_weights(weights) if weights else [],
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
    """Return a stage's report, or None and the problem; the problem is empty if there is none."""
    try:
        return kind.below(path), ""
    except ArtifactError as error:
        return None, error.message.replace(f"{path}/", "")


@dataclass(frozen=True)
class Figure:
    """A figure on the page. If `svg` is empty, the caption gives the reason."""

    svg: str
    caption: str

    @property
    def address(self) -> str:
        """The figure as a `data:` URL."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg.encode()).decode()}"


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


# Rows of the tables. The benchmark's are in `rows`.


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
            "time, memory": f"{stage.seconds:.1f} s, {stage.peak_rss_bytes / 1e6:,.0f} MB",
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


def _differing_weights(weights: WeightMetrics) -> list[Row]:
    return [
        {"graph": found.graph, "parameter": found.parameter or found.weight, "how": found.problem}
        for found in weights.differences
    ]


def _untraced_weights(weights: WeightMetrics) -> list[Row]:
    return [
        {
            "graph": found.graph,
            "name": found.weight,
            "shape": " × ".join(map(str, found.shape)),
            "share of all elements": f"{math.prod(found.shape) / max(1, weights.elements):.2%}",
        }
        for found in weights.untraced
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
            "capability": ", ".join(engine["capabilities"]) or "8.0 and above",
            "profiles": "; ".join(engine["profiles"]) or "fixed shapes",
            "layers": ", ".join(f"{count} {kind}" for kind, count in engine["layers"].items()),
            "size": f"{engine['plan_size_bytes'] / 1e6:,.1f} MB",
        }
        for engine in report.engines
    ]


def _is_narrow(rows: Sequence[Row]) -> bool:
    """Return True if all cells are short: on a small screen such a table scrolls, others wrap."""
    return all(len(cell) <= _SHORT for row in rows for cell in row.values())


def _number(value: float | None, form: str, nothing: str = _NOTHING) -> str:
    return format(value, form) if value is not None and math.isfinite(value) else nothing


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value or "''"
    return json.dumps(value, ensure_ascii=False)
