"""Each architecture in INT8 and FP16, built for a real GPU generation."""

import json

import numpy as np
import pytest

from enginery.quantize import stage

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


@pytest.fixture(scope="module")
def images():
    generator = np.random.default_rng(0)
    return [(generator.random((48, 40, 3)) * 255).astype(np.uint8) for _ in range(12)]


@pytest.mark.parametrize(
    ("kind", "task", "config", "layers", "kernels", "attentions"), CASES, ids=[c[0] for c in CASES]
)
def test_every_quantized_layer_is_multiplied_in_int8(
    tiny, quantized, images, kind, task, config, layers, kernels, attentions
):
    source = tiny(kind, task, **config)
    inputs = {"inputs": images} if "image" in task else {}
    made = quantized(source, capabilities=("8.9",), **inputs)
    report = json.loads((made.path / stage.REPORT).read_bytes())
    (engine,) = report["engines"]
    assert engine["not_int8"] == []
    assert engine["int8_layers"] == len(report["int8_layers"]) > 0
    assert layers in (None, engine["int8_layers"])
    assert {name: engine["layers"].get(name) for name in kernels} == kernels
    assert engine["fused_attentions"] == attentions
    assert report["accuracy"]["cosine"] > 0.9  # random weights, drawn wide
