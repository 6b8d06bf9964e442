"""Notes and advice, on results built in code."""

from dataclasses import replace

import pytest

from enginery.bench.config import BenchConfig
from enginery.bench.notes import advise, fallback_notes, stage_notes
from enginery.runtime.providers.known import CPU as CPU_PROVIDER
from tests.bench.sample_results import CUDA, make_backend_record, make_case, make_result

OPENVINO = {"name": "OpenVINOExecutionProvider", "reason": "requested"}
REASON = "cuda requested, but libcudart.so.13 was not found"


def gpu_and_cpu(gpu_ms, cpu_ms, *, provider=CUDA, rounds=10):
    times = {"enginery": gpu_ms, "enginery-cpu": cpu_ms}
    contenders = [make_backend_record(name, provider=provider) for name in times]
    pairs = [("enginery-cpu", "enginery")]
    cases = [
        make_case({"height": height}, times, pairs=pairs, rounds=rounds) for height in (640, 704)
    ]
    return make_result(contenders=contenders, cases=cases)


def test_gpu_that_is_clearly_slower_than_the_cpu_has_advice_with_the_ratio():
    (advice,) = advise(gpu_and_cpu(100.0, 40.0))
    assert advice.finding == "the GPU is slower than the CPU at 640"
    assert advice.evidence == (
        "enginery compared with enginery-cpu: 0.40x as fast (0.40x to 0.40x)"
    )


@pytest.mark.parametrize(
    "result",
    [
        gpu_and_cpu(10.0, 40.0),
        gpu_and_cpu(40.4, 40.0),
        gpu_and_cpu(100.0, 40.0, rounds=3),
        gpu_and_cpu(100.0, 40.0, provider=OPENVINO),
    ],
    ids=["faster", "no difference", "no interval", "OpenVINO may run on the CPU"],
)
def test_no_advice_without_a_clear_ratio_against_a_gpu(result):
    assert advise(result) == []


def test_unclear_ratio_is_no_advice():
    result = gpu_and_cpu(100.0, 40.0)
    (comparison,) = result.cases[0].comparisons
    unclear = replace(comparison, interval=(1.1, 9.0))
    assert advise(replace(result, cases=[replace(result.cases[0], comparisons=[unclear])])) == []


@pytest.mark.parametrize(
    ("int8_ms", "has_advice"),
    [(2.0, True), (1.0, False), (0.5, False)],
    ids=["slow", "same", "fast"],
)
@pytest.mark.parametrize("int8_first", [True, False])
def test_int8_slower_than_fp16(int8_ms, has_advice, int8_first):
    names = ["int8: enginery", "fp16: enginery"]
    times = {"int8: enginery": int8_ms, "fp16: enginery": 1.0}
    pair = tuple(names if int8_first else names[::-1])
    contenders = [make_backend_record(n, kind="enginery", subject=n.split(":")[0]) for n in names]
    result = make_result(
        contenders=contenders,
        cases=[make_case({"batch": 1}, times, pairs=[pair])],
        precisions={"int8": "int8", "fp16": "fp16"},
    )
    evidence = "int8: enginery compared with fp16: enginery: 0.50x as fast (0.50x to 0.50x)"
    assert [advice.evidence for advice in advise(result)] == [evidence] * has_advice


def test_reason_of_a_fallback_is_in_the_notes():
    fallback = {"name": CPU_PROVIDER, "reason": REASON}
    contenders = [make_backend_record(n, provider=fallback) for n in ("enginery", "onnxruntime")]
    machine = make_result(contenders=contenders).machine
    assert stage_notes(machine, [], contenders, BenchConfig(cuda_graph=True)) == [
        f"enginery, onnxruntime on cpu: {REASON}",
        "no CUDA graph was captured: cpu does not support them",
    ]
    requested = {"name": CPU_PROVIDER, "reason": "requested"}
    assert fallback_notes([("enginery", [requested]), ("pytorch", [])]) == []
