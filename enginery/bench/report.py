"""The report of an artifact: one page and its figures, from whatever is in it.

Takes a directory with `manifest.json`, `reports/benchmark.json` or both; leaves
`reports/report.html` and the figures as SVG beside it.

>>> write_report(Path("minilm"))
PosixPath('minilm/reports/report.html')
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from enginery.bench.curves import FIGURES, caption, draw_figures, height_of
from enginery.bench.page import render_page
from enginery.bench.rows import lines, tables
from enginery.bench.sections import (
    Figure,
    Section,
    Table,
    engines_section,
    guarded,
    made_sections,
    quantization_section,
    validation_section,
)
from enginery.core.artifact import MANIFEST, REPORTS, Artifact
from enginery.core.errors import ArtifactError
from enginery.core.figures import NOT_DRAWN, can_draw, figure_svg
from enginery.core.json_file import document_bytes
from enginery.core.reports import BenchResult
from enginery.core.staging import write_beside

PAGE = f"{REPORTS}/report.html"
_BENCHMARK = "benchmark.json"
_WHERE = ("Contenders", "Placement", "Compute on the CPU", "Copies between devices", "Left out")
"""Tables of what ran, and where."""
_WIDTH = 4.8
"""Inches: on a telephone of 360 pixels the figure's text is still 9 pixels high."""


def write_report(path: Path) -> Path:
    """Makes the page anew from what is there; returns its path.

    Raises:
        ArtifactError: the directory is no artifact and has no benchmark, or a file is damaged.
        MissingPackageError: jinja2 is not installed.
    """
    result = read_benchmark(path)
    sections: list[Section] = []
    figures: dict[str, bytes] = {}
    title, subtitle = path.resolve().name, ""
    if (path / MANIFEST).is_file() or result is None:
        manifest = Artifact.open(path).manifest
        title = manifest.source.name
        subtitle = f"{manifest.task}, {manifest.precision}, for {manifest.target}"
        sections += made_sections(manifest)
    for make, name in ((validation_section, "Validation"), (quantization_section, "Quantization"),
                       (engines_section, "Engines")):  # fmt: skip
        sections += guarded(make, path, name)
    if result is not None:
        if not subtitle:
            subject = result.subjects[0]
            title, subtitle = subject["name"], f"{subject['precision']}, {subject['path']}"
        figures = draw_bench_figures(result)
        sections += bench_sections(result, figures)
    files = {PAGE: render_page(title, subtitle, sections).encode(), **figures}
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
        write_beside(path / name, content)


def read_benchmark(path: Path) -> BenchResult | None:
    """What `reports/benchmark.json` holds; None where there is none.

    Raises:
        ArtifactError: it is damaged, or of another version.
    """
    file = path / REPORTS / _BENCHMARK
    if not file.is_file():
        return None
    try:
        return BenchResult.from_json(document_bytes(file))
    except (OSError, ValueError, RecursionError, ValidationError) as error:
        first = str(error).partition("\n")[0]
        raise ArtifactError(
            f"{file} cannot be read: {first}.", do="Measure again: enginery bench"
        ) from error


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


def bench_sections(result: BenchResult, drawn: Mapping[str, bytes]) -> list[Section]:
    """Return the sections of what was measured, with the figures that were drawn."""
    notes = [*result.notes, *([] if can_draw() else [NOT_DRAWN])]
    figures = [
        Figure(svg.decode(), caption(Path(file).stem, result)) for file, svg in drawn.items()
    ]
    found = tables(result)
    apart = {*_WHERE, "Padding", "Advice"}
    machine = result.machine
    gpus = ", ".join(gpu["name"] for gpu in machine["gpus"]) or machine["no_gpu"]
    facts = {
        "processor": f"{machine['cpu']}, {machine['physical_cores']} cores, "
        f"{machine['usable_cpus']} CPUs usable",
        "flags": ", ".join(machine["cpu_flags"]) or "none known",
        "memory": f"{machine['memory_bytes'] / 1e9:,.1f} GB",
        "GPU": gpus,
        "driver": machine["driver"] or "none",
        "system": f"{machine['system']}, Python {machine['python']}",
        "versions": ", ".join(f"{tool} {version}" for tool, version in machine["tools"].items()),
    }
    confidence = float(result.options["confidence"])
    lead = (
        "All contenders take inputs from the host's memory and leave the outputs there; each has a "
        "process of its own, and they take turns in rounds. Intervals are of the median, at "
        f"{confidence:.0%}; ratios are paired by round."
    )
    speed = Section(
        "Speed", lead=lead, figures=figures, notes=[*lines(result)[1:], *notes[len(result.notes):]],
        tables=[Table(title, rows) for title, rows in found.items() if title not in apart],
    )  # fmt: skip
    advice = [Table("Findings", found["Advice"])] if "Advice" in found else []
    padding = [Table("Padding by batch", found["Padding"])] if "Padding" in found else []
    sections = [speed]
    if advice or padding:
        sections.append(Section("Advice", tables=[*advice, *padding]))
    rest = [Table(title, found[title]) for title in _WHERE if title in found]
    sections.append(Section("What ran, and where", facts=facts, tables=rest))
    return sections
