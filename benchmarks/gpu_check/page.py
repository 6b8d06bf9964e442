"""Write the results as a page of Markdown tables.

page(document).splitlines()[0]  # '# GPU check: NVIDIA H200, 2026-11-21'
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu_check.goals import fastest_enginery
from benchmarks.gpu_check.records import rows

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
    lines += _section(
        "Goals",
        ("goal", "figure", "verdict"),
        ((goal["goal"], goal["figure"], goal["verdict"]) for goal in document["goals"]),
    )
    lines += _section(
        "Parts",
        ("part", "status", "cases", "seconds", "problem"),
        (
            (n, p["status"], str(len(p["cases"])), f"{p['seconds']:.0f}", p["problem"])
            for n, p in parts.items()
        ),
    )
    lines += _section(
        "Checks",
        ("check", "", "found"),
        (
            (c["check"], "ok" if c["passed"] else "**failed**", c["found"])
            for c in rows(parts, "checks")
        ),
    )
    lines += _section("Models", ("model", "source"), rows(parts, "sources"))
    lines += _speed(rows(parts, "points"), document)
    lines += _compiled(rows(parts, "compiled"))
    lines += _speedups(rows(parts, "speedups"))
    lines += _agreement(rows(parts, "agreements"))
    lines += _placement(rows(parts, "placed"))
    lines += _images(rows(parts, "searches"))
    lines += _pooled(rows(parts, "pooled"))
    lines += _section(
        "New shapes, ms",
        ("model", "shapes", "new: median, p99, most", "seen: median, p99, most", "ready after s"),
        (
            (
                r["model"],
                str(r["shapes"]),
                ", ".join(_figure(value) for value in r["new_ms"].values()),
                ", ".join(_figure(value) for value in r["seen_ms"].values()),
                _figure(r["ready_seconds"]),
            )
            for r in rows(parts, "shapes")
        ),
    )
    lines += _server(parts)
    lines += _section(
        "Embed from Python",
        ("model", "by", "sentences", "rows/s, by turn"),
        (
            (
                r["model"],
                r["side"],
                str(r["rows"]),
                ", ".join(f"{rate:.0f}" for rate in r["per_second"]),
            )
            for r in rows(parts, "embedded")
        ),
    )
    lines += _generation(parts)
    lines += _section(
        "Predict",
        ("model", "output", "rows", "rows/s", "seconds in all", "workers"),
        (
            (
                r["model"],
                r["way"],
                str(r["rows"]),
                f"{r['per_second']:.0f}",
                _figure(r.get("seconds")),
                str(r["workers"]),
            )
            for r in rows(parts, "predicted")
        ),
    )
    lines += _section(
        "Prototypes",
        ("script", "result"),
        (
            (r["script"], ", ".join(f"{name}: {value}" for name, value in r["line"].items()))
            for r in rows(parts, "prototyped")
        ),
    )
    lines += _section("TensorRT", ("flavor", "outcome"), rows(parts, "flavors"))
    lines += _section(
        "Notes",
        ("part", "case", "note"),
        (
            (name, title, note)
            for name, part in parts.items()
            for title, case in part["cases"].items()
            for note in case["notes"]
        ),
    )
    return "\n".join(lines) + "\n"


def _pooled(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a row for each shape: token ids to vectors, by every way."""
    names = list(dict.fromkeys(name for point in points for name in point["latency"]))
    return _section(
        "FP16, token ids to vectors, median in ms",
        ("model", "batch×sequence", *names, "on the host", "on the device"),
        (
            (
                p["model"],
                f"{p['batch']}×{p['sequence']}",
                *(_ms(p["latency"].get(name)) for name in names),
                _beside(p, "host"),
                _beside(p, "device"),
            )
            for p in points
        ),
    )


def _server(parts: Mapping[str, Any]) -> list[str]:
    """Return the tables of the server's loads."""
    lines = _section(
        "Server",
        (
            "model",
            "connections",
            "requests/s",
            "p50 ms",
            "p99 ms",
            "refused",
            "5xx",
            "connections lost",
            "wrong of checked",
        ),
        (
            (
                r["model"],
                str(r["connections"]),
                f"{r['per_second']:.0f}",
                _figure(r["latency_ms"]["p50"]),
                _figure(r["latency_ms"]["p99"]),
                str(r["refused"]),
                str(r.get("server_errors", _NOTHING)),
                str(r.get("lost", _NOTHING)),
                f"{r['wrong']} of {r['checked']}" if "wrong" in r else _NOTHING,
            )
            for r in rows(parts, "served")
        ),
    )
    return lines + _section(
        "Server, large requests",
        ("model", "texts a request", "connections", "rows/s", "load_model, rows/s", "p99 ms"),
        (
            (
                r["model"],
                str(r["texts"]),
                str(r["connections"]),
                f"{r['served_per_second']:.0f}",
                f"{r['load_model_per_second']:.0f}",
                _figure(r["latency_ms"]["p99"]),
            )
            for r in rows(parts, "large")
        ),
    )


