"""The HTML report of an artifact, with its figures.

    write_report(Path("minilm"))  # PosixPath('minilm/reports/report.html')

The input is a directory with `manifest.json`, `reports/benchmark.json` or both. The page is written
to `reports/report.html`, and the figures are written beside it as SVG files.

The page is self-contained: it loads no scripts, fonts or network resources, and its content
security policy forbids them. The template engine escapes all text, and the paths that options and
reports name become the names of their files. A damaged benchmark is an error.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from enginery.bench.report.curves import FIGURES, draw_figures, height_of
from enginery.bench.report.sections import Figure, page_sections
from enginery.core.artifact.artifact import MANIFEST, REPORTS, Artifact
from enginery.core.artifact.manifest import Manifest
from enginery.core.errors import ArtifactError
from enginery.core.figures import NOT_DRAWN, can_draw, figure_svg
from enginery.core.scratch import write_atomically
from enginery.reports.benchmark import BenchResult

PAGE = f"{REPORTS}/report.html"
_TEMPLATES = Path(__file__).parent / "templates"
_WIDTH = 4.8
"""Width of a figure in inches: on a screen of 360 pixels, its text is still 9 pixels high."""
_NODES = ("exclude", "keep_fp32")
"""Options with names of nodes, which may look like paths."""

if TYPE_CHECKING:
    from jinja2 import Environment


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
        shown = list(drawn.values()) if can_draw() else [Figure("", NOT_DRAWN)]
        page = _page(path, artifact, result, shown).encode()
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


def _draw_figures(result: BenchResult) -> dict[str, Figure]:
    """Return name -> figure of a benchmark; empty if matplotlib is not installed."""
    if not can_draw():
        return {}
    return {
        name: Figure(figure_svg(draw, width=_WIDTH, height=height_of(name, result)), caption)
        for name, (caption, draw) in draw_figures(result).items()
    }


def _page(
    path: Path, artifact: Artifact | None, result: BenchResult | None, figures: Sequence[Figure]
) -> str:
    manifest = artifact.manifest if artifact else None
    if manifest:
        title = manifest.source.name
        words = [manifest.task, manifest.describe_precision(), f"for {manifest.target}"]
    else:
        subjects = result.subjects if result else []
        title = ", ".join(subject["name"] for subject in subjects)
        words = list(dict.fromkeys(subject["precision"] for subject in subjects))
    template = _environment(_local_paths(path, manifest, result)).get_template("page.html")
    return template.render(
        style=(_TEMPLATES / "page.css").read_text(encoding="utf-8"),
        title=title,
        subtitle=", ".join(words),
        sections=page_sections(path, artifact, result, figures),
    )


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
