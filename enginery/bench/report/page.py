"""The HTML report of an artifact, with its figures.

    write_report(Path("minilm"))  # PosixPath('minilm/reports/report.html')

The input is a directory with `manifest.json`, `reports/benchmark.json` or both. The page is written
to `reports/report.html`, and the figures are written beside it as SVG files.

The page is self-contained: it loads no scripts, fonts or network resources. The template engine
escapes all text, and paths of the machine become the names of their files. Figures may come from an
artifact that somebody else made, so they are embedded as images, in which browsers neither run
scripts nor load resources, and the page's content security policy forbids both as well. A damaged
report of another stage is mentioned on the page; a damaged benchmark is an error.
"""

from __future__ import annotations

import base64
import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath, PureWindowsPath
from typing import TYPE_CHECKING, Any, TypeVar

from enginery.bench.config import BenchConfig
from enginery.bench.report.curves import FIGURES, caption, draw_figures, height_of
from enginery.bench.report.rows import Row, lines, tables
from enginery.bench.report.summary import Summary, summarize
from enginery.core.artifact.artifact import MANIFEST, REPORTS, Artifact
from enginery.core.artifact.engine_record import describe_products
from enginery.core.artifact.manifest import Manifest
from enginery.core.errors import ArtifactError
from enginery.core.figures import NOT_DRAWN, can_draw, figure_svg
from enginery.core.json_file import read_document
from enginery.core.options import options_dict
from enginery.core.paths import resolve_inside
from enginery.core.temporary import write_atomically
from enginery.reports.base import Report, named_versions
from enginery.reports.benchmark import BenchResult, gpu_names
from enginery.reports.engines import BuildReport
from enginery.reports.quantization import QuantizationReport
from enginery.reports.validation import ValidationReport, worst_by_output
from enginery.reports.weights import WeightMetrics

PAGE = f"{REPORTS}/report.html"
_TEMPLATES = Path(__file__).parent / "templates"
_WIDTH = 4.8
"""Width of a figure in inches: on a screen of 360 pixels, its text is still 9 pixels high."""
_MAX_FIGURE_BYTES = 4 * 2**20
"""Limit for a stored figure; the figures of this stage have 0.1 MB."""
_NOTHING = "–"

_ROOTS = (
    "(?:home|Users|root|tmp|var|mnt|media|opt|srv|data|scratch|work|workspace|private|run|Volumes)"
)
"""Top directories that people keep files in. The name of an ONNX node may look like a path, too."""
_NODES = ("exclude", "keep_fp32")
"""Options with names of nodes."""

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
        drawn = draw_bench_figures(result) if result else {}
        files = {PAGE: _page(path, artifact, result, drawn).encode(), **drawn}
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
    path: Path, artifact: Artifact | None, result: BenchResult | None, drawn: Mapping[str, bytes]
) -> str:
    manifest = artifact.manifest if artifact else None
    environment = _environment(_local_paths(path, manifest, result))
    validation, no_validation = _read(ValidationReport, path)
    weights = validation.weights if validation else None
    quantization, no_quantization = _read(QuantizationReport, path)
    engines, no_engines = _read(BuildReport, path)
    summary = summarize(artifact, validation, result)
    return environment.get_template("page.html").render(
        style=(_TEMPLATES / "page.css").read_text(encoding="utf-8"),
        title=_title(manifest, summary),
        summary=summary,
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
        stage_options=_option_rows(manifest) if manifest else [],
        outputs=_output_rows(validation) if validation else [],
        differing_weights=_differing_weights(weights) if weights else [],
        untraced_weights=_untraced_weights(weights) if weights else [],
        mixes=_mix_rows(quantization) if quantization else [],
        engine_rows=_engine_rows(engines) if engines else [],
        layer_rows=_layer_rows(engines) if engines else [],
        bench_options=_bench_options(result) if result else "",
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


def _title(manifest: Manifest | None, summary: Summary) -> str:
    if manifest:
        return manifest.source.name
    return ", ".join(model.name for model in summary.models)


def _environment(local_paths: re.Pattern[str]) -> Environment:
    """Return the template engine, which escapes text and shortens paths of this machine."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def shorten(value: Any) -> Any:
        if not isinstance(value, str) or isinstance(value, Markup):
            return value
        return local_paths.sub(lambda match: _last_part(match[0]), value)

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shorten,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"gpus": gpu_names, "number": _number, "versions": named_versions}
    return environment


def _local_paths(
    path: Path, manifest: Manifest | None, result: BenchResult | None
) -> re.Pattern[str]:
    """Return a pattern of paths on the machine that made the reports, or that writes the page.

    It matches the paths that the reports name, with all that is below them, and those in the usual
    directories.
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
    usual = rf"(?:/{_ROOTS}|[A-Za-z]:[/\\]Users)(?=[/\\])"
    return re.compile(rf"(?<![\w./\\-])(?:file://)?(?:(?:{alternatives})(?![\w-])|{usual}){below}")


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
    """Return a row for each stage, with the options that are not the defaults."""
    return [
        {
            "stage": stage.stage,
            "changed options": _option_list(
                {name: stage.options.get(name) for name in stage.changed_options}
            )
            or "none",
            "time, memory": f"{stage.seconds:.1f} s, {stage.peak_rss_bytes / 1e6:,.0f} MB",
            "finished": stage.finished.replace("T", " ").replace("+00:00", " UTC"),
        }
        for stage in manifest.stages
    ]


def _option_rows(manifest: Manifest) -> list[Row]:
    """Return a row for each stage, with all options and the versions of its tools."""
    return [
        {
            "stage": stage.stage,
            "options": _option_list(stage.options) or "none",
            "tools": named_versions(stage.tools),
        }
        for stage in manifest.stages
    ]


def _bench_options(result: BenchResult) -> str:
    """Return the options of the benchmark that are not the defaults."""
    defaults = options_dict(BenchConfig())
    return _option_list(
        {n: value for n, value in result.options.items() if value != defaults.get(n)}
    )


def _option_list(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_plain(value)}" for name, value in options.items())


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
        {
            "graph": difference.graph,
            "parameter": difference.parameter or difference.weight,
            "how": difference.problem,
        }
        for difference in weights.differences
    ]


def _untraced_weights(weights: WeightMetrics) -> list[Row]:
    return [
        {
            "graph": weight.graph,
            "name": weight.weight,
            "shape": " × ".join(map(str, weight.shape)),
            "share of all elements": f"{math.prod(weight.shape) / max(1, weights.elements):.2%}",
        }
        for weight in weights.untraced
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
            "multiplied in": describe_products(engine["layers"]) or _NOTHING,
            "size": f"{engine['plan_size_bytes'] / 1e6:,.1f} MB",
        }
        for engine in report.engines
    ]


def _layer_rows(report: BuildReport) -> list[Row]:
    """Return a row for each kind and precision of layers of each engine."""
    return [
        {"engine": engine["directory"], "layers": kind, "count": str(count)}
        for engine in report.engines
        for kind, count in engine["layers"].items()
    ]


def _number(value: float | None, form: str, nothing: str = _NOTHING) -> str:
    return format(value, form) if value is not None and math.isfinite(value) else nothing


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value or "''"
    return json.dumps(value, ensure_ascii=False)
