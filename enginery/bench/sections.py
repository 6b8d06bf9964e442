"""What an artifact's page says: sections of facts, tables and figures, from what lies in it.

>>> [section.title for section in sections_of(Path("minilm"))]
['What it is', 'How it was made', 'Validation', 'Speed']

Everything is read from `manifest.json` and the reports beside it, so that a page can be made anew
at any time. A report that is missing or damaged is said to be, and is no reason to make no page.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from enginery.core.artifact import REPORTS
from enginery.core.json_file import document_bytes, parse_json
from enginery.core.manifest import GraphRecord, Manifest
from enginery.core.paths import resolve_inside

Row = Mapping[str, str]

_SHORT = 38
_MAX_FIGURE_BYTES = 4 * 2**20
"""Of a figure that lies in the artifact; those that are drawn here have 0.1 MB."""


@dataclass(frozen=True)
class Table:
    """Rows with the same keys."""

    caption: str
    rows: Sequence[Row]

    @property
    def columns(self) -> list[str]:
        return list(self.rows[0]) if self.rows else []

    @property
    def is_narrow(self) -> bool:
        """Whether every cell is short: such a table is scrolled on a telephone, and not folded."""
        return all(len(cell) <= _SHORT for row in self.rows for cell in row.values())


@dataclass(frozen=True)
class Figure:
    """An SVG in the page."""

    svg: str
    caption: str

    @property
    def address(self) -> str:
        """The figure as a `data:` address."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg.encode()).decode()}"


@dataclass(frozen=True)
class Section:
    """One part of the page."""

    title: str
    verdict: str = ""
    """`passed` or `failed`, where the section is a check."""
    lead: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()


def made_sections(manifest: Manifest) -> list[Section]:
    """What the artifact is, and the stages that made it, each with its options."""
    source = manifest.source
    size = sum(record.size_bytes for record in manifest.files.values())
    facts = {
        "source": f"{source.id}{f' at {source.revision}' if source.revision else ''}",
        "source sha256": source.sha256,
        "task": manifest.task,
        "model type": manifest.model_type,
        "precision": manifest.precision,
        "target": manifest.target,
        "size": f"{size / 1e6:,.1f} MB in {len(manifest.files)} files",
    }
    stages = [
        {
            "stage": stage.stage,
            "options": ", ".join(f"{name}={_plain(value)}" for name, value in stage.options.items())
            or "none",
            "tools": ", ".join(f"{name} {version}" for name, version in stage.tools.items()),
            "took": f"{stage.seconds:.1f} s, {stage.peak_rss_bytes / 1e6:,.0f} MB",
            "finished": stage.finished,
        }
        for stage in manifest.stages
    ]
    notes = [f"{stage.stage}: {note}" for stage in manifest.stages for note in stage.notes]
    return [
        Section("What it is", facts=facts,
                tables=[Table("Inputs and outputs", _interface(manifest.graphs))]),
        Section("How it was made", tables=[Table("Stages", stages)], notes=notes),
    ]  # fmt: skip


def validation_section(path: Path) -> Section | None:
    """Each output's worst case against PyTorch."""
    report, problem = read_report(path, "validation.json")
    if report is None:
        return Section("Validation", lead=problem) if problem else None
    pairs = [(case, out) for case in report["cases"] for out in case["outputs"]]
    worst: dict[tuple[str, str], tuple[Any, Any]] = {}
    for case, out in pairs:
        key = (case["graph"], out["output"])
        if key not in worst or _badness(out) > _badness(worst[key][1]):
            worst[key] = (case, out)
    rows = [
        {
            "output": output if graph == "model.onnx" else f"{graph}: {output}",
            "worst input": f"{case['kind']}: {case['name']}",
            "max abs error": _number(out["max_abs"]),
            "allowed": _number(out["limit"], none="any"),
            "cosine": _number(out["cosine"], digits=6),
            "verdict": out.get("problem") or "ok",
        }
        for (graph, output), (case, out) in worst.items()
    ]
    rows += [
        {"output": "–", "worst input": f"{case['kind']}: {case['name']}", "max abs error": "–",
         "allowed": "–", "cosine": "–", "verdict": case["problem"]}
        for case in report["cases"] if case["problem"]
    ]  # fmt: skip
    facts = {
        "reference": f"{report['reference']['as']} of {report['reference']['id']}",
        "provider": ", ".join(f"{p['name']} ({p['reason']})" for p in report["providers"]),
    }
    if report.get("embeddings"):
        found = report["embeddings"]
        facts["embeddings"] = (
            f"{found['sentences']} sentences, cosine at least {found['min_cosine']:.6f}, nearest "
            f"neighbour the same for {found['neighbour_agreement']:.0%}"
        )
    return Section(
        "Validation",
        verdict="passed" if report["passed"] else "failed",
        lead=report["summary"],
        facts=facts,
        tables=[Table("Worst case of each output", rows)],
        notes=report["notes"],
    )


