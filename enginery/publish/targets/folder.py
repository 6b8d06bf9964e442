"""A registry that is a folder: on a disk, a share, a volume.

An address is `file:///path` or a plain path. A version is there whole or not at all:

    /srv/models/
      index.json              every model, version and alias; made anew from the folders each time
      minilm/
        1/  2/                versions: artifacts, each whole; load_model takes one as it is
        latest -> 2           relative links: the newest version, and what --alias named
        production -> 1

A version is written into a hidden folder under the model's lock, read back, and renamed. The index
is made from the folders each time, so the next run mends what a killed one has left. Where the file
system has no links, `latest` and the aliases are files with the version's name in them.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from filelock import FileLock, Timeout

from enginery.core.artifact.artifact import MANIFEST
from enginery.core.artifact.staging import STAGING_PREFIX, replace_directory, write_atomically
from enginery.core.errors import (
    ArtifactError,
    EngineryError,
    OptionError,
    RegistryError,
    nearest,
)
from enginery.core.json_file import json_bytes
from enginery.core.paths import is_portable_name, resolve_inside
from enginery.core.progress import Progress
from enginery.publish.config import LATEST, PublishConfig
from enginery.publish.destination import Published
from enginery.publish.package import Package
from enginery.publish.package_files import PackageFile, write_file
from enginery.publish.publication import LISTING, REMEDY, Publication

INDEX = "index.json"
SCHEMA_VERSION = 1
_LONGEST_NAME = 200
_WAIT_SECONDS = 0.0
_PART = ".part-"
_OLD = ".old-"
# Clocks of two machines differ, and shares round: what is published later has a later time still.
_APART_NS = 10_000_000


@dataclass(frozen=True)
class FolderRegistry:
    """A folder of models, by its address."""

    url: str
    config: PublishConfig

    @property
    def path(self) -> Path:
        """Return the path in the address."""
        return path_of(self.url)

    def publish(self, package: Package, config: PublishConfig, progress: Progress) -> Published:
        """Write the package as a version, unless its content is one already.

        Raises:
            RegistryError: the folder cannot be written, holds something else, or has another
                content under the version that is asked for.
            OptionError: the alias is a version's name, or the other way round.
        """
        root = self.path
        folder = root / package.name
        with _registry_errors(root):
            check_overwritable(root)
            with _locked(folder, progress):
                bring_back(folder)
                version, is_new = _find_or_write(package, folder, config, progress)
                if is_new:
                    point(folder, LATEST, version)
                else:
                    # A run that was killed may have left a version that `latest` does not know.
                    mend_latest(folder, versions_of(folder))
                if config.alias:
                    point(folder, config.alias, version)
            with _locked(root, progress):
                write_index(root)
        url = (folder / version).resolve().as_uri()
        return Published(url, version, is_new, package.notes)

    @property
    def remedy(self) -> str:
        """Say what to do about a damaged version: publishing reads it, and writes it again."""
        return REMEDY

    def pull(self, out: Path, progress: Progress) -> Path:
        """Copy a version into `out`; `…/minilm` is the newest, `…/minilm@production` an alias."""
        with _registry_errors(self.path):
            source, listing = find_version(self.url)
            names = [*listing.files, LISTING]
            with progress.task(f"copying {source.name}", total=len(names)) as advance:
                for name in names:
                    if not resolve_inside(source, name, what=self.url).is_file():
                        raise ArtifactError(f"{self.url}: {name} is missing.", do=self.remedy)
                    (out / name).parent.mkdir(parents=True, exist_ok=True)
                    # Never a link: an edit of what was pulled must not reach the registry.
                    shutil.copyfile(source / name, out / name)
                    advance()
        return out


def _find_or_write(
    package: Package, folder: Path, config: PublishConfig, progress: Progress
) -> tuple[str, bool]:
    """Return the version of this content and whether it is new; write a damaged one again."""
    found = versions_of(folder)
    _check_names(folder, config, list(found))
    same = [version for version, listing in found.items() if package.is_version(listing)]
    if same and config.version not in ("", *same):
        raise RegistryError(
            f"{folder} has this content as version {same[-1]} already, and version "
            f"{config.version} was asked for.",
            do=f"Leave out --version, or name it as well: --alias {config.version}",
        )
    if not same:
        version = config.version or _next_version(folder)
        _require_free(folder / version, found.get(version), package)
        write_version(package, folder, version, progress)
        return version, True
    version = config.version or same[-1]
    place, listing = folder / version, found[version]
    if damage := damage_of(listing, place):
        package.require_rights(damage.rstrip("."), listing.content_sha256)
        progress.say(f"publish: writes version {version} again: {damage}")
        write_version(package, folder, version, progress, stamp_ns=published_ns(place))
    else:
        progress.say(f"publish: nothing to do, version {version} has the same content")
    return version, False


def _require_free(place: Path, there: Publication | None, package: Package) -> None:
    """Raise RegistryError if a new version cannot be made under this name."""
    if there:
        raise RegistryError(
            f"{place} has another content: {_changes(there, package)}.",
            do="Name another --version, or leave it out.",
        )
    if place.exists():
        raise RegistryError(
            f"{place} is there, and its {LISTING} is missing or cannot be read.",
            do="Remove it, or name another --version.",
        )


def _next_version(folder: Path) -> str:
    """Return one more than the largest whole number in the folder, damaged versions included."""
    names = [path.name for path in folder.iterdir()]
    return str(max((int(name) for name in names if name.isdecimal()), default=0) + 1)


def _check_names(folder: Path, config: PublishConfig, versions: list[str]) -> None:
    if config.alias and config.alias in versions:
        raise OptionError(f"alias '{config.alias}' is the name of a version of {folder.name}.")
    if config.alias and config.alias == config.version:
        raise OptionError(f"alias and version are both '{config.alias}'.", do="Keep the version.")
    if config.version in aliases_of(folder):
        raise OptionError(f"version '{config.version}' is the name of an alias of {folder.name}.")


def _changes(there: Publication, package: Package) -> str:
    """Say which parts of the content differ, by name."""
    names = sorted({*there.content, *package.content})
    changed = [n for n in names if there.content.get(n) != package.content.get(n)]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f"{', '.join(changed[:3])}{more} differ" if changed else "its digest differs"


@contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock that lies in the registry itself: one writer at a time, on any machine."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=_WAIT_SECONDS)
    except Timeout:
        progress.say(f"waiting: another process writes into {folder}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _registry_errors(place: Path) -> Iterator[None]:
    """Turn an error of the file system into a RegistryError."""
    try:
        yield
    except OSError as error:
        raise RegistryError(
            f"{place} cannot be used as a registry: {error.strerror or error}: "
            f"{error.filename or place}."
        ) from error


def path_of(url: str) -> Path:
    """Return the path that `file:///path` or a plain path names.

    Raises:
        OptionError: it is another host's, or no path.
    """
    if "\0" in unquote(url):
        raise OptionError(f"address {url!r} has a zero byte, which no path has.")
    if not url.lower().startswith("file:"):
        try:
            return Path(url).expanduser().absolute()
        except RuntimeError:
            raise OptionError(f"address '{url}': there is no such user.") from None
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise OptionError(
            f"address '{url}' names the host '{parts.netloc}', and a folder is on this machine.",
            do=f"Three slashes begin a path: file:///{parts.netloc}{parts.path}",
        )
    if parts.query or parts.fragment or not parts.path.startswith("/"):
        raise OptionError(f"address '{url}': expected file:/// and an absolute path.")
    path = unquote(parts.path)
    return Path(path.lstrip("/") if re.match(r"/[A-Za-z]:", path) else path)


def find_version(url: str) -> tuple[Path, Publication]:
    """Return the folder of the version that an address names, with its listing.

    `…/minilm/3` and `…/minilm/production` name a version, `…/minilm@3` and `…/minilm@production`
    as well; `…/minilm` is the newest.

    Raises:
        RegistryError: there is no such version, or no such registry.
        OptionError: the address is none of a folder.
    """
    path = path_of(url)
    if (path / LISTING).is_file():
        return path, Publication.read(path, url)
    folder, wanted = path, LATEST
    if "@" in path.name and not path.exists():
        name, _, wanted = path.name.rpartition("@")
        folder = path.with_name(name)
    elif not versions_of(path) and versions_of(path.parent):
        folder, wanted = path.parent, path.name
    versions, aliases = versions_of(folder), aliases_of(folder)
    version = aliases.get(wanted, wanted)
    if wanted == LATEST and versions and LATEST not in aliases:
        version = newest(folder, versions)
    if (folder / version / LISTING).is_file():
        return folder / version, Publication.read(folder / version, url)
    raise _not_there(url, folder, wanted, [*versions, *aliases])


def _not_there(url: str, folder: Path, wanted: str, known: list[str]) -> RegistryError:
    """Say what there is in place of what was asked for."""
    if known:
        return RegistryError(
            f"{folder} has no version or alias '{wanted}'{nearest(wanted, known)}",
            do=f"It has {', '.join(known)}.",
        )
    if models := _models(folder):
        return RegistryError(
            f"{folder} is a registry, and no model in it is named.",
            do=f"Add one to the address: {', '.join(models)}.",
        )
    near = _models(folder.parent)
    return RegistryError(
        f"{url}: there is no published model{nearest(folder.name, near)}",
        do=f"{folder.parent} has {', '.join(near)}." if near else "",
    )


def _models(path: Path) -> list[str]:
    found = path.iterdir() if path.is_dir() else ()
    return sorted(p.name for p in found if p.is_dir() and versions_of(p))


def check_overwritable(root: Path) -> None:
    """Raise if a folder is a version, a model's folder or an artifact, and so no registry."""
    if root.exists() and not root.is_dir():
        raise RegistryError(f"{root} is a file, expected the folder of a registry.")
    for inside, registry in ((root, root.parent), (root.parent, root.parent.parent)):
        if (registry / INDEX).is_file() and versions_of(inside):
            raise OptionError(
                f"{root} lies inside the registry {registry}.",
                do=f"Publish to {registry.as_uri()}; --name and --version say where in it.",
            )
    if (root / MANIFEST).is_file():
        raise RegistryError(f"{root} is an artifact, expected the folder of a registry.")


