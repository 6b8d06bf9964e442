"""The peak memory of the optimize stage for a graph that is mostly weights."""

import os
import subprocess
import sys
import time

import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto, helper

from enginery import export_model
from enginery.core.artifact.artifact import Artifact

WIDTH = 4096
LAYERS = 16
LAYER_BYTES = 4 * WIDTH * WIDTH
ALLOWED = 2.2
"""Peak resident memory over the size of the FP32 weights."""


def stack_of_products(folder, layers):
    """Write a graph of MatMul and Tanh per layer, with external FP32 weights written by memmap."""
    folder.mkdir()
    data = np.memmap(folder / "weights.bin", np.float32, "w+", shape=(layers, WIDTH, WIDTH))
    numbers = np.random.default_rng(0)
    drawn = (numbers.standard_normal((WIDTH, WIDTH), np.float32) / np.sqrt(WIDTH)).astype("f4")
    nodes, weights, last = [], [], "x"
    for layer in range(layers):
        data[layer] = np.roll(drawn, layer, axis=0)  # no two alike, and quick to make
        weight = TensorProto(
            name=f"w{layer}",
            data_type=TensorProto.FLOAT,
            dims=[WIDTH, WIDTH],
            data_location=TensorProto.EXTERNAL,
        )
        for key, value in (
            ("location", "weights.bin"),
            ("offset", str(layer * LAYER_BYTES)),
            ("length", str(LAYER_BYTES)),
        ):
            weight.external_data.add(key=key, value=value)
        weights.append(weight)
        made = "y" if layer == layers - 1 else f"h{layer}"
        nodes.append(helper.make_node("MatMul", [last, f"w{layer}"], [f"p{layer}"], f"m{layer}"))
        nodes.append(helper.make_node("Tanh", [f"p{layer}"], [made], name=f"t{layer}"))
        last = made
    data.flush()
    dims = ["batch", WIDTH]
    graph = helper.make_graph(
        nodes,
        "stack",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, dims)],
        weights,
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10),
        folder / "model.onnx",
    )
    return folder / "model.onnx"


def peak_of_tree(command, log):
    """Run a command; return the peak resident memory of it and its children in bytes."""
    with log.open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=os.environ.copy())
    root, most = psutil.Process(process.pid), 0
    while process.poll() is None:
        total = 0
        try:
            for one in (root, *root.children(recursive=True)):
                total += one.memory_info().rss
        except psutil.NoSuchProcess:
            continue  # the process has ended meanwhile
        most = max(most, total)
        time.sleep(0.02)
    assert process.returncode == 0, log.read_text()
    return most


@pytest.mark.slow
def test_optimize_peaks_at_little_more_than_twice_the_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    artifact = export_model(str(stack_of_products(tmp_path / "source", LAYERS)))
    out = tmp_path / "fp16"
    most = peak_of_tree(
        [
            sys.executable,
            "-m",
            "enginery",
            "optimize",
            str(artifact.path),
            "--target",
            "tensorrt",
            "--precision",
            "fp16",
            "--out",
            str(out),
        ],
        tmp_path / "log",
    )
    made = Artifact.open(out)
    most = max(most, made.manifest.stages[-1].peak_rss_bytes)
    weights = LAYERS * LAYER_BYTES
    said = f"{most / 1e9:.2f} GB for {weights / 1e9:.2f} GB of weights: {most / weights:.2f} times"
    assert made.manifest.precision == "fp16"
    assert sum((out / name).stat().st_size for name in made.manifest.graphs[0].data_files) == (
        weights // 2
    )
    assert most <= ALLOWED * weights, said