def quantization_section(path: Path) -> Section | None:
    """The share in INT8, its accuracy, and the curve of the one against the other."""
    report, problem = read_report(path, "quantization.json")
    if report is None:
        return Section("Quantization", lead=problem) if problem else None
    facts = {"scheme": report["scheme"], "calibration": report["calibration"]["inputs"],
             "method": report["calibration"]["method"]}  # fmt: skip
    if "multiply_adds" in report:
        facts["multiply-adds quantized"] = f"{report['multiply_adds']['share']:.1%}"
    if "search" in report:
        facts["budget"] = report["search"]["budget"]
    rows = [
        {
            "multiply-adds quantized": f"{point['share']:.1%}",
            "mean cosine": _number(point["cosine"], digits=5),
            **({"accuracy": f"{point['label_accuracy']:.1%}"}
               if point.get("label_accuracy") is not None else {}),
        }
        for point in report.get("search", {}).get("curve", [])
    ]  # fmt: skip
    figures = stored_figure(path, "quantization.svg", "Accuracy against the quantized share")
    return Section(
        "Quantization", lead=report["summary"], facts=facts,
        tables=[Table("Measured mixes", rows)] if rows else [], figures=figures,
        notes=report["notes"],
    )  # fmt: skip


def engines_section(path: Path) -> Section | None:
    """Engines with their layers, and the buckets of the data that their profiles came from."""
    report, problem = read_report(path, "engines.json")
    if report is None:
        return Section("Engines", lead=problem) if problem else None
    rows = [
        {
            "engine": engine["directory"],
            "for": ", ".join(engine["capabilities"]) or "every GPU from 8.0 on",
            "profiles": "; ".join(engine["profiles"]) or "fixed shapes",
            "layers": ", ".join(f"{count} {kind}" for kind, count in engine["layers"].items()),
            "size": f"{engine['plan_size_bytes'] / 1e6:,.1f} MB",
        }
        for engine in report["engines"]
    ]
    figures = stored_figure(path, "lengths.svg", "Lengths of the data and the profiles' buckets")
    return Section(
        "Engines", lead=report["summary"], tables=[Table("Engines", rows)], figures=figures,
        notes=report["notes"],
    )  # fmt: skip


def read_report(path: Path, name: str) -> tuple[dict[str, Any] | None, str]:
    """A report of the artifact, or None and why there is none; no words where none was made."""
    file = resolve_inside(path, f"{REPORTS}/{name}", what=str(path))
    if not file.is_file():
        return None, ""
    try:
        found = parse_json(document_bytes(file))
    except (OSError, ValueError) as error:
        return None, f"{REPORTS}/{name} cannot be read: {error}"
    if not isinstance(found, dict):
        return None, f"{REPORTS}/{name} is no JSON object"
    return found, ""


def stored_figure(path: Path, name: str, caption: str) -> list[Figure]:
    """A figure that another stage left, if it is there."""
    file = resolve_inside(path, f"{REPORTS}/{name}", what=str(path))
    if not file.exists():
        return []
    svg = document_bytes(file, most_bytes=_MAX_FIGURE_BYTES)
    return [Figure(svg.decode(errors="replace"), caption)]


def guarded(make: Callable[[Path], Section | None], path: Path, title: str) -> Iterable[Section]:
    """A section, or one that says that its report is of another version or cannot be read."""
    try:
        section = make(path)
    except OSError as error:
        yield Section(title, lead=f"{error.filename} cannot be read: {error.strerror}")
        return
    except (ArithmeticError, LookupError, TypeError, AttributeError, ValueError) as error:
        yield Section(title, lead=f"the report is of another version: {error!r}")
        return
    if section is not None:
        yield section


def _interface(graphs: Iterable[GraphRecord]) -> list[Row]:
    return [
        {"graph": graph.file, "direction": direction, "name": spec.name, "type": spec.dtype,
         "shape": ", ".join(str(dim) for dim in spec.dims) or "scalar"}
        for graph in graphs
        for direction, specs in (("in", graph.inputs), ("out", graph.outputs))
        for spec in specs
    ]  # fmt: skip


def _badness(out: Mapping[str, Any]) -> float:
    """Failed ones first, then by the share of what is allowed."""
    if out.get("problem"):
        return float("inf")
    if out["limit"]:
        return float(out["max_abs"] or 0) / float(out["limit"])
    return 1 - float(out["cosine"] or 0)


def _number(value: float | None, *, digits: int = 0, none: str = "–") -> str:
    if value is None:
        return none
    return f"{value:.{digits}f}" if digits else f"{value:.1e}"


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value or "''"
    return json.dumps(value, ensure_ascii=False)
