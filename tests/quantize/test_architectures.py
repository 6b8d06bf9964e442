"""Quantize tiny models of each architecture and build trial engines of them."""

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest

from enginery import validate_model
from enginery.quantize import stage
from enginery.quantize.accuracy import measure_file
from enginery.runtime.onnxruntime.runner import OrtRunner

WIDE = {"hidden_size": 128, "num_attention_heads": 2}

# kind, task, config, quantized layers, INT8 kernels of the engine, fused attentions
CASES = [
    ("bert", "token-classification", WIDE, 12, {"gemm int8": 8}, 2),
    ("distilbert", "token-classification", {"dim": 128, "n_heads": 2}, 12, {"gemm int8": 8}, 2),
    ("roberta", "token-classification", WIDE, 12, {"gemm int8": 8}, 2),
    ("vit", "image-classification", WIDE, 13, {"gemm int8": 8, "convolution int8": 1}, 2),
    ("gpt2", "text-generation", {"n_embd": 128, "n_head": 2}, 9, {"gemm int8": 9}, 2),
    ("albert", "feature-extraction", {}, 13, {"gemm int8": 9}, 0),  # heads of 8: too narrow
    (
        "resnet",
        "image-classification",
        {"embedding_size": 16, "hidden_sizes": [64, 64, 64, 64]},
        None,
        {},
        0,
    ),
    ("convnext", "image-classification", {"hidden_sizes": [16, 16, 24, 32]}, None, {}, 0),
]


def report_of(artifact):
    return json.loads((artifact.path / stage.REPORT).read_bytes())


@pytest.fixture(scope="module")
def images():
    generator = np.random.default_rng(0)
    return [(generator.random((48, 40, 3)) * 255).astype(np.uint8) for _ in range(12)]


def cases(*kinds, quick):
    """Return the cases of these kinds as parameters; those that `quick` does not name are slow."""
    chosen = [case for case in CASES if case[0] in kinds]
    marks = {case[0]: quick.get(case[0], pytest.mark.slow) for case in chosen}
    return [pytest.param(*case, marks=marks[case[0]], id=case[0]) for case in chosen]


@pytest.mark.more
@pytest.mark.parametrize(
    ("kind", "task", "config", "layers", "kernels", "attentions"),
    cases(
        *(case[0] for case in CASES),
        quick={"bert": (), "vit": pytest.mark.more, "resnet": pytest.mark.more},
    ),
)
def test_every_quantized_layer_is_multiplied_in_int8(
    tiny, quantized, images, kind, task, config, layers, kernels, attentions
):
    source = tiny(kind, task, **config)
    inputs = {"inputs": images} if "image" in task else {}
    made = quantized(source, capability=("8.9",), **inputs)
    report = report_of(made)
    (engine,) = report["engines"]
    assert engine["not_quantized"] == []
    assert engine["quantized_layers"] == len(report["quantized_layers"]) > 0
    assert layers in (None, engine["quantized_layers"])
    assert {name: engine["layers"].get(name) for name in kernels} == kernels
    assert engine["fused_attentions"] == attentions
    assert report["accuracy"]["cosine"] > 0.9  # random weights, drawn wide


@pytest.mark.parametrize(
    ("kind", "task", "config", "layers", "kernels", "attentions"),
    cases("bert", "distilbert", "roberta", "vit", "gpt2", quick={"bert": pytest.mark.more}),
)
def test_per_tensor_weights_are_multiplied_in_int8(
    tiny, quantized, images, kind, task, config, layers, kernels, attentions
):
    inputs = {"inputs": images} if "image" in task else {}
    made = quantized(tiny(kind, task, **config), capability=("8.9",), per_channel=False, **inputs)
    report = report_of(made)
    (engine,) = report["engines"]
    assert engine["not_quantized"] == []
    assert engine["quantized_layers"] == len(report["quantized_layers"]) == layers
    assert engine["fused_attentions"] == attentions
    scales = [
        tensor
        for tensor in onnx.load(made.model).graph.initializer
        if tensor.name.endswith("/weight_scale")
    ]
    assert len(scales) == layers
    assert all(len(tensor.dims) == 0 for tensor in scales)


