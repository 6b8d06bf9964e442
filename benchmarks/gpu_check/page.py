"""Write the results as a page of Markdown tables.

page(document).splitlines()[0]  # '# GPU check: NVIDIA H200, 2026-11-21'
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Document = Mapping[str, Any]
_NOTHING = "–"


def page(document: Document) -> str:
    """Return the page. Parts without results are only in the table of parts, with the reason."""
    lines = [
        f"# GPU check: {document['gpu'] or document['dry_run']}, {document['started'][:10]}",
        "",
        *_head(document),
    ]
    parts = document["parts"]
    found = {name: part["found"] for name, part in parts.items()}
    lines += _section(
        "Goals",
        ("goal", "figure", "verdict"),
        ((goal["goal"], goal["figure"], goal["verdict"]) for goal in document["goals"]),
    )
    lines += _section(
        "Parts",
        ("part", "status", "seconds", "problem"),
        ((n, p["status"], f"{p['seconds']:.0f}", p["problem"]) for n, p in parts.items()),
    )
    lines += _section(
        "Checks",
        ("check", "", "found"),
        (
            (c["check"], "ok" if c["passed"] else "**failed**", c["found"])
            for one in found.values()
            for c in one["checks"]
        ),
    )
    lines += _section(
        "Models", ("model", "source"), found.get("models", {}).get("sources", {}).items()
    )
    lines += _speed([p for one in found.values() for p in one.get("points", [])], document)
    lines += _section(
        "Agreement with PyTorch FP32",
        ("model", "precision", "batch×sequence", "largest error", "allowed", "cosine", "verdict"),
        (
            (
                r["model"],
                r["precision"],
                f"{r['batch']}×{r['sequence']}",
                _figure(r["max_abs"]),
                _figure(r["limit"]),
                _figure(r["cosine"], "{:.7f}"),
                r["problem"] or "ok",
            )
            for r in found.get("agreement", {}).get("agreements", [])
        ),
    )
    lines += _section(
        "Placement",
        (
            "model",
            "precision",
            "on the provider",
            "shapes on the CPU",
            "compute on the CPU",
            "copies",
        ),
        (
            (
                r["model"],
                r["precision"],
                str(r["on the head"]),
                str(len(r["on the cpu"])),
                ", ".join(node["name"] for node in r["fallen"]) or "none",
                str(len(r["copies"])),
            )
            for r in found.get("placement", {}).get("placed", [])
        ),
    )
    lines += _images(found.get("convolutions", {}))
    flavors = found.get("tensorrt", {}).get("flavors", {})
    lines += _section(
        "TensorRT", ("flavor", "outcome"), ((name, one["outcome"]) for name, one in flavors.items())
    )
    notes = [(name, note) for name, one in found.items() for note in one["notes"]]
    lines += _section("Notes", ("part", "note"), notes)
    return "\n".join(lines) + "\n"


def _head(document: Document) -> Iterator[str]:
    machine = document["machine"]
    tools = ", ".join(f"{name} {version}" for name, version in machine["tools"].items())
    gpus = ", ".join(
        f"{gpu['name']} (compute capability {gpu['compute_capability']}, "
        f"{gpu['memory_total_bytes'] / 1e9:.0f} GB)"
        for gpu in machine["gpus"]
    )
    if document["dry_run"]:
        yield f"**Every figure is {document['dry_run']}.**"
        yield ""
    if not document["complete"]:
        yield "**This page was written before the run ended.**"
        yield ""
    failed = len(document["failures"])
    yield f"{failed} failures." if failed else "No check failed."
    yield ""
    driver = machine["driver"] or "of unknown version"
    yield f"- GPU: {gpus or machine['no_gpu'].rstrip('.')}; driver {driver}"
    yield f"- CPU: {machine['cpu']}, {machine['physical_cores']} cores; {machine['system']}"
    yield f"- versions: Python {machine['python']}, {tools}"
    yield f"- started {document['started']}, took {document['seconds']:.0f} s"
    yield ""


def _speed(points: Sequence[Mapping[str, Any]], document: Document) -> Iterator[str]:
    """Return a table for each model and place: medians in ms, and the speedups over PyTorch."""
    for model in dict.fromkeys(point["model"] for point in points):
        for place in ("host", "device"):
            mine = [point for point in points if point["model"] == model]
            sides = list(
                dict.fromkeys(
                    name.removesuffix(f", {place}")
                    for point in mine
                    for name in point["latency"]
                    if name.endswith(f", {place}")
                )
            )
            rows = []
            for point in sorted(mine, key=lambda p: (p["sequence"], p["batch"])):
                medians = {s: point["latency"].get(f"{s}, {place}") for s in sides}
                rows.append(
                    (
                        f"{point['batch']}×{point['sequence']}",
                        *(_ms(one) for one in medians.values()),
                        _beside(point, place),
                    )
                )
            title = f"FP16 {model}, {'host to host' if place == 'host' else 'on the device'}"
            note = f", {document['dry_run']}" if document["dry_run"] else ""
            yield from _section(
                f"{title}, median in ms{note}",
                ("batch×sequence", *sides, "speedup of enginery's fastest"),
                rows,
            )
    compiled = [
        (
            p["model"],
            f"{p['batch']}×{p['sequence']}",
            p["compile"].get("mode", "none"),
            _figure(p["compile"].get("seconds"), "{:.1f}"),
            "; ".join(p["compile"].get("tried", [])) or p["left out"].get("torch.compile", ""),
        )
        for p in points
    ]
    yield from _section(
        "torch.compile", ("model", "batch×sequence", "mode", "seconds", "not used"), compiled
    )


def _beside(point: Mapping[str, Any], place: str) -> str:
    """Return `2.10 × PyTorch SDPA (2.05 to 2.15)` for each of PyTorch's ways."""
    from benchmarks.gpu_check.goals import fastest_enginery

    best = fastest_enginery(point, place)
    said = []
    for ratio in point["ratios"]:
        if best and ratio["place"] == place and ratio["ours"] == best[0]:
            span = ratio["interval"]
            within = f" ({span[0]:.2f} to {span[1]:.2f})" if span else ""
            said.append(f"{ratio['speedup']:.2f} × {ratio['theirs']}{within}")
    return "; ".join(said) or _NOTHING


def _images(found: Mapping[str, Any]) -> Iterator[str]:
    """Return a row for each image size, with the first run and the steady time of each search."""
    searches = found.get("searches", {})
    if not searches:
        return
    columns = [f"{name}, {what}" for name in searches for what in ("first run", "steady")]
    rows = []
    for index, (height, width) in enumerate(found["images"]):
        cells = [
            _figure(dict(enumerate(one[key])).get(index))
            for one in searches.values()
            for key in ("first_ms", "ms")
        ]
        rows.append((f"{height}×{width}", *cells))
    totals = [_figure(sum(one[key])) for one in searches.values() for key in ("first_ms", "ms")]
    rows.append(("all", *totals))
    yield from _section("ResNet over image sizes, ms", ("height×width", *columns), rows)


def _section(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table with a title; empty without rows."""
    found = [[_cell(cell) for cell in row] for row in rows]
    if not found:
        return []
    table = [list(columns), ["-" * 3] * len(columns), *found]
    return [f"## {title}", "", *(f"| {' | '.join(row)} |" for row in table), ""]


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def _ms(one: Mapping[str, Any] | None) -> str:
    return _figure(one["median_ms"]) if one else _NOTHING


def _figure(value: float | None, form: str = "{:.3g}") -> str:
    return _NOTHING if value is None else form.format(value)
