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

import hashlib
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from enginery.core.artifact.artifact import MANIFEST, link_or_copy
from enginery.core.artifact.fingerprint import sha256_of
from enginery.core.artifact.staging import replace_directory
from enginery.core.errors import ArtifactError
from enginery.core.home import file_lock
from enginery.core.json_file import json_bytes
from enginery.core.paths import list_tree
from enginery.core.temporary import PREFIX
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
_OLD = "old"
"""Folder in the staging directory for models that are moved between two renames."""
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
        out.mkdir(parents=True, exist_ok=True)
        with _locked(out) as alone:
            if alone:
                _clear_leftovers(out)
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


@contextmanager
def _locked(out: Path) -> Iterator[bool]:
    """Wait for other exports into the repository, even if they use another $ENGINERY_HOME.

    Yields:
        True if no other export can run. False if the file system has no locks, so that only the
        store's lock is held. Windows has only the store's lock, too, but one store per user.
    """
    store_lock = hashlib.sha256(os.fsencode(out)).hexdigest()[:16]
    with file_lock(f"triton-{store_lock}"):
        if sys.platform == "win32":
            yield True
            return
        import fcntl

        handle = os.open(out, os.O_RDONLY)  # lock the folder itself, without a lock file
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                alone = True
            except OSError:
                alone = False
            yield alone
        finally:
            os.close(handle)


def _clear_leftovers(out: Path) -> None:
    """Restore the models that a killed export had moved, and remove its temporary files."""
    name = re.compile(rf"{re.escape(PREFIX + out.name)}-[0-9a-f]{{12}}-triton")
    for leftover in [path for path in out.parent.iterdir() if name.fullmatch(path.name)]:
        _restore_moved(leftover, out)
        shutil.rmtree(leftover, ignore_errors=True)


def _restore_moved(staged: Path, out: Path) -> None:
    old = staged / _OLD
    if not old.is_dir():
        return
    for model in old.iterdir():
        if not (out / model.name).exists():
            os.replace(model, out / model.name)


def _install(
    out: Path,
    models: Sequence[TritonModel],
    listings: Mapping[str, Mapping[str, Any]],
    kept: Mapping[str, Mapping[str, Path]],
    gone: Sequence[str],
    version: int,
) -> None:
    # Beside the repository, not in it: a polling server would take the folder for a model.
    fresh = out.parent / f"{PREFIX}{out.name}-{uuid.uuid4().hex[:12]}-triton"
    for folder in ("new", _OLD, "gone"):
        (fresh / folder).mkdir(parents=True)
    try:
        for model in models:
            listing = listings[model.name]
            _write(model, fresh / "new" / model.name, listing, kept[model.name], version)
        for model in models:
            replace_directory(
                fresh / "new" / model.name, out / model.name, old=fresh / _OLD / model.name
            )
        for part in gone:
            os.replace(out / part, fresh / "gone" / part)
    finally:
        _restore_moved(fresh, out)
        shutil.rmtree(fresh, ignore_errors=True)


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
    for path in (*files.values(), directory / LISTING):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())


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
