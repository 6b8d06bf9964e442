"""Types of entries in the store (artifacts, engines, optimized graphs) and one entry of it.

>>> ARTIFACTS.folder, [key.stage for key in ARTIFACTS.provenance(artifact)]
('artifacts', ['export'])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.fingerprint import Fingerprint
from enginery.core.store.optimized_graph import OptimizedGraph

Content = TypeVar("Content")
Inode = tuple[int, int]
"""(device, inode number), equal for all hard links to a file."""


@dataclass(frozen=True)
class EntryType(Generic[Content]):
    """A type of entry: its folder, how to open it, and what it was made from."""

    folder: str
    """Name of the folder in the store."""
    open: Callable[[Path], Content]
    """Open an entry; raise ArtifactError if it is damaged."""
    provenance: Callable[[Content], Sequence[Fingerprint]]
    """Return the fingerprints of the stages that made an entry, the last stage last."""
    is_earlier_version: Callable[[Fingerprint, Fingerprint], bool]
    """(wanted, other) -> True if a cache miss should report how `wanted` differs from `other`."""


def _same_field(target: Fingerprint, other: Fingerprint, field: str) -> bool:
    return field in target.fields and target.fields[field] == other.fields.get(field)


def _same_input(target: Fingerprint, other: Fingerprint, field: str) -> bool:
    """Return True if the input is the same, or if it is all that differs (an earlier version)."""
    return _same_field(target, other, field) or (
        field in target.fields and len(target.changes(other.fields)) == 1
    )


ARTIFACTS = EntryType(
    "artifacts",
    Artifact.open,
    lambda artifact: [Fingerprint(s.stage, s.fields) for s in artifact.manifest.stages],
    lambda target, other: (
        _same_field(target, other, "model") or _same_input(target, other, "artifact")
    ),
)
ENGINES = EntryType(
    "engines",
    Engine.open,
    lambda engine: [engine.fingerprint],
    lambda target, other: _same_input(target, other, "graph"),
)
GRAPHS = EntryType(
    "graphs",
    OptimizedGraph.open,
    lambda graph: [graph.fingerprint],
    lambda target, other: _same_input(target, other, "graph"),
)
AnyEntryType = EntryType[Artifact] | EntryType[Engine] | EntryType[OptimizedGraph]
ENTRY_TYPES: tuple[AnyEntryType, ...] = (ARTIFACTS, ENGINES, GRAPHS)


@dataclass(frozen=True)
class StoreEntry:
    """One directory of the store."""

    path: Path
    kind: str
    """`artifacts`, `engines` or `graphs`."""
    content: Artifact | Engine | OptimizedGraph | None
    """None if it cannot be opened."""
    problem: str
    """Reason why it cannot be opened; empty otherwise."""
    files: Mapping[Inode, int]
    """Size of each file, in bytes."""
    used: float
    """Time of the last use, in seconds since the epoch."""
    is_own: bool = True
    """False for a directory that the store is not known to have made."""

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
    def graph(self) -> OptimizedGraph | None:
        return self.content if isinstance(self.content, OptimizedGraph) else None
