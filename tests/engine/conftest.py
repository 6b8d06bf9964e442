"""A short way to build engines; every test has a store of its own."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from enginery.core.artifact import Artifact
from enginery.core.options import options_from
from enginery.engine import stage
from enginery.engine.config import BuildConfig
from enginery.runtime.tensorrt.process import has_tensorrt
from tests.engine.products import PROFILE


class Said:
    """A progress that keeps what it was told."""

    def __init__(self):
        self.messages = []

    @contextmanager
    def task(self, name, total=0):
        yield lambda: None

    def say(self, message):
        self.messages.append(message)


def build_config(**options) -> BuildConfig:
    """For 8.9 unless something else is named; with the profile of `product` if none is."""
    ways = {"profile", "min_shapes", "profiles_from"}
    profile = {} if ways & options.keys() else {"profile": [PROFILE]}
    return options_from(BuildConfig, "build", {"capability": "8.9", **profile, **options})


@pytest.fixture
def built(tmp_path):
    """`built(artifact, capability="8.0")`: a new artifact with the engines, outside the store."""
    if not has_tensorrt():
        pytest.skip("pip install 'enginery[tensorrt-rtx]'")
    numbers = iter(range(100))

    def make(artifact: Artifact, **options) -> Artifact:
        out = tmp_path / f"built-{next(numbers)}"
        return stage.run(artifact, build_config(**options), out)

    return make
