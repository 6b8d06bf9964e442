"""Build an OCI image from a package: layers, config, manifest. It has files, but no program.

The weights, the graphs and each engine are layers, and all small files are one: `weights.tar`,
`graph.tar`, `engine-<name>.tar`, `files.tar`. The image's root is the artifact's directory. The
same package has the same bytes and digests on every machine.

It is an image, not an OCI artifact of single files: container runtimes mount images as Kubernetes
image volumes, but containerd does not mount such artifacts. So the manifest has no `artifactType`.

The layers are tar without gzip, which every runtime supports: weights hardly compress, different
versions of zlib produce different bytes, and a layer is streamed from the artifact's files without
a copy on disk.

Formats: OCI image specification 1.1; layers are POSIX pax.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from enginery.core.artifact.engine_record import ENGINES
from enginery.core.errors import ArtifactError
from enginery.publish.package import Package, PackageFile
from enginery.publish.publication import LISTING

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
FILES = "enginery.files"
"""Annotation of a layer with the names of its files, and field of the config with the listing."""
TITLE = "org.opencontainers.image.title"
VERSION = "org.opencontainers.image.version"
"""Annotation with the value of --version; a tag of this name is never moved."""

TAR_END = bytes(1024)
_BLOCK = 512  # of tar
_PIECE = 1 << 20
_SMALL, _SMALL_BYTES = "files", 1 << 20


def digest_of(content: bytes) -> str:
    """Return `sha256:` and the sha256 of a blob or a manifest in hex digits."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@dataclass(frozen=True)
class Blob:
    """A config or a manifest; iterable as the body of a request."""

    media_type: str
    content: bytes

    @property
    def digest(self) -> str:
        return digest_of(self.content)

    def __len__(self) -> int:
        return len(self.content)

    def __iter__(self) -> Iterator[bytes]:
        yield self.content

    def descriptor(self) -> dict[str, Any]:
        """Return the descriptor for a manifest."""
        return {"mediaType": self.media_type, "digest": self.digest, "size": len(self)}


@dataclass(frozen=True)
class ImageLayer:
    """A group of files as a tar, which is generated while a request sends it."""

    title: str
    files: tuple[PackageFile, ...]
    """The files, sorted by name."""
    digest: str
    size_bytes: int

    def __len__(self) -> int:
        return self.size_bytes

    def __iter__(self) -> Iterator[bytes]:
        """Yield pieces of at most 1 MiB; raise ArtifactError if a file has changed."""
        return _tar(self.files)

    def descriptor(self) -> dict[str, Any]:
        """Return the descriptor for a manifest."""
        names = json.dumps([file.name for file in self.files])
        return {
            "mediaType": LAYER,
            "digest": self.digest,
            "size": self.size_bytes,
            "annotations": {TITLE: self.title, FILES: names},
        }


@dataclass(frozen=True)
class Image:
    """All parts of an image, in the order in which a registry needs them."""

    layers: tuple[ImageLayer, ...]
    config: Blob
    manifest: Blob


def build_image(package: Package) -> Image:
    """Return the image of a package. Every file is read once to compute the layers' digests.

    Raises:
        ArtifactError: a file has changed since the package was made; the message names it.
    """
    groups: dict[str, list[PackageFile]] = {}
    for file in sorted(package.files, key=lambda file: file.name):
        groups.setdefault(_group(file), []).append(file)
    # The small files change most, and runtimes unpack all layers after a changed one again.
    titles = sorted(groups, key=lambda group: (group == _SMALL, group))
    layers = tuple(_layer(f"{title}.tar", tuple(groups[title])) for title in titles)
    annotations = _annotations(package)
    listing = next(file.path for file in package.files if file.name == LISTING)
    config = _json_blob(
        CONFIG,
        {
            # One image for all: runtimes compare an image's architecture with theirs when they
            # choose from an index (containerd's images.Manifest), and otherwise only report it.
            "architecture": "amd64",
            "os": "linux",
            "config": {"Labels": annotations},
            # Without gzip, the digest of a layer is the digest of its content.
            "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
            "history": [{"created_by": f"enginery publish: {layer.title}"} for layer in layers],
            # "Any extra fields … are considered implementation specific", image-spec, config.md.
            FILES: listing.read_text(encoding="utf-8"),
        },
    )
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": config.descriptor(),
        "layers": [layer.descriptor() for layer in layers],
        "annotations": annotations,
    }
    return Image(layers, config, _json_blob(MANIFEST, manifest))


def _group(file: PackageFile) -> str:
    """Return the layer of a file, so that layers are shared between versions."""
    parts = PurePosixPath(file.name).parts
    if parts[0] == ENGINES and len(parts) > 2:
        return f"engine-{parts[1]}"
    if file.name.endswith(".onnx"):
        return "graph"
    return "weights" if file.size_bytes > _SMALL_BYTES else _SMALL


def _layer(title: str, files: tuple[PackageFile, ...]) -> ImageLayer:
    digest, size_bytes = hashlib.sha256(), 0
    for piece in _tar(files):
        digest.update(piece)
        size_bytes += len(piece)
    return ImageLayer(title, files, f"sha256:{digest.hexdigest()}", size_bytes)


def _tar(files: tuple[PackageFile, ...]) -> Iterator[bytes]:
    headers = tar_headers({file.name: file.size_bytes for file in files})
    for file, header in zip(files, headers, strict=True):
        yield header
        yield from _content(file)
        yield tar_padding(file.size_bytes)
    yield TAR_END


def tar_headers(sizes: Mapping[str, int]) -> Iterator[bytes]:
    """Yield what comes before the content of each file in a tar: its directories and its header.

    They have no times and owners, and are readable by all.

    Args:
        sizes: name of each file -> size in bytes.
    """
    directories: set[PurePosixPath] = set()
    for name, size_bytes in sizes.items():
        header = b""
        for parent in reversed(PurePosixPath(name).parents[:-1]):
            if parent not in directories:
                directories.add(parent)
                header += _header(f"{parent}/", tarfile.DIRTYPE, 0, 0o755)
        yield header + _header(name, tarfile.REGTYPE, size_bytes, 0o644)


def tar_padding(size_bytes: int) -> bytes:
    """Return what comes after the content of a file in a tar."""
    return bytes(-size_bytes % _BLOCK)


def _header(name: str, kind: bytes, size_bytes: int, mode: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mode = kind, size_bytes, mode
    return info.tobuf(tarfile.PAX_FORMAT)


def _content(file: PackageFile) -> Iterator[bytes]:
    """Yield the content of a file; raise ArtifactError if it differs from its record.

    It never yields more bytes than the record says, because the tar header already has the size.
    """
    digest, remaining = hashlib.sha256(), file.size_bytes
    try:
        with file.path.open("rb") as stream:
            while piece := stream.read(min(_PIECE, remaining)):
                digest.update(piece)
                remaining -= len(piece)
                yield piece
            changed = remaining or stream.read(1) or digest.hexdigest() != file.sha256
    except OSError as error:
        raise ArtifactError(f"{file.path} cannot be read: {error.strerror}.") from error
    if changed:
        raise ArtifactError(f"{file.path} was changed while it was published.", do="Publish again.")


def _annotations(package: Package) -> dict[str, str]:
    version = package.publication.version
    return {
        TITLE: package.name,
        "org.opencontainers.image.description": f"{package.description}; an artifact of enginery",
        **({VERSION: version} if version else {}),
        **package.tags,
    }


def _json_blob(media_type: str, document: Any) -> Blob:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return Blob(media_type, text.encode())
