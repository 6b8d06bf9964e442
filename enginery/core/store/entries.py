"""What the store holds: artifacts, engines, optimized graphs; and one entry of the store.

>>> ENGINES.open(Path("engines/tensorrt-rtx-sm89-3f2a91c04be7d815")).record.profiles
('batch=1:8:32,sequence=8:128:512',)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.fingerprint import Fingerprint
from enginery.core.store.optimized_graph import LoadedGraph

Finished = TypeVar("Finished")
Inode = tuple[int, int]
"""Device and number: what is the same for all hard links to a file."""


@dataclass(frozen=True)
class Kind(Generic[Finished]):
    """One kind of finished directory: where it lies, how it is opened, what it was made from."""

    folder: str
    """Below the store."""
    open: Callable[[Path], Finished]
    """Raises ArtifactError for one that is damaged."""
    made_from: Callable[[Finished], Sequence[Fingerprint]]
    """Of every step that made it, the last step last."""
    related: Callable[[Fingerprint, Fingerprint], bool]
    """Whether an earlier one is worth naming as what has changed."""


def _same(wanted: Fingerprint, other: Fingerprint, field: str) -> bool:
    return field in wanted.fields and wanted.fields[field] == other.fields.get(field)


def _same_start(wanted: Fingerprint, other: Fingerprint, field: str) -> bool:
    """From the same thing, or from another with the very same words: its earlier version."""
    return _same(wanted, other, field) or (
        field in wanted.fields and len(wanted.changes(other.fields)) == 1
    )


ARTIFACTS = Kind(
    "artifacts",
    Artifact.open,
    lambda artifact: [Fingerprint(s.stage, s.fields) for s in artifact.manifest.stages],
    lambda wanted, other: _same(wanted, other, "model") or _same_start(wanted, other, "artifact"),
)
ENGINES = Kind(
    "engines",
    Engine.open,
    lambda engine: [engine.fingerprint],
    lambda wanted, other: _same_start(wanted, other, "graph"),
)
GRAPHS = Kind(
    "graphs",
    LoadedGraph.open,
    lambda graph: [graph.fingerprint],
    lambda wanted, other: _same_start(wanted, other, "graph"),
)
AnyKind = Kind[Artifact] | Kind[Engine] | Kind[LoadedGraph]
KINDS: tuple[AnyKind, ...] = (ARTIFACTS, ENGINES, GRAPHS)


@dataclass(frozen=True)
class StoreEntry:
    """One directory of the store."""

    path: Path
    kind: str
    """`artifacts`, `engines` or `graphs`."""
    content: Artifact | Engine | LoadedGraph | None
    """None where it cannot be opened."""
    problem: str
    """Why it cannot be opened; empty when it can."""
    files: Mapping[Inode, int]
    """The size of every file in it, in bytes."""
    used: float
    """Seconds since the epoch of the last time it was asked for."""

    @property
    def size_bytes(self) -> int:
        return sum(self.files.values())

    @property
    def artifact(self) -> Artifact | None:
        return self.content if isinstance(self.content, Artifact) else None

    @property
    def engine(self) -> Engine | None:
        return self.content if isinstance(self.content, Engine) else None

    @property
    def graph(self) -> LoadedGraph | None:
        return self.content if isinstance(self.content, LoadedGraph) else None
