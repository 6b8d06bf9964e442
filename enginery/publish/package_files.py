"""Files of a package: collect them, and group them by purpose.

>>> card = tmp_path / "README.md"
>>> _ = card.write_text("# MiniLM")
>>> files, left_out = collect_files(artifact, card, {})
>>> next(file.group for file in files if file.name == "tokenizer.json")
'tokenizer'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from enginery.core.artifact.artifact import MANIFEST, Artifact
from enginery.core.artifact.engine_record import ENGINES
from enginery.core.artifact.fingerprint import sha256_of
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError
from enginery.core.paths import list_tree
from enginery.publish.publication import CARD, LISTING

_TOKENIZER = (
    "tokenizer",
    "vocab",
    "merges",
    "special_tokens_map",
    "added_tokens",
    "spiece",
    "sentencepiece",
    "chat_template",
)


@dataclass(frozen=True)
class PackageFile:
    """A file of a package."""

    name: str
    """Path below the package's root, with `/` as separator."""
    path: Path
    """Path of the file on this machine."""
    sha256: str
    size_bytes: int
    group: str
    """`graph`, `weights`, `tokenizer`, `engine:<directory>`, `report`, `card`, `manifest` or
    `config`."""


def collect_files(
    artifact: Artifact, card: Path, variants: Mapping[str, Artifact]
) -> tuple[list[PackageFile], list[str]]:
    """Return the package's files without its listing, and the names of files left out.

    Args:
        artifact: the artifact.
        card: the file of its card.
        variants: artifacts of other precisions in its folder, by name.

    Raises:
        ArtifactError: the card or the manifest cannot be read.
    """
    root, manifest = artifact.path, artifact.manifest
    graphs = [g for member in (artifact, *variants.values()) for g in member.manifest.graphs]
    files = [package_file(CARD, card, "card")]
    files += [
        PackageFile(name, root / name, record.sha256, record.size_bytes, _group(graphs, name))
        for name, record in manifest.files.items()
        if name != CARD
    ]
    files.append(package_file(MANIFEST, root / MANIFEST, "manifest"))
    files += [
        PackageFile(name, root / name, record.sha256, record.size_bytes, "report")
        for name, record in manifest.reports.items()
    ]
    listed = {file.name for file in files} | {LISTING}
    names = [path.relative_to(root).as_posix() for path in list_tree(root) if not path.is_dir()]
    return files, sorted(name for name in names if name not in listed)


def package_file(name: str, path: Path, group: str) -> PackageFile:
    """Return a file with its digest and size; raise ArtifactError if it cannot be read."""
    try:
        return PackageFile(name, path, sha256_of(path), path.stat().st_size, group)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}.") from error


def _group(graphs: Sequence[GraphRecord], name: str) -> str:
    parts = PurePosixPath(name)
    if parts.parts[0] == ENGINES and len(parts.parts) > 2:
        return f"engine:{parts.parts[1]}"
    if any(name == graph.file for graph in graphs):
        return "graph"
    if any(name in graph.data_files for graph in graphs):
        return "weights"
    is_tokenizer = parts.name.startswith(_TOKENIZER) or parts.suffix in (".model", ".spm")
    return "tokenizer" if is_tokenizer else "config"
