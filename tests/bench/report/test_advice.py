"""The rules of the advice, on results built in code."""

from __future__ import annotations

import pytest

from enginery.bench.measurement.padding import compute_padding
from enginery.bench.report.advice import (
    advise,
    copies_dominate,
    gpu_slower_than_cpu,
    int8_slower_than_fp16,
    launches_dominate,
    more_shapes_than_buckets,
    more_shapes_than_profiles,
    much_padding,
    searching_convolutions,
    too_many_threads,
)
from tests.bench.sample_results import CPU, CUDA, make_backend_record, make_case, make_result


def records_with_search(search="EXHAUSTIVE", *, convolutions=12, provider=CUDA):
    options = {"CUDAExecutionProvider": {"cudnn_conv_algo_search": search}}
    return [
        make_backend_record("enginery", provider=provider, convolutions=convolutions),
        make_backend_record("onnxruntime", provider=provider, provider_options=options),
    ]


TWO_SHAPES = [make_case({"batch": 1, "height": height}, {"enginery": 9.0}) for height in (640, 704)]


def test_exhaustive_search_with_several_shapes():
    (advice,) = searching_convolutions(
        make_result(contenders=records_with_search(), cases=TWO_SHAPES)
    )
    assert "12 convolutions, ran 2 shapes" in advice.evidence
    assert "HEURISTIC" in advice.remedy


@pytest.mark.parametrize(
    "contenders",
    [
        records_with_search("HEURISTIC"),
        records_with_search(convolutions=0),
        records_with_search(provider=CPU),
    ],
    ids=["heuristic", "no convolution", "on the CPU"],
)
def test_no_advice_without_exhaustive_search(contenders):
    assert not list(searching_convolutions(make_result(contenders=contenders, cases=TWO_SHAPES)))


def test_exhaustive_search_with_one_shape():
    result = make_result(contenders=records_with_search(), cases=TWO_SHAPES[:1])
    assert not list(searching_convolutions(result))


def test_more_shapes_than_profiles():
    contender = make_backend_record("enginery", provider=CUDA, profiles=["batch=1,height=640"])
    (advice,) = more_shapes_than_profiles(make_result(contenders=[contender], cases=TWO_SHAPES))
    assert advice.evidence == "2 shapes ran in 1 profiles: batch=1,height=640"
    both = make_backend_record("enginery", provider=CUDA, profiles=["a=1", "a=2"])
    assert not list(more_shapes_than_profiles(make_result(contenders=[both], cases=TWO_SHAPES)))


@pytest.mark.parametrize(("several", "fires"), [(1.1, True), (4.0, False)])
def test_launches_dominate_if_eight_inputs_take_as_long_as_one(several, fires):
    cases = [
        make_case({"batch": 1, "sequence": 16}, {"enginery": 1.0}),
        make_case({"batch": 8, "sequence": 16}, {"enginery": several}),
        make_case({"batch": 8, "sequence": 512}, {"enginery": 90.0}),
    ]
    on_gpu = make_result(contenders=[make_backend_record("enginery", provider=CUDA)], cases=cases)
    found = list(launches_dominate(on_gpu))
    assert len(found) == fires
    if fires:
        assert found[0].evidence == "enginery: 1.00 ms for 1 input, 1.10 ms for 8"
    on_cpu = make_result(contenders=[make_backend_record("enginery")], cases=cases)
    assert not list(launches_dominate(on_cpu))


@pytest.mark.parametrize(("share", "fires"), [(0.4, True), (0.2, False)])
def test_host_copies_dominate(share, fires):
    copies = {"in_ms": 0.1, "device_ms": 1.0, "out_ms": 0.6, "share": share}
    case = make_case({"batch": 8}, {"onnxruntime": 1.7}, copies={"onnxruntime": copies})
    contender = make_backend_record("onnxruntime", provider=CUDA)
    found = list(copies_dominate(make_result(contenders=[contender], cases=[case])))
    assert len(found) == fires
    if fires:
        assert found[0].evidence.startswith("onnxruntime, a session without binding, at batch 8")
        assert "already binds" in found[0].remedy
        unbound = make_result(contenders=[contender], cases=[case], io_binding=False)
        (advice,) = copies_dominate(unbound)
        assert "leave --no-io-binding out" in advice.remedy


def test_no_advice_to_use_a_cuda_graph_that_is_in_use():
    cases = [make_case({"batch": batch}, {"enginery": 1.0}) for batch in (1, 8)]
    contenders = [make_backend_record("enginery", provider=CUDA)]
    (plain,) = launches_dominate(make_result(contenders=contenders, cases=cases))
    (graph,) = launches_dominate(make_result(contenders=contenders, cases=cases, cuda_graph=True))
    assert "--cuda-graph" in plain.remedy
    assert graph.remedy == "Batch requests together."