def versions_of(folder: Path) -> dict[str, Publication]:
    """Return the versions of a model by name, in their natural order, without damaged ones."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if is_portable_name(path.name) and not path.is_symlink() and (path / LISTING).is_file():
            with suppress(EngineryError):
                found[path.name] = Publication.read(path, str(path))
    return dict(sorted(found.items(), key=lambda pair: _natural(pair[0])))


def aliases_of(folder: Path) -> dict[str, str]:
    """Return what points to an existing version: `latest` and the aliases, links or files."""
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
    """Return the version that was published last."""
    dates = {version: published_ns(folder / version) for version in versions}
    return max(versions, key=lambda version: (dates[version], _natural(version)))


def point(folder: Path, name: str, version: str) -> None:
    """Let `name` point to a version, at once: readers see the old one or the new."""
    place = folder / name
    if aliases_of(folder).get(name) == version:
        return
    fresh = folder / f"{STAGING_PREFIX}{name}"
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(version, target_is_directory=True)
    except OSError:  # Windows without the right to, or a share without links
        write_atomically(place, f"{version}\n".encode())
        return
    fresh.replace(place)


def mend_latest(folder: Path, versions: dict[str, Publication]) -> None:
    """Point `latest` to a version that a killed run has left unpointed, and never back.

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
    """Write `index.json` from the folders, under the registry's lock."""
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
        write_atomically(place, content)


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
    """Return when the listing was written, in nanoseconds: the last file of a version."""
    return (version / LISTING).stat().st_mtime_ns


