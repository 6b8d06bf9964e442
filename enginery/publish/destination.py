"""Where a package goes, by the address.

>>> destination = open_destination("file:///srv/models", PublishConfig())
>>> destination.publish(package, PublishConfig(), SILENT).url
'file:///srv/models/minilm/1'

A registry's own client is imported when an address names it, and not before.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

from enginery.core.errors import OptionError, nearest
from enginery.core.progress import Progress
from enginery.publish.config import PublishConfig
from enginery.publish.package import Package

_SCHEMES = {
    "file": ("folder", "FolderRegistry", "file:///path, or a plain path"),
    "mlflow": ("mlflow.registry", "MlflowRegistry", "mlflow:/name"),
    "hf": ("hub", "HubRegistry", "hf://org/name"),
    "oci": ("oci.registry", "OciRegistry", "oci://registry/name:tag"),
}
"""Module below `targets`, class and what an address looks like. Each class is made of an address
and the options, and is a `Destination`; making one raises MissingPackageError where its client is
not installed."""
# A letter and a colon is a drive of Windows.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")


@dataclass(frozen=True)
class Published:
    """What publishing left."""

    url: str
    """The address of the version: what `pull` takes."""
    version: str
    is_new: bool
    """False where the same content was there already."""
    notes: tuple[str, ...] = ()
    """What somebody who looks at the registry should know."""


class Destination(Protocol):
    """A registry at an address."""

    @property
    def remedy(self) -> str:
        """What to do about a version whose files are not as its listing says."""

    def publish(self, package: Package, config: PublishConfig, progress: Progress) -> Published:
        """Leaves the package there, or finds that its content is there already.

        Raises:
            RegistryError: the registry cannot be reached, refuses, or holds something else.
            OptionError: an option does not fit the registry.
        """

    def pull(self, out: Path, progress: Progress) -> Path:
        """Fetches the package's files into `out`, an empty directory, and returns it.

        Whoever calls checks every file against the package's own listing.

        Raises:
            RegistryError: the registry cannot be reached, refuses, or has no such version.
        """


def open_destination(url: str, config: PublishConfig) -> Destination:
    """The registry that an address names; nothing is sent yet.

    Raises:
        OptionError: the address has an unknown scheme, or is none.
        MissingPackageError: the registry's client is not installed.
    """
    module, name, _ = _SCHEMES[scheme_of(url)]
    make: Callable[[str, PublishConfig], Destination] = getattr(
        import_module(f"enginery.publish.targets.{module}"), name
    )
    return make(url, config)


def scheme_of(url: str) -> str:
    """Return the kind of registry that an address names: `file`, also for a plain path.

    Raises:
        OptionError: the address is empty or has an unknown scheme.
    """
    if not url.strip():
        raise OptionError("the address to publish to is empty.", do=_supported_addresses())
    found = _SCHEME.match(url)
    scheme = found[1].lower() if found else "file"
    if scheme not in _SCHEMES:
        raise OptionError(
            f"address '{url}': unknown scheme '{scheme}'{nearest(scheme, _SCHEMES)}",
            do=_supported_addresses(),
        )
    return scheme


def _supported_addresses() -> str:
    return f"Known: {'; '.join(example for _, _, example in _SCHEMES.values())}."
