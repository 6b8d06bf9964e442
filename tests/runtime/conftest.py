"""Tiny artifacts, each exported once per session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from enginery.core.artifact.artifact import Artifact
from tests.tiny import tiny_artifact


@pytest.fixture(scope="session", autouse=True)
def _home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENGINERY_HOME", str(tmp_path_factory.mktemp("home")))
        yield


class TinyModels:
    """Source directories and artifacts, by kind, task and changes to the config."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._artifacts: dict[str, Artifact] = {}

    def source(self, kind: str, task: str, **config: Any) -> Path:
        """Return the Hugging Face directory that the artifact was exported from."""
        return Path(self.artifact(kind, task, **config).manifest.source.id)

    def artifact(self, kind: str, task: str, **config: Any) -> Artifact:
        """Return the artifact; do not change it."""
        name = self._name(kind, task, config)
        if name not in self._artifacts:
            self._artifacts[name] = tiny_artifact(kind, task, self._root / name, **config)
        return self._artifacts[name]

    @staticmethod
    def _name(kind: str, task: str, config: dict[str, Any]) -> str:
        return "-".join([kind, task, *(f"{k}={v}" for k, v in sorted(config.items()))])


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return TinyModels(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def altered(tmp_path):
    """Return a copy of an artifact with other files and new hashes."""
    import shutil

    from enginery.core.artifact.artifact import commit_artifact

    def alter(artifact: Artifact, files: dict[str, str | None]) -> Artifact:
        copy = tmp_path / f"altered-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(artifact.path, copy)
        for name, content in files.items():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                (copy / name).unlink()
            else:
                (copy / name).write_text(content, encoding="utf-8")
        commit_artifact(copy, artifact.manifest)
        return Artifact.open(copy)

    return alter