def _generation(parts: Mapping[str, Any]) -> list[str]:
    """Return the tables of generated tokens, by call and by stream."""
    lines = _section(
        "Generation, tokens/s",
        (
            "model",
            "rows × beams",
            "enginery",
            "PyTorch FP16",
            "speedup",
            "first call, ms",
            "rows equal to PyTorch FP32",
            "distinct tokens",
        ),
        (
            (
                r["model"],
                f"{r['rows']} × {r['beams']}",
                f"{r['per_second']:.0f}",
                f"{r['pytorch_per_second']:.0f}",
                f"{r['speedup']:.2f} ×",
                f"{r['first_ms']:.0f}",
                f"{r['equal_rows']} of {r['rows']}",
                str(r["distinct_tokens"]),
            )
            for r in rows(parts, "generated")
        ),
    )
    return lines + _section(
        "Generation by the server",
        ("model", "streams", "tokens/s", "p50 of a text, ms", "p99"),
        (
            (
                r["model"],
                str(r["streams"]),
                f"{r['per_second']:.0f}",
                f"{r['latency_ms']['p50']:.0f}",
                f"{r['latency_ms']['p99']:.0f}",
            )
            for r in rows(parts, "streamed")
        ),
    )


def _agreement(found: Sequence[Mapping[str, Any]]) -> list[str]:
    return _section(
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
            for r in found
        ),
    )


def _placement(found: Sequence[Mapping[str, Any]]) -> list[str]:
    return _section(
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
            for r in found
        ),
    )


def _compiled(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a row for each mode, shape and place."""
    return _section(
        "torch.compile",
        (
            "model",
            "batch×sequence",
            "mode",
            "compiled in s",
            "place",
            "speedup of enginery's fastest",
        ),
        (
            (
                p["model"],
                f"{p['batch']}×{p['sequence']}",
                p["mode"],
                f"{p['compile_seconds']:.1f}",
                place,
                _beside(p, place),
            )
            for p in found
            for place in ("host", "device")
        ),
    )


def _speedups(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a row for each shape: the time per phrase on the CPU and on the GPU."""
    names = dict.fromkeys(name for row in found for name in row["latency"])
    return _section(
        "CPU and GPU, ms per run, host to host",
        ("model", "batch×sequence", *(n.removesuffix(", host") for n in names), "GPU over CPU"),
        (
            (
                r["model"],
                f"{r['batch']}×{r['sequence']}",
                *(_ms(r["latency"].get(name)) for name in names),
                "not measured" if r["speedup"] is None else f"{r['speedup']:.1f} ×",
            )
            for r in found
        ),
    )


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
        yield "**Some cases have not run yet.**"
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
            table = []
            for point in sorted(mine, key=lambda p: (p["sequence"], p["batch"])):
                medians = {s: point["latency"].get(f"{s}, {place}") for s in sides}
                table.append(
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
                table,
            )


def _beside(point: Mapping[str, Any], place: str) -> str:
    """Return `2.10 × PyTorch SDPA (2.05 to 2.15)` for each of PyTorch's ways."""
    best = fastest_enginery(point, place)
    said = []
    for ratio in point["ratios"]:
        if best and ratio["place"] == place and ratio["ours"] == best[0]:
            span = ratio["interval"]
            within = f" ({span[0]:.2f} to {span[1]:.2f})" if span else ""
            said.append(f"{ratio['speedup']:.2f} × {ratio['theirs']}{within}")
    return "; ".join(said) or _NOTHING


def _images(searches: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Return a row for each image size, with the first run and the steady time of each search."""
    if not searches:
        return
    columns = [f"{one['search']}, {what}" for one in searches for what in ("first run", "steady")]
    times = [one[key] for one in searches for key in ("first_ms", "ms")]
    cells = [
        (f"{height}×{width}", *(_figure(values[index]) for values in times))
        for index, (height, width) in enumerate(searches[0]["images"])
    ]
    cells.append(("all", *(_figure(sum(values)) for values in times)))
    yield from _section("ResNet over image sizes, ms", ("height×width", *columns), cells)


def _section(title: str, columns: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """Return a table with a title; empty without rows."""
    found = [[_cell(cell) for cell in line] for line in lines]
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
