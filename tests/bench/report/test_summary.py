"""The summary that opens the page."""

from dataclasses import replace

import pytest

from enginery.bench.report.summary import summarize
from enginery.core.accuracy import AccuracyChange, LabelAccuracy, LabelMetrics
from enginery.core.artifact.artifact import Artifact
from enginery.reports.validation import ValidationReport
from tests.bench.sample_results import make_backend_record, make_case, make_result


def make_comparison(times, *, pairs, precisions, rounds=10, **subjects):
    """Return the benchmark of models, with a backend for each time: `model: backend`."""
    contenders = [
        make_backend_record(name, kind=name.split(": ")[1], subject=name.split(": ")[0])
        for name in times
    ]
    case = make_case({"batch": 8, "sequence": 128}, times, pairs=pairs, rounds=rounds)
    result = make_result(contenders=contenders, cases=[case], precisions=precisions)
    found = [{**s, **subjects.get(s["name"], {})} for s in result.subjects]
    return replace(result, subjects=found)


def bars_of(measure):
    return [(bar.name, bar.value, round(bar.share, 3), bar.is_base) for bar in measure.bars]


def test_models_are_compared_with_fp32():
    result = make_comparison(
        {"small: enginery": 5.0, "fp32: enginery": 20.0, "fp32: pytorch": 40.0},
        pairs=[("small: enginery", "fp32: pytorch"), ("fp32: enginery", "fp32: pytorch")],
        precisions={"small": "int8", "fp32": "fp32"},
        small={
            "size_bytes": 25_000_000,
            "verdict": "passed",
            "error": {"found": "mean cosine 0.9990", "allowed": "at least 0.9980", "share": 0.5},
        },
        fp32={"size_bytes": 100_000_000},
    )
    summary = summarize(None, None, result)
    assert [(m.name, m.verdict_words) for m in summary.models] == [
        ("fp32", "not validated"),
        ("small", "passed"),
    ]
    size, error, speed = summary.measures
    assert bars_of(size) == [
        ("fp32", "100.0 MB", 1.0, True),
        ("small (int8)", "25.0 MB", 0.25, False),
    ]
    assert size.notes == ["small (int8): 0.25x the size of FP32"]
    assert bars_of(error) == [
        ("allowed", "100%", 1.0, True),
        ("small (int8)", "50% of what is allowed", 0.5, False),
    ]
    assert error.notes == [
        "small (int8): mean cosine 0.9990, at least 0.9980 allowed",
        "not validated: fp32",
    ]
    assert speed.title == "Speed at batch 8, sequence 128, on the CPU"
    assert bars_of(speed) == [
        ("PyTorch, FP32", "200.0 inputs/s", 0.125, True),
        ("fp32", "400.0 inputs/s", 0.25, False),
        ("small (int8)", "1,600.0 inputs/s", 1.0, False),
    ]
    assert speed.notes == [
        "small (int8): 8.00x the speed of FP32 (8.00x to 8.00x)",
        "fp32: 2.00x the speed of FP32 (2.00x to 2.00x)",
    ]


def test_fp32_model_stands_in_for_pytorch():
    result = make_comparison(
        {"small: enginery": 5.0, "fp32: enginery": 20.0},
        pairs=[("fp32: enginery", "small: enginery")],
        precisions={"small": "int8", "fp32": "fp32"},
    )
    speed = summarize(None, None, result).measures[2]
    assert [bar.is_base for bar in speed.bars] == [True, False]
    assert speed.notes == ["small (int8): 4.00x the speed of FP32 (4.00x to 4.00x)"]


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        (None, "unclear, there were too few rounds"),
        ((0.3, 7.0), "unclear, 0.30x to 7.00x the speed of FP32: times varied too much"),
        ((1.8, 2.2), "2.00x the speed of FP32 (1.80x to 2.20x)"),
    ],
)
def test_ratio_without_a_narrow_interval_is_unclear(interval, words):
    result = make_comparison(
        {"m: enginery": 5.0, "m: pytorch": 10.0},
        pairs=[("m: enginery", "m: pytorch")],
        precisions={"m": "fp16"},
    )
    (case,) = result.cases
    (found,) = case.comparisons
    cases = [replace(case, comparisons=[replace(found, interval=interval)])]
    assert summarize(None, None, replace(result, cases=cases)).measures[2].notes == [words]


