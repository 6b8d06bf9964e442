"""A registry in a folder: on a disk, a network share or a volume.

An address is `file:///path` or a plain path:

    /srv/models/
      index.json              all models, versions and aliases; rewritten from the folders each time
      minilm/
        1/  2/                versions; each is an artifact that load_model can open
        latest -> 2           relative links: the newest version, and the aliases
        production -> 1

A version is written into a hidden folder under the model's lock, verified, and renamed. So a
version is never incomplete, and the next run repairs what a killed one has left. If the file system
has no links, `latest` and the aliases are files that contain the version's name.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from enginery.core.artifact.artifact import MANIFEST
from enginery.core.artifact.staging import replace_directory
from enginery.core.durable import make_directory, sync_directory, sync_tree
from enginery.core.errors import (
    ArtifactError,
    EngineryError,
    OptionError,
    RegistryError,
    nearest,
    os_errors_as,
)
from enginery.core.json_file import json_bytes
from enginery.core.paths import is_portable_name, list_prefixed, list_tree, resolve_inside
from enginery.core.progress import Progress
from enginery.core.temporary import (
    PREFIX,
    locked_file,
    remove_leftovers,
    write_atomically,
)
from enginery.publish.config import LATEST, PublishConfig
from enginery.publish.destination import Published
from enginery.publish.package import Package
from enginery.publish.package_files import PackageFile, write_file
from enginery.publish.publication import LISTING, REMEDY, Publication

INDEX = "index.json"
SCHEMA_VERSION = 1
_MAX_NAME_BYTES = 200
_PART = ".part-"
_OLD = ".old-"
# Clocks of machines differ, and network shares round times; so a later version is given a time at
# least this much later.
_MIN_INTERVAL_NS = 10_000_000


@dataclass(frozen=True)
class FolderRegistry:
    """A folder of models."""

    url: str
    config: PublishConfig

    @property
    def path(self) -> Path:
        """Path of the folder, or of a version in it."""
        return path_from_url(self.url)

    def publish(self, package: Package, config: PublishConfig, progress: Progress) -> Published:
        """Write the package as a version, unless a version has the same content.

        Raises:
            RegistryError: the folder cannot be written, is not a registry, or has the version with
                other content.
            OptionError: the alias is the name of a version, or the version that of an alias.
        """
        root = self.path
        folder = root / package.name
        with _registry_errors(root):
            check_registry_root(root)
            with _locked(folder, progress):
                restore_interrupted(folder)
                version, is_new = _find_or_write(package, folder, config, progress)
                if is_new:
                    set_alias(folder, LATEST, version)
                else:
                    # A killed run may have written a version without moving `latest`.
                    repair_latest(folder, read_versions(folder))
                if config.alias:
                    set_alias(folder, config.alias, version)
                _remove_leftovers(folder)
            with _locked(root, progress):
                write_index(root)
                remove_leftovers(root)
        url = (folder / version).resolve().as_uri()
        return Published(url, version, is_new, package.notes)

    @property
    def remedy(self) -> str:
        """Remedy for a damaged version; publishing verifies and rewrites it."""
        return REMEDY

    def pull(self, out: Path, progress: Progress) -> Path:
        """Copy a version into `out` and return it; see `find_version` for addresses."""
        with _registry_errors(self.path):
            source, listing = find_version(self.url)
        names = [*listing.files, LISTING]
        with progress.task(f"copying {source.name}", total=len(names)) as advance:
            for name in names:
                if not resolve_inside(source, name, what=self.url).is_file():
                    raise ArtifactError(f"{self.url}: {name} is missing.", do=self.remedy)
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                # Never a link: edits of the copy must not change the registry.
                shutil.copyfile(source / name, out / name)
                advance()
        return out


def _find_or_write(
    package: Package, folder: Path, config: PublishConfig, progress: Progress
) -> tuple[str, bool]:
    """Return the version with this content, and True if it is new; rewrite a damaged one."""
    # Else the content of one that cannot be read at this time would become another version.
    versions = read_versions(folder, strict=True)
    _check_names(folder, config, list(versions))
    same = [version for version, listing in versions.items() if package.matches(listing)]
    if same and config.version not in ("", *same):
        raise RegistryError(
            f"option 'version' is '{config.version}', but {folder} already has this content as "
            f"version {same[-1]}.",
            do=f"Leave out --version, or add a second name: --alias {config.version}",
        )
    if not same:
        version = config.version or _next_version(folder)
        _check_version_free(folder / version, versions.get(version), package)
        write_version(package, folder, version, progress)
        return version, True
    version = config.version or same[-1]
    directory, listing = folder / version, versions[version]
    if damage := find_damage(listing, directory):
        package.check_rights_known(damage.rstrip("."), listing.content_sha256)
        progress.say(f"publish: writing version {version} again: {damage}")
        write_version(package, folder, version, progress, stamp_ns=published_ns(directory))
    else:
        progress.say(f"publish: nothing to do, version {version} has the same content")
    return version, False


def _check_version_free(directory: Path, existing: Publication | None, package: Package) -> None:
    """Raise RegistryError if the name of a new version is taken."""
    if existing:
        raise RegistryError(
            f"{directory} has other content: {_describe_changes(existing, package)}.",
            do="Choose another --version, or leave it out.",
        )
    if directory.exists():
        raise RegistryError(
            f"{directory} exists, but its {LISTING} is missing or cannot be read.",
            do="Remove it, or choose another --version.",
        )


def _next_version(folder: Path) -> str:
    """Return one more than the largest number in the folder, including damaged versions."""
    names = [path.name for path in folder.iterdir()]
    return str(max((int(name) for name in names if name.isdecimal()), default=0) + 1)


def _check_names(folder: Path, config: PublishConfig, versions: list[str]) -> None:
    if config.alias and config.alias in versions:
        raise OptionError(f"alias '{config.alias}' is the name of a version of {folder.name}.")
    if config.alias and config.alias == config.version:
        raise OptionError(
            f"options 'alias' and 'version' are both '{config.alias}'.", do="Leave out --alias."
        )
    if config.version in read_aliases(folder):
        raise OptionError(f"version '{config.version}' is the name of an alias of {folder.name}.")


def _describe_changes(existing: Publication, package: Package) -> str:
    """Return the names of the parts of the content that differ, in a phrase."""
    names = sorted({*existing.content, *package.content})
    changed = [n for n in names if existing.content.get(n) != package.content.get(n)]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f"{', '.join(changed[:3])}{more} differ" if changed else "its digest differs"


@contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock in the registry's folder, so that only one process of any machine writes."""
    make_directory(folder)
    with locked_file(
        folder / ".lock", lambda: progress.say(f"waiting: another process writes into {folder}")
    ):
        yield


