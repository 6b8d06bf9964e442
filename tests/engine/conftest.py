"""Fixtures that build engines; every test has its own store."""

from __future__ import annotations

import pytest

from enginery.core.artifact.artifact import Artifact
from enginery.core.options import options_from
from enginery.engine import stage
from enginery.engine.config import BuildConfig
from enginery.runtime.tensorrt.library import has_tensorrt
from tests.engine.products import PROFILE


def build_config(**options) -> BuildConfig:
    """Return a build configuration; by default for 8.9 and with the profile of `product`."""
    ways = {"profile", "min_shapes", "data"}
    profile = {} if ways & options.keys() else {"profile": [PROFILE]}
    return options_from(BuildConfig, "build", {"capability": "8.9", **profile, **options})


@pytest.fixture
def built(tmp_path):
    """Build engines into a new artifact: `built(artifact, capability="8.0")`."""
    if not has_tensorrt():
        pytest.skip("pip install 'enginery[tensorrt-rtx]'")
    numbers = iter(range(100))

    def make(artifact: Artifact, **options) -> Artifact:
        out = tmp_path / f"built-{next(numbers)}"
        return stage.run(artifact, build_config(**options), out)

    return make
