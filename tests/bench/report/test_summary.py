"""What a reader decides by, at the top of the page."""

from dataclasses import replace

import pytest

from enginery.bench.report.summary import model_facts
from tests.bench.sample_results import make_backend_record, make_case, make_result
from tests.reports import samples


def make_comparison(times, *, pairs, precisions, rounds=10, **subjects):
    """Return the benchmark of models, with a backend for each time: `model: backend`."""
    contenders = [
        make_backend_record(name, kind=name.split(": ")[1], subject=name.split(": ")[0])
        for name in times
    ]
    case = make_case({"batch": 8, "sequence": 128}, times, pairs=pairs, rounds=rounds)
    result = make_result(contenders=contenders, cases=[case], precisions=precisions)
    changed = [{**s, **subjects.get(s["name"], {})} for s in result.subjects]
    return replace(result, subjects=changed)


def facts_of(result):
    return dict(model_facts(None, None, result))


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
    assert model_facts(None, None, result) == [
        ("fp32, fp32: size", "100.0 MB"),
        ("fp32, fp32: error", "not validated; run: enginery validate"),
        (
            "fp32, fp32: speed",
            "400.0 inputs/s at batch 8, sequence 128 on the CPU; 2.00x as fast (2.00x to 2.00x), "
            "compared with fp32: pytorch",
        ),
        ("small, int8: size", "25.0 MB, 0.25x of the 100.0 MB in FP32"),
        (
            "small, int8: error",
            "passed, 50% of what is allowed: mean cosine 0.9990, at least 0.9980 allowed",
        ),
        (
            "small, int8: speed",
            "1,600.0 inputs/s at batch 8, sequence 128 on the CPU; 8.00x as fast (8.00x to 8.00x), "
            "compared with fp32: pytorch",
        ),
    ]


def test_fp32_model_stands_in_for_pytorch():
    result = make_comparison(
        {"small: enginery": 5.0, "fp32: enginery": 20.0},
        pairs=[("fp32: enginery", "small: enginery")],
        precisions={"small": "int8", "fp32": "fp32"},
    )
    words = "4.00x as fast (4.00x to 4.00x), compared with fp32: enginery"
    assert facts_of(result)["small, int8: speed"].endswith(words)


@pytest.mark.parametrize(
    ("provider", "gpus", "device"),
    [
        ("CPUExecutionProvider", [], "the CPU"),
        ("CUDAExecutionProvider", [{"name": "NVIDIA L4"}], "NVIDIA L4"),
        ("OpenVINOExecutionProvider", [], "openvino"),
    ],
)
def test_speed_names_its_device_and_what_was_not_measured(provider, gpus, device):
    result = make_comparison({"m: enginery": 5.0}, pairs=[], precisions={"m": "fp16"})
    contenders = [
        replace(record, providers=[{"name": provider, "reason": "requested"}])
        for record in result.contenders
    ]
    machine = {**result.machine, "gpus": gpus}
    facts = facts_of(replace(result, contenders=contenders, machine=machine))
    assert facts["speed"] == (
        f"1,600.0 inputs/s at batch 8, sequence 128 on {device}; nothing in FP32 was measured; "
        "run: enginery bench --against pytorch"
    )
    assert facts["size"] == "not recorded"


def test_artifact_is_described_from_its_manifest_and_validation(tmp_path):
    artifact = samples.sample_artifact(tmp_path / "minilm")
    facts = dict(model_facts(artifact, samples.validation(), None))
    assert facts["size"].endswith("of the 90.4 MB in FP32"), "four bytes for each weight"
    assert facts["error"].startswith("80% of what is allowed: mean cosine 0.9708")
    assert facts["speed"] == "not measured; run: enginery bench"
