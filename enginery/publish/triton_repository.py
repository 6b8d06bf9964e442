"""A Triton model repository on disk: models written beside it, then renamed into it.

    >>> place(Path("models"), "minilm", models, version=1, made_from=artifact.content_sha256())

    models/
      minilm/            config.pbtxt, 1/, enginery.json
      minilm-tokenizer/  …
      another/           somebody else's; never touched

A repository may hold models of others. A folder that this command did not make, or whose files were
edited since, is never overwritten: `enginery.json` in each has the digests of its files. The model
that clients ask is renamed last, when all that it is made of is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from enginery.core.artifact import MANIFEST, link_or_copy
from enginery.core.errors import ArtifactError
from enginery.core.fingerprint import sha256_of
from enginery.core.json_file import json_bytes
from enginery.core.locks import named_lock
from enginery.publish.triton_models import ANSWERS, GRAPH, TOKENIZER, TritonModel

LISTING = "enginery.json"
CONFIG = "config.pbtxt"
_KEPT = ".keep"
"""An ensemble's version has no file, and object stores have no empty folders."""


def place(
    out: Path, name: str, models: Sequence[TritonModel], *, version: int, made_from: str
) -> None:
    """Leaves the models in the repository; the last one is the one that clients ask.

    Folders of an earlier export of the same name that are no longer part of it go.

    Raises:
        ArtifactError: a folder is somebody else's or was edited, or `out` cannot be written.
    """
    out = out.resolve()
    lock = hashlib.sha256(os.fsencode(out)).hexdigest()[:16]
    with named_lock(f"triton-{lock}"):
        parts = [name, *(f"{name}-{part}" for part in (GRAPH, TOKENIZER, ANSWERS))]
        _require_repository(out)
        for part in parts:
            _require_ours(out / part, name)
        try:
            _place(out, name, models, parts, version=version, made_from=made_from)
        except OSError as error:
            raise ArtifactError(
                f"{out} cannot be written: {error.strerror}: {error.filename}.",
                do="Name another directory.",
            ) from error


def _place(
    out: Path,
    name: str,
    models: Sequence[TritonModel],
    parts: Sequence[str],
    *,
    version: int,
    made_from: str,
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    prefix = f".tmp-{out.name}-triton-"
    for leftover in out.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)  # its writer is dead: the lock is ours
    # Beside the repository, not in it: a server that polls would take it for a model.
    fresh = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
    try:
        for model in models:
            _write(model, fresh / "new" / model.name, name, version, made_from)
        old = fresh / "old"
        old.mkdir()
        for model in models:
            _swap(fresh / "new" / model.name, out / model.name, old / model.name)
        for part in parts:
            if part not in {model.name for model in models} and (out / part).exists():
                os.replace(out / part, old / part)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _write(model: TritonModel, directory: Path, export: str, version: int, made_from: str) -> None:
    (directory / str(version)).mkdir(parents=True)
    # Readable by the user that the server runs as, whoever exported.
    (directory / CONFIG).write_text(model.config(), encoding="utf-8")
    for file, content in model.texts.items():
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_bytes(content)
    for file, source in model.files.items():
        link_or_copy(source, directory / file)
    if not any((directory / str(version)).iterdir()):
        (directory / str(version) / _KEPT).write_bytes(b"")
    found = {p.relative_to(directory).as_posix(): p for p in directory.rglob("*") if p.is_file()}
    listing: dict[str, Any] = {
        "schema_version": 1,
        "made_by": "enginery export-triton",
        "export": export,
        "artifact": made_from,
        "files": {name: sha256_of(path) for name, path in sorted(found.items())},
    }
    (directory / LISTING).write_bytes(json_bytes(listing))
    for path in (*found.values(), directory / LISTING):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())


def _swap(fresh: Path, target: Path, old: Path) -> None:
    if target.exists():
        os.replace(target, old)
    try:
        os.replace(fresh, target)
    except OSError:
        if old.exists():
            os.replace(old, target)
        raise


def _require_repository(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ArtifactError(f"{out} is a file, expected the folder of a model repository.")
    if (out / MANIFEST).is_file():
        raise ArtifactError(
            f"{out} has a {MANIFEST}, so it is an artifact, expected a model repository.",
            do="Name another directory.",
        )


def _require_ours(directory: Path, export: str) -> None:
    """Raises ArtifactError for a folder that an export of this name did not leave as it is."""
    if not directory.exists():
        return
    remedy = "Move it elsewhere, or name another with --name."
    try:
        listing = json.loads((directory / LISTING).read_text(encoding="utf-8"))
        files, made_for = dict(listing["files"]), listing["export"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ArtifactError(
            f"{directory} exists and was not made by export-triton, so it is not overwritten.",
            do=remedy,
        ) from None
    if made_for != export:
        raise ArtifactError(f"{directory} is part of the export '{made_for}'.", do=remedy)
    found = {p.relative_to(directory).as_posix(): p for p in directory.rglob("*") if p.is_file()}
    found.pop(LISTING, None)
    changed = [name for name, path in found.items() if files.get(name) != sha256_of(path)]
    if changed:
        raise ArtifactError(
            f"{directory} was edited since it was made, and {changed[0]} would be lost.", do=remedy
        )
