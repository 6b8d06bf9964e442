"""A small detector, images and results for the tests of the bench stage."""

from __future__ import annotations

from dataclasses import asdict

from enginery.bench.config import BenchConfig
from enginery.bench.measurement.statistics import compare, latency
from enginery.reports.benchmark import (
    BenchCase,
    BenchResult,
    ContenderRecord,
    ImagesResult,
    ImageTimes,
    Measurement,
)

QUICK = {
    "min_rounds": 1,
    "max_rounds": 7,
    "max_seconds": 4.0,
    "warm_up_seconds": 0.3,
    "precision": 0.5,
}
"""Options of a short measurement whose times do not matter."""

CUDA = {"name": "CUDAExecutionProvider", "reason": "requested"}
CPU = {"name": "CPUExecutionProvider", "reason": "requested"}


def save_detector(path, *, dims=("N", 3, "DynamicDimension.1", "DynamicDimension.2")):
    """Save a model of two convolutions, with dynamic dims named as Paddle's exporter does."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    generator = np.random.default_rng(0)
    weights = {
        "w1": generator.standard_normal((8, 3, 3, 3)),
        "w2": generator.standard_normal((1, 8, 3, 3)),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], "first", pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("Conv", ["b", "w2"], ["c"], "second", pads=[1, 1, 1, 1]),
        helper.make_node("Sigmoid", ["c"], ["scores"], "scores"),
    ]
    graph = helper.make_graph(
        nodes,
        "detector",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [None, 1, None, None])],
        [numpy_helper.from_array(w.astype("float32"), name) for name, w in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, str(path))
    return path


def save_photographs(folder, *sizes):
    from PIL import Image

    folder.mkdir()
    for index, (width, height) in enumerate(sizes):
        Image.effect_noise((width, height), 40).convert("RGB").save(folder / f"{index}.png")
    return folder


def make_backend_record(name, *, kind="", subject="model", provider=CPU, **facts):
    return ContenderRecord(
        name=name,
        kind=kind or name,
        label=name,
        subject=subject,
        providers=[provider],
        tools={"onnxruntime": "1.31"},
        start_seconds=0.1,
        load_seconds=0.2,
        peak_rss_bytes=10**8,
        device_memory_bytes=None,
        device_memory="the backend runs on the CPU",
        facts=facts,
        notes=[],
    )


def make_case(sizes, times_ms, *, pairs=(), rounds=10):
    """Return the result of a shape.

    Args:
        sizes: dim -> size.
        times_ms: backend -> time of every run.
        pairs: (backend, base) to compare.
        rounds: number of rounds.
    """
    turns = {name: [[time] * 2] * rounds for name, time in times_ms.items()}
    rows = sizes.get("batch", 1)
    measurements = [
        Measurement(
            contender=name,
            first_ms=3 * time,
            warm_up_runs=11,
            settled=True,
            latency=latency(turns[name]),
            inputs_per_second=1e3 * rows / time,
            tokens_per_second=None,
        )
        for name, time in times_ms.items()
    ]
    found = [
        compare(turns[base], turns[name], confidence=0.95, smallest=0.02, names=(name, base))
        for name, base in pairs
    ]
    return BenchCase(sizes, rows, None, measurements, found, {}, {}, "10 rounds")


def make_result(*, contenders, cases=(), images=None, padding=(), precisions=None, **options):
    names = list(dict.fromkeys(record.subject for record in contenders))
    subjects = [
        {
            "name": name,
            "path": f"build/{name}",
            "graph": "model.onnx",
            "graph_sha256": "0" * 64,
            "source": "org/name",
            "task": "unknown",
            "target": "onnx",
            "precision": (precisions or {}).get(name, "fp32"),
        }
        for name in names
    ]
    machine = {
        "cpu": "A <processor>",
        "physical_cores": 4,
        "usable_cpus": 8,
        "cpu_flags": ["avx2"],
        "load": 0.1,
        "memory_bytes": 16 * 10**9,
        "system": "Linux",
        "python": "3.11.7",
        "gpus": [],
        "no_gpu": "there is no NVIDIA driver",
        "driver": "",
        "tools": {"onnxruntime": "1.31"},
    }
    return BenchResult(
        subjects=subjects,
        machine=machine,
        options=asdict(BenchConfig(**options)),
        fields={},
        contenders=list(contenders),
        left_out={},
        cases=list(cases),
        images=images,
        padding=list(padding),
        advice=[],
        unknown={"energy": "nothing ran on an NVIDIA GPU"},
        notes=[],
        finished="2026-01-01T00:00:00+00:00",
        seconds=1.0,
    )


def make_image_result():
    """Return the result of eight images of different widths."""
    turns = {"enginery": [[9.0]] * 8, "enginery-cpu": [[4.0]] * 8}
    images = [
        ImageTimes(
            f"photograph-{i}.png",
            [1, 3, 640, 32 * i],
            dict.fromkeys(turns, 9.0),
            dict.fromkeys(turns, 1.0 * i),
        )
        for i in range(1, 9)
    ]
    totals = {name: latency(found) for name, found in turns.items()}
    pair = compare(
        turns["enginery"],
        turns["enginery-cpu"],
        confidence=0.95,
        smallest=0.02,
        names=("enginery-cpu", "enginery"),
    )
    found = ImagesResult("photos", images, 8, 2.0, dict.fromkeys(turns, 70.0), totals, [pair], 8)
    return make_result(contenders=[make_backend_record(name) for name in turns], images=found)
