"""The sections of a card that are about numbers: validation, accuracy, benchmark.

>>> print(table(["Batch", "p50"], [["1", "0.9 ms"]]))
| Batch | p50 |
|-|-|
| 1 | 0.9 ms |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from enginery.core.manifest import Manifest, SourceRecord
from enginery.publish.card.paths import without_path
from enginery.publish.card.reports import Benchmark, Output, Quantization, Validation

_NOTHING = "–"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a bar or a line break in a cell stays what it is."""
    lines = [_row(head), "|" + "-|" * len(head), *(_row(row) for row in rows)]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(c.replace("|", "\\|").split()) for c in cells) + " |"


def validation_section(manifest: Manifest, found: Validation | None) -> Iterator[str]:
    """What every check said, and the outputs by kind of input."""
    yield "## Validation"
    for verdict in manifest.verdicts:
        word = "passed" if verdict.passed else "**failed**"
        summary = without_path(verdict.summary.rstrip("."), manifest.source)
        yield f"{verdict.stage}: {word}. {summary}."
    if found is None:
        if not any(verdict.stage == "validate" for verdict in manifest.verdicts):
            yield "Its outputs were never compared with PyTorch's."
        return
    providers = ", ".join(str(provider.get("name", "")) for provider in found.providers)
    tools = ", ".join(f"{tool} {version}" for tool, version in found.tools.items())
    yield f"Compared with {found.reference.get('as', 'PyTorch')} on {providers}; {tools}."
    groups: dict[tuple[str, str, str], list[Output]] = {}
    for case in found.cases:
        for output in case.outputs:
            groups.setdefault((case.graph, output.output, case.kind), []).append(output)
    rows = [
        [f"`{graph}`", f"`{name}`", kind, str(len(outputs)), *_worst(outputs)]
        for (graph, name, kind), outputs in groups.items()
    ]
    head = ["Graph", "Output", "Inputs", "Compared", "Max abs error", "Allowed there", "Min cosine",
            "Result"]  # fmt: skip
    if rows:
        yield table(head, rows)
    if skipped := sum(bool(case.skipped) for case in found.cases):
        yield f"{skipped} of {len(found.cases)} inputs were skipped; the report says why."
    if found.embeddings:
        yield (
            f"Pooled embeddings of {found.embeddings.sentences} sentences: cosine at least "
            f"{_number(found.embeddings.min_cosine, '.6f')}, nearest neighbours agree for "
            f"{_number(found.embeddings.neighbour_agreement, '.1%')}."
        )
    for overall in found.overall:
        yield (
            f"`{overall.output}` over {overall.inputs} real inputs together: cosine "
            f"{_number(overall.cosine, '.4f')}, at least {_number(overall.cosine_limit, '.4f')} "
            "expected."
        )
    if found.notes:
        yield "\n".join(f"- {without_path(note, manifest.source)}" for note in found.notes)


def _worst(outputs: Sequence[Output]) -> list[str]:
    """Error and limit of the output nearest to its limit, the least cosine, and the verdict."""

    def share(output: Output) -> float:
        if output.max_abs is None:
            return float("inf")
        return output.max_abs / output.limit if output.limit else output.max_abs

    worst = max(outputs, key=share)
    cosines = [output.cosine for output in outputs if output.cosine is not None]
    failed = sum(bool(output.problem) for output in outputs)
    return [
        _number(worst.max_abs, ".1e"),
        _number(worst.limit, ".1e") if worst.limit is not None else "any",
        _number(min(cosines, default=None), ".6f"),
        f"**{failed} failed**" if failed else "passed",
    ]


def quantization_section(found: Quantization | None) -> Iterator[str]:
    """The share that is INT8 or FP8, and what it costs."""
    if found is None:
        return
    kind = found.scheme.upper()
    yield f"## Accuracy in {kind}"
    yield (
        f"{found.layers.quantized} of {found.layers.all} layers are {kind}, the rest "
        f"{found.residual.upper()}. Calibration: {found.calibration.get('inputs', 'not known')}, "
        f"method {found.calibration.get('method', 'not known')}."
    )
    rows: list[list[str]] = []
    if found.multiply_adds:
        rows += [
            [f"Share of multiply-adds in {kind}", f"{found.multiply_adds.share:.1%}"],
            ["The same, attention counted", f"{found.multiply_adds.share_with_attention:.1%}"],
        ]
    if accuracy := found.accuracy:
        for words, value, form in (
            (f"Mean cosine to FP32, {accuracy.rows} rows", accuracy.cosine, ".5f"),
            ("Least cosine to FP32", accuracy.worst_cosine, ".5f"),
            ("Nearest neighbours as FP32's", accuracy.neighbour_agreement, ".1%"),
            ("Largest scores as FP32's", accuracy.argmax_agreement, ".1%"),
            ("Accuracy on labels", accuracy.label_accuracy, ".1%"),
        ):
            if value is not None:
                rows.append([words, _number(value, form)])
    if rows:
        yield table(["Measure", "Value"], rows)
    if found.left_out:
        left = [[f"`{layer}`", reason] for layer, reason in found.left_out.items()]
        yield table(["Layer left out", "Reason"], left)


def benchmark_section(found: Benchmark | None, source: SourceRecord) -> Iterator[str]:
    """Latencies, and on which machine; `source` is what was measured."""
    if found is None:
        return
    yield "## Benchmark"
    yield _machine(found.machine)
    labels = {contender.name: contender.label for contender in found.contenders}
    rows = [
        [case.shape, f"{one.contender} ({labels.get(one.contender, one.contender)})",
         f"{one.latency.p50_ms:.3g} ms",
         f"{one.latency.p99_ms:.3g} ms" if one.latency.p99_ms is not None else _NOTHING,
         f"{one.inputs_per_second:,.1f}"]
        for case in found.cases
        for one in case.measurements
    ]  # fmt: skip
    yield table(["Shape", "Contender", "p50", "p99", "Inputs/s"], rows)
    compared = [
        [case.shape, two.contender, two.base, two.words]
        for case in found.cases
        for two in case.comparisons
    ]
    if compared:
        yield table(["Shape", "Contender", "Beside", "Is"], compared)
    if found.notes:
        yield "\n".join(f"- {without_path(note, source)}" for note in found.notes)


def _machine(machine: dict[str, Any]) -> str:
    gpus = machine.get("gpus") or []
    gpu = ", ".join(str(gpu.get("name", "a GPU")) for gpu in gpus) or "no GPU"
    driver = f", driver {machine['driver']}" if machine.get("driver") else ""
    tools = ", ".join(f"{tool} {version}" for tool, version in (machine.get("tools") or {}).items())
    return (
        f"Measured on {machine.get('cpu', 'an unknown processor')}, "
        f"{machine.get('physical_cores', 0)} cores, {machine.get('usable_cpus', 0)} CPUs usable; "
        f"{gpu}{driver}; {machine.get('system', '')}; {tools}. Times on another machine differ."
    )


def _number(value: float | None, form: str) -> str:
    return _NOTHING if value is None else format(value, form)
