"""Tables of a benchmark, for the terminal and the page.

for title, rows in tables(result).items():
    console.table(title, rows)
"""

from __future__ import annotations

from collections.abc import Mapping

from enginery.bench.config import ENGINERY
from enginery.bench.report.notes import is_overloaded
from enginery.reports.benchmark import BenchResult, Latency, PlacementRecord
from enginery.runtime.providers.known import short_name

Row = dict[str, str]
_NOTHING = "–"
_MAX_NAMES = 8
"""Number of copy nodes that are listed by name."""


def tables(result: BenchResult) -> dict[str, list[Row]]:
    """Return title -> rows, for the tables that have rows."""
    rows_by_title = {
        "Latency": latency_rows(result),
        "Accuracy": result.labels.table() if result.labels else [],
        "Comparison": comparison_rows(result),
        "Images": image_rows(result),
        "All images": image_total_rows(result),
        "Backends": backend_rows(result),
        "Placement": placement_rows(result),
        "Compute on the CPU": cpu_fallback_rows(result),
        "Copies between devices": copy_rows(result),
        "Padding": padding_rows(result),
        "Advice": advice_rows(result),
        "Left out": [{"backend": n, "reason": why} for n, why in result.left_out.items()],
    }
    return {title: rows for title, rows in rows_by_title.items() if rows}


def lines(result: BenchResult) -> list[str]:
    """Return the machine, the notes and what was not measured, as lines of text."""
    machine = result.machine
    gpus = ", ".join(gpu["name"] for gpu in machine["gpus"]) or f"no GPU: {machine['no_gpu']}"
    texts = [f"on {machine['cpu']}, {machine['physical_cores']} cores; {gpus.rstrip('.')}"]
    for reason in dict.fromkeys(result.unknown.values()):
        names = ", ".join(name for name, why in result.unknown.items() if why == reason)
        texts.append(f"not measured: {names}: {reason.rstrip('.')}")
    for record in result.contenders:
        if problem := record.facts.get("no_placement"):
            texts.append(f"the placement of {record.name} is not known: {problem.rstrip('.')}")
        texts += [f"{record.name}: {note}" for note in record.notes]
    at: dict[str, list[str]] = {}
    for case in result.cases:
        for measurement in case.measurements:
            for note in measurement.notes:
                at.setdefault(f"{measurement.contender} {note}", []).append(_shape(case.sizes))
    texts += [f"{note}: at {', '.join(shapes)}" for note, shapes in at.items()]
    if result.images:
        texts += [f"{name} did not run: {why}" for name, why in result.images.problems.items()]
    return texts + [f"note: {note}" for note in result.notes]


def latency_rows(result: BenchResult) -> list[Row]:
    """Return a row for each backend at each shape."""
    rows = []
    accuracies = accuracy_by_backend(result)
    for case in result.cases:
        for measurement in case.measurements:
            times = measurement.latency
            accuracy = (
                {"accuracy": accuracies.get(measurement.contender, _NOTHING)} if accuracies else {}
            )
            tokens = measurement.tokens_per_second
            rows.append(
                {
                    _dims(case.sizes): _shape(case.sizes),
                    "backend": measurement.contender,
                    "median": _ms(times.median_ms),
                    "interval": _interval(times),
                    "mean": _ms(times.mean_ms),
                    "p90": _ms(times.p90_ms),
                    "p99": _ms(times.p99_ms) if times.p99_ms is not None else _NOTHING,
                    "first": _ms(measurement.first_ms),
                    "inputs/s": f"{measurement.inputs_per_second:,.1f}",
                    "tokens/s": f"{tokens:,.0f}" if tokens else _NOTHING,
                    "runs": str(times.runs),
                    **accuracy,
                }
            )
        for name, problem in case.problems.items():
            blank = dict.fromkeys(
                ("interval", "mean", "p90", "p99", "first", "inputs/s", "tokens/s", "runs"),
                _NOTHING,
            )
            if accuracies:
                blank["accuracy"] = accuracies.get(name, _NOTHING)
            head = {_dims(case.sizes): _shape(case.sizes), "backend": name}
            rows.append({**head, "median": problem, **blank})
    return rows


def accuracy_by_backend(result: BenchResult) -> dict[str, str]:
    """Return the accuracy of each artifact in enginery's runner, by backend; empty without labels.

    The other backends were only timed.
    """
    if result.labels is None:
        return {}
    by_subject = {accuracy.name: accuracy.describe() for accuracy in result.labels.accuracies}
    return {
        record.name: by_subject[record.subject]
        for record in result.contenders
        if record.kind == ENGINERY and record.subject in by_subject
    }


def comparison_rows(result: BenchResult) -> list[Row]:
    """Return a row for each pair at each shape."""
    shaped = [(_shape(case.sizes), c) for case in result.cases for c in case.comparisons]
    shaped += [("all", c) for c in result.images.comparisons] if result.images else []
    head = _dims(result.cases[0].sizes) if result.cases else "images"
    busy = "; on a busy machine" if is_overloaded(result.machine) else ""
    return [
        {head: shape, "backend": c.contender, "compared with": c.base, "result": c.words + busy}
        for shape, c in shaped
    ]


