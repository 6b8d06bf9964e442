"""A package as an OCI image that has files and no program: layers, configs, manifests.

The same package has the same bytes and digests everywhere. Each group of files is a layer:
`weights.tar`, `graph.tar`, `tokenizer.tar`, `config.tar`, `report.tar`, `manifest.tar`, `card.tar`.

An image, and no OCI artifact of single files: container runtimes mount the first as a Kubernetes
image volume, and containerd does not mount the second; so the manifest has no `artifactType`. The
image's root is the artifact's directory. The layers are tar without gzip, which every runtime
takes: weights hardly get smaller, two versions of zlib do not make the same bytes, and a layer is
sent from the artifact's files without a copy of it on disk.

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
"""What --version named: a tag of this name is not moved."""
ARCHITECTURES = ("amd64", "arm64")
"""A runtime takes an image of its own architecture alone; the layers of both are the same."""

# What changes least comes first.
_ORDER = ("weights", "graph", "tokenizer", "config", "engine", "report", "manifest", "card")
_BLOCK = 512  # of tar
_PIECE = 1 << 20


@dataclass(frozen=True)
class Blob:
    """Some bytes of an image, and how others refer to them; iterable as the body of a request."""

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
        """Return how a manifest or an index names it."""
        return {"mediaType": self.media_type, "digest": self.digest, "size": len(self.content)}


@dataclass(frozen=True)
class Layer:
    """The files of one group, as a tar that is made while a request sends it."""

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
        """Yield pieces of at most 1 MiB; raise ArtifactError for a file that has changed."""
        return _tar(self.files)

    def descriptor(self) -> dict[str, Any]:
        """Return how a manifest names it."""
        return {
            "mediaType": LAYER,
            "digest": self.digest,
            "size": self.size_bytes,
            "annotations": self.annotations,
        }


@dataclass(frozen=True)
class Image:
    """Everything that a registry gets, in the order in which it must come."""

    layers: tuple[Layer, ...]
    configs: tuple[Blob, ...]
    manifests: tuple[Blob, ...]
    index: Blob
    """One manifest for each architecture; what a tag points to."""


def image_of(package: Package) -> Image:
    """Return the image of a package. Every file is read once, for the layers' digests.

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


def _layer(group: str, files: tuple[PackageFile, ...], package: Package) -> Layer:
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
            "enginery.engine.profiles.parse": "; ".join(record.profiles),
            "enginery.engine.gpu": record.gpu.name or "none",
        }
    return Layer(group, files, f"sha256:{digest.hexdigest()}", size_bytes, annotations)


def _tar(files: tuple[PackageFile, ...]) -> Iterator[bytes]:
    """Yield a tar of files with their directories: no times, no owners, readable by everybody."""
    made: set[PurePosixPath] = set()
    for file in files:
        for parent in reversed(PurePosixPath(file.name).parents[:-1]):
            if parent not in made:
                made.add(parent)
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
    """Yield the bytes of a file, as many as its record says; a tar with others would be no tar."""
    digest, left = hashlib.sha256(), file.size_bytes
    try:
        with file.path.open("rb") as stream:
            while piece := stream.read(min(_PIECE, left)):
                digest.update(piece)
                left -= len(piece)
                yield piece
            changed = left or stream.read(1) or digest.hexdigest() != file.sha256
    except OSError as error:
        raise ArtifactError(f"{file.path} cannot be read: {error.strerror}.") from error
    if changed:
        raise ArtifactError(f"{file.path} has changed since it was checked.", do="Publish again.")


def _config(package: Package, layers: tuple[Layer, ...], architecture: str) -> Blob:
    """Return the image's config: no command, and the artifact's manifest as an extra field."""
    config = {
        "architecture": architecture,
        "os": "linux",
        "config": {"Labels": _annotations(package)},
        # Without gzip a layer's digest is that of its content.
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
        f"{manifest.precision}, for {manifest.target}; an artifact of enginery",
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
