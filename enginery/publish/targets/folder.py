"""A registry in a folder: on a disk, a network share or a volume.

An address is `file:///path` or a plain path:

    /srv/models/
      minilm/
        1/  2/                versions; each is an artifact that load_model can open
        latest -> 2           the version that was made last, as a relative link

A version is written into a hidden folder under the model's lock, verified, and renamed: it is
complete or absent, and it is never written again. If the file system has no links, `latest` is a
file that contains the version's name.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from enginery.core.artifact.artifact import MANIFEST
from enginery.core.errors import (
    ArtifactError,
    OptionError,
    RegistryError,
    nearest,
    os_errors_as,
)
from enginery.core.paths import is_portable_name, list_directory, resolve_inside
from enginery.core.progress import Progress
from enginery.core.scratch import (
    PREFIX,
    Scratch,
    locked,
    make_directory,
    remove_leftovers,
    replace_synced,
    sync,
    write_atomically,
)
from enginery.publish.config import LATEST, PublishConfig
from enginery.publish.destination import Published
from enginery.publish.package import Package, PackageFile
from enginery.publish.publication import LISTING, Publication

_NEXT = f"{PREFIX}{LATEST}"
"""`latest` of a version that is about to appear. A run that is killed before it moves `latest`
leaves it, so that the next one can."""
_VERSION = "version"
"""What the lock in a model's folder is beside: a version that a process adds."""
_MAX_NAME_BYTES = 200
# A registry's files are readable by all its users, whatever modes the artifact's files have.
_MODE = 0o644


class FolderRegistry:
    """A folder of models."""

    def __init__(self, url: str, config: PublishConfig) -> None:
        """Parse the address.

        Raises:
            OptionError: the address is not a path on this machine, or an alias is given.
        """
        self.url, self.path = url, path_from_url(url)
        if config.alias:
            raise OptionError(
                f"option 'alias' is '{config.alias}', but a folder has only versions and "
                f"'{LATEST}'.",
                do="Leave it out. A link of your own can name a version, and `pull` follows it.",
                option="alias",
            )

    def publish(self, package: Package, config: PublishConfig, progress: Progress) -> Published:
        """Write the package as a version, unless a version has the same content.

        Raises:
            RegistryError: the folder cannot be written, is not a registry, or has the version with
                other content.
            ArtifactError: the version with this content is damaged, or a file was changed while it
                was published; the message names the file.
        """
        folder = self.path / package.name
        waiting = f"waiting: another process writes into {folder}"
        with _registry_errors(self.path):
            check_registry_root(self.path)
            make_directory(folder)
            with locked(folder / _VERSION, lambda: progress.say(waiting)):
                _move_latest(folder)  # of a run that was killed
                remove_leftovers(folder)
                version = _find_version(package, folder, config)
                is_new = not version
                if version:
                    progress.say(f"publish: nothing to do, version {version} has the same content")
                else:
                    version = config.version or _next_version(folder)
                    _write_version(package, folder / version, progress)
        url = (folder / version).resolve().as_uri()
        return Published(url, version, is_new)

    @property
    def remedy(self) -> str:
        """Remedy for a damaged version, which is never written again."""
        return (
            "It cannot be trusted: remove the version's folder, and publish it again from an "
            "undamaged artifact."
        )

    def pull(self, out: Path, progress: Progress) -> Path:
        """Copy a version into `out` and return it; see `find_version` for addresses."""
        with _registry_errors(self.path):
            source = find_version(self.url)
            listing = Publication.read(source, self.url)
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


def _find_version(package: Package, folder: Path, config: PublishConfig) -> str:
    """Return the version with the package's content; empty if there is none.

    Raises:
        RegistryError: the name of a new version is taken, or the content has another name.
        ArtifactError: a listing cannot be read, or the version with this content is damaged.
    """
    versions = read_versions(folder)
    same = [version for version, listing in versions.items() if package.matches(listing)]
    if same and config.version not in ("", *same):
        raise RegistryError(
            f"option 'version' is '{config.version}', but {folder} already has this content as "
            f"version {same[-1]}.",
            do="Leave out --version.",
        )
    if same:
        version = config.version or same[-1]
        directory = folder / version
        remedy = f"Remove {directory}, and publish again."
        versions[version].verify(directory, str(directory), do=remedy)
        return version
    if config.version in versions:
        changes = _describe_changes(versions[config.version], package)
        raise RegistryError(
            f"{folder / config.version} has other content: {changes}.",
            do="Choose another --version, or leave it out.",
        )
    if config.version and os.path.lexists(folder / config.version):
        raise RegistryError(
            f"{folder / config.version} exists, but its {LISTING} is missing or cannot be read.",
            do="Remove it, or choose another --version.",
        )
    return ""


def _next_version(folder: Path) -> str:
    """Return one more than the largest number in the folder, including damaged versions."""
    names = [path.name for path in folder.iterdir()]
    return str(max((int(name) for name in names if name.isdecimal()), default=0) + 1)


def _describe_changes(existing: Publication, package: Package) -> str:
    """Return the names of the parts of the content that differ, in a phrase."""
    content = package.publication.content
    names = sorted({*existing.content, *content})
    changed = [name for name in names if existing.content.get(name) != content.get(name)]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f"{', '.join(changed[:3])}{more} differ" if changed else "its digest differs"


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