def _date(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat(timespec="seconds")


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a key for sorting: 2 before 10, 1.9 before 1.10."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)


def write_version(
    package: Package, folder: Path, version: str, progress: Progress, *, stamp_ns: int = 0
) -> None:
    """Write a version beside its place and rename it; replace a damaged one that is there.

    Args:
        package: what is published.
        folder: of the model.
        version: its name, without anything else in its place than a damaged version.
        progress: receives progress messages.
        stamp_ns: when the version was published; 0 for now, and later than every other version.

    Raises:
        ArtifactError: a file has changed since the package was made; the message names it.
        OSError: the folder cannot be written.
    """
    part = folder / f"{_PART}{package.content_sha256[:16]}"
    for leftover in folder.glob(f"{_PART}*"):
        if leftover != part:
            shutil.rmtree(leftover, ignore_errors=True)  # its writer is dead: the lock is ours
    part.mkdir(exist_ok=True)
    with progress.task(f"writing {folder.name}/{version}", total=len(package.files)) as advance:
        for file in package.files:
            _write_one(package, file, part)
            advance()
    wanted = {file.name for file in package.files}
    for path in part.rglob("*"):
        if path.is_file() and path.relative_to(part).as_posix() not in wanted:
            path.unlink()
    Publication.read(part, str(part)).verify(part, f"{package.artifact.path}, as it is now")
    stamp_ns = stamp_ns or _now_ns(folder)
    os.utime(part / LISTING, ns=(stamp_ns, stamp_ns))
    _sync(part)
    old = folder / f"{_OLD}{version}"
    replace_directory(part, folder / version, old=old)
    for left in (part, old):  # one of the two has what was damaged
        shutil.rmtree(left, ignore_errors=True)
    progress.say(f"publish: wrote {folder / version}")


def damage_of(listing: Publication, place: Path) -> str:
    """Read a version; return what is not as its listing says, empty if all is."""
    try:
        listing.verify(place, str(place))
    except ArtifactError as error:
        return error.message
    return ""


def bring_back(folder: Path) -> None:
    """Finish what a writer killed between two renames has left, under the model's lock."""
    for old in folder.glob(f"{_OLD}*"):
        place = folder / old.name.removeprefix(_OLD)
        if place.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.replace(place)


def _now_ns(folder: Path) -> int:
    """Return the time now, or just after the version that was published last."""
    others = [published_ns(folder / version) for version in versions_of(folder)]
    return max([time.time_ns(), *(other + _APART_NS for other in others)])


def _write_one(package: Package, file: PackageFile, part: Path) -> None:
    try:
        write_file(file, part / file.name)
    except FileNotFoundError as error:
        if file.path.exists():
            raise
        raise ArtifactError(
            f"{package.artifact.path}: {file.name} went away while it was published."
        ) from error


def _sync(directory: Path) -> None:
    """Flush the files, so that the rename cannot reach the disk before the content."""
    for path in (p for p in directory.rglob("*") if p.is_file()):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