@contextmanager
def _registry_errors(path: Path) -> Iterator[None]:
    """Raise RegistryError for errors of the file system."""
    with os_errors_as(RegistryError, f"{path} cannot be used as a registry"):
        yield


def path_from_url(url: str) -> Path:
    """Return the path that `file:///path` or a plain path names.

    Raises:
        OptionError: the address names another host, or is not a path.
    """
    if "\0" in unquote(url):
        raise OptionError(f"address {url!r} has a NUL character, which a path cannot have.")
    if not url.lower().startswith("file:"):
        try:
            return Path(url).expanduser().absolute()
        except RuntimeError:
            raise OptionError(f"address '{url}': the user does not exist.") from None
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise OptionError(
            f"address '{url}' names the host '{parts.netloc}', but a folder is on this machine.",
            do=f"Write a path with three slashes: file:///{parts.netloc}{parts.path}",
        )
    if parts.query or parts.fragment or not parts.path.startswith("/"):
        raise OptionError(f"address '{url}': expected file:/// and an absolute path.")
    path = unquote(parts.path)
    return Path(path.lstrip("/") if re.match(r"/[A-Za-z]:", path) else path)


def find_version(url: str) -> tuple[Path, Publication]:
    """Return the folder of the version that an address names, and its listing.

    `…/minilm/3`, `…/minilm@3`, `…/minilm/production` and `…/minilm@production` name a version or
    an alias; `…/minilm` names the newest version.

    Raises:
        RegistryError: the version or the registry does not exist.
        OptionError: the address is not a path on this machine.
    """
    path = path_from_url(url)
    if (path / LISTING).is_file():
        return path, Publication.read(path, url)
    folder, requested = path, LATEST
    if "@" in path.name and not path.exists():
        name, _, requested = path.name.rpartition("@")
        folder = path.with_name(name)
    elif not read_versions(path) and read_versions(path.parent):
        folder, requested = path.parent, path.name
    versions, aliases = read_versions(folder), read_aliases(folder)
    version = aliases.get(requested, requested)
    if requested == LATEST and versions and LATEST not in aliases:
        version = newest_version(folder, versions)
    if (folder / version / LISTING).is_file():
        return folder / version, Publication.read(folder / version, url)
    raise _version_not_found(url, folder, requested, [*versions, *aliases])


