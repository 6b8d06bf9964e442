"""Write models into a Triton model repository: beside it first, then renamed into it.

    install_models(Path("models"), "minilm", models, version=2, made_from=digest)
    # ['version 1 is kept beside 2; Triton serves the newest']

    models/
      minilm/            config.pbtxt, 1/, 2/, enginery.json
      minilm-tokenizer/  …
      another/           a model that enginery did not write; never changed

`enginery.json` in each folder has the digests of its files. A folder without it, or whose files
were edited, is never overwritten. The ensemble is written last, when its parts are complete. Old
and new folder of a model exchange their names atomically if the system supports it; if not, the
next export restores a model that a killed one had moved.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from enginery.core.artifact.artifact import MANIFEST, link_or_copy
from enginery.core.artifact.fingerprint import sha256_of
from enginery.core.errors import ArtifactError
from enginery.core.json_file import json_bytes
from enginery.core.paths import list_tree
from enginery.core.scratch import (
    PREFIX,
    Scratch,
    final_name,
    leftovers,
    locked,
    make_directory,
    replace_synced,
)
from enginery.deploy.triton.existing_model import (
    LISTING,
    check_newest,
    describe_changes,
    read_existing_model,
)
from enginery.deploy.triton.models import ANSWERS, GRAPH, TOKENIZER, TritonModel

CONFIG = "config.pbtxt"
_KEPT = ".keep"
"""File in the version of an ensemble, as object stores do not keep empty folders."""
_NEW = "new"
"""Folder of the new models beside the repository."""
_READABLE = 0o044


def install_models(
    out: Path, name: str, models: Sequence[TritonModel], *, version: int, made_from: str
) -> list[str]:
    """Write the models into the repository.

    Other versions from an earlier export with the same name are kept if they are for the same
    backend. Folders of the earlier export that this one does not have are removed.

    Args:
        out: the repository.
        name: name of the export.
        models: the models, with the one for clients last.
        version: version of the models.
        made_from: sha256 of the artifact's content.

    Returns:
        Messages about kept and removed versions and folders.

    Raises:
        ArtifactError: a folder was not written by this command or was edited, or `out` cannot be
            written.
        OptionError: a version that is kept is newer than `version`, so that Triton would serve it.
    """
    out = out.resolve()
    _check_repository(out)
    parts = [name, *(f"{name}-{part}" for part in (GRAPH, TOKENIZER, ANSWERS))]
    try:
        make_directory(out)
        with locked(out, lambda: None):
            for leftover in leftovers(out.parent, out.name):
                with leftover:
                    _restore_moved(leftover.path, out)
            earlier = {part: read_existing_model(out / part, name) for part in parts}
            kept = {
                model.name: earlier[model.name].other_versions(model.backend, version)
                for model in models
            }
            check_newest(out, kept, version)
            gone = [part for part in parts if part not in kept and earlier[part].files]
            listings = {
                model.name: {
                    "schema_version": 1,
                    "made_by": "enginery export-triton",
                    "export": name,
                    "backend": model.backend,
                    "artifact": made_from,
                }
                for model in models
            }
            _install(out, models, listings, kept, gone, version)
            return describe_changes(earlier, kept, gone, version)
    except OSError as error:
        raise ArtifactError(
            f"{out} cannot be written: {error.strerror}: {error.filename}.",
            do="Choose another directory.",
        ) from error


def _restore_moved(staged: Path, out: Path) -> None:
    """Rename the models back that an export had moved when it was killed between two renames."""
    for model in (staged / _NEW).glob(f"{PREFIX}*"):
        if not (out / final_name(model)).exists():
            os.replace(model, out / final_name(model))


def _install(
    out: Path,
    models: Sequence[TritonModel],
    listings: Mapping[str, Mapping[str, Any]],
    kept: Mapping[str, Mapping[str, Path]],
    gone: Sequence[str],
    version: int,
) -> None:
    # Beside the repository, not in it: a polling server would take the folder for a model.
    with Scratch.beside(out) as scratch:
        new, removed = scratch.path / _NEW, scratch.path / "removed"
        removed.mkdir()
        for model in models:
            _write(model, new / model.name, listings[model.name], kept[model.name], version)
        for model in models:
            replace_synced(new / model.name, out / model.name)
        for part in gone:
            os.replace(out / part, removed / part)


def _write(
    model: TritonModel,
    directory: Path,
    listing: Mapping[str, Any],
    kept: Mapping[str, Path],
    version: int,
) -> None:
    (directory / str(version)).mkdir(parents=True)
    (directory / CONFIG).write_text(model.config(), encoding="utf-8")
    for file, content in model.contents.items():
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_bytes(content)
    for file, source in (*model.files.items(), *kept.items()):
        _copy(source, directory / file)
    if not any((directory / str(version)).iterdir()):
        (directory / str(version) / _KEPT).write_bytes(b"")
    files = {p.relative_to(directory).as_posix(): p for p in list_tree(directory) if p.is_file()}
    (directory / LISTING).touch()
    # The server's user must be able to read the files.
    for path in (directory, *list_tree(directory)):
        if path.is_dir():
            path.chmod(0o755)
        elif path.stat().st_nlink == 1:  # a hard link shares its mode with the artifact's file
            path.chmod(0o644)
    digests = {name: sha256_of(path) for name, path in sorted(files.items())}
    (directory / LISTING).write_bytes(json_bytes({**listing, "files": digests}))


def _copy(source: Path, target: Path) -> None:
    if source.stat().st_mode & _READABLE == _READABLE:
        link_or_copy(source, target)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _check_repository(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ArtifactError(f"{out} is a file, expected the folder of a model repository.")
    if (out / MANIFEST).is_file():
        raise ArtifactError(
            f"{out} is an artifact, as it has a {MANIFEST}; expected a model repository.",
            do="Choose another directory.",
        )
