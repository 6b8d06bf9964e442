"""What an address of a folder registry names: the folder itself, or a version in it.

>>> path_of("file:///srv/models")
PosixPath('/srv/models')
>>> find_version("file:///srv/models/minilm@production")[0]
PosixPath('/srv/models/minilm/1')
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from enginery.core.artifact import MANIFEST
from enginery.core.errors import OptionError, RegistryError, nearest
from enginery.publish.config import LATEST
from enginery.publish.publication import LISTING, Publication
from enginery.publish.targets.folder.index import INDEX, aliases_of, newest, versions_of


def path_of(url: str) -> Path:
    """The path that `file:///path` or a plain path names; raises OptionError for another host's."""
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
    """The folder of the version that an address names, with its listing.

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
    """What there is in place of what was asked for."""
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


def refuse_foreign(root: Path) -> None:
    """A registry is a folder of models: not a version, not a model's folder, not an artifact."""
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
