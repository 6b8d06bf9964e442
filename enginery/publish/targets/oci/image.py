"""Build an OCI image from a package: layers, configs, manifests. It has files, but no program.

Each group of files is a layer: `weights.tar`, `graph.tar`, `tokenizer.tar`, `config.tar`,
`report.tar`, `manifest.tar`, `card.tar`. The image's root is the artifact's directory. The same
package has the same bytes and digests on every machine.

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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from enginery.core.errors import ArtifactError
from enginery.publish.package import Package, PackageFile

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
CONTENT = "enginery.content_sha256"
FILES = "enginery.files"
WITHOUT_RIGHTS = "enginery.without_rights_sha256"
TITLE = "org.opencontainers.image.title"
VERSION = "org.opencontainers.image.version"
"""Annotation with the value of --version; a tag of this name is never moved."""
ARCHITECTURES = ("amd64", "arm64")
"""A runtime accepts only images of its architecture; both images have the same layers."""

# Groups that change least come first.
_ORDER = ("weights", "graph", "tokenizer", "config", "engine", "report", "manifest", "card")
_BLOCK = 512  # of tar
_PIECE = 1 << 20


@dataclass(frozen=True)
class Blob:
    """A config, a manifest or an index of an image; iterable as the body of a request."""

    media_type: str
    content: bytes

    @property
    def digest(self) -> str:
        return f"sha256:{hashlib.sha256(self.content).hexdigest()}"

    def __len__(self) -> int:
        return len(self.content)

    def __iter__(self) -> Iterator[bytes]:
        yield self.content

    def descriptor(self) -> dict[str, Any]:
        """Return the descriptor for a manifest or an index."""
        return {"mediaType": self.media_type, "digest": self.digest, "size": len(self.content)}


@dataclass(frozen=True)
class ImageLayer:
    """A group of files as a tar, which is generated while a request sends it."""

    group: str
    files: tuple[PackageFile, ...]
    digest: str
    size_bytes: int
    annotations: dict[str, str]

    @property
    def title(self) -> str:
        return self.annotations[TITLE]

    def __len__(self) -> int:
        return self.size_bytes

    def __iter__(self) -> Iterator[bytes]:
        """Yield pieces of at most 1 MiB; raise ArtifactError if a file has changed."""
        return _tar(self.files)

    def descriptor(self) -> dict[str, Any]:
        """Return the descriptor for a manifest."""
        return {
            "mediaType": LAYER,
            "digest": self.digest,
            "size": self.size_bytes,
            "annotations": self.annotations,
        }


@dataclass(frozen=True)
class Image:
    """All parts of an image, in the order in which a registry needs them."""

    layers: tuple[ImageLayer, ...]
    configs: tuple[Blob, ...]
    manifests: tuple[Blob, ...]
    index: Blob
    """Index with one manifest per architecture; tags point to it."""


def build_image(package: Package) -> Image:
    """Return the image of a package. Every file is read once to compute the layers' digests.

    Raises:
        ArtifactError: a file has changed since the package was made; the message names it.
    """
    groups: dict[str, list[PackageFile]] = {}
    for file in sorted(package.files, key=lambda file: file.name):
        groups.setdefault(file.group, []).append(file)
    layers = tuple(
        _layer(group, tuple(groups[group]), package) for group in sorted(groups, key=_rank)
    )
    annotations = _annotations(package)
    configs = tuple(_config(package, layers, architecture) for architecture in ARCHITECTURES)
    manifests = tuple(
        _json_blob(
            MANIFEST,
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": config.descriptor(),
                "layers": [layer.descriptor() for layer in layers],
                "annotations": annotations,
            },
        )
        for config in configs
    )
    index = {
        "schemaVersion": 2,
        "mediaType": INDEX,
        "manifests": [
            {**manifest.descriptor(), "platform": {"architecture": architecture, "os": "linux"}}
            for manifest, architecture in zip(manifests, ARCHITECTURES, strict=True)
        ],
        "annotations": annotations,
    }
    return Image(layers, configs, manifests, _json_blob(INDEX, index))


def _rank(group: str) -> tuple[int, str]:
    kind = group.partition(":")[0]
    return (_ORDER.index(kind) if kind in _ORDER else len(_ORDER), group)


def _layer(group: str, files: tuple[PackageFile, ...], package: Package) -> ImageLayer:
    digest, size_bytes = hashlib.sha256(), 0
    for piece in _tar(files):
        digest.update(piece)
        size_bytes += len(piece)
    annotations = {
        TITLE: f"{group.replace(':', '-')}.tar",
        FILES: json.dumps({file.name: file.sha256 for file in files}, sort_keys=True),
    }
    record = next((r for r in package.engines if group == f"engine:{r.directory_name}"), None)
    if record:
        annotations |= {
            "enginery.engine.hardware_bound": "true",
            "enginery.engine.flavor": record.flavor,
            "enginery.engine.tensorrt": record.tensorrt,
            "enginery.engine.capabilities": ",".join(record.capabilities) or "portable",
            "enginery.engine.profiles": "; ".join(record.profiles),
            "enginery.engine.gpu": record.gpu.name or "none",
        }
    return ImageLayer(group, files, f"sha256:{digest.hexdigest()}", size_bytes, annotations)


def _tar(files: tuple[PackageFile, ...]) -> Iterator[bytes]:
    """Yield a tar of files and their directories, without times and owners, readable by all."""
    directories: set[PurePosixPath] = set()
    for file in files:
        for parent in reversed(PurePosixPath(file.name).parents[:-1]):
            if parent not in directories:
                directories.add(parent)
                yield _header(f"{parent}/", tarfile.DIRTYPE, 0, 0o755)
        yield _header(file.name, tarfile.REGTYPE, file.size_bytes, 0o644)
        yield from _content(file)
        yield bytes(-file.size_bytes % _BLOCK)
    yield bytes(2 * _BLOCK)


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


def _config(package: Package, layers: tuple[ImageLayer, ...], architecture: str) -> Blob:
    """Return the image's config, without a command, and with the manifest as an extra field."""
    config = {
        "architecture": architecture,
        "os": "linux",
        "config": {"Labels": _annotations(package)},
        # Without gzip, the digest of a layer is the digest of its content.
        "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
        "history": [{"created_by": f"enginery publish: {layer.group}"} for layer in layers],
        # "Any extra fields … are considered implementation specific", image-spec, config.md.
        "enginery": package.artifact.manifest.model_dump(mode="json"),
    }
    return _json_blob(_CONFIG, config)


def _annotations(package: Package) -> dict[str, str]:
    manifest = package.artifact.manifest
    engines = {record.directory_name: record.hardware_target for record in package.engines}
    return {
        TITLE: package.name,
        "org.opencontainers.image.description": f"{manifest.source.id}: {manifest.task}, "
        f"{manifest.describe_precision()}, for {manifest.target}; an artifact of enginery",
        **({VERSION: package.version} if package.version else {}),
        CONTENT: package.content_sha256,
        WITHOUT_RIGHTS: package.without_rights_sha256,
        "enginery.task": manifest.task,
        "enginery.precision": manifest.precision,
        "enginery.target": manifest.target,
        "enginery.source": f"{manifest.source.id}@{manifest.source.revision}".rstrip("@"),
        "enginery.validated": "false" if package.problem else "true",
        "enginery.engines": json.dumps(engines, sort_keys=True),
    }


def _json_blob(media_type: str, document: Any) -> Blob:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return Blob(media_type, text.encode())
