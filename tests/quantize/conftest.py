"""Fixtures: tiny FP32 artifacts, exported once per session, and a function that quantizes one."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginery.core.artifact.artifact import Artifact
from enginery.core.options import options_from
from enginery.quantize import stage
from enginery.quantize.config import QuantizeConfig
from enginery.runtime.tensorrt.process import has_tensorrt
from tests.tiny import TEXT, tiny_artifact


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Export a tiny model once per session: `tiny("bert", "text-classification")`. Read-only."""
    root = tmp_path_factory.mktemp("tiny")
    made: dict[str, Artifact] = {}

    def make(kind: str, task: str, **config) -> Artifact:
        name = "-".join([kind, task, *(f"{k}={v}" for k, v in sorted(config.items()))])
        if name not in made:
            made[name] = tiny_artifact(kind, task, root / name, **config)
        return made[name]

    return make


@pytest.fixture
def quantized(tmp_path):
    """Quantize an artifact: `quantized(artifact, min_cosine=0.9)`.

    To be fast, there is no budget, no trial engine and no accuracy curve unless an option asks
    for one, and INT8 is static.
    """

    def make(artifact: Artifact, inputs=TEXT, *, out: Path | None = None, **options) -> Artifact:
        if options.get("capability") and not has_tensorrt():
            pytest.skip("pip install 'enginery[tensorrt-rtx]'")
        settings = {"capability": (), "curve": False, "scheme": "int8", **options}
        if "accuracy_budget" not in settings:
            settings.setdefault("min_cosine", -1)
        config = options_from(QuantizeConfig, "quantize", settings)
        data = stage.read_calibration(artifact, config, inputs)
        return stage.run(artifact, config, out or tmp_path / "int8", data=data)

    return make
