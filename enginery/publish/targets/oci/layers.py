"""The layers of a pulled image: what the registry says of them, checked, and their files.

A registry is somebody else's: nothing of what it says becomes a path, and no file gets larger than
the package's own listing says. The layer with that listing comes first.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol, cast

from enginery.core.artifact.manifest import FileRecord
from enginery.core.errors import ArtifactError, RegistryError
from enginery.publish.publication import LISTING
from enginery.publish.targets.oci.image import CONTENT, FILES, LAYER, TITLE

REMEDY = (
    "It cannot be trusted. A registry takes no layer again that it has by name: delete it there, "
    "or name another registry, and publish it again."
)
_GZIP_LAYER = f"{LAYER}+gzip"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_GZIP_MAGIC = b"\x1f\x8b"
_LISTING_BYTES = 64 << 20
# Of tar itself: headers, padding, the end, and what is before the listing in its layer.
_TAR_BYTES = 64 << 20
_HEADER_BYTES = 4 << 20
_PIECE = 1 << 20


@dataclass(frozen=True)
class PulledLayer:
    """One layer, as the registry's manifest describes it."""

    digest: str
    """`sha256:` and 64 digits: fit for a file name."""
    size_bytes: int
    title: str
    files: Mapping[str, str]
    """sha256 by name, where enginery published it; nothing that is relied on."""


def parse_descriptor(descriptor: Any, what: str) -> tuple[str, int]:
    """Return the digest and the size in a descriptor; raise RegistryError if it has none."""
    found = descriptor if isinstance(descriptor, Mapping) else {}
    digest, size = found.get("digest"), found.get("size")
    is_digest = isinstance(digest, str) and _DIGEST.fullmatch(digest)
    if is_digest and type(size) is int and size >= 0:  # true is an int, too
        return str(digest), size
    raise RegistryError(
        f"{what}: the registry's manifest describes a blob by digest {digest!r} and size {size!r}, "
        "expected sha256: with 64 digits, and a number of bytes."
    )


def parse_layers(document: Mapping[str, Any], what: str) -> list[PulledLayer]:
    """Return the layers of an image manifest, that with the listing first.

    Raises:
        RegistryError: it is no image of enginery's, or describes a layer wrongly.
    """
    found = document.get("layers")
    layers = found if isinstance(found, list) else []
    known = all(_get(layer, "mediaType") in (LAYER, _GZIP_LAYER) for layer in layers)
    if not _get(document.get("annotations"), CONTENT) or not layers or not known:
        raise RegistryError(
            f"{what} was not published by enginery: it has no annotation {CONTENT}.",
            do="Fetch it by other means, such as oras pull or docker create.",
        )
    read = [_layer(layer, what) for layer in layers]
    if not any(LISTING in layer.files for layer in read):
        raise RegistryError(f"{what}: none of its layers has {LISTING}, by their {FILES}.")
    return sorted(read, key=lambda layer: LISTING not in layer.files)


def check_layer(path: Path, layer: PulledLayer, what: str) -> None:
    """Raise ArtifactError for an altered layer; name its altered files if they can be told."""
    with path.open("rb") as stream:
        found = _sha256(stream)
    if f"sha256:{found}" == layer.digest:
        return
    altered = ", ".join(_altered_files(path, layer.files))
    raise ArtifactError(
        f"{what}: {altered} was altered, in the layer {layer.title}."
        if altered
        else f"{what}: the layer {layer.title} was altered: its sha256 is {found[:12]}…, the "
        f"registry's manifest says {layer.digest.removeprefix('sha256:')[:12]}….",
        do=REMEDY,
    )


def unpack(path: Path, out: Path, files: Mapping[str, FileRecord], what: str) -> None:
    """Write the files of a tar that are listed; what else is in it stays there.

    Args:
        path: the tar, which may be packed by gzip.
        out: where the files go.
        files: name and size of those that are wanted.
        what: the image, for messages.

    Raises:
        ArtifactError: it is no tar, a member is a link or lies outside, or a file is larger than
            it may be.
    """
    limit = sum(record.size_bytes for record in files.values()) + _TAR_BYTES
    with _translate_errors(what), _open_tar(path) as stream:
        bounded = _SizeLimitedStream(stream, max(limit, path.stat().st_size), what)
        # A stream of tar needs `read` alone.
        with tarfile.open(fileobj=cast("IO[bytes]", bounded), mode="r|") as archive:
            for member in archive:
                bounded.allow(member.size)
                name = _checked_name(member, what)
                record = files.get(name)
                if record is None or member.isdir():
                    continue
                if member.size > record.size_bytes:
                    raise ArtifactError(
                        f"{what}: {name} has {member.size} bytes, {LISTING} says "
                        f"{record.size_bytes}.",
                        do=REMEDY,
                    )
                _write(archive, member, out / name)


