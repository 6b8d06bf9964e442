"""Engines that TensorRT for RTX builds from the FP16 graphs of each architecture."""

from collections import Counter

import pytest

from enginery.core.shapes import Profile, dynamic_dims
from enginery.optimize import stage
from enginery.optimize.config import OptimizeConfig
from enginery.runtime.tensorrt.build import BuildRequest
from tests.tiny import tiny_artifact

pytest.importorskip("tensorrt_rtx_bindings")

# Heads of size 32: TensorRT does not fuse attention with the small heads of the tiny models.
WIDE = {"hidden_size": 128, "intermediate_size": 256}


CASES = [
    ("bert", "text-classification", WIDE, 10, 0, 2),
    ("distilbert", "text-classification", {"dim": 128, "hidden_dim": 256}, 10, 0, 2),
    ("roberta", "text-classification", WIDE, 10, 0, 2),
    ("vit", "image-classification", WIDE, 9, 1, 2),
    ("convnext", "image-classification", {}, 8, 8, 0),
    ("resnet", "image-classification", {}, 1, 10, 0),
    ("gpt2", "text-generation", {"n_embd": 128}, 9, 0, 2),
]
MARKS = {"bert": (), "resnet": pytest.mark.more}


@pytest.mark.more
@pytest.mark.parametrize(
    ("kind", "task", "config", "gemms", "convolutions", "attentions"),
    [pytest.param(*case, marks=MARKS.get(case[0], pytest.mark.slow), id=case[0]) for case in CASES],
)
def test_fp16_engine_multiplies_in_fp16_alone_and_fuses_attention(
    tmp_path, kind, task, config, gemms, convolutions, attentions
):
    """The engine has at least as many GEMMs and convolutions as remain after fusion."""
    from enginery.runtime.tensorrt.process import build_plan

    source = tiny_artifact(kind, task, tmp_path / "source", **config)
    artifact = stage.run(source, OptimizeConfig(), tmp_path / "out")
    names = dynamic_dims(artifact.manifest.graphs[0].inputs)
    pixels = "32" if kind == "vit" else "64"  # the tiny model has positions for this size
    sizes = {"batch": "1:2:4", "height": pixels, "width": pixels}
    profile = Profile.parse(",".join(f"{name}={sizes.get(name, '1:8:16')}" for name in names))
    built = build_plan(artifact.model, BuildRequest([profile], capabilities=("8.9",)))
    heavy = [layer for layer in built.layers if layer.kind != "other"]
    assert {layer.precision for layer in heavy} == {"fp16"}
    found = Counter(layer.kind for layer in heavy)
    assert found["gemm"] >= gemms, found
    assert found["convolution"] >= convolutions, found
    assert found["attention"] == built.fused_attentions == attentions, found
