"""What is in a folder registry: versions, aliases, and `index.json` made from them.

>>> versions_of(Path("/srv/models/minilm")).keys(), aliases_of(Path("/srv/models/minilm"))
(dict_keys(['1', '2']), {'latest': '2', 'production': '1'})

The folders are the truth. The index is made from them anew, so that a run that was killed between
the two leaves nothing that the next one does not mend.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from enginery.core.errors import EngineryError
from enginery.core.json_file import json_bytes
from enginery.core.names import is_portable_name
from enginery.core.staging import STAGING_PREFIX, write_beside
from enginery.publish.config import LATEST
from enginery.publish.publication import LISTING, Publication

INDEX = "index.json"
SCHEMA_VERSION = 1
_LONGEST_NAME = 200


def versions_of(folder: Path) -> dict[str, Publication]:
    """The versions of a model by name, in their natural order; damaged ones are left out."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if is_portable_name(path.name) and not path.is_symlink() and (path / LISTING).is_file():
            with suppress(EngineryError):
                found[path.name] = Publication.read(path, str(path))
    return dict(sorted(found.items(), key=lambda pair: _natural(pair[0])))


def aliases_of(folder: Path) -> dict[str, str]:
    """What points to a version that is there: `latest` and the aliases, as links or as files."""
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not is_portable_name(path.name):
            continue
        if path.is_symlink():
            found[path.name] = path.readlink().name
        elif path.is_file() and path.stat().st_size <= _LONGEST_NAME:
            name = path.read_text(encoding="utf-8", errors="replace").strip()
            if is_portable_name(name):
                found[path.name] = name
    return {name: version for name, version in found.items() if (folder / version).is_dir()}


def newest(folder: Path, versions: dict[str, Publication]) -> str:
    """The version that was published last."""
    dates = {version: published_ns(folder / version) for version in versions}
    return max(versions, key=lambda version: (dates[version], _natural(version)))


def point(folder: Path, name: str, version: str) -> None:
    """Lets `name` point to a version, at once: readers see the old one or the new."""
    place = folder / name
    if aliases_of(folder).get(name) == version:
        return
    fresh = folder / f"{STAGING_PREFIX}{name}"
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(version, target_is_directory=True)
    except OSError:  # Windows without the right to, or a share without links
        write_beside(place, f"{version}\n".encode())
        return
    fresh.replace(place)


def mend_latest(folder: Path, versions: dict[str, Publication]) -> None:
    """Points `latest` to a version that a killed run has left unpointed, and never back.

    Times alone do not say so: a registry that was copied has those of the copy.
    """
    if not versions:
        return
    pointed, last = aliases_of(folder).get(LATEST, ""), newest(folder, versions)
    if pointed in versions:
        is_later = published_ns(folder / last) > published_ns(folder / pointed)
        if not is_later or _natural(last) <= _natural(pointed):
            return
    point(folder, LATEST, last)


def write_index(root: Path) -> None:
    """Makes `index.json` anew, under the registry's lock."""
    models = {
        path.name: _model(path)
        for path in sorted(root.iterdir())
        if path.is_dir() and is_portable_name(path.name)
    }
    document = {
        "schema_version": SCHEMA_VERSION,
        "models": {name: model for name, model in models.items() if model["versions"]},
    }
    content = json_bytes(document)
    place = root / INDEX
    if not place.is_file() or place.read_bytes() != content:
        write_beside(place, content)


def _model(folder: Path) -> dict[str, Any]:
    aliases = aliases_of(folder)
    return {
        "latest": aliases.pop(LATEST, ""),
        "aliases": aliases,
        "versions": {
            version: {
                "published": _date(published_ns(folder / version)),
                "content_sha256": publication.content_sha256,
                "size_bytes": sum(record.size_bytes for record in publication.files.values()),
                "validated": publication.validated,
                "engines": [mark.model_dump(mode="json") for mark in publication.engines],
            }
            for version, publication in versions_of(folder).items()
        },
    }


def published_ns(version: Path) -> int:
    """When the listing was written, in nanoseconds: the last file of a version."""
    return (version / LISTING).stat().st_mtime_ns


def _date(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat(timespec="seconds")


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """For sorting: 2 before 10, 1.9 before 1.10."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)
