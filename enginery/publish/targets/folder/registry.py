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

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from enginery.core.errors import ArtifactError, OptionError, RegistryError
from enginery.core.paths import resolve_inside
from enginery.core.progress import Progress
from enginery.publish.config import LATEST, PublishConfig
from enginery.publish.destination import Published
from enginery.publish.package import Package
from enginery.publish.publication import LISTING, REMEDY, Publication
from enginery.publish.targets.folder.address import find_version, path_of, refuse_foreign
from enginery.publish.targets.folder.index import (
    aliases_of,
    mend_latest,
    point,
    published_ns,
    versions_of,
    write_index,
)
from enginery.publish.targets.folder.version import bring_back, damage_of, write_version

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
        folder = root / package.name
        with _told(root):
            refuse_foreign(root)
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
        """What to do about a damaged version: publishing reads it, and writes it again."""
        return REMEDY

    def pull(self, out: Path, progress: Progress) -> Path:
        """Copies a version into `out`; `…/minilm` is the newest, `…/minilm@production` an alias."""
        with _told(self.path):
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
    """The version of this content, and whether it is new; a damaged one is written again."""
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
        version = config.version or _next(folder)
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
    """Raises RegistryError where a new version cannot be made under this name."""
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


def _next(folder: Path) -> str:
    """One more than the largest whole number in the folder, that of a damaged version included."""
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
