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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath, PureWindowsPath
from typing import TYPE_CHECKING, Any, TypeVar

from enginery.bench.config import BenchConfig
from enginery.bench.report.curves import FIGURES, caption, draw_figures, height_of, reference_of
from enginery.bench.report.summary import Summary, summarize
from enginery.core.artifact.artifact import MANIFEST, REPORTS, Artifact
from enginery.core.artifact.manifest import Manifest
from enginery.core.errors import ArtifactError
from enginery.core.figures import NOT_DRAWN, can_draw, figure_svg
from enginery.core.json_file import read_document
from enginery.core.options import options_dict
from enginery.core.paths import resolve_inside
from enginery.core.scratch import write_atomically
from enginery.core.table import format_number
from enginery.reports.artifact import (
    artifact_rows,
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
        artifact=artifact_rows(artifact) if artifact else [],
        interface=interface_rows(manifest) if manifest else [],
        stages=stage_rows(manifest) if manifest else [],
        stage_options=option_rows(manifest) if manifest else [],
        engine_rows=engine_rows(engines.engines) if engines else [],
        other_inputs=_other_inputs(validation, quantization),
        reference=reference_of(result) if result else "",
        clear_comparisons=result.comparison_rows(reference_of(result)) if result else [],
        bench_options=_bench_options(result) if result else "none",
        tables={table.title: table.rows for table in result.tables()} if result else {},
        notes=[*result.lines()[1:], *([] if can_draw() else [NOT_DRAWN])] if result else [],
        drawn=[
            Figure(svg.decode(), caption(Path(file).stem, result)) for file, svg in drawn.items()
        ]
        if result
        else [],
        curve=_stored_figure(path, "quantization.svg", "Accuracy against the quantized share"),
        layer_errors=_stored_figure(
            path,
            LAYER_ERRORS,
            "Error of each layer against FP32 on the same inputs, in the order of the graph",
        ),
        lengths=_stored_figure(
            path, "lengths.svg", "Lengths of the data and the profiles' buckets"
        ),
    )


def _other_inputs(
    validation: ValidationReport | None, quantization: QuantizationReport | None
) -> list[str]:
    """Say why the two stages have different cosines; nothing if one of them has none."""
    if not validation or not validation.accuracy or not quantization or not quantization.accuracy:
        return []
    held_out, validated = quantization.accuracy, validation.accuracy.found
    return [
        f"quantize measured a mean cosine of {held_out.cosine:.4f} on {held_out.rows} held-out "
        f"rows, validate one of {validated.cosine:.4f} on {validated.rows} real inputs of its own: "
        "the inputs are others, so the two numbers differ"
    ]


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
    environment.filters |= {"gpus": gpu_names, "number": format_number, "versions": named_versions}
    return environment


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


def _bench_options(result: BenchResult) -> str:
    """Return the options of the benchmark that are not the defaults."""
    defaults = options_dict(BenchConfig())
    return format_options({n: v for n, v in result.options.items() if v != defaults.get(n)})
