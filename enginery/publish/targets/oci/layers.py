"""Check and unpack the layers of a pulled image.

A registry is not trusted. The image's config has the package's listing, so that a layer is known
before it is downloaded, except for the content of its files: nothing that a registry sends is used
as a path, and no file becomes larger than the listing says.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginery.core.errors import ArtifactError, RegistryError
from enginery.core.json_file import parse_json
from enginery.core.table import human_bytes
from enginery.publish.package import CONTENT
from enginery.publish.publication import LISTING, Publication
from enginery.publish.targets.oci.image import (
    FILES,
    LAYER,
    TAR_END,
    TITLE,
    tar_headers,
    tar_padding,
)

REMEDY = (
    "It cannot be trusted. A registry does not accept a layer again that it already has: delete it "
    "there, or use another registry, and publish the artifact again."
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PIECE = 1 << 20


@dataclass(frozen=True)
class PulledLayer:
    """A layer, as the registry's manifest describes it."""

    digest: str
    """`sha256:` and 64 hex digits, so that it is safe in a file name."""
    size_bytes: int
    title: str
    files: tuple[str, ...]
    """Names of the files in their order, as annotated by enginery."""


def parse_json_object(content: bytes, label: str) -> dict[str, Any]:
    """Return a manifest or a config; raise RegistryError if it is not a JSON object."""
    try:
        document = parse_json(content)
    except ValueError as error:
        raise RegistryError(f"{label}: the registry's manifest is not JSON: {error}.") from error
    if not isinstance(document, dict):
        raise RegistryError(f"{label}: the registry's manifest is not a JSON object.")
    return document


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


def annotation(document: Any, name: str) -> str:
    """Return an annotation of a manifest or a layer; empty without one."""
    annotations = document.get("annotations") if isinstance(document, Mapping) else None
    return str(annotations.get(name, "")) if isinstance(annotations, Mapping) else ""


def parse_layers(document: Mapping[str, Any], label: str) -> list[PulledLayer]:
    """Return the layers of an image manifest.

    Raises:
        RegistryError: enginery did not publish the image, or a layer's description is malformed.
    """
    listed = document.get("layers")
    layers = [x for x in listed if isinstance(x, Mapping)] if isinstance(listed, list) else []
    are_ours = all(layer.get("mediaType") == LAYER for layer in layers)
    if not annotation(document, CONTENT) or not layers or not are_ours:
        raise _foreign_image(label)
    return [_layer(layer, label) for layer in layers]


def _layer(layer: Any, label: str) -> PulledLayer:
    digest, size_bytes = parse_descriptor(layer, label)
    try:
        files = json.loads(annotation(layer, FILES))
    except (ValueError, RecursionError):
        files = None
    if not isinstance(files, list) or not all(isinstance(name, str) for name in files):
        raise RegistryError(
            f"{label}: the annotation {FILES} of the layer {digest[:19]}… is not a list of names."
        )
    return PulledLayer(digest, size_bytes, annotation(layer, TITLE) or digest, tuple(files))


def read_listing(config: bytes, out: Path, label: str) -> dict[str, int]:
    """Write the listing in an image's config into `out`; return the size of each file in bytes.

    Raises:
        RegistryError: the config has no listing.
        ArtifactError: the listing is malformed.
    """
    text = parse_json_object(config, label).get(FILES)
    if not isinstance(text, str):
        raise _foreign_image(label)
    content = text.encode(errors="surrogatepass")
    (out / LISTING).parent.mkdir(parents=True, exist_ok=True)
    (out / LISTING).write_bytes(content)
    listing = Publication.read(out, label)
    return {n: r.size_bytes for n, r in listing.files.items()} | {LISTING: len(content)}


def _foreign_image(label: str) -> RegistryError:
    return RegistryError(
        f"{label} was not published by enginery: it has no annotation {CONTENT}, or no listing.",
        do="Download it with another tool, such as oras pull or docker create.",
    )


def check_layer(layer: PulledLayer, sizes: Mapping[str, int], directory: Path, label: str) -> None:
    """Raise RegistryError if a layer is not the tar of its files, or larger than the free space.

    Args:
        layer: the layer.
        sizes: name of each file in the listing -> size in bytes.
        directory: where the layer is downloaded to.
        label: name of the image in messages.
    """
    if unlisted := [name for name in layer.files if name not in sizes]:
        raise RegistryError(f"{label}: {LISTING} lacks {unlisted[0]!r} of the layer {layer.title}.")
    inside = {name: sizes[name] for name in layer.files}
    expected = sum(len(header) for header in tar_headers(inside)) + len(TAR_END)
    expected += sum(size + len(tar_padding(size)) for size in inside.values())
    if layer.size_bytes != expected:
        raise RegistryError(
            f"{label}: the layer {layer.title} has {layer.size_bytes} bytes, expected {expected} "
            f"for its files in {LISTING}.",
            do=REMEDY,
        )
    free = shutil.disk_usage(directory).free
    if layer.size_bytes > free:
        raise RegistryError(
            f"{label}: the layer {layer.title} has {human_bytes(layer.size_bytes)}, and "
            f"{directory} has {human_bytes(free)} free.",
            do="Free disk space, or set ENGINERY_HOME to a directory on another disk.",
        )


def unpack(path: Path, out: Path, layer: PulledLayer, sizes: Mapping[str, int], label: str) -> None:
    """Write the files of a layer into `out`. Their content is to be verified with the listing.

    Args:
        path: the layer, which `check_layer` accepts.
        out: directory for the files.
        layer: its description.
        sizes: name of each file in the listing -> size in bytes.
        label: name of the image in messages.

    Raises:
        ArtifactError: it is not the tar of its files, or a file cannot be written.
    """
    headers = tar_headers({name: sizes[name] for name in layer.files})
    try:
        with path.open("rb") as stream:
            for name, header in zip(layer.files, headers, strict=True):
                if stream.read(len(header)) != header:
                    raise ArtifactError(
                        f"{label}: the layer {layer.title} was altered before {name}.", do=REMEDY
                    )
                end = stream.tell() + sizes[name]
                if name != LISTING:  # the config's is verified by its digest
                    target = out / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with target.open("wb") as written:
                        while piece := stream.read(min(_PIECE, end - stream.tell())):
                            written.write(piece)
                stream.seek(end + len(tar_padding(sizes[name])))
    except OSError as error:
        raise ArtifactError(
            f"{label} cannot be unpacked: {error.strerror or error}: {error.filename or ''}."
        ) from error
