"""Write models into a Triton model repository: beside it first, then renamed into it.

    install_models(Path("models"), "minilm", models, made_from=digest)

    models/
      minilm/            config.pbtxt, 1/, enginery.json
      minilm-tokenizer/  …
      another/           a model that enginery did not write; never changed

`enginery.json` in each folder has the digests of its files. A folder without it, or whose files
were edited, is never overwritten. The ensemble is written last, when its parts are complete.
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
from enginery.core.json_file import json_bytes, parse_json, read_document
from enginery.core.paths import list_tree
from enginery.core.scratch import Scratch, locked, make_directory, replace_synced
from enginery.deploy.triton.models import ANSWERS, GRAPH, TOKENIZER, VERSION, TritonModel

CONFIG = "config.pbtxt"
LISTING = "enginery.json"
"""File in each model's folder with the name of its export, and its files' digests."""
_KEPT = ".keep"
"""File in the version of an ensemble, as object stores do not keep empty folders."""
_READABLE = 0o044


def install_models(
    out: Path, name: str, models: Sequence[TritonModel], *, made_from: str
) -> list[str]:
    """Write the models into the repository.

    Folders of an earlier export with the same name are replaced or removed.

    Args:
        out: the repository.
        name: name of the export.
        models: the models, with the one for clients last.
        made_from: sha256 of the artifact's content.

    Returns:
        Messages about removed folders.

    Raises:
        ArtifactError: a folder was not written by this command or was edited, or `out` cannot be
            written.
    """
    out = out.resolve()
    _check_repository(out)
    listing = {
        "schema_version": 1,
        "made_by": "enginery export-triton",
        "export": name,
        "artifact": made_from,
    }
    parts = [name, *(f"{name}-{part}" for part in (GRAPH, TOKENIZER, ANSWERS))]
    names = {model.name for model in models}
    try:
        make_directory(out)
        with locked(out, lambda: None):
            earlier = [part for part in parts if _is_earlier_export(out / part, name)]
            gone = [part for part in earlier if part not in names]
            # Beside the repository: a polling server would take a folder in it for a model.
            with Scratch.beside(out) as scratch:
                new, removed = scratch.path / "new", scratch.path / "removed"
                removed.mkdir()
                for model in models:
                    _write(model, new / model.name, listing)
                for model in models:
                    replace_synced(new / model.name, out / model.name)
                for part in gone:
                    os.replace(out / part, removed / part)
    except OSError as error:
        raise ArtifactError(
            f"{out} cannot be written: {error.strerror}: {error.filename}.",
            do="Choose another directory.",
        ) from error
    if gone:
        return [f"removed {', '.join(gone)}, which an earlier export wrote and this one does not"]
    return []


def _is_earlier_export(directory: Path, export: str) -> bool:
    """Return True if an earlier export with this name wrote a folder, False if there is none.

    Raises:
        ArtifactError: the folder is not from such an export, or its files were changed.
    """
    if not directory.exists():
        return False
    remedy = "Move it elsewhere, or choose another --name."
    try:
        listing = parse_json(read_document(directory / LISTING))
        digests, made_for = dict(listing["files"]), listing["export"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ArtifactError(
            f"{directory} exists and was not written by export-triton.", do=remedy
        ) from None
    if made_for != export:
        raise ArtifactError(
            f"{directory} belongs to the export '{made_for}', expected '{export}'.", do=remedy
        )
    for path in list_tree(directory):
        name = path.relative_to(directory).as_posix()
        # The Python backend writes byte code beside model.py.
        if path.is_dir() or name == LISTING or path.parent.name == "__pycache__":
            continue
        if digests.get(name) != sha256_of(path):
            raise ArtifactError(
                f"{directory} was edited after its export: {name} would be overwritten.", do=remedy
            )
    return True


def _write(model: TritonModel, directory: Path, listing: Mapping[str, Any]) -> None:
    (directory / VERSION).mkdir(parents=True)
    (directory / CONFIG).write_text(model.config(), encoding="utf-8")
    for file, content in model.contents.items():
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_bytes(content)
    for file, source in model.files.items():
        _copy(source, directory / file)
    if not any((directory / VERSION).iterdir()):
        (directory / VERSION / _KEPT).write_bytes(b"")
    files = {p.relative_to(directory).as_posix(): p for p in list_tree(directory) if p.is_file()}
    digests = {name: sha256_of(path) for name, path in sorted(files.items())}
    (directory / LISTING).write_bytes(json_bytes({**listing, "files": digests}))
    # The server's user must be able to read the files.
    for path in (directory, *list_tree(directory)):
        if path.is_dir():
            path.chmod(0o755)
        elif path.stat().st_nlink == 1:  # a hard link shares its mode with the artifact's file
            path.chmod(0o644)
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
