"""The listing of a package, `reports/publication.json`: digests of all its files.

    publication = Publication.read(Path("minilm"), "file:///srv/models/minilm/1")
    publication.verify(Path("minilm"), "file:///srv/models/minilm/1")

The manifest has the digests of the model's files. The listing also has those of the manifest, the
card and the reports. It has no dates, so that the same package has the same listing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from enginery.core.artifact.fingerprint import sha256_of
from enginery.core.artifact.manifest import FileRecord, RelativePath
from enginery.core.artifact.staging import CARD, LISTING
from enginery.core.errors import ArtifactError, RegistryError
from enginery.core.json_file import (
    ChecksumError,
    append_checksum,
    first_problem,
    read_document,
    verify_checksum,
)
from enginery.core.paths import resolve_inside

__all__ = ["CARD", "LISTING", "Publication", "Rights", "check_file"]

SCHEMA_VERSION: Literal[2] = 2
REMEDY = "It cannot be trusted: publish it again from an undamaged artifact."


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Rights(_Record):
    """Rights of the model as on the card, taken from the source's card.

    If a pulled artifact is published again without its source, they are taken from here.
    """

    license: str = ""
    """Identifier of the licence on the Hub, `apache-2.0`; empty if it is not known."""
    license_name: str = ""
    """Name of a licence whose identifier is `other`."""
    license_link: str = ""
    base_model: str = ""
    """Hub id of the model; empty if it is not on the Hub."""
    language: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    sections: tuple[tuple[str, str], ...] = ()
    """Heading and text of sections on limitations, bias, intended uses and the licence."""


class Publication(_Record):
    """The content of `reports/publication.json`."""

    schema_version: Literal[2] = SCHEMA_VERSION
    name: str
    version: str = ""
    """Value of --version; empty if the registry numbered the version. An alias never takes the
    name of a version."""
    content_sha256: str
    """Digest over `content`; packages with the same digest are the same version."""
    content: dict[str, str]
    """Part of the content -> digest."""
    validated: bool
    """False if publishing needed --allow-failed."""
    rights: Rights | None = None
    """None if the source's card could not be read."""
    files: dict[RelativePath, FileRecord]
    """All files of the package except the listing."""

    @classmethod
    def read(cls, directory: Path, label: str) -> Publication:
        """Return the listing in a directory; `label` is the directory's name in messages.

        Raises:
            RegistryError: there is no listing.
            ArtifactError: the listing cannot be read, is from a newer enginery, or has a path that
                leads out of the package.
        """
        try:
            content = read_document(resolve_inside(directory, LISTING, what=label))
        except (FileNotFoundError, NotADirectoryError):
            raise RegistryError(
                f"{label} has no {LISTING}, so it was not published by enginery.",
                do="Download it with another tool, and check it: enginery inspect DIR --verify",
            ) from None
        except OSError as error:
            raise ArtifactError(
                f"{label}: {LISTING} cannot be read: {error.strerror}.", do=REMEDY
            ) from error
        altered = "It was altered, or comes from another version of enginery."
        try:
            return cls.model_validate_json(verify_checksum(content))
        except ChecksumError as error:
            raise ArtifactError(f"{label}: {LISTING}: {error}.", do=altered) from None
        except ValidationError as error:
            raise ArtifactError(
                f"{label}: {LISTING}: {first_problem(error)} (expected version {SCHEMA_VERSION}).",
                do=altered,
            ) from error

    def to_json(self) -> bytes:
        """Return the content of `reports/publication.json`."""
        return append_checksum(self.model_dump_json(indent=2))

    def verify(self, directory: Path, label: str, *, do: str = REMEDY) -> None:
        """Read every file and compare its digest; `do` is the remedy in the error.

        Raises:
            ArtifactError: a file is missing or was changed, and the message names it.
        """
        for name, record in self.files.items():
            check_file(directory, name, record, label, do=do)


def check_file(
    directory: Path, name: str, record: FileRecord, label: str, *, do: str = REMEDY
) -> None:
    """Raise ArtifactError if a file is missing or differs from its record."""
    path = resolve_inside(directory, name, what=f"the package {label}")
    if not path.is_file():
        raise ArtifactError(f"{label}: {name} is missing.", do=do)
    try:
        size_bytes = path.stat().st_size
        # A file of another size is not read: it may be huge or endless.
        digest = sha256_of(path, trust_stat=False) if size_bytes == record.size_bytes else ""
    except OSError as error:
        raise ArtifactError(f"{label}: {name} cannot be read: {error.strerror}.") from error
    if size_bytes != record.size_bytes:
        raise ArtifactError(
            f"{label}: {name} has {size_bytes} bytes, expected {record.size_bytes} as in "
            f"{LISTING}.",
            do=do,
        )
    if digest != record.sha256:
        raise ArtifactError(
            f"{label}: {name} was altered: its sha256 is {digest[:12]}…, expected "
            f"{record.sha256[:12]}… as in {LISTING}.",
            do=do,
        )
