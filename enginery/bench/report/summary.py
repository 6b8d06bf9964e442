"""The summary that opens the page: verdict, size, error and speed of each model beside FP32.

    summary = summarize(artifact, validation, result)
    summary.measures[0].bars[1]    # Bar(name='int8', value='37.5 MB', share=0.41, is_base=False)

Every bar has its number beside it, and FP32's bars are hollow, so that nothing depends on colors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from enginery.bench.report.curves import middle_size
from enginery.core.accuracy import LabelMetrics
from enginery.core.artifact.artifact import Artifact
from enginery.reports.benchmark import (
    BenchCase,
    BenchResult,
    Comparison,
    SubjectRecord,
    describe_ratio,
    format_ratio,
    gpu_names,
    is_clear_ratio,
    is_overloaded,
)
from enginery.reports.validation import ErrorUse, ValidationReport
from enginery.runtime.providers.known import short_name

_FP32 = "fp32"
_BYTES_OF_FP32 = 4
_CPU = "the CPU"
VERDICTS = {"passed": "passed", "failed": "failed", "none": "not validated"}


@dataclass(frozen=True)
class Bar:
    """A number of a measure."""

    name: str
    value: str
    share: float
    """Length of the bar, 0 to 1."""
    is_base: bool = False
    """True for FP32, or for what is allowed."""


@dataclass(frozen=True)
class Measure:
    """One panel of the summary."""

    title: str
    bars: list[Bar]
    notes: list[str]
    """What the bars amount to: ratios to FP32, or why there are none."""


@dataclass(frozen=True)
class Model:
    """What the summary says of one model."""

    name: str
    precision: str
    size_bytes: int | None
    verdict: str
    """A key of `VERDICTS`."""
    error: ErrorUse | None
    backend: str
    """Name of enginery's runner of this model in the benchmark; empty if it was not measured."""

    @property
    def verdict_words(self) -> str:
        return VERDICTS.get(self.verdict, self.verdict)


@dataclass(frozen=True)
class Summary:
    """The models, and how they compare with FP32."""

    models: list[Model]
    measures: list[Measure]


def summarize(
    artifact: Artifact | None, validation: ValidationReport | None, result: BenchResult | None
) -> Summary:
    """Return the summary of an artifact's reports, or of a benchmark of several models.

    Args:
        artifact: the artifact of the page; None for a benchmark in a directory of its own.
        validation: the artifact's validation, if it has one.
        result: the benchmark, if there is one.

    Raises:
        ValueError: the benchmark has no model.
    """
    if result and not result.subjects:
        raise ValueError("it has no model")
    models = [_measured(subject, result) for subject in result.subjects] if result else []
    if artifact:
        files, graphs = artifact.manifest.files, artifact.manifest.graphs
        hashes = {files[graph.file].sha256 for graph in graphs}
        subjects = result.subjects if result else []
        subject_name = next((s["name"] for s in subjects if s["graph_sha256"] in hashes), "")
        this = Model(
            subject_name or artifact.manifest.source.name,
            artifact.manifest.precision,
            sum(map(artifact.graph_bytes, graphs)),
            artifact.validation_status(),
            validation.error_use() if validation else None,
            _runner_of(subject_name, result),
        )
        models = [this, *(model for model in models if model.name != subject_name)]
    models.sort(key=lambda model: model.precision != _FP32)
    labels = (result and result.labels) or (validation and validation.labels) or None
    measures = [
        _size(models, validation),
        _accuracy(labels) if labels and labels.accuracies else _error(models),
        _speed(models, result),
    ]
    return Summary(models, measures)


def _measured(subject: SubjectRecord, result: BenchResult) -> Model:
    return Model(
        subject["name"],
        subject["precision"],
        subject.get("size_bytes"),
        subject.get("verdict", "none"),
        subject.get("error"),
        _runner_of(subject["name"], result),
    )


def _runner_of(subject: str, result: BenchResult | None) -> str:
    records = result.contenders if result else []
    names = (r.name for r in records if r.is_enginery and r.subject == subject)
    return next(names, "")


def _size(models: Sequence[Model], validation: ValidationReport | None) -> Measure:
    sizes = [(model, model.size_bytes) for model in models if model.size_bytes]
    bases = [size for model, size in sizes if model.precision == _FP32]
    base = bases[0] if bases else 0
    bars = [Bar(_name(m, models), _mb(size), size, m.precision == _FP32) for m, size in sizes]
    if not bases and validation and validation.weights.elements:
        base = validation.weights.elements * _BYTES_OF_FP32
        bars.insert(0, Bar("weights in FP32", _mb(base), base, is_base=True))
    notes = [
        _about(model, models, f"{format_ratio(size / base)} the size of FP32")
        for model, size in sizes
        if base and model.precision != _FP32
    ]
    if not base and sizes:
        notes = ["The size of the FP32 model is not known. Run: enginery validate"]
    return Measure("Size", _scaled(bars), notes or ([] if sizes else ["The size is not recorded."]))


def _accuracy(labels: LabelMetrics) -> Measure:
    bars = [
        Bar(accuracy.name, f"{100 * accuracy.accuracy:.1f} %", accuracy.accuracy, index == 0)
        for index, accuracy in enumerate(labels.accuracies)
    ]
    notes = [f"{change.name}: {change.describe()}" for change in labels.changes]
    return Measure(f"Accuracy on {labels.accuracies[0].rows} labelled rows", bars, notes)


