"""A registry that is a folder: on a disk, a share, a volume.

Takes a package and `file:///path`, or a plain path; leaves `<name>/<version>/` whole, or nothing.

    >>> FolderRegistry("file:///srv/models", PublishConfig()).publish(package, config, SILENT).url
    'file:///srv/models/minilm/1'

    /srv/models/
      index.json              every model, version and alias; made anew from the folders each time
      minilm/
        1/  2/                versions: artifacts, each whole; load_model takes one as it is
        latest -> 2           relative links: the newest version, and what --alias named
        production -> 1

A version is written into a hidden folder under the model's lock, read back, and renamed. Where the
file system has no links, `latest` and the aliases are files with the version's name in them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from enginery.core.errors import ArtifactError, OptionError, RegistryError
from enginery.core.progress import Progress
from enginery.publish.config import LATEST, PublishConfig
from enginery.publish.destination import Published
from enginery.publish.folder_address import find_version, path_of, refuse_foreign
from enginery.publish.folder_index import aliases_of, newest, point, versions_of, write_index
from enginery.publish.package import Package
from enginery.publish.package_files import PackageFile, write_file
from enginery.publish.publication import LISTING, Publication

_PART = ".part-"
_WAIT_SECONDS = 0.0


@dataclass(frozen=True)
class FolderRegistry:
    """A folder of models; made of its address."""

    url: str
    config: PublishConfig

    @property
    def path(self) -> Path:
        """The path in the address."""
        return path_of(self.url)

    def publish(self, package: Package, config: PublishConfig, progress: Progress) -> Published:
        """Leaves the package as a version, or finds that its content is one already.

        Raises:
            RegistryError: the folder cannot be written, holds something else, or has another
                content under the version that is asked for.
            OptionError: the alias is a version's name, or the other way round.
        """
        root = self.path
        refuse_foreign(root)
        folder = root / package.name
        with _told(root), _locked(folder, progress):
            found = versions_of(folder)
            _check_names(folder, config, list(found))
            same = [v for v, p in found.items() if p.content_sha256 == package.content_sha256]
            version = same[0] if same else config.version or _next(list(found))
            is_new = not same
            if same and config.version and config.version not in same:
                raise RegistryError(
                    f"{folder} has this content as version {same[0]} already, and version "
                    f"{config.version} was asked for.",
                    do=f"Leave out --version, or name it as well: --alias {config.version}",
                )
            if is_new and version in found:
                raise RegistryError(
                    f"{folder / version} has another content: {_changes(found[version], package)}.",
                    do="Name another --version, or leave it out.",
                )
            if is_new:
                _write(package, folder, version, progress)
            else:
                progress.say(f"publish: nothing to do, version {version} has the same content")
            known = versions_of(folder)
            # A run that was killed may have left a version that `latest` does not know yet.
            point(folder, LATEST, version if is_new else newest(folder, known))
            if config.alias:
                point(folder, config.alias, version)
        with _told(root), _locked(root, progress):
            write_index(root)
        url = (folder / version).resolve().as_uri()
        return Published(url, version, is_new, package.notes)

    def pull(self, out: Path, progress: Progress) -> Path:
        """Copies a version into `out`; `…/minilm` is the newest, `…/minilm@production` an alias."""
        source, listing = find_version(self.url)
        names = [*listing.files, LISTING]
        with _told(source), progress.task(f"copying {source.name}", total=len(names)) as advance:
            for name in names:
                if not (source / name).is_file():
                    raise ArtifactError(f"{self.url}: {name} is missing.")
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                # Never a link: an edit of what was pulled must not reach the registry.
                shutil.copyfile(source / name, out / name)
                advance()
        return out


def _write(package: Package, folder: Path, version: str, progress: Progress) -> None:
    """Writes a version beside its place and renames it; a killed run's files are taken over."""
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
    listed = Publication.read(part, str(part))
    listed.verify(part, f"{package.artifact.path}, as it is now")
    _sync(part)
    part.replace(folder / version)
    progress.say(f"publish: wrote {folder / version}")


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
    """Flushes what is written, so that the rename cannot reach the disk before the content."""
    for path in (p for p in directory.rglob("*") if p.is_file()):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())


def _next(versions: list[str]) -> str:
    """One more than the largest whole number among the versions."""
    return str(max((int(name) for name in versions if name.isdecimal()), default=0) + 1)


def _check_names(folder: Path, config: PublishConfig, versions: list[str]) -> None:
    if config.alias and config.alias in versions:
        raise OptionError(f"alias '{config.alias}' is the name of a version of {folder.name}.")
    if config.alias and config.alias == config.version:
        raise OptionError(f"alias and version are both '{config.alias}'.", do="Keep the version.")
    if config.version in aliases_of(folder):
        raise OptionError(f"version '{config.version}' is the name of an alias of {folder.name}.")


def _changes(there: Publication, package: Package) -> str:
    """Which parts of the content differ, by name."""
    names = sorted({*there.content, *package.content})
    changed = [n for n in names if there.content.get(n) != package.content.get(n)]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f"{', '.join(changed[:3])}{more} differ" if changed else "its digest differs"


@contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    """One writer at a time, on whichever machine: the lock lies in the registry itself."""
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
def _told(place: Path) -> Iterator[None]:
    """An error of the file system is the registry's."""
    try:
        yield
    except OSError as error:
        raise RegistryError(
            f"{place} cannot be used as a registry: {error.strerror or error}: "
            f"{error.filename or place}."
        ) from error