def test_more_shapes_than_buckets_on_a_gpu():
    cases = [make_case({"batch": batch}, {"enginery": 1.0}) for batch in range(1, 10)]
    on_gpu = [make_backend_record("enginery", provider=CUDA)]
    (advice,) = more_shapes_than_buckets(make_result(contenders=on_gpu, cases=cases))
    assert "enginery ran 9 shapes; by default a runner keeps 8" in advice.evidence
    assert "buckets=9" in advice.remedy
    (graph,) = more_shapes_than_buckets(
        make_result(contenders=on_gpu, cases=cases, cuda_graph=True)
    )
    assert "run without a CUDA graph" in graph.evidence
    engine = [make_backend_record("enginery", provider=CUDA, profiles=["a=1"])]
    for result in (
        make_result(contenders=on_gpu, cases=cases[:8]),
        make_result(contenders=on_gpu, cases=cases, io_binding=False),
        make_result(contenders=[make_backend_record("enginery")], cases=cases),
        make_result(contenders=engine, cases=cases),
    ):
        assert not list(more_shapes_than_buckets(result))


def gpu_and_cpu(gpu_ms, cpu_ms):
    contenders = [*records_with_search(), make_backend_record("enginery-cpu")]
    times = {"enginery": gpu_ms, "enginery-cpu": cpu_ms}
    cases = [
        make_case({"height": height}, times, pairs=[("enginery-cpu", "enginery")])
        for height in (640, 704)
    ]
    return make_result(contenders=contenders, cases=cases)


def test_gpu_slower_than_cpu_gives_reasons():
    (advice,) = gpu_slower_than_cpu(gpu_and_cpu(100.0, 40.0))
    assert advice.finding == "the GPU is slower than the CPU at height 640"
    assert advice.evidence.startswith("the CPU is 2.50x as fast; enginery has 12 convolutions")


def test_openvino_does_not_count_as_a_gpu():
    openvino = {"name": "OpenVINOExecutionProvider", "reason": "requested"}
    contenders = [
        make_backend_record("enginery", provider=openvino),
        make_backend_record("enginery-cpu"),
    ]
    times = {"enginery": 100.0, "enginery-cpu": 40.0}
    cases = [make_case({"height": 640}, times, pairs=[("enginery-cpu", "enginery")])]
    assert not list(gpu_slower_than_cpu(make_result(contenders=contenders, cases=cases)))


@pytest.mark.parametrize("gpu_ms", [10.0, 40.0, 40.4])
def test_no_advice_on_a_faster_or_equal_gpu(gpu_ms):
    assert not list(gpu_slower_than_cpu(gpu_and_cpu(gpu_ms, 40.0)))


@pytest.mark.parametrize(
    ("int8_ms", "fires"), [(2.0, True), (1.0, False), (0.5, False)], ids=["slow", "same", "fast"]
)
@pytest.mark.parametrize("int8_first", [True, False])
def test_int8_slower_than_fp16(int8_ms, fires, int8_first):
    names = ["int8: enginery", "fp16: enginery"]
    times = {"int8: enginery": int8_ms, "fp16: enginery": 1.0}
    pair = tuple(names if int8_first else names[::-1])
    contenders = [make_backend_record(n, kind="enginery", subject=n.split(":")[0]) for n in names]
    case = make_case({"batch": 1}, times, pairs=[pair])
    result = make_result(
        contenders=contenders, cases=[case], precisions={"int8": "int8", "fp16": "fp16"}
    )
    found = list(int8_slower_than_fp16(result))
    assert len(found) == fires
    if fires:
        assert found[0].evidence == "INT8 is 0.50x as fast as FP16"


def test_padding_over_thirty_percent():
    lengths = [10, 200] * 32
    padding = [compute_padding(lengths, batch=batch) for batch in (1, 8)]
    (advice,) = much_padding(
        make_result(contenders=[make_backend_record("enginery")], padding=padding)
    )
    assert advice.finding == "48% of the tokens are padding"
    assert "batch 8; sorted by length: 0%" in advice.evidence
    little = [compute_padding([100, 90] * 8, batch=8)]
    result = make_result(contenders=[make_backend_record("enginery")], padding=little)
    assert not list(much_padding(result))


def test_padding_of_known_lengths():
    found = compute_padding([10, 30, 20], batch=2)
    assert found.in_order == pytest.approx(1 - 60 / 80)
    assert found.sorted == pytest.approx(1 - 60 / 70)
    assert compute_padding([5, 9, 7], batch=1).in_order == 0


@pytest.mark.parametrize(("threads", "fires"), [(0, False), (4, False), (5, True)])
def test_more_threads_than_physical_cores(threads, fires):
    result = make_result(contenders=[make_backend_record("enginery")], threads=threads)
    assert [advice.rule for advice in too_many_threads(result)] == ["threads"] * fires


def test_ordinary_result_has_no_advice():
    case = make_case({"batch": 1}, {"enginery": 1.0, "onnxruntime": 1.0})
    contenders = [make_backend_record("enginery"), make_backend_record("onnxruntime")]
    assert advise(make_result(contenders=contenders, cases=[case])) == []
