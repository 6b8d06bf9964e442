"""Check and unpack the layers of a pulled image.

A registry is not trusted: nothing that it sends is used as a path, and no file may become larger
than the package's listing says. So the layer with the listing is unpacked first.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol, cast

from enginery.core.artifact.manifest import FileRecord
from enginery.core.errors import ArtifactError, RegistryError
from enginery.core.table import human_bytes
from enginery.publish.publication import LISTING, Publication
from enginery.publish.targets.oci.image import CONTENT, FILES, LAYER, TITLE

REMEDY = (
    "It cannot be trusted. A registry does not accept a layer again that it already has: delete it "
    "there, or use another registry, and publish the artifact again."
)
_GZIP_LAYER = f"{LAYER}+gzip"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_GZIP_MAGIC = b"\x1f\x8b"
_LISTING_BYTES = 64 << 20
# Limit for tar's headers and padding, and for files before the listing in its layer.
_TAR_BYTES = 64 << 20
_HEADER_BYTES = 4 << 20
_PIECE = 1 << 20
_EMPTY_READS = 100
"""tarfile reads on at the end of the stream, for as many blocks as a header says."""


@dataclass(frozen=True)
class PulledLayer:
    """A layer, as the registry's manifest describes it."""

    digest: str
    """`sha256:` and 64 hex digits, so that it is safe in a file name."""
    size_bytes: int
    title: str
    files: Mapping[str, str]
    """File name -> sha256, as annotated by enginery; only used in messages."""


def parse_descriptor(descriptor: Any, label: str) -> tuple[str, int]:
    """Return digest and size in bytes of a descriptor; raise RegistryError if it is malformed."""
    fields = descriptor if isinstance(descriptor, Mapping) else {}
    digest, size = fields.get("digest"), fields.get("size")
    is_digest = isinstance(digest, str) and _DIGEST.fullmatch(digest)
    if is_digest and type(size) is int and size >= 0:  # a bool is an int, too
        return str(digest), size
    raise RegistryError(
        f"{label}: the registry's manifest has a blob with digest {digest!r} and size {size!r}, "
        "expected sha256: with 64 hex digits, and a number of bytes."
    )


def parse_layers(document: Mapping[str, Any], label: str) -> list[PulledLayer]:
    """Return the layers of an image manifest, the one with the listing first.

    Raises:
        RegistryError: enginery did not publish the image, or a layer's description is malformed.
    """
    listed = document.get("layers")
    layers = listed if isinstance(listed, list) else []
    are_ours = all(_get(layer, "mediaType") in (LAYER, _GZIP_LAYER) for layer in layers)
    if not _get(document.get("annotations"), CONTENT) or not layers or not are_ours:
        raise RegistryError(
            f"{label} was not published by enginery: it has no annotation {CONTENT}.",
            do="Download it with another tool, such as oras pull or docker create.",
        )
    pulled = [_layer(layer, label) for layer in layers]
    if not any(LISTING in layer.files for layer in pulled):
        raise RegistryError(f"{label}: no layer has {LISTING} in its annotation {FILES}.")
    return sorted(pulled, key=lambda layer: LISTING not in layer.files)


def check_layer_size(
    layer: PulledLayer, listing: Publication | None, directory: Path, label: str
) -> None:
    """Raise RegistryError if a layer is larger than its files or the free space.

    Args:
        layer: the layer.
        listing: the package's listing; None before its layer was read.
        directory: where the layer is downloaded to.
        label: name of the image in messages.
    """
    free = shutil.disk_usage(directory).free
    if layer.size_bytes > free:
        raise RegistryError(
            f"{label}: the layer {layer.title} has {human_bytes(layer.size_bytes)}, and "
            f"{directory} has {human_bytes(free)} free.",
            do="Free disk space, or set ENGINERY_HOME to a directory on another disk.",
        )
    if listing is None:
        return
    listed = sum(record.size_bytes for record in listing.files.values()) + _TAR_BYTES
    if layer.size_bytes > listed:
        raise RegistryError(
            f"{label}: the layer {layer.title} has {human_bytes(layer.size_bytes)}, more than all "
            f"files in {LISTING}.",
            do=REMEDY,
        )


def check_layer(path: Path, layer: PulledLayer, label: str) -> None:
    """Raise ArtifactError if a layer was changed; name the changed files if possible."""
    with path.open("rb") as stream:
        digest = _sha256(stream)
    if f"sha256:{digest}" == layer.digest:
        return
    altered = ", ".join(_altered_files(path, layer.files))
    raise ArtifactError(
        f"{label}: {altered} was altered, in the layer {layer.title}."
        if altered
        else f"{label}: the layer {layer.title} was altered: its sha256 is {digest[:12]}…, "
        f"expected {layer.digest.removeprefix('sha256:')[:12]}… as in the registry's manifest.",
        do=REMEDY,
    )


