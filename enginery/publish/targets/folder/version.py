"""One version in a folder registry: written beside its place, read back, and renamed.

Takes a package and a model's folder, whose lock is held; leaves `<version>/` whole, or as it was.

    >>> write_version(package, Path("/srv/models/minilm"), "3", SILENT)
    >>> damage_of(Publication.read(place, "minilm/3"), place)
    ''

What a killed writer has left is taken over where it is whole.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from enginery.core.errors import ArtifactError
from enginery.core.progress import Progress
from enginery.core.staging import put_in_place
from enginery.publish.package import Package
from enginery.publish.package_files import PackageFile, write_file
from enginery.publish.publication import LISTING, Publication
from enginery.publish.targets.folder.index import published_ns, versions_of

_PART = ".part-"
_OLD = ".old-"
# Clocks of two machines differ, and shares round: what is published later has a later time still.
_APART_NS = 10_000_000


def write_version(
    package: Package, folder: Path, version: str, progress: Progress, *, stamp_ns: int = 0
) -> None:
    """Writes a version beside its place and puts it there; a damaged one that is there goes.

    Args:
        package: what is published.
        folder: of the model.
        version: its name, without anything else in its place than a damaged version.
        progress: who is told.
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
    put_in_place(part, folder / version, old=old)
    for left in (part, old):  # one of the two has what was damaged
        shutil.rmtree(left, ignore_errors=True)
    progress.say(f"publish: wrote {folder / version}")


def damage_of(listing: Publication, place: Path) -> str:
    """Reads a version that is there; what is not as its listing says, empty where all is."""
    try:
        listing.verify(place, str(place))
    except ArtifactError as error:
        return error.message
    return ""


def bring_back(folder: Path) -> None:
    """Ends what a writer that was killed between two renames has left, under the model's lock."""
    for old in folder.glob(f"{_OLD}*"):
        place = folder / old.name.removeprefix(_OLD)
        if place.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.replace(place)


def _now_ns(folder: Path) -> int:
    """The time now, or just after the version that was published last."""
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
    """Flushes what is written, so that the rename cannot reach the disk before the content."""
    for path in (p for p in directory.rglob("*") if p.is_file()):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
