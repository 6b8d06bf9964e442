"""A graph as ONNX Runtime optimized it for one processor, on disk.

    >>> LoadedGraph.open(Path("graphs/graph-minilm-5d0c41f9a6b27e83")).model.name
    'model.onnx'

It loads faster than what it was made from, and its weights, in a file of their own, are mapped
instead of copied. It runs on the kind of processor and the version of ONNX Runtime that it was made
with, and is never part of an artifact.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from enginery.core.artifact.fingerprint import Fingerprint, sha256_of
from enginery.core.errors import ArtifactError
from enginery.core.json_file import load_json
from enginery.core.paths import resolve_inside

GRAPH_FILE = "graph.json"
MODEL_FILE = "model.onnx"
STAGE = "graph"
_REMEDY = "It is made anew when it is asked for."


@dataclass(frozen=True)
class LoadedGraph:
    """One optimized graph, whole."""

    path: Path
    fingerprint: Fingerprint
    source: str
    """The graph that it was made from, for people."""

    @classmethod
    def open(cls, path: Path) -> LoadedGraph:
        """Opens it and compares its files with what was noted of them.

        Raises:
            ArtifactError: it is not one, or a file of it is missing or altered.
        """
        path = Path(path)
        try:
            found = load_json(path / GRAPH_FILE, error=ArtifactError)
            fingerprint = Fingerprint(STAGE, dict(found["fields"]))
            digests, source = dict(found["files"]), str(found["source"])
        except (ArtifactError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"{path} is no optimized graph: {error}.", do=_REMEDY) from error
        for name, digest in digests.items():
            file = resolve_inside(path, name, what=f"the optimized graph {path}")
            if not file.is_file() or sha256_of(file) != digest:
                raise ArtifactError(f"{file} is missing or was altered.", do=_REMEDY)
        return cls(path, fingerprint, source)

    @property
    def model(self) -> Path:
        """The ONNX file."""
        return self.path / MODEL_FILE


def write_record(directory: Path, fingerprint: Fingerprint, source: str) -> None:
    """Notes what the files of a directory are; the last step of making one."""
    files = {path.name: sha256_of(path) for path in sorted(directory.iterdir()) if path.is_file()}
    record = {"source": source, "fields": fingerprint.fields, "files": files}
    (directory / GRAPH_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
