"""The OCI image of a package: layers, config, manifest. It has files, but no program.

The weights, the graphs and each engine are layers, and all small files are one: `weights.tar`,
`graph.tar`, `engine-<name>.tar`, `files.tar`. The image's root is the artifact's directory. The
same package has the same bytes and digests on every machine.

It is an image, not an OCI artifact of single files: container runtimes mount images as Kubernetes
image volumes, but containerd does not mount such artifacts. So the manifest has no `artifactType`.

The layers are tar without gzip, which every runtime supports: weights hardly compress, different
versions of zlib produce different bytes, and a layer is streamed from the artifact's files without
a copy on disk.

The config has the package's listing, from which the layers follow with all their bytes except the
contents of the files. A registry is not trusted: nothing else that it sends says where a file goes,
or how large it is.

Formats: OCI image specification 1.1; layers are POSIX pax.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from enginery.core.artifact.engine_record import ENGINES
from enginery.core.errors import ArtifactError, RegistryError
from enginery.publish.package import CONTENT, Package, PackageFile
from enginery.publish.publication import LISTING, Publication

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
FILES = "enginery.files"
"""Field of the config with the listing."""
TITLE = "org.opencontainers.image.title"
VERSION = "org.opencontainers.image.version"
"""Annotation with the value of --version; a tag of this name is never moved."""

_TAR_END = bytes(1024)
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
class Layer:
    """A group of files as a tar. They have no times and owners, and are readable by all."""

    title: str
    sizes: Mapping[str, int]
    """Name of each file -> size in bytes, in their order."""

    @property
    def size_bytes(self) -> int:
        """Size of the tar."""
        padded = sum(size + len(_padding(size)) for size in self.sizes.values())
        return sum(len(header) for _, header in self._headers()) + padded + len(_TAR_END)

    def pack(self, files: Mapping[str, PackageFile]) -> Iterator[bytes]:
        """Yield the tar in pieces of at most 1 MiB; raise ArtifactError if a file has changed."""
        for name, header in self._headers():
            yield header
            yield from _content(files[name])
            yield _padding(self.sizes[name])
        yield _TAR_END

    def unpack(self, path: Path, out: Path, label: str, *, do: str) -> None:
        """Write the files into `out`. Their content is to be verified with the listing.

        Args:
            path: the tar, of `size_bytes`.
            out: directory for the files.
            label: name of the image in messages.
            do: remedy for a layer that was altered.

        Raises:
            ArtifactError: it is not the tar of the files, or a file cannot be written.
        """
        try:
            with path.open("rb") as stream:
                for name, header in self._headers():
                    if stream.read(len(header)) != header:
                        raise ArtifactError(
                            f"{label}: the layer {self.title} was altered before {name}.", do=do
                        )
                    size_bytes = self.sizes[name]
                    end = stream.tell() + size_bytes
                    if name != LISTING:  # the config's is verified by its digest
                        target = out / name
                        target.parent.mkdir(parents=True, exist_ok=True)
                        with target.open("wb") as written:
                            while piece := stream.read(min(_PIECE, end - stream.tell())):
                                written.write(piece)
                    stream.seek(end + len(_padding(size_bytes)))
        except OSError as error:
            raise ArtifactError(
                f"{label} cannot be unpacked: {error.strerror or error}: {error.filename or ''}."
            ) from error

    def _headers(self) -> Iterator[tuple[str, bytes]]:
        """Yield each file's name and what comes before its content: directories and a header."""
        directories: set[PurePosixPath] = set()
        for name, size_bytes in self.sizes.items():
            header = b""
            for parent in reversed(PurePosixPath(name).parents[:-1]):
                if parent not in directories:
                    directories.add(parent)
                    header += _header(f"{parent}/", tarfile.DIRTYPE, 0, 0o755)
            yield name, header + _header(name, tarfile.REGTYPE, size_bytes, 0o644)