def _version_not_found(url: str, folder: Path, wanted: str, known: list[str]) -> RegistryError:
    """Return the error for a version that does not exist, with the existing ones."""
    if known:
        return RegistryError(
            f"{folder} has no version or alias '{wanted}'{nearest(wanted, known)}",
            do=f"It has {', '.join(known)}.",
        )
    if models := _models(folder):
        return RegistryError(
            f"{folder} is a registry, expected the address of a model in it.",
            do=f"Add a model to the address: {', '.join(models)}.",
        )
    other_models = _models(folder.parent)
    return RegistryError(
        f"{url} is not a published model{nearest(folder.name, other_models)}",
        do=f"{folder.parent} has {', '.join(other_models)}." if other_models else "",
    )


def _models(path: Path) -> list[str]:
    paths = path.iterdir() if path.is_dir() else ()
    return sorted(p.name for p in paths if p.is_dir() and read_versions(p))


def check_registry_root(root: Path) -> None:
    """Raise an error if a folder cannot be a registry: a model, a version, an artifact, a file.

    Raises:
        OptionError: it is the folder of a model or a version in a registry.
        RegistryError: it is an artifact or a file.
    """
    if root.exists() and not root.is_dir():
        raise RegistryError(f"{root} is a file, expected a folder.")
    for inside, registry in ((root, root.parent), (root.parent, root.parent.parent)):
        if (registry / INDEX).is_file() and read_versions(inside):
            raise OptionError(
                f"{root} is inside the registry {registry}, expected the registry itself.",
                do=f"Publish to {registry.as_uri()}, with --name and --version.",
            )
    if (root / MANIFEST).is_file():
        raise RegistryError(f"{root} is an artifact, expected the folder of a registry.")


def read_versions(folder: Path, *, strict: bool = False) -> dict[str, Publication]:
    """Return the versions of a model by name, in natural order, without those without a listing.

    Args:
        folder: folder of the model.
        strict: raise ArtifactError for a listing that the system cannot read; a damaged one is left
            out in any case.
    """
    versions: dict[str, Publication] = {}
    if not folder.is_dir():
        return versions
    for path in folder.iterdir():
        if is_portable_name(path.name) and not path.is_symlink() and (path / LISTING).is_file():
            try:
                versions[path.name] = Publication.read(path, str(path))
            except EngineryError as error:
                if strict and isinstance(error.__cause__, OSError):
                    raise
    return dict(sorted(versions.items(), key=lambda pair: _natural_key(pair[0])))


def read_aliases(folder: Path) -> dict[str, str]:
    """Return `latest` and the aliases, links or files, with the existing versions they point to."""
    aliases: dict[str, str] = {}
    if not folder.is_dir():
        return aliases
    for path in sorted(folder.iterdir()):
        if not is_portable_name(path.name):
            continue
        if path.is_symlink():
            aliases[path.name] = path.readlink().name
        elif path.is_file() and path.stat().st_size <= _MAX_NAME_BYTES:
            name = path.read_text(encoding="utf-8", errors="replace").strip()
            if is_portable_name(name):
                aliases[path.name] = name
    return {name: version for name, version in aliases.items() if (folder / version).is_dir()}


def newest_version(folder: Path, versions: dict[str, Publication]) -> str:
    """Return the version that was published last."""
    dates = {version: published_ns(folder / version) for version in versions}
    return max(versions, key=lambda version: (dates[version], _natural_key(version)))


def set_alias(folder: Path, name: str, version: str) -> None:
    """Point `latest` or an alias to a version, atomically."""
    path = folder / name
    if read_aliases(folder).get(name) == version:
        return
    fresh = folder / f"{PREFIX}{name}"
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(version, target_is_directory=True)
    except OSError:  # Windows without permission, or a network share without links
        write_atomically(path, f"{version}\n".encode())
        return
    fresh.replace(path)
    sync_directory(folder)


