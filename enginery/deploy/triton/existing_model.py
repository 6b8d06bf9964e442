"""Models from an earlier export in a Triton repository, and the versions that are kept.

    existing = read_existing_model(Path("models/minilm-graph"), "minilm")
    list(existing.other_versions("onnxruntime", version=2))  # ['1/model.onnx']

All versions of a model share one configuration in Triton, and its `version_policy` serves only the
newest version. Older versions are kept for a rollback: remove the newer folders.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from enginery.core.artifact.fingerprint import sha256_of
from enginery.core.errors import ArtifactError, OptionError
from enginery.core.json_file import parse_json, read_document
from enginery.core.paths import list_tree

LISTING = "enginery.json"
"""File in each model's folder with the name of its export, its backend, and its files' digests."""


@dataclass(frozen=True)
class ExistingModel:
    """A model's folder from an earlier export; empty if there is no folder."""

    backend: str = ""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Path below the folder -> path."""

    def other_versions(self, backend: str, version: int) -> dict[str, Path]:
        """Return the files of other versions; none if they are for another backend."""
        if self.backend != backend:
            return {}
        return {n: path for n, path in self.files.items() if _version_of(n) not in (0, version)}


def read_existing_model(directory: Path, export: str) -> ExistingModel:
    """Return the model that an earlier export with this name left in a folder.

    Raises:
        ArtifactError: the folder is not from such an export, or its files were changed.
    """
    if not directory.exists():
        return ExistingModel()
    remedy = "Move it elsewhere, or choose another --name."
    try:
        listing = parse_json(read_document(directory / LISTING))
        files, made_for = dict(listing["files"]), listing["export"]
        backend = str(listing.get("backend", ""))
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        raise ArtifactError(
            f"{directory} exists and was not written by export-triton.",
            do=remedy,
        ) from None
    if made_for != export:
        raise ArtifactError(
            f"{directory} belongs to the export '{made_for}', expected '{export}'.", do=remedy
        )
    paths = {p.relative_to(directory).as_posix(): p for p in list_tree(directory) if p.is_file()}
    paths.pop(LISTING, None)
    # The Python backend writes byte code beside model.py.
    paths = {name: path for name, path in paths.items() if path.parent.name != "__pycache__"}
    changed = [name for name, path in paths.items() if files.get(name) != sha256_of(path)]
    if changed:
        raise ArtifactError(
            f"{directory} was edited after its export: {changed[0]} would be overwritten.",
            do=remedy,
        )
    return ExistingModel(backend, paths)


def check_newest(out: Path, kept: Mapping[str, Iterable[str]], version: int) -> None:
    """Raise OptionError if a version that is kept is newer than the exported one.

    Args:
        out: the repository.
        kept: model -> its files that are kept.
        version: the exported version.
    """
    for model, files in kept.items():
        newest = max(_version_numbers(files), default=0)
        if newest > version:
            raise OptionError(
                f"option 'version' is {version}, but {out / model} has version {newest}, which "
                "Triton would continue to serve.",
                do=f"Use this version or a later one: --version {newest}",
            )


def describe_changes(
    earlier: Mapping[str, ExistingModel],
    kept: Mapping[str, Iterable[str]],
    gone: Sequence[str],
    version: int,
) -> list[str]:
    """Return messages about kept and removed versions and folders.

    Args:
        earlier: folder -> model of the earlier export.
        kept: exported model -> files of other versions that are kept.
        gone: folders of the earlier export that were removed.
        version: the exported version.
    """
    notes = []
    if stay := {number for files in kept.values() for number in _version_numbers(files)}:
        notes.append(f"version {_joined(stay)} is kept beside {version}; Triton serves the newest")
    for model, files in kept.items():
        if lost := _version_numbers(earlier[model].files) - _version_numbers(files) - {version}:
            notes.append(f"removed version {_joined(lost)} of {model}: it is for another backend")
    if gone:
        notes.append(
            f"removed {', '.join(gone)}, which an earlier export wrote and this one does not"
        )
    return notes


def _version_of(name: str) -> int:
    """Return the version whose folder contains a file; 0 for a file outside of versions."""
    folder, separator, _ = name.partition("/")
    return int(folder) if separator and folder.isdecimal() else 0


def _version_numbers(names: Iterable[str]) -> set[int]:
    return {_version_of(name) for name in names} - {0}


def _joined(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
