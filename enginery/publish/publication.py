"""What a package says of itself: `reports/publication.json`, the listing of all of its files.

Takes a directory that was pulled; checks every byte of it.

    >>> publication = Publication.read(Path("minilm"), "file:///srv/models/minilm/1")
    >>> publication.verify(Path("minilm"), "file:///srv/models/minilm/1")

The manifest has the digests of the model's files; this has those of the manifest, the card and the
reports, too. It has no dates: the same package has the same listing.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from enginery.core.artifact.fingerprint import combined_sha256, sha256_of
from enginery.core.artifact.manifest import FileRecord, RelativePath
from enginery.core.artifact.staging import CARD, LISTING
from enginery.core.errors import ArtifactError, RegistryError
from enginery.core.json_file import ChecksumError, append_checksum, read_document, verify_checksum
from enginery.core.paths import resolve_inside

__all__ = ["CARD", "LISTING", "EngineMark", "Publication", "Rights", "check_file"]

SCHEMA_VERSION: Literal[2] = 2
REMEDY = "It cannot be trusted: publish it again from a whole artifact."


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


class Rights(_Record):
    """What the card states of the model's rights, taken over from the source's own card.

    A pulled artifact states them again when it is published from where its source is not.
    """

    license: str
    license_name: str
    license_link: str
    base_model: str
    language: tuple[str, ...]
    tags: tuple[str, ...]
    sections: tuple[tuple[str, str], ...]
    """Heading and text of limitations, bias, intended uses and the licence."""


class Publication(_Record):
    """The whole of `reports/publication.json`."""

    schema_version: Literal[2] = SCHEMA_VERSION
    name: str
    version: str = ""
    """What --version named; empty where the registry numbers. A name that is a version's is never
    moved as an alias."""
    content_sha256: str
    """Over `content`: two packages with the same are the same version."""
    content: dict[str, str]
    """What counts as content, by digest."""
    validated: bool
    """False for what was published with --allow-unvalidated and would have been refused."""
    rights: Rights | None = None
    """None where the source's card could not be read."""
    engines: tuple[EngineMark, ...]
    files: dict[RelativePath, FileRecord]
    """Every file of the package but this one."""

    @classmethod
    def read(cls, directory: Path, what: str) -> Publication:
        """The listing in a directory; `what` names the directory in messages.

        Raises:
            RegistryError: there is none.
            ArtifactError: it cannot be read, a newer enginery wrote it, or a name in it leads
                out of the package.
        """
        try:
            content = read_document(resolve_inside(directory, LISTING, what=what))
        except (FileNotFoundError, NotADirectoryError):
            raise RegistryError(
                f"{what} has no {LISTING}: it was not published by enginery publish.",
                do="Fetch it by other means, and check it: enginery inspect DIR --verify",
            ) from None
        except OSError as error:
            raise ArtifactError(
                f"{what}: {LISTING} cannot be read: {error.strerror}.", do=REMEDY
            ) from error
        altered = "It was altered, or comes from another version of enginery."
        try:
            found = cls.model_validate_json(verify_checksum(content))
        except ChecksumError as error:
            raise ArtifactError(f"{what}: {LISTING}: {error}.", do=altered) from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the document"
            raise ArtifactError(
                f"{what}: {LISTING}: {where}: {first['msg']} (expected version {SCHEMA_VERSION}).",
                do=altered,
            ) from error
        _check_names(found, what)
        return found

    def to_json(self) -> bytes:
        """The content of `reports/publication.json`."""
        return append_checksum(self.model_dump_json(indent=2))

    def verify(self, directory: Path, what: str, *, do: str = REMEDY) -> None:
        """Reads every file of the listing and compares it; `do` is the remedy.

        Raises:
            ArtifactError: a file is missing, truncated or altered; the message names it.
        """
        for name, record in self.files.items():
            check_file(directory, name, record, what, do=do)


def without_rights(content: Mapping[str, str]) -> str:
    """One digest over all content but the rights, for a package that could not read them."""
    return combined_sha256({name: digest for name, digest in content.items() if name != "rights"})


def check_file(
    directory: Path, name: str, record: FileRecord, what: str, *, do: str = REMEDY
) -> None:
    """Reads one file and compares it with its record; raises ArtifactError that names it."""
    path = resolve_inside(directory, name, what=f"the package {what}")
    if not path.is_file():
        raise ArtifactError(f"{what}: {name} is missing.", do=do)
    try:
        size_bytes = path.stat().st_size
        # A file of another size is not read: it may be terabytes, or endless.
        found = sha256_of(path, trust_stat=False) if size_bytes == record.size_bytes else ""
    except OSError as error:
        raise ArtifactError(f"{what}: {name} cannot be read: {error.strerror}.") from error
    if size_bytes != record.size_bytes:
        raise ArtifactError(
            f"{what}: {name} has {size_bytes} bytes, {LISTING} says {record.size_bytes}.",
            do=do,
        )
    if found != record.sha256:
        raise ArtifactError(
            f"{what}: {name} was altered: its sha256 is {found[:12]}…, {LISTING} says "
            f"{record.sha256[:12]}….",
            do=do,
        )


def _check_names(found: Publication, what: str) -> None:
    """Refuse a listing that has one name for a file and for a directory."""
    parts = sorted(PurePosixPath(name).parts for name in found.files)
    for one, two in pairwise(parts):
        if two[: len(one)] == one:
            raise ArtifactError(
                f"{what}: {LISTING} names {'/'.join(one)} as a file and a directory."
            )
