"""What a package says of itself: `reports/publication.json`, the listing of all of its files.

Takes a directory that was pulled; checks every byte of it.

    >>> publication = Publication.read(Path("minilm"), "file:///srv/models/minilm/1")
    >>> publication.verify(Path("minilm"), "file:///srv/models/minilm/1")

The manifest has the digests of the model's files; this has those of the manifest, the card and the
reports, too. It has no dates: the same package has the same listing.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from enginery.core.errors import ArtifactError, RegistryError
from enginery.core.fingerprint import sha256_of
from enginery.core.manifest import FileRecord
from enginery.core.staging import CARD, LISTING

__all__ = ["CARD", "LISTING", "EngineMark", "Publication", "check_file"]

SCHEMA_VERSION: Literal[1] = 1


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineMark(_Record):
    """What an engine of the package is bound to."""

    directory: str
    """`engines/tensorrt-rtx-sm89-3f2a91c04be7d815`."""
    hardware_bound: Literal[True] = True
    flavor: str
    """`tensorrt` or `tensorrt-rtx`."""
    tensorrt: str
    """The version that loads it, and no other unless it is `version_compatible`."""
    capabilities: tuple[str, ...]
    """Compute capabilities, `8.9`; none for a portable plan."""
    gpu: str
    """The GPU that it was built on; empty for a flavor that builds without one."""
    hardware_compatibility: str
    version_compatible: bool
    profiles: tuple[str, ...]
    graph: str


class Publication(_Record):
    """The whole of `reports/publication.json`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    name: str
    content_sha256: str
    """Over `content`: two packages with the same are the same version."""
    content: dict[str, str]
    """What counts as content, by digest."""
    validated: bool
    """False for what was published with --allow-unvalidated and would have been refused."""
    engines: tuple[EngineMark, ...]
    files: dict[str, FileRecord]
    """Every file of the package but this one."""

    @classmethod
    def read(cls, directory: Path, what: str) -> Publication:
        """The listing in a directory; `what` names the directory in messages.

        Raises:
            RegistryError: there is none.
            ArtifactError: it cannot be read, or a newer enginery wrote it.
        """
        try:
            text = (directory / LISTING).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            raise RegistryError(
                f"{what} has no {LISTING}: it was not published by enginery publish.",
                do="Fetch it by other means, and check it: enginery inspect DIR --verify",
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError(f"{what}: {LISTING} cannot be read: {error}.") from error
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the document"
            raise ArtifactError(
                f"{what}: {LISTING}: {where}: {first['msg']} (expected version {SCHEMA_VERSION}).",
                do="It was altered, or comes from a newer enginery.",
            ) from error

    def to_json(self) -> bytes:
        """The content of `reports/publication.json`."""
        return (self.model_dump_json(indent=2) + "\n").encode()

    def verify(self, directory: Path, what: str) -> None:
        """Reads every file of the listing and compares it.

        Raises:
            ArtifactError: a file is missing, truncated or altered; the message names it.
        """
        for name, record in self.files.items():
            check_file(directory, name, record, what)


def check_file(directory: Path, name: str, record: FileRecord, what: str) -> None:
    """Reads one file and compares it with its record; raises ArtifactError that names it."""
    path = directory / name
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or not _inside(path, directory):
        raise ArtifactError(f"{what}: {name} lies outside the package.")
    if not path.is_file():
        raise ArtifactError(f"{what}: {name} is missing.", do=_REMEDY)
    try:
        size_bytes = path.stat().st_size
        found = sha256_of(path, trust_stat=False)
    except OSError as error:
        raise ArtifactError(f"{what}: {name} cannot be read: {error.strerror}.") from error
    if size_bytes != record.size_bytes:
        raise ArtifactError(
            f"{what}: {name} has {size_bytes} bytes, {LISTING} says {record.size_bytes}.",
            do=_REMEDY,
        )
    if found != record.sha256:
        raise ArtifactError(
            f"{what}: {name} was altered: its sha256 is {found[:12]}…, {LISTING} says "
            f"{record.sha256[:12]}….",
            do=_REMEDY,
        )


_REMEDY = "It cannot be trusted: publish it again from a whole artifact."


def _inside(path: Path, directory: Path) -> bool:
    return path.resolve().is_relative_to(directory.resolve())
