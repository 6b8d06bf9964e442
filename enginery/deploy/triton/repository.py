"""A Triton model repository on disk: models written beside it, then renamed into it.

    >>> place(Path("models"), "minilm", models, version=2, made_from=artifact.content_sha256())
    ['version 1 stays beside 2; Triton serves the newest']

    models/
      minilm/            config.pbtxt, 1/, 2/, enginery.json
      minilm-tokenizer/  …
      another/           somebody else's; never touched

A repository may hold models of others. A folder that this command did not make, or whose files were
edited since, is never overwritten: `enginery.json` in each has the digests of its files. The model
that clients ask comes last, when all that it is made of is there. The old and the new folder of a
model exchange names where the system can; elsewhere the next export brings back a model that a
killed one had moved away.
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
from enginery.core.artifact.staging import STAGING_PREFIX, replace_directory
from enginery.core.errors import ArtifactError
from enginery.core.home import file_lock
from enginery.core.json_file import json_bytes
from enginery.deploy.triton.earlier import LISTING, notes_on, read_earlier, require_newest
from enginery.deploy.triton.models import ANSWERS, GRAPH, TOKENIZER, TritonModel

CONFIG = "config.pbtxt"
_KEPT = ".keep"
"""An ensemble's version has no file, and object stores have no empty folders."""
_OLD = "old"
"""Of a staging directory: models that are nowhere else between two renames."""
_READABLE = 0o044


def place(
    out: Path, name: str, models: Sequence[TritonModel], *, version: int, made_from: str
) -> list[str]:
    """Leaves the models in the repository; the last one is the one that clients ask.

    Folders of an earlier export of the same name that are no longer part of it go. Its other
    versions stay, where they are of the same backend.

    Returns:
        What became of earlier versions and folders, in words.

    Raises:
        ArtifactError: a folder is somebody else's or was edited, or `out` cannot be written.
        OptionError: a version that stays is newer than `version`, and Triton would serve that.
    """
    out = out.resolve()
    _require_repository(out)
    parts = [name, *(f"{name}-{part}" for part in (GRAPH, TOKENIZER, ANSWERS))]
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _locked(out) as alone:
            if alone:
                _clear_leftovers(out)
            earlier = {part: read_earlier(out / part, name) for part in parts}
            kept = {
                model.name: earlier[model.name].other_versions(model.backend, version)
                for model in models
            }
            require_newest(out, kept, version)
            gone = [part for part in parts if part not in kept and earlier[part].files]
            _place(out, name, models, kept, gone, version=version, made_from=made_from)
            return notes_on(earlier, kept, gone, version)
    except OSError as error:
        raise ArtifactError(
            f"{out} cannot be written: {error.strerror}: {error.filename}.",
            do="Name another directory.",
        ) from error


@contextmanager
def _locked(out: Path) -> Iterator[bool]:
    """Waits for other exports into a repository, whatever $ENGINERY_HOME they have.

    Yields whether there can be none besides: a file system without locks has that of the store
    alone, and so has Windows, where one store a user is taken for granted.
    """
    store_lock = hashlib.sha256(os.fsencode(out)).hexdigest()[:16]
    with file_lock(f"triton-{store_lock}"):
        if sys.platform == "win32":
            yield True
            return
        import fcntl

        handle = os.open(out, os.O_RDONLY)  # the folder itself: a lock file would stay beside it
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
    """Brings back the models that a killed export had moved away, and removes what it left."""
    name = re.compile(rf"{re.escape(STAGING_PREFIX + out.name)}-[0-9a-f]{{12}}-triton")
    for leftover in [path for path in out.parent.iterdir() if name.fullmatch(path.name)]:
        _bring_back(leftover, out)
        shutil.rmtree(leftover, ignore_errors=True)


def _bring_back(staged: Path, out: Path) -> None:
    for model in (staged / _OLD).iterdir() if (staged / _OLD).is_dir() else ():
        if not (out / model.name).exists():
            os.replace(model, out / model.name)


def _place(
    out: Path,
    name: str,
    models: Sequence[TritonModel],
    kept: Mapping[str, Mapping[str, Path]],
    gone: Sequence[str],
    *,
    version: int,
    made_from: str,
) -> None:
    # Beside the repository, not in it: a server that polls would take it for a model.
    fresh = out.parent / f"{STAGING_PREFIX}{out.name}-{uuid.uuid4().hex[:12]}-triton"
    for folder in ("new", _OLD, "gone"):
        (fresh / folder).mkdir(parents=True)
    try:
        for model in models:
            listing = {
                "schema_version": 1,
                "made_by": "enginery export-triton",
                "export": name,
                "backend": model.backend,
                "artifact": made_from,
            }
            _write(model, fresh / "new" / model.name, listing, kept[model.name], version)
        for model in models:
            replace_directory(
                fresh / "new" / model.name, out / model.name, old=fresh / _OLD / model.name
            )
        for part in gone:
            os.replace(out / part, fresh / "gone" / part)
    finally:
        _bring_back(fresh, out)
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
    for file, content in model.texts.items():
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_bytes(content)
    for file, source in (*model.files.items(), *kept.items()):
        _copy(source, directory / file)
    if not any((directory / str(version)).iterdir()):
        (directory / str(version) / _KEPT).write_bytes(b"")
    files = {p.relative_to(directory).as_posix(): p for p in directory.rglob("*") if p.is_file()}
    (directory / LISTING).touch()
    # Readable by the user that the server runs as, whoever exported.
    for path in (directory, *directory.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
        elif path.stat().st_nlink == 1:  # a link's mode is that of the artifact's file
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


def _require_repository(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ArtifactError(f"{out} is a file, expected the folder of a model repository.")
    if (out / MANIFEST).is_file():
        raise ArtifactError(
            f"{out} has a {MANIFEST}, so it is an artifact, expected a model repository.",
            do="Name another directory.",
        )