def unpack(path: Path, out: Path, files: Mapping[str, FileRecord], label: str) -> None:
    """Unpack the listed files of a tar; skip all others.

    Args:
        path: the tar, with or without gzip.
        out: directory for the files.
        files: name -> record of the files to unpack.
        label: name of the image in messages.

    Raises:
        ArtifactError: it is not a tar, a member is a link or has a path outside `out`, or a file
            is larger than its record says.
    """
    limit = sum(record.size_bytes for record in files.values()) + _TAR_BYTES
    with _translate_errors(label), _open_tar(path) as stream:
        bounded = _SizeLimitedStream(stream, max(limit, path.stat().st_size), label)
        # In stream mode, tarfile only calls `read`.
        with tarfile.open(fileobj=cast("IO[bytes]", bounded), mode="r|") as archive:
            for member in archive:
                # PAX headers may say any size, and tarfile would skip a petabyte block by block.
                if not 0 <= member.size <= limit:
                    raise ArtifactError(
                        f"{label}: {member.name} has {member.size} bytes, more than all files in "
                        f"{LISTING}.",
                        do=REMEDY,
                    )
                bounded.allow(member.size)
                name = _checked_name(member, label)
                record = files.get(name)
                if record is None or member.isdir():
                    continue
                if member.size > record.size_bytes:
                    raise ArtifactError(
                        f"{label}: {name} has {member.size} bytes, expected {record.size_bytes} as "
                        f"in {LISTING}.",
                        do=REMEDY,
                    )
                _write(archive, member, out / name)


def unpack_listing(path: Path, out: Path, label: str) -> None:
    """Unpack only the package's listing, which limits the sizes of all other files."""
    unpack(path, out, {LISTING: FileRecord(sha256="", size_bytes=_LISTING_BYTES)}, label)


def _layer(layer: Any, label: str) -> PulledLayer:
    digest, size_bytes = parse_descriptor(layer, label)
    annotations = _get(layer, "annotations")
    try:
        files = json.loads(str(_get(annotations, FILES) or "{}"))
    except (ValueError, RecursionError):
        files = None
    if not isinstance(files, dict):
        raise RegistryError(
            f"{label}: the annotation {FILES} of the layer {digest[:19]}… is not a JSON object."
        )
    title = str(_get(annotations, TITLE) or digest)
    return PulledLayer(digest, size_bytes, title, {str(n): str(d) for n, d in files.items()})


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None


class _Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


class _SizeLimitedStream:
    """A stream with a size limit, as gzip data may unpack to 1000 times their size."""

    def __init__(self, stream: _Readable, limit: int, label: str) -> None:
        self._stream, self._left, self._label = stream, limit, label
        self._ahead = _HEADER_BYTES
        self._empty_reads = 0

    def allow(self, size_bytes: int) -> None:
        """Set the limit for reading ahead: this member, and the headers before the next one.

        tarfile keeps headers in memory, so they must not be arbitrarily long.
        """
        self._ahead = size_bytes + _HEADER_BYTES

    def read(self, size: int = _PIECE) -> bytes:
        piece = self._stream.read(size)
        if not piece and size:
            self._empty_reads += 1
            if self._empty_reads > _EMPTY_READS:
                raise tarfile.ReadError("it ends within a file")
        self._left -= len(piece)
        self._ahead -= len(piece)
        if min(self._left, self._ahead) < 0:
            raise ArtifactError(
                f"{self._label}: a layer unpacks to more bytes than {LISTING} says.", do=REMEDY
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


def _checked_name(member: tarfile.TarInfo, label: str) -> str:
    name = PurePosixPath(member.name)
    is_plain = member.isreg() and not member.issparse() and bool(name.parts)
    if not (is_plain or member.isdir()) or name.is_absolute() or ".." in name.parts:
        raise ArtifactError(
            f"{label}: {member.name} is not a regular file inside the package.", do=REMEDY
        )
    return name.as_posix()


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    stream = archive.extractfile(member)
    with target.open("wb") as written:
        while stream and (piece := stream.read(_PIECE)):
            written.write(piece)


@contextmanager
def _translate_errors(label: str) -> Iterator[None]:
    """Raise ArtifactError for errors of tar, gzip and the disk."""
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ArtifactError(f"{label}: a layer is not a valid tar: {error}.", do=REMEDY) from error
    except OSError as error:
        raise ArtifactError(
            f"{label} cannot be unpacked: {error.strerror or error}: {error.filename or ''}."
        ) from error


def _altered_files(path: Path, files: Mapping[str, str]) -> list[str]:
    """Return the files of a changed tar whose digests differ from the manifest."""
    digests: dict[str, str] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if member.isreg() and (stream := archive.extractfile(member)):
                    digests[member.name] = _sha256(stream)
    except (tarfile.TarError, OSError, EOFError):
        return []
    return [name for name, digest in files.items() if digests.get(name) != digest]


def _sha256(stream: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while piece := stream.read(_PIECE):
        digest.update(piece)
    return digest.hexdigest()
