"""A graph on disk that ONNX Runtime has optimized for one processor.

    graph = OptimizedGraph.open(Path("graphs/graph-minilm-5d0c41f9a6b27e83"))
    graph.model.name    # 'model.onnx'

It loads faster than the graph it was made from, and its weights, which are in a separate file, are
memory-mapped instead of copied. It runs only on the type of processor and the version of ONNX
Runtime that it was made with, and is never part of an artifact.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from enginery.core.artifact.fingerprint import Fingerprint, sha256_of
from enginery.core.errors import ArtifactError
from enginery.core.json_file import (
    append_checksum,
    parse_json,
    read_document,
    verify_checksum,
)
from enginery.core.paths import resolve_inside

GRAPH_FILE = "graph.json"
MODEL_FILE = "model.onnx"
STAGE = "graph"
_REMEDY = "It will be made again when it is needed."


@dataclass(frozen=True)
class OptimizedGraph:
    """One verified optimized graph."""

    path: Path
    fingerprint: Fingerprint
    source: str
    """Description of the graph that it was made from."""

    @classmethod
    def open(cls, path: Path) -> OptimizedGraph:
        """Open an optimized graph and check its files against their recorded hashes.

        Raises:
            ArtifactError: the directory is not an optimized graph, or one of its files is missing
                or altered.
        """
        path = Path(path)
        try:
            document = parse_json(verify_checksum(read_document(path / GRAPH_FILE)))
            fingerprint = Fingerprint(STAGE, dict(document["fields"]))
            digests, source = dict(document["files"]), str(document["source"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(
                f"{path / GRAPH_FILE} cannot be used: {error}.", do=_REMEDY
            ) from error
        for name, digest in digests.items():
            file = resolve_inside(path, name, what=f"the optimized graph {path}")
            if not file.is_file() or sha256_of(file) != digest:
                raise ArtifactError(f"{file} is missing or was altered.", do=_REMEDY)
        return cls(path, fingerprint, source)

    @property
    def model(self) -> Path:
        """Path of the ONNX file."""
        return self.path / MODEL_FILE


def write_record(directory: Path, fingerprint: Fingerprint, source: str) -> None:
    """Write graph.json, which makes a directory with its files an optimized graph."""
    files = {path.name: sha256_of(path) for path in sorted(directory.iterdir()) if path.is_file()}
    record = {"source": source, "fields": fingerprint.fields, "files": files}
    (directory / GRAPH_FILE).write_bytes(append_checksum(json.dumps(record, indent=2)))
