"""What a tag of an OCI registry points to: which content, whether it is whole, and a version.

Takes a client and a tag; asks the registry, and leaves nothing.

    >>> tagged(client, "1.0", url).is_version
    True

A tag that --version made is known by its index: its `org.opencontainers.image.version` is the tag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from enginery.core.errors import RegistryError
from enginery.publish.targets.oci.client import OciClient
from enginery.publish.targets.oci.image import CONTENT, TITLE, VERSION, WITHOUT_RIGHTS
from enginery.publish.targets.oci.layers import digest_and_size


@dataclass(frozen=True)
class Tagged:
    """What a tag points to."""

    tag: str
    digest: str
    content: str
    """sha256 of the content; empty for what is not of enginery."""
    without_rights: str
    is_version: bool
    """Whether --version made the tag."""
    manifests: tuple[Any, ...]
    """Descriptors of the manifests of the index."""


def tagged(client: OciClient, tag: str, what: str) -> Tagged | None:
    """What a tag points to; None where there is no such tag.

    Raises:
        RegistryError: the registry cannot be reached, or answers no JSON.
    """
    if not client.has_manifest(tag):
        return None
    content, _, digest = client.manifest(tag)
    document = parsed(content, what)
    annotations, manifests = document.get("annotations"), document.get("manifests")
    said = annotations if isinstance(annotations, Mapping) else {}
    return Tagged(
        tag=tag,
        digest=digest,
        content=str(said.get(CONTENT, "")),
        without_rights=str(said.get(WITHOUT_RIGHTS, "")),
        is_version=said.get(VERSION) == tag,
        manifests=tuple(manifests) if isinstance(manifests, list) else (),
    )


def missing_blobs(client: OciClient, there: Tagged, what: str) -> str:
    """What of a tag's image the registry does not have, by title or digest; empty where all is."""
    blobs: dict[str, str] = {}
    for descriptor in there.manifests:
        manifest, _ = digest_and_size(descriptor, what)
        if not client.has_manifest(manifest):
            return manifest
        document = parsed(client.manifest(manifest)[0], what)
        layers = document.get("layers")
        for blob in [document.get("config"), *(layers if isinstance(layers, list) else [])]:
            digest, _ = digest_and_size(blob, what)
            annotations = blob.get("annotations")
            said = annotations if isinstance(annotations, Mapping) else {}
            blobs[digest] = str(said.get(TITLE, digest))
    return ", ".join(title for digest, title in blobs.items() if not client.has_blob(digest))


def parsed(content: bytes, what: str) -> dict[str, Any]:
    """A manifest or an index as an object; raises RegistryError for anything else."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RegistryError(f"{what}: the registry's manifest is no JSON: {error}.") from error
    if not isinstance(document, dict):
        raise RegistryError(f"{what}: the registry's manifest is no object.")
    return document