def image_rows(result: BenchResult) -> list[Row]:
    """Return a row for each image."""
    if result.images is None:
        return []
    names = list(result.images.totals)
    return [
        {
            "image": image.file,
            "input": "×".join(str(size) for size in image.shape),
            **{f"{name}, first": _ms(image.first_ms[name]) for name in names},
            **{name: _ms(image.median_ms[name]) for name in names},
        }
        for image in result.images.images
    ]


def image_total_rows(result: BenchResult) -> list[Row]:
    """Return a row for each backend, with the times over all images."""
    images = result.images
    if images is None:
        return []
    return [
        {
            "backend": name,
            "images": str(len(images.images)),
            "shapes": str(images.shapes),
            "first pass": _ms(images.first_total_ms[name]),
            "later passes": _ms(total.median_ms),
            "per image": _ms(total.median_ms / len(images.images)),
            "passes": str(images.passes),
        }
        for name, total in images.totals.items()
    ]


def backend_rows(result: BenchResult) -> list[Row]:
    """Return a row for each backend, with its providers, load time, memory and versions."""
    return [
        {
            "backend": record.name,
            "runs": record.label,
            "on": ", ".join(short_name(p["name"]) for p in record.providers)
            or str(record.facts.get("device", _NOTHING)),
            "reason": record.providers[0]["reason"] if record.providers else _NOTHING,
            "load": f"{record.load_seconds:.1f} s",
            "peak memory": f"{record.peak_rss_bytes / 1e6:,.0f} MB",
            "peak GPU memory": f"{record.device_memory_bytes / 1e6:,.0f} MB"
            if record.device_memory_bytes is not None
            else _NOTHING,
            "versions": ", ".join(f"{tool} {version}" for tool, version in record.tools.items()),
        }
        for record in result.contenders
    ]


def placement_rows(result: BenchResult) -> list[Row]:
    """Return a row for each provider of each backend, with its nodes and multiply-adds."""
    rows = []
    for name, placed in _placements(result):
        total = sum(part["multiply_adds"] for part in placed["providers"])
        counted = placed["multiply_adds_counted"]
        rows += [
            {
                "backend": name,
                "provider": short_name(part["name"]),
                "nodes": str(part["nodes"]),
                "for shapes": str(part["for_shapes"]),
                "multiply-adds": f"{part['multiply_adds']:,}" if counted else _NOTHING,
                "share": f"{part['multiply_adds'] / total:.1%}" if total else _NOTHING,
                "main ops": ", ".join(f"{n} {op}" for op, n in list(part["op_types"].items())[:4]),
            }
            for part in placed["providers"]
        ]
    return rows


def cpu_fallback_rows(result: BenchResult) -> list[Row]:
    """Return the compute nodes that run on the CPU although another provider was requested."""
    return [
        {
            "backend": name,
            "node": node["name"] or "unnamed",
            "op": node["op_type"],
            "multiply-adds": f"{node['multiply_adds']:,}"
            if placed["multiply_adds_counted"]
            else _NOTHING,
        }
        for name, placed in _placements(result)
        for node in placed["fallen"]
    ]


def copy_rows(result: BenchResult) -> list[Row]:
    """Return a row for each backend with Memcpy nodes."""
    return [
        {
            "backend": name,
            "copies per run": str(len(copies)),
            "nodes": ", ".join(copies[:_MAX_NAMES])
            + (f" and {len(copies) - _MAX_NAMES} more" if len(copies) > _MAX_NAMES else ""),
        }
        for name, placed in _placements(result)
        if (copies := placed["copies"])
    ]


def _placements(result: BenchResult) -> list[tuple[str, PlacementRecord]]:
    """Return (backend, placement) for the backends with a known placement."""
    return [(record.name, record.placement) for record in result.contenders if record.placement]


def padding_rows(result: BenchResult) -> list[Row]:
    """Return a row for each batch size."""
    return [
        {
            "batch": str(padding.batch),
            "padding in file order": f"{padding.in_order:.0%}",
            "padding sorted by length": f"{padding.sorted:.0%}",
        }
        for padding in result.padding
    ]


def advice_rows(result: BenchResult) -> list[Row]:
    """Return a row for each advice."""
    return [
        {"finding": advice.finding, "evidence": advice.evidence, "do": advice.remedy}
        for advice in result.advice
    ]


def _dims(sizes: Mapping[str, int]) -> str:
    """Return the dims as a column title: `batch×sequence`."""
    return "×".join(sizes) or "shape"


def _shape(sizes: Mapping[str, int]) -> str:
    return "×".join(str(size) for size in sizes.values()) or "fixed"


def _ms(value: float) -> str:
    """Format a time with three significant digits: in ms, or in s from a second on."""
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f} ms"


def _interval(times: Latency) -> str:
    if times.interval_ms is None:
        return f"too few rounds ({times.rounds})"
    low, high = times.interval_ms
    return f"{_ms(low).removesuffix(' ms').removesuffix(' s')} to {_ms(high)}"
