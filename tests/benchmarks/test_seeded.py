"""Models whose random weights are computed again on another machine."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

from benchmarks.gpu_check import seeded
from benchmarks.gpu_check.seeded import Parameter

SEED = 7
PARAMETERS = {
    "q": Parameter(0, (64, 96), 0.0, 0.04),
    "k": Parameter(1, (64, 96), 0.0, 0.04),
    "scale": Parameter(2, (64,), 1.0, 0.0),
    "table": Parameter(3, (500, 64), 0.0, 0.5),
}


@pytest.fixture
def models(tmp_path):
    """Write a source and two graphs whose weights are pieces of its parameters."""
    values = {name: spec.values(SEED) for name, spec in PARAMETERS.items()}
    source = tmp_path / "models" / "made-full-source"
    source.mkdir(parents=True)
    padding = {"other": np.random.default_rng(0).random(300_000, np.float32)}
    save_file({**values, **padding}, source / "model.safetensors")
    document = {
        "seed": SEED,
        "parameters": {name: vars(spec) for name, spec in PARAMETERS.items()},
    }
    (source / seeded.PARAMETERS).write_text(json.dumps(document))
    weights = {
        "joined": np.concatenate([values["q"].T, values["k"].T], axis=1),
        "part": values["k"].T[:, 16:48],
        "wide": values["table"].astype(np.float32),
        "scaled": values["q"] * np.float16(3),
        "constant": np.full((300, 1000), 2, np.float32),
    }
    tensors = [numpy_helper.from_array(np.ascontiguousarray(a), n) for n, a in weights.items()]
    outputs = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT16, list(a.shape))
        for n, a in weights.items()
    ]
    graph = helper.make_graph([], "g", [], outputs, tensors)
    for name, options in (
        ("made-fp16", {}),
        ("made-large", {"save_as_external_data": True, "location": "model.onnx_data"}),
    ):
        directory = tmp_path / "models" / name
        directory.mkdir()
        onnx.save(helper.make_model(graph), directory / "model.onnx", **options)
        (directory / "config.json").write_text("{}")
    return tmp_path / "models"


def test_files_have_the_same_bytes_after_packing_without_their_weights(models, tmp_path):
    packed, again = tmp_path / "packed", tmp_path / "again"
    command = [sys.executable, "-m", "benchmarks.gpu_check.seeded"]
    subprocess.run([*command, "pack", models, packed, "made"], check=True)
    subprocess.run([*command, "unpack", packed, again], check=True)
    for name in ("made-full-source", "made-fp16", "made-large"):
        files = sorted(p.relative_to(models / name) for p in (models / name).iterdir())
        assert files == sorted(p.relative_to(again / name) for p in (again / name).iterdir())
        for file in files:
            assert (again / name / file).read_bytes() == (models / name / file).read_bytes()
    kept = {name: recipe_of(packed / name) for name in ("made-fp16", "made-large")}
    for recipe in kept.values():
        (file,) = recipe["files"].values()
        # All but the tensor with other values and the constant.
        assert len(file["pieces"]) == 3
    pieces = {len(blocks) for *_, blocks in kept["made-fp16"]["files"]["model.onnx"]["pieces"]}
    assert pieces == {1, 2}


def recipe_of(directory):
    return json.loads((directory / "recipe.json").read_bytes())


def test_unpacking_checks_the_bytes(models, tmp_path):
    packed = tmp_path / "packed"
    seeded.pack(models, packed, ["made"])
    rest = packed / "made-fp16" / "model.onnx.rest"
    rest.write_bytes(rest.read_bytes()[:-1] + b"!")
    with pytest.raises(ValueError, match=r"made-fp16/model\.onnx has the hash"):
        seeded.unpack(packed, tmp_path / "again")
    assert not (tmp_path / "again" / "made-fp16").exists()


def test_model_without_seeded_weights_is_refused(models, tmp_path):
    with pytest.raises(ValueError, match="0 sources of other"):
        seeded.pack(models, tmp_path / "packed", ["other"])
    (models / "made-full-source" / seeded.PARAMETERS).unlink()
    with pytest.raises(ValueError, match=r"with parameters\.json, expected one"):
        seeded.pack(models, tmp_path / "packed", ["made"])


def test_values_are_those_of_every_machine():
    values = Parameter(5, (4, 3), 0.5, 0.1).values(0)
    assert values.dtype == np.float16
    # Computed once; the arithmetic is exact, so no machine may differ.
    assert values.view(np.uint16).reshape(-1)[:4].tolist() == EXPECTED
    large = Parameter(5, (1000, 100), 0.0, 0.1).values(0).astype(np.float64)
    assert abs(large.mean()) < 0.001
    assert abs(large.std() - 0.1) < 0.001


EXPECTED = [14357, 14475, 14458, 14169]