@pytest.mark.parametrize(
    ("provider", "gpus", "device"),
    [
        ("CPUExecutionProvider", [], "the CPU"),
        ("CUDAExecutionProvider", [{"name": "NVIDIA L4"}], "NVIDIA L4"),
        ("OpenVINOExecutionProvider", [], "openvino"),
    ],
)
def test_speed_names_its_device(provider, gpus, device):
    result = make_comparison({"m: enginery": 5.0}, pairs=[], precisions={"m": "fp16"})
    contenders = [
        replace(record, providers=[{"name": provider, "reason": "requested"}])
        for record in result.contenders
    ]
    machine = {**result.machine, "gpus": gpus}
    subjects = [{**subject, "target": "tensorrt"} for subject in result.subjects]
    result = replace(result, contenders=contenders, machine=machine, subjects=subjects)
    speed = summarize(None, None, result).measures[2]
    assert speed.title == f"Speed at batch 8, sequence 128, on {device}"
    elsewhere = "Made for tensorrt; the speed on a GPU was not measured." in speed.notes
    assert elsewhere == (device == "the CPU")


def test_what_was_not_measured_is_said_with_the_command():
    result = make_comparison({"m: enginery": 5.0}, pairs=[], precisions={"m": "fp16"})
    size, error, speed = summarize(None, None, result).measures
    assert size.notes == ["The size is not recorded."]
    assert error.notes == ["It was not validated. Run: enginery validate"]
    assert "enginery bench --against pytorch" in speed.notes[0]
    busy = replace(result, machine={**result.machine, "load": 99.0})
    assert summarize(None, None, busy).measures[2].notes[-1] == "The machine was busy."


@pytest.mark.more
def test_artifact_is_summarized_from_its_manifest_and_validation(exported, copied):
    from enginery import validate_model

    artifact = copied(exported("bert", "feature-extraction"))
    summary = summarize(artifact, None, None)
    assert [model.verdict for model in summary.models] == ["none"]
    validate_model(artifact)
    artifact = Artifact.open(artifact.path)
    report = ValidationReport.of(artifact)
    (model,) = (summary := summarize(artifact, report, None)).models
    assert (model.verdict, model.precision) == ("passed", "fp32")
    assert model.size_bytes == artifact.model.stat().st_size
    size, error, speed = summary.measures
    assert [bar.name for bar in size.bars] == ["this model, fp32"]
    assert error.bars[1].share == pytest.approx(report.worst()[1].limit_ratio)
    assert speed.notes == ["It was not measured. Run: enginery bench"]


def test_accuracy_on_labels_replaces_the_error():
    accuracies = [
        LabelAccuracy("PyTorch", 90, 100, (0.8, 0.95)),
        LabelAccuracy("this artifact", 85, 100, (0.75, 0.9)),
    ]
    change = AccuracyChange("this artifact", "PyTorch", 6, 1, -0.05, (-0.1, 0.0))
    result = make_comparison({"m: enginery": 5.0}, pairs=[], precisions={"m": "int8"})
    labelled = replace(result, labels=LabelMetrics("label", accuracies, [change]))
    accuracy = summarize(None, None, labelled).measures[1]
    assert accuracy.title == "Accuracy on 100 labelled rows"
    assert bars_of(accuracy) == [
        ("PyTorch", "90.0 %", 0.9, True),
        ("this artifact", "85.0 %", 0.85, False),
    ]
    assert accuracy.notes == ["this artifact: -5.0 % (-10.0 to +0.0 %)"]


def test_error_beyond_what_is_allowed_is_the_longer_bar():
    error = {"found": "mean cosine 0.9", "allowed": "at least 0.95", "share": 2.0}
    result = make_comparison(
        {"m: enginery": 5.0}, pairs=[], precisions={"m": "int8"}, m={"error": error}
    )
    bars = summarize(None, None, result).measures[1].bars
    assert [(bar.value, bar.share) for bar in bars] == [
        ("100%", 0.5),
        ("200% of what is allowed", 1.0),
    ]


def test_size_in_fp32_follows_from_the_weights(exported, copied):
    from enginery import validate_model

    artifact = copied(exported("bert", "feature-extraction"))
    validate_model(artifact)
    artifact = Artifact.open(artifact.path)
    report = ValidationReport.of(artifact)
    half = replace(artifact, manifest=artifact.manifest.model_copy(update={"precision": "fp16"}))
    size = summarize(half, report, None).measures[0]
    assert size.bars[0].name == "weights in FP32"
    assert size.bars[0].value == f"{4 * report.weights.elements / 1e6:,.1f} MB"
    assert size.notes[0].endswith("x the size of FP32")