def unpack_listing(path: Path, out: Path, what: str) -> None:
    """Write the package's listing alone, before anything else is believed; see `unpack`."""
    unpack(path, out, {LISTING: FileRecord(sha256="", size_bytes=_LISTING_BYTES)}, what)


def _layer(layer: Any, what: str) -> PulledLayer:
    digest, size_bytes = parse_descriptor(layer, what)
    annotations = _get(layer, "annotations")
    try:
        files = json.loads(str(_get(annotations, FILES) or "{}"))
    except (ValueError, RecursionError):
        files = None
    if not isinstance(files, dict):
        raise RegistryError(f"{what}: the {FILES} of the layer {digest[:19]}… is no JSON object.")
    title = str(_get(annotations, TITLE) or digest)
    return PulledLayer(digest, size_bytes, title, {str(n): str(d) for n, d in files.items()})


def _get(found: Any, name: str) -> Any:
    return found.get(name) if isinstance(found, Mapping) else None


class _Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


class _SizeLimitedStream:
    """A stream that fails if it gives more than it may: gzip packs 1000 to 1."""

    def __init__(self, stream: _Readable, limit: int, what: str) -> None:
        self._stream, self._left, self._what = stream, limit, what
        self._ahead = _HEADER_BYTES

    def allow(self, size_bytes: int) -> None:
        """Allow a member and the headers before the next, which tarfile keeps in memory."""
        self._ahead = size_bytes + _HEADER_BYTES

    def read(self, size: int = _PIECE) -> bytes:
        piece = self._stream.read(size)
        self._left -= len(piece)
        self._ahead -= len(piece)
        if min(self._left, self._ahead) < 0:
            raise ArtifactError(
                f"{self._what}: a layer unpacks to more than {LISTING} says.", do=REMEDY
            )
        return piece


@contextmanager
def _open_tar(path: Path) -> Iterator[_Readable]:
    with path.open("rb") as stream:
        is_packed = stream.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        stream.seek(0)
        if not is_packed:
            yield stream
            return
        with gzip.GzipFile(fileobj=stream) as unpacked:
            yield unpacked


def _checked_name(member: tarfile.TarInfo, what: str) -> str:
    name = PurePosixPath(member.name)
    is_plain = member.isreg() and not member.issparse() and bool(name.parts)
    if not (is_plain or member.isdir()) or name.is_absolute() or ".." in name.parts:
        raise ArtifactError(f"{what}: {member.name} is no plain file of the package.", do=REMEDY)
    return name.as_posix()


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    stream = archive.extractfile(member)
    with target.open("wb") as written:
        while stream and (piece := stream.read(_PIECE)):
            written.write(piece)


@contextmanager
def _translate_errors(what: str) -> Iterator[None]:
    """Turn the errors of a broken tar or gzip, and of the disk, into an ArtifactError."""
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ArtifactError(f"{what}: a layer is no tar: {error}.", do=REMEDY) from error
    except OSError as error:
        raise ArtifactError(
            f"{what} cannot be unpacked: {error.strerror or error}: {error.filename or ''}."
        ) from error


def _altered_files(path: Path, files: Mapping[str, str]) -> list[str]:
    """Return the files of a damaged tar that are not as the registry's manifest says."""
    found: dict[str, str] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if member.isreg() and (stream := archive.extractfile(member)):
                    found[member.name] = _sha256(stream)
    except (tarfile.TarError, OSError, EOFError):
        return []
    return [name for name, digest in files.items() if found.get(name) != digest]


def _sha256(stream: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while piece := stream.read(_PIECE):
        digest.update(piece)
    return digest.hexdigest()