def find_version(url: str) -> Path:
    """Return the folder of the version that an address names.

    `…/minilm/3` names a version, as does any link to it; `…/minilm` and `…/minilm/latest` name the
    newest one.

    Raises:
        RegistryError: the version or the registry does not exist.
        OptionError: the address is not a path on this machine.
    """
    path = path_from_url(url)
    if (path / LISTING).is_file():
        # Links are followed once: `latest` may move while its files are copied.
        return Path(os.path.realpath(path))
    # Without links, `latest` is a file in the folder of the model.
    folder = path.parent if path.name == LATEST else path
    version = read_latest(folder)
    if version and (folder / version / LISTING).is_file():
        return folder / version
    raise _version_not_found(url, path)


def _version_not_found(url: str, path: Path) -> RegistryError:
    """Return the error for a version that does not exist, with the existing versions or models."""
    for folder in (path, path.parent):
        models = [entry.name for entry in list_directory(folder) if read_latest(entry)]
        if names := _version_names(folder) or sorted(models):
            return RegistryError(
                f"{url} is not a published model{nearest(path.name, names)}",
                do=f"{folder} has {', '.join(names)}.",
            )
    return RegistryError(f"{url} is not a published model.")


def check_registry_root(root: Path) -> None:
    """Raise an error if a folder cannot be a registry: a model, a version, an artifact, a file.

    Raises:
        OptionError: it is the folder of a model in a registry.
        RegistryError: it is an artifact, a version for example, or a file.
    """
    if root.exists() and not root.is_dir():
        raise RegistryError(f"{root} is a file, expected a folder.")
    if (root / MANIFEST).is_file():
        raise RegistryError(f"{root} is an artifact, expected the folder of a registry.")
    if read_latest(root):
        raise OptionError(
            f"{root} is a model in the registry {root.parent}, expected the registry itself.",
            do=f"Publish to {root.parent.as_uri()}, with --name and --version.",
        )


def read_versions(folder: Path) -> dict[str, Publication]:
    """Return the listings of a model's versions by name, without those that are damaged.

    Raises:
        ArtifactError: the system cannot read a listing: its content might be published again as
            another version.
    """
    versions: dict[str, Publication] = {}
    for name in _version_names(folder):
        try:
            versions[name] = Publication.read(folder / name, str(folder / name))
        except ArtifactError as error:
            if isinstance(error.__cause__, OSError):
                raise
    return versions


def _version_names(folder: Path) -> list[str]:
    """Return the names of the folders with a listing, shorter numbers first."""
    names = [
        path.name
        for path in list_directory(folder)
        if is_portable_name(path.name) and not path.is_symlink() and (path / LISTING).is_file()
    ]
    return sorted(names, key=lambda name: (not name.isdecimal(), len(name), name))


def read_latest(folder: Path) -> str:
    """Return the version that `latest` in a model's folder names; empty if there is none."""
    return _read_pointer(folder / LATEST)


def _read_pointer(path: Path) -> str:
    """Return the existing version that a link, or a file in its place, names; else empty."""
    if path.is_symlink():
        name = str(path.readlink())
    elif path.is_file() and path.stat().st_size <= _MAX_NAME_BYTES:
        name = path.read_text(encoding="utf-8", errors="replace").strip()
    else:
        return ""
    return name if is_portable_name(name) and (path.parent / name).is_dir() else ""


def _write_version(package: Package, directory: Path, progress: Progress) -> None:
    """Write a version into a temporary folder, verify and rename it, and move `latest`.

    Args:
        package: the package.
        directory: path of the version, which must not exist.
        progress: receives progress messages.

    Raises:
        ArtifactError: a file was changed while it was published, and the message names it.
        OSError: the folder cannot be written.
    """
    folder, version = directory.parent, directory.name
    with Scratch.beside(directory) as scratch:
        task = progress.task(f"writing {folder.name}/{version}", total=len(package.files))
        with task as advance:
            for file in package.files:
                copy_file(package, file, scratch.path / file.name)
                advance()
        publication = Publication.read(scratch.path, str(scratch.path))
        publication.verify(scratch.path, f"{package.artifact.path}, as it is now")
        _prepare_latest(folder, version)
        replace_synced(scratch.path, directory)
    _move_latest(folder)
    progress.say(f"publish: wrote {directory}")


def copy_file(package: Package, file: PackageFile, target: Path) -> None:
    """Copy a file of a package; never a hard link, since the artifact may change later."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copyfile(file.path, target)
    except FileNotFoundError as error:
        if file.path.exists():
            raise
        raise ArtifactError(
            f"{package.artifact.path}: {file.name} was removed while it was published."
        ) from error
    with suppress(OSError):  # a network share without file modes
        target.chmod(_MODE)


def _prepare_latest(folder: Path, version: str) -> None:
    """Write a pointer to a version that is about to appear, for `_move_latest`."""
    path = folder / _NEXT
    try:
        path.symlink_to(version, target_is_directory=True)
        sync(folder)
    except OSError:  # Windows without permission, or a network share without links
        write_atomically(path, f"{version}\n".encode())


def _move_latest(folder: Path) -> None:
    """Rename the prepared pointer to `latest` if its version has appeared; else remove it."""
    path = folder / _NEXT
    if _read_pointer(path):
        os.replace(path, folder / LATEST)
        sync(folder)
    else:
        path.unlink(missing_ok=True)