@dataclass(frozen=True)
class PackedLayer:
    """A layer of a package; iterable as the body of a request, which generates it."""

    layer: Layer
    files: Mapping[str, PackageFile]
    digest: str

    def __len__(self) -> int:
        return self.layer.size_bytes

    def __iter__(self) -> Iterator[bytes]:
        return self.layer.pack(self.files)

    def descriptor(self) -> dict[str, Any]:
        """Return the descriptor for a manifest."""
        return {
            "mediaType": LAYER,
            "digest": self.digest,
            "size": len(self),
            "annotations": {TITLE: self.layer.title},
        }


class Descriptor(BaseModel):
    """A blob, as a manifest describes it."""

    digest: Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]
    """64 hex digits, so that it is safe in a file name."""
    size: Annotated[int, Field(ge=0, strict=True)]
    annotations: dict[str, str] = {}


class ImageManifest(BaseModel):
    """The manifest of an image that enginery published."""

    config: Descriptor
    layers: tuple[Descriptor, ...]
    annotations: dict[str, str]

    @property
    def content_sha256(self) -> str:
        """Digest of the package's content."""
        return self.annotations[CONTENT]

    @classmethod
    def read(cls, content: bytes | None) -> ImageManifest | None:
        """Return the manifest; None for an index, and for a foreign image."""
        try:
            manifest = cls.model_validate_json(content or b"")
        except ValidationError:
            return None
        return manifest if CONTENT in manifest.annotations else None


@dataclass(frozen=True)
class Image:
    """All parts of an image, in the order in which a registry needs them."""

    layers: tuple[PackedLayer, ...]
    config: Blob
    manifest: Blob


def build_image(package: Package) -> Image:
    """Return the image of a package. Every file is read once to compute the layers' digests.

    Raises:
        ArtifactError: a file has changed since the package was made; the message names it.
    """
    files = {file.name: file for file in package.files}
    layers = tuple(
        PackedLayer(layer, files, _digest_of_pieces(layer.pack(files)))
        for layer in layers_of({name: file.size_bytes for name, file in files.items()})
    )
    annotations = _annotations(package)
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
            "history": [
                {"created_by": f"enginery publish: {packed.layer.title}"} for packed in layers
            ],
            # "Any extra fields … are considered implementation specific", image-spec, config.md.
            FILES: files[LISTING].path.read_text(encoding="utf-8"),
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


def read_listing(config: bytes, out: Path, label: str) -> dict[str, int]:
    """Write the listing in an image's config into `out`; return the size of each file in bytes.

    Raises:
        RegistryError: the config has no listing.
        ArtifactError: the listing is malformed.
    """
    try:
        content = json.loads(config)[FILES].encode(errors="surrogatepass")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise foreign_image(label) from None
    (out / LISTING).parent.mkdir(parents=True, exist_ok=True)
    (out / LISTING).write_bytes(content)
    listing = Publication.read(out, label)
    return {n: r.size_bytes for n, r in listing.files.items()} | {LISTING: len(content)}


def foreign_image(label: str) -> RegistryError:
    """Return the error for an image that enginery did not publish."""
    return RegistryError(
        f"{label} was not published by enginery, or its manifest was altered.",
        do="Download it with another tool, such as oras pull or docker create.",
    )


def layers_of(sizes: Mapping[str, int]) -> list[Layer]:
    """Return the layers of a package in their order, so that versions share layers.

    Args:
        sizes: name of each file -> size in bytes.
    """
    groups: dict[str, dict[str, int]] = {}
    for name in sorted(sizes):
        groups.setdefault(_group(name, sizes[name]), {})[name] = sizes[name]
    # The small files change most, and runtimes unpack all layers after a changed one again.
    titles = sorted(groups, key=lambda group: (group == _SMALL, group))
    return [Layer(f"{title}.tar", groups[title]) for title in titles]


def _group(name: str, size_bytes: int) -> str:
    parts = PurePosixPath(name).parts
    if parts[0] == ENGINES and len(parts) > 2:
        return f"engine-{parts[1]}"
    if name.endswith(".onnx"):
        return "graph"
    return "weights" if size_bytes > _SMALL_BYTES else _SMALL


def _digest_of_pieces(pieces: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return f"sha256:{digest.hexdigest()}"


def _padding(size_bytes: int) -> bytes:
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
