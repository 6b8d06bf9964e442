"""What an earlier export left in a folder of a Triton repository, and what of it stays.

Takes a model's folder; says whether it is as export-triton left it, and which versions it has.

    >>> earlier = read_earlier(Path("models/minilm-graph"), "minilm")
    >>> list(earlier.other_versions("onnxruntime", version=2))
    ['1/model.onnx']

Triton has one configuration for all versions of a model, the newest's, and its `version_policy`
serves that one: the others are there to go back to, by removing the newer folders.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from enginery.core.artifact.fingerprint import sha256_of
from enginery.core.errors import ArtifactError, OptionError
from enginery.core.json_file import parse_json, read_document

LISTING = "enginery.json"
"""In each folder: the export that it is of, its backend, and the digests of its files."""


@dataclass(frozen=True)
class Earlier:
    """A folder as an earlier export left it, or none."""

    backend: str = ""
    files: Mapping[str, Path] = field(default_factory=dict)
    """By their names below the folder; none where there is no folder."""

    def other_versions(self, backend: str, version: int) -> dict[str, Path]:
        """The files of other versions; none where another backend loaded them."""
        if self.backend != backend:
            return {}
        return {n: path for n, path in self.files.items() if _version_of(n) not in (0, version)}


def read_earlier(directory: Path, export: str) -> Earlier:
    """What an earlier export of this name left in a folder.

    Raises:
        ArtifactError: there is a folder, and it is not as such an export left it.
    """
    if not directory.exists():
        return Earlier()
    remedy = "Move it elsewhere, or name another with --name."
    try:
        listing = parse_json(read_document(directory / LISTING))
        files, made_for = dict(listing["files"]), listing["export"]
        backend = str(listing.get("backend", ""))
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        raise ArtifactError(
            f"{directory} exists and was not made by export-triton, so it is not overwritten.",
            do=remedy,
        ) from None
    if made_for != export:
        raise ArtifactError(f"{directory} is part of the export '{made_for}'.", do=remedy)
    found = {p.relative_to(directory).as_posix(): p for p in directory.rglob("*") if p.is_file()}
    found.pop(LISTING, None)
    # The Python backend leaves its byte code beside model.py.
    found = {name: path for name, path in found.items() if path.parent.name != "__pycache__"}
    changed = [name for name, path in found.items() if files.get(name) != sha256_of(path)]
    if changed:
        raise ArtifactError(
            f"{directory} was edited since it was made, and {changed[0]} would be lost.", do=remedy
        )
    return Earlier(backend, found)


def require_newest(out: Path, kept: Mapping[str, Iterable[str]], version: int) -> None:
    """Raises OptionError where a version that stays is newer than the one that is exported.

    Args:
        out: the repository.
        kept: each model's files that stay.
        version: the one that is exported.
    """
    for model, files in kept.items():
        newest = max(_versions(files), default=0)
        if newest > version:
            raise OptionError(
                f"option 'version' is {version}, and {out / model} has version {newest}, which "
                "Triton would go on to serve.",
                do=f"Name that one or a later one: --version {newest}",
            )


def notes_on(
    earlier: Mapping[str, Earlier],
    kept: Mapping[str, Iterable[str]],
    gone: Sequence[str],
    version: int,
) -> list[str]:
    """What became of earlier versions and folders, in words.

    Args:
        earlier: each folder, before.
        kept: the files of other versions that stay, for each model that is exported.
        gone: folders of the earlier export that this one has not.
        version: the one that was exported.
    """
    notes = []
    if stay := {number for files in kept.values() for number in _versions(files)}:
        notes.append(f"version {_listed(stay)} stays beside {version}; Triton serves the newest")
    for model, files in kept.items():
        if lost := _versions(earlier[model].files) - _versions(files) - {version}:
            notes.append(f"version {_listed(lost)} of {model} is gone: it was of another backend")
    if gone:
        notes.append(f"{', '.join(gone)} of an earlier export went: this one has none")
    return notes


def _version_of(name: str) -> int:
    """The version whose folder a file is in; 0 for one beside them."""
    first, found, _ = name.partition("/")
    return int(first) if found and first.isdecimal() else 0


def _versions(names: Iterable[str]) -> set[int]:
    return {_version_of(name) for name in names} - {0}


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
