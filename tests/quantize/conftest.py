"""Fixtures: tiny FP32 artifacts, exported once per session, and a function that quantizes one."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from enginery.core.artifact.artifact import Artifact
from enginery.core.options import options_from
from enginery.quantize import stage
from enginery.quantize.config import QuantizeConfig
from enginery.runtime.tensorrt.library import has_tensorrt
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


@pytest.fixture(scope="session")
def results(shared_directory) -> Path:
    """Return the folder of the artifacts that any worker process has quantized before."""
    is_patched()  # notes what there is before a test has replaced anything
    folder = shared_directory / "quantized"
    folder.mkdir(exist_ok=True)
    return folder


_PRISTINE: dict[str, dict[str, Any]] = {}


def is_patched() -> bool:
    """Return True if a test has replaced a function or a constant of the package."""
    for name, module in list(sys.modules.items()):
        if name.startswith("enginery."):
            known = _PRISTINE.setdefault(
                name, {n: v for n, v in vars(module).items() if callable(v) or n.isupper()}
            )
            if any(vars(module).get(n) is not value for n, value in known.items()):
                return True
    return False


@pytest.fixture
def quantized(tmp_path, results):
    """Quantize an artifact: `quantized(artifact, min_cosine=0.9)`.

    To be fast, there is no budget, no trial engine and no accuracy curve unless an option asks
    for one. What another test has quantized with the same inputs and options is copied, unless a
    part of the package is patched, or the artifact may be rejected.
    """

    def make(artifact: Artifact, inputs=TEXT, *, out: Path | None = None, **options) -> Artifact:
        if options.get("capability") and not has_tensorrt():
            pytest.skip("pip install 'enginery[tensorrt-rtx]'")
        settings = {"capability": (), "curve": False, **options}
        if "accuracy_budget" not in settings:
            settings.setdefault("min_cosine", -1)
        config = options_from(QuantizeConfig, "quantize", settings)
        data = stage.read_calibration(artifact, config, inputs)
        if is_patched() or artifact.failed_verdict():
            return stage.run(artifact, config, out or tmp_path / "int8", data=data)
        inputs_digest = data.content if data else ""
        key = artifact.path.name, artifact.content_sha256(), inputs_digest, config
        folder = results / hashlib.sha256(repr(key).encode()).hexdigest()
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                stage.run(artifact, config, folder, data=data)
        return Artifact.open(folder).copy_to(out or tmp_path / "int8")

    return make
