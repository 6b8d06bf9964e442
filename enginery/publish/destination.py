"""Open the registry that an address names.

>>> type(open_destination("file:///srv/models", PublishConfig())).__name__
'FolderRegistry'

A registry's client library is imported only when an address needs it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from enginery.core.errors import OptionError, nearest
from enginery.core.options import options_dict
from enginery.core.progress import Progress
from enginery.core.table import Table
from enginery.publish.config import PublishConfig
from enginery.publish.package import Package

_SCHEMES = {
    "file": ("folder", "FolderRegistry", "file:///path, or a plain path"),
    "mlflow": ("mlflow.registry", "MlflowRegistry", "mlflow:/name"),
    "hf": ("hub", "HubRegistry", "hf://org/name"),
    "oci": ("oci.registry", "OciRegistry", "oci://registry/name:tag"),
}
"""Scheme -> module below `targets`, class, and form of an address. Each class is a `Destination`,
constructed from an address and the options; it raises MissingPackageError if the registry's client
is not installed."""
# A single letter and a colon is a Windows drive.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")


@dataclass(frozen=True)
class Published:
    """A published version."""

    url: str
    """Address of the version, for `pull`."""
    version: str
    is_new: bool
    """False if the same content was published before."""
    notes: tuple[str, ...] = ()
    """Messages about the version, such as the hardware that its engines need."""

    def rows(self) -> list[Table | str]:
        """Return the address."""
        return [self.url]

    def as_json(self) -> dict[str, Any]:
        """Return the version as JSON values."""
        return options_dict(self)


class Destination(Protocol):
    """A registry at an address."""

    @property
    def remedy(self) -> str:
        """Remedy for a version whose files differ from its listing."""

    def publish(self, package: Package, config: PublishConfig, progress: Progress) -> Published:
        """Publish the package, unless its content is published already.

        Raises:
            RegistryError: the registry cannot be reached, rejects the request, or has other content
                under this name.
            OptionError: an option does not fit the registry.
        """

    def pull(self, out: Path, progress: Progress) -> Path:
        """Download the package's files into `out`, an empty directory, and return it.

        The caller verifies every file with the package's listing.

        Raises:
            RegistryError: the registry cannot be reached, rejects the request, or has no such
                version.
        """


def open_destination(url: str, config: PublishConfig) -> Destination:
    """Return the registry that an address names, without connecting to it.

    Raises:
        OptionError: the address is malformed or has an unknown scheme.
        MissingPackageError: the registry's client is not installed.
    """
    module, name, _ = _SCHEMES[scheme_of(url)]
    make: Callable[[str, PublishConfig], Destination] = getattr(
        import_module(f"enginery.publish.targets.{module}"), name
    )
    return make(url, config)


def scheme_of(url: str) -> str:
    """Return the scheme of an address; `file` for a plain path.

    Raises:
        OptionError: the address is empty or has an unknown scheme.
    """
    if not url.strip():
        raise OptionError("the address of the registry is empty.", do=_supported_addresses())
    match = _SCHEME.match(url)
    scheme = match[1].lower() if match else "file"
    if scheme not in _SCHEMES:
        raise OptionError(
            f"address '{url}': unknown scheme '{scheme}'{nearest(scheme, _SCHEMES)}",
            do=_supported_addresses(),
        )
    return scheme


def _supported_addresses() -> str:
    return f"Supported: {'; '.join(example for _, _, example in _SCHEMES.values())}."