@pytest.mark.more
@pytest.mark.parametrize("capability", ["8.9", pytest.param("12.0", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "per_channel",
    [
        pytest.param(True, id="per-channel"),
        pytest.param(False, id="per-tensor", marks=pytest.mark.more),
    ],
)
def test_fp8_layers_of_bert_are_multiplied_in_fp8(tiny, quantized, capability, per_channel):
    source = tiny("bert", "token-classification", **WIDE)
    made = quantized(source, scheme="fp8", capability=(capability,), per_channel=per_channel)
    report = report_of(made)
    (engine,) = report["engines"]
    assert engine["not_quantized"] == []
    assert engine["quantized_layers"] == len(report["quantized_layers"]) == 12
    assert engine["layers"]["gemm fp8"] in (8, 12)  # query, key and value are one, or three
    assert engine["fused_attentions"] == 2
    types = {tensor.data_type for tensor in onnx.load(made.model).graph.initializer}
    assert onnx.TensorProto.FLOAT8E4M3FN in types
    assert onnx.TensorProto.INT8 not in types
    assert report["accuracy"]["cosine"] > 0.9


def test_fp8_with_fp32_residual_runs_on_the_cpu(tiny, quantized):
    """Without disabling them, ONNX Runtime's fusions make a graph that it rejects itself."""
    made = quantized(tiny("bert", "token-classification", **WIDE), scheme="fp8", residual="fp32")
    ids = np.array([[5, 6, 7, 8]], np.int64)
    feeds = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "token_type_ids": np.zeros_like(ids),
    }
    with OrtRunner(made) as runner:
        assert np.isfinite(runner(feeds)["logits"]).all()


@pytest.mark.parametrize(
    ("kind", "config", "kernels"),
    [
        pytest.param("vit", WIDE, {"gemm fp8": 8, "convolution fp16": 1}, marks=pytest.mark.more),
        pytest.param(
            "resnet",
            {"embedding_size": 16, "hidden_sizes": [64, 64, 64, 64]},
            {"convolution fp8": 16, "convolution fp16": 1},
            marks=pytest.mark.more,
        ),
    ],
)
def test_report_counts_only_convolutions_that_run_in_fp8(
    tiny, quantized, images, kind, config, kernels
):
    source = tiny(kind, "image-classification", **config)
    report = report_of(quantized(source, images, scheme="fp8", capability=("8.9",)))
    (engine,) = report["engines"]
    assert engine["not_quantized"] == []
    assert {name: engine["layers"].get(name) for name in kernels} == kernels
    assert any("3 input channels" in reason for reason in report["left_out"].values())


RESNET = {"embedding_size": 64, "hidden_sizes": [64, 64], "depths": [2, 2]}


def residual_inputs(artifact):
    """Return the op types that the additions of a graph read."""
    graph = onnx.load(artifact.model).graph
    made = {name: node.op_type for node in graph.node for name in node.output}
    return [{made.get(name, "") for name in n.input} for n in graph.node if n.op_type == "Add"]


@pytest.mark.more
def test_residual_additions_read_int8(tiny, quantized, images):
    made = quantized(tiny("resnet", "image-classification", **RESNET), images, capability=("8.9",))
    additions = [found for found in residual_inputs(made) if "DequantizeLinear" in found]
    assert additions
    assert all("Conv" in found for found in additions)
    (note,) = [note for note in made.manifest.stages[-1].notes if "residual additions" in note]
    assert note.startswith(f"{len(additions)} residual additions after convolutions read")
    assert validate_model(made, effort="quick").passed


def test_residual_additions_stay_if_they_miss_the_budget(tiny, quantized, images, monkeypatch):
    measured = []

    def measure(*arguments, **options):
        found = measure_file(*arguments, **options)
        measured.append(found)
        return found if len(measured) > 1 else replace(found, cosine=-1.0)

    monkeypatch.setattr(stage, "measure_file", measure)
    made = quantized(tiny("resnet", "image-classification", **RESNET), images, min_cosine=0.9)
    assert len(measured) == 2
    assert not any("DequantizeLinear" in found for found in residual_inputs(made))
    assert not any("residual additions" in note for note in made.manifest.stages[-1].notes)
