"""What a reader decides by: size, error and speed of each model beside FP32."""

from __future__ import annotations

from collections.abc import Sequence

from enginery.bench.report.curves import middle_size
from enginery.core.artifact.artifact import Artifact
from enginery.core.table import human_bytes
from enginery.reports.benchmark import (
    BenchCase,
    BenchResult,
    Comparison,
    SubjectRecord,
    format_ratio,
    gpu_names,
)
from enginery.reports.validation import ValidationReport

_FP32 = "fp32"
_BYTES_OF_FP32 = 4
_CPU = "the CPU"


def model_facts(
    artifact: Artifact | None, validation: ValidationReport | None, result: BenchResult | None
) -> list[tuple[str, str]]:
    """Return size, error and speed of each model as (name, value), FP32 first.

    Args:
        artifact: the artifact of the page; None for a benchmark in a directory of its own.
        validation: the artifact's validation, if it has one.
        result: the benchmark, if there is one.

    Raises:
        ValueError: the benchmark has no model.
    """
    subjects = list(result.subjects) if result else []
    if result and not subjects:
        raise ValueError("it has no model")
    if artifact:
        subjects = _with_artifact(subjects, artifact, validation)
    subjects.sort(key=lambda subject: subject["precision"] != _FP32)
    weights = _BYTES_OF_FP32 * validation.weights.elements if validation else 0
    sizes = [s.get("size_bytes", 0) for s in subjects if s["precision"] == _FP32]
    fp32_bytes = next(filter(None, [*sizes, weights]), 0)
    facts = []
    for subject in subjects:
        prefix = f"{subject['name']}, {subject['precision']}: " if len(subjects) > 1 else ""
        facts += [
            (f"{prefix}size", _size(subject, fp32_bytes)),
            (f"{prefix}error", _error(subject)),
            (f"{prefix}speed", _speed(subject, subjects, result)),
        ]
    return facts


def _with_artifact(
    subjects: Sequence[SubjectRecord], artifact: Artifact, validation: ValidationReport | None
) -> list[SubjectRecord]:
    """Return the subjects with the artifact as it is now: it may have been validated since."""
    manifest = artifact.manifest
    hashes = {manifest.files[graph.file].sha256: graph.file for graph in manifest.graphs}
    measured = next((s for s in subjects if s["graph_sha256"] in hashes), None)
    sha256, graph = next(iter(hashes.items()))
    current: SubjectRecord = {
        "name": measured["name"] if measured else manifest.source.name,
        "path": str(artifact.path),
        "graph": graph,
        "graph_sha256": sha256,
        "source": manifest.source.id,
        "task": manifest.task,
        "precision": manifest.precision,
        "target": manifest.target,
        "size_bytes": sum(map(artifact.graph_bytes, manifest.graphs)),
        "verdict": artifact.validation_status(),
    }
    if error := validation and validation.error_use():
        current["error"] = error
    return [current, *(subject for subject in subjects if subject is not measured)]


def _size(subject: SubjectRecord, fp32_bytes: int) -> str:
    size = subject.get("size_bytes", 0)
    if not size:
        return "not recorded"
    if subject["precision"] == _FP32 or not fp32_bytes:
        return human_bytes(size)
    ratio = format_ratio(size / fp32_bytes)
    return f"{human_bytes(size)}, {ratio} of the {human_bytes(fp32_bytes)} in FP32"


def _error(subject: SubjectRecord) -> str:
    verdict, error = subject.get("verdict", "none"), subject.get("error")
    if error:
        used = f"{error['share']:.0%} of what is allowed"
        words = f"{used}: {error['found']}, {error['allowed']} allowed"
        return words if verdict == "none" else f"{verdict}, {words}"
    return "not validated; run: enginery validate" if verdict == "none" else verdict


def _speed(
    subject: SubjectRecord, subjects: Sequence[SubjectRecord], result: BenchResult | None
) -> str:
    """Return inputs per second at the middle shape, and how they compare with FP32."""
    contenders = result.contenders if result else []
    runners = {record.subject: record.name for record in contenders if record.is_enginery}
    runner = runners.get(subject["name"], "")
    measured = _measured(result, runner) if result else None
    if result is None or measured is None:
        return "not measured; run: enginery bench"
    bases = [record.name for record in contenders if record.kind == "pytorch"]
    bases += [
        runners[other["name"]]
        for other in subjects
        if other["precision"] == _FP32 and other["name"] in runners
    ]
    where, speed, comparisons = measured
    device = _device(result, runner)
    words = [f"{speed:,.1f} inputs/s{where} on {device}"]
    if not bases:
        words.append("nothing in FP32 was measured; run: enginery bench --against pytorch")
    for base in bases[:1]:
        compared = [c for c in comparisons if {c.contender, c.base} == {runner, base}]
        words += [f"{c.words_of(runner)}, compared with {base}" for c in compared]
    if device == _CPU and subject["target"] in ("tensorrt", "cuda"):
        words.append(f"made for {subject['target']}, its speed on a GPU was not measured")
    return "; ".join(words)


def _measured(result: BenchResult, runner: str) -> tuple[str, float, list[Comparison]] | None:
    """Return the middle shape in words, the inputs per second there, and its comparisons."""
    middle = {dim: middle_size(result, dim) for dim in ("batch", "sequence")}

    def rank(case: BenchCase) -> int:
        return sum(case.sizes.get(dim) == size for dim, size in middle.items())

    speeds = [
        (case, measurement.inputs_per_second)
        for case in result.cases
        for measurement in case.measurements
        if measurement.contender == runner
    ]
    if speeds:
        case, speed = max(speeds, key=lambda pair: rank(pair[0]))
        sizes = ", ".join(f"{dim} {size}" for dim, size in case.sizes.items())
        return f" at {sizes}" if sizes else "", speed, case.comparisons
    if result.images is None or runner not in result.images.totals:
        return None
    count = len(result.images.images)
    speed = 1e3 * count / result.images.totals[runner].median_ms
    return f" over {count} images", speed, result.images.comparisons


def _device(result: BenchResult, runner: str) -> str:
    """Return what a backend ran on: the CPU, the GPUs' names, or the providers."""
    device = result.contender(runner).device
    return _CPU if device == "cpu" else gpu_names(result.machine) or device