def _error(models: Sequence[Model]) -> Measure:
    title = "Error against FP32 in PyTorch"
    measured = [(model, model.error) for model in models if model.error]
    if not measured:
        return Measure(title, [], ["It was not validated. Run: enginery validate"])
    bars = [
        Bar(_name(m, models), f"{error['share']:.0%} of what is allowed", min(error["share"], 4.0))
        for m, error in measured
    ]
    notes = [
        _about(m, models, f"{error['found']}, {error['allowed']} allowed") for m, error in measured
    ]
    missing = [_name(model, models) for model in models if not model.error]
    if missing:
        notes.append(f"not validated: {', '.join(missing)}")
    return Measure(title, _scaled([Bar("allowed", "100%", 1.0, is_base=True), *bars]), notes)


def _speed(models: Sequence[Model], result: BenchResult | None) -> Measure:
    measured = [model for model in models if model.backend]
    if result is None or not measured:
        return Measure("Speed", [], ["It was not measured. Run: enginery bench"])
    base = _fp32_backend(models, result)
    names = list(dict.fromkeys(filter(None, [base, *(model.backend for model in measured)])))
    title, speeds, comparisons = _speeds(result, names)
    device = _device(result, names)
    labels = {model.backend: _name(model, models) for model in measured}
    if base:
        labels.setdefault(base, "PyTorch, FP32")
    bars = [
        Bar(labels[name], f"{speeds[name]:,.1f} inputs/s", speeds[name], name == base)
        for name in names
        if name in speeds
    ]
    by_backend = {model.backend: model for model in measured}
    notes = [
        _about(by_backend[name], models, _compare(comparison, name))
        for comparison in comparisons
        if base in (comparison.contender, comparison.base)
        for name in {comparison.contender, comparison.base} - {base}
    ]
    if not base:
        notes = ["Nothing in FP32 was measured beside it. Run: enginery bench --against pytorch"]
    if is_overloaded(result.machine):
        notes.append("The machine was busy.")
    targets = {subject["target"] for subject in result.subjects} & {"tensorrt", "cuda"}
    if device == _CPU and targets:
        made_for = " and ".join(sorted(targets))
        notes.append(f"Made for {made_for}; the speed on a GPU was not measured.")
    return Measure(f"{title}, on {device}", _scaled(bars), notes)


def _device(result: BenchResult, names: Sequence[str]) -> str:
    """Return what these backends ran on: the CPU, the GPUs' names, or the providers."""
    on = {
        short_name(record.providers[0]["name"])
        if record.providers
        else str(record.facts.get("device", "cpu"))
        for record in result.contenders
        if record.name in names
    }
    return _CPU if on <= {"cpu"} else gpu_names(result.machine) or ", ".join(sorted(on))


def _fp32_backend(models: Sequence[Model], result: BenchResult) -> str:
    """Return the backend of FP32: PyTorch, or else enginery's runner of an FP32 model."""
    pytorch = [record.name for record in result.contenders if record.kind == "pytorch"]
    fp32 = [model.backend for model in models if model.precision == _FP32 and model.backend]
    return next(iter([*pytorch, *(fp32 if len(models) > 1 else [])]), "")


def _speeds(
    result: BenchResult, names: Sequence[str]
) -> tuple[str, dict[str, float], list[Comparison]]:
    """Return a title, inputs per second by backend, and the comparisons: at one shape."""
    case = _middle_case(result, names)
    if case is not None:
        all_speeds = ((m.contender, m.inputs_per_second) for m in case.measurements)
        speeds = {name: speed for name, speed in all_speeds if name in names}
        where = ", ".join(f"{dim} {size}" for dim, size in case.sizes.items())
        comparisons = [c for c in case.comparisons if {c.contender, c.base} <= set(names)]
        return f"Speed at {where}" if where else "Speed", speeds, comparisons
    images = result.images
    if images is None:
        return "Speed", {}, []
    count = len(images.images)
    speeds = {n: 1e3 * count / t.median_ms for n, t in images.totals.items() if n in names}
    comparisons = [c for c in images.comparisons if {c.contender, c.base} <= set(names)]
    return f"Speed on {count} images", speeds, comparisons


def _middle_case(result: BenchResult, names: Sequence[str]) -> BenchCase | None:
    """Return the shape of the figures, or the one nearest to it that most backends ran."""
    middle = {dim: middle_size(result, dim) for dim in ("batch", "sequence")}

    def rank(case: BenchCase) -> tuple[int, int]:
        ran = sum(measured.contender in names for measured in case.measurements)
        return ran, sum(case.sizes.get(dim) == size for dim, size in middle.items())

    return max(result.cases, key=rank, default=None)


def _compare(comparison: Comparison, backend: str) -> str:
    ratio, interval = comparison.speedup_of(backend)
    if interval is None:
        return "unclear, there were too few rounds"
    low, high = map(format_ratio, interval)
    if not is_clear_ratio(ratio, interval):
        return (
            f"unclear, {describe_ratio(ratio, interval)} the speed of FP32: times varied too much"
        )
    if not comparison.different:
        return f"no difference seen from FP32 ({low} to {high})"
    return f"{format_ratio(ratio)} the speed of FP32 ({low} to {high})"


def _name(model: Model, models: Sequence[Model]) -> str:
    """Return a model's precision, or its name with the precision if there are several models."""
    if len(models) == 1:
        return f"this model, {model.precision}"
    return model.name if model.precision in model.name else f"{model.name} ({model.precision})"


def _about(model: Model, models: Sequence[Model], words: str) -> str:
    """Return the words, after the model's name if there are several."""
    return f"{_name(model, models)}: {words}" if len(models) > 1 else words


def _scaled(bars: Sequence[Bar]) -> list[Bar]:
    """Return the bars with shares of the longest one."""
    longest = max((bar.share for bar in bars), default=0) or 1.0
    return [Bar(bar.name, bar.value, bar.share / longest, bar.is_base) for bar in bars]


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
