"""Tiny artifacts to publish, and a progress that records messages."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from enginery.core.artifact.artifact import Artifact, commit_artifact
from enginery.core.artifact.manifest import Manifest
from enginery.publish.config import PublishConfig
from tests.core.artifacts import validated
from tests.engine.made import with_engines

UNVALIDATED = PublishConfig(allow_failed=True, insecure=True)


class Heard:
    """A progress that records tasks, steps and messages."""

    def __init__(self):
        self.tasks: dict[str, tuple[int, int]] = {}
        self.news: list[str] = []

    @contextmanager
    def task(self, name, total=0):
        self.tasks[name] = (0, total)

        def advance():
            done, of = self.tasks[name]
            self.tasks[name] = (done + 1, of)

        yield advance

    def say(self, message):
        self.news.append(message)


def with_an_engine(artifact: Artifact, out: Path) -> Artifact:
    """Return a copy with an engine for 8.9, in the layout of the build stage."""
    return with_engines(artifact, out, {})


def large(artifact: Artifact, out: Path, *, seed: int = 0) -> Artifact:
    """Return a copy with 3 MiB of external data, which is too large for git on the Hub."""
    shutil.copytree(artifact.path, out)
    file = out / artifact.manifest.graphs[0].file
    model = onnx.load(file)
    weights = np.random.default_rng(seed).standard_normal((768, 1024)).astype(np.float32)
    tensor = numpy_helper.from_array(weights, "unused_weights")
    model.graph.initializer.append(tensor)
    onnx.save(
        model,
        file,
        save_as_external_data=True,
        location=f"{file.name}.data",
        size_threshold=1 << 20,
    )
    graph = artifact.manifest.graphs[0].model_copy(update={"data_files": (f"{file.name}.data",)})
    manifest: Manifest = artifact.manifest.model_copy(update={"graphs": (graph,)})
    commit_artifact(out, manifest)
    return _validated_anew(Artifact.open(out))


def altered(artifact: Artifact, out: Path, text: str = '{"changed": true}') -> Artifact:
    """Return a copy with other content."""
    shutil.copytree(artifact.path, out)
    (out / "notes.json").write_text(text)
    commit_artifact(out, artifact.manifest)
    return _validated_anew(Artifact.open(out))


def _validated_anew(artifact: Artifact) -> Artifact:
    """Return the artifact with its verdict, if any, updated for its present content."""
    found = artifact.manifest.verdict("validate")
    if found is None:
        return artifact
    return validated(artifact, summary=found.summary)