def repair_latest(folder: Path, versions: dict[str, Publication]) -> None:
    """Point `latest` to a newer version that a killed run has written.

    It moves only if both the time and the name of the version are later: in a copied registry the
    times are those of the copy.
    """
    if not versions:
        return
    pointed, last = read_aliases(folder).get(LATEST, ""), newest_version(folder, versions)
    if pointed in versions:
        is_later = published_ns(folder / last) > published_ns(folder / pointed)
        if not is_later or _natural_key(last) <= _natural_key(pointed):
            return
    set_alias(folder, LATEST, last)


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
    index_path = root / INDEX
    if not index_path.is_file() or index_path.read_bytes() != content:
        write_atomically(index_path, content)


def _model(folder: Path) -> dict[str, Any]:
    aliases = read_aliases(folder)
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
            for version, publication in read_versions(folder).items()
        },
    }


def published_ns(version: Path) -> int:
    """Return when a version was published, in nanoseconds: its listing's modification time."""
    return (version / LISTING).stat().st_mtime_ns


def _date(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat(timespec="seconds")


def _natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key with 2 before 10 and 1.9 before 1.10."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)


def write_version(
    package: Package, folder: Path, version: str, progress: Progress, *, stamp_ns: int = 0
) -> None:
    """Write a version into a temporary folder and rename it; replace a damaged version.

    Args:
        package: the package.
        folder: folder of the model.
        version: name of the version, which must not exist or be damaged.
        progress: receives progress messages.
        stamp_ns: time of the version; 0 for now, but later than all other versions.

    Raises:
        ArtifactError: a file was changed while it was published, and the message names it.
        OSError: the folder cannot be written.
    """
    part = folder / f"{_PART}{package.content_sha256[:16]}"
    for leftover in list_prefixed(folder, _PART):
        if leftover != part:
            # A killed run left it: this run holds the lock.
            shutil.rmtree(leftover, ignore_errors=True)
    part.mkdir(exist_ok=True)
    with progress.task(f"writing {folder.name}/{version}", total=len(package.files)) as advance:
        for file in package.files:
            _write_file(package, file, part)
            advance()
    names = {file.name for file in package.files}
    for path in list_tree(part):
        if path.is_file() and path.relative_to(part).as_posix() not in names:
            path.unlink()
    Publication.read(part, str(part)).verify(part, f"{package.artifact.path}, as it is now")
    stamp_ns = stamp_ns or _now_ns(folder)
    os.utime(part / LISTING, ns=(stamp_ns, stamp_ns))
    sync_tree(part)
    old = folder / f"{_OLD}{version}"
    replace_directory(part, folder / version, old=old)
    for damaged in (part, old):  # one of them has the damaged version
        shutil.rmtree(damaged, ignore_errors=True)
    progress.say(f"publish: wrote {folder / version}")


def find_damage(listing: Publication, directory: Path) -> str:
    """Verify a version with its listing; return the problem, empty if there is none."""
    try:
        listing.verify(directory, str(directory))
    except ArtifactError as error:
        return error.message
    return ""


def restore_interrupted(folder: Path) -> None:
    """Restore the versions that a run killed between two renames had moved; hold the lock."""
    for old in list_prefixed(folder, _OLD):
        original = folder / old.name.removeprefix(_OLD)
        if original.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.replace(original)


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed runs have left in a model's folder; hold the lock."""
    remove_leftovers(folder)
    for prefix in (_PART, _OLD):
        for path in list_prefixed(folder, prefix):
            shutil.rmtree(path, ignore_errors=True)
    for path in list_prefixed(folder, PREFIX):
        if path.is_symlink():
            path.unlink()


def _now_ns(folder: Path) -> int:
    """Return the current time, but later than that of all versions."""
    others = [published_ns(folder / version) for version in read_versions(folder)]
    return max([time.time_ns(), *(other + _MIN_INTERVAL_NS for other in others)])


def _write_file(package: Package, file: PackageFile, part: Path) -> None:
    try:
        write_file(file, part / file.name)
    except FileNotFoundError as error:
        if file.path.exists():
            raise
        raise ArtifactError(
            f"{package.artifact.path}: {file.name} was removed while it was published."
        ) from error
