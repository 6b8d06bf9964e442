"""`oci://registry/name:tag`: publish to and pull from an OCI registry.

The package is an image that container runtimes can mount. Publishing uploads one layer per group of
files, and sets a tag:

    $ enginery publish minilm oci://ghcr.io/org/minilm:1
    oci://ghcr.io/org/minilm@sha256:5f0e…

The credentials are Docker's (`docker login`, with credential helpers). A layer that the registry
already has, from any version, is not uploaded again, so that a killed run can be resumed. The same
package has the same digest everywhere. A tag set with --version is marked in its index and never
moved.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginery.core.errors import OptionError, RegistryError
from enginery.core.extras import require_packages
from enginery.core.home import enginery_home, file_lock, note_made
from enginery.core.progress import Progress
from enginery.core.trust.resource_limits import ResourceLimits
from enginery.publish.config import LATEST, PublishConfig
from enginery.publish.destination import Published
from enginery.publish.package import Package
from enginery.publish.publication import Publication
from enginery.publish.targets.oci.image import (
    CONTENT,
    INDEX,
    TITLE,
    VERSION,
    WITHOUT_RIGHTS,
    Image,
    build_image,
)
from enginery.publish.targets.oci.layers import (
    REMEDY,
    check_layer,
    check_layer_size,
    parse_descriptor,
    parse_layers,
    unpack,
    unpack_listing,
)

if TYPE_CHECKING:
    from enginery.publish.targets.oci.client import OciClient

# Repositories and tags according to the distribution specification 1.1.
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_ADDRESS = re.compile(
    r"oci://(?P<host>(?:[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?::\d+)?)/"
    rf"(?P<repository>{_PART}(?:/{_PART})*)"
    r"(?:[:@](?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)


class OciRegistry:
    """A repository of an OCI registry."""

    def __init__(self, url: str, config: PublishConfig) -> None:
        """Parse the address, without connecting to the registry.

        Raises:
            OptionError: the address is not `oci://registry/name`, with `:tag`, `@tag` or
                `@sha256:…`.
            MissingPackageError: oras is not installed.
        """
        match = _ADDRESS.fullmatch(url)
        if not match:
            raise OptionError(
                f"address '{url}': expected oci://registry/name:tag or "
                "oci://registry/name@sha256:…, with lowercase letters, digits, '.', '_', '-' and "
                "'/' in the name."
            )
        self.url, self.host, self.repository = url, match["host"], match["repository"]
        self.tag, self.digest = match["tag"] or "", match["digest"] or ""
        if config.name and config.name != self.repository.rpartition("/")[2]:
            raise OptionError(
                f"option 'name' is '{config.name}', but the address has the name "
                f"'{self.repository}'."
            )
        require_packages(url, "oras", extra="oci")
        from enginery.publish.targets.oci.client import OciClient

        self._connect = partial(OciClient, self.host, self.repository, insecure=config.insecure)

    @property
    def remedy(self) -> str:
        """Remedy for a damaged version."""
        return REMEDY

    def publish(self, package: Package, config: PublishConfig, progress: Progress) -> Published:
        """Upload missing layers, then the manifests, then the tags.

        Raises:
            RegistryError: the registry cannot be reached or rejects a request, the version exists
                with other content, or a tag that would move is a version.
            OptionError: the address has a digest, or a tag that differs from --version.
            ArtifactError: a file was changed while it was published.
        """
        if self.digest:
            raise OptionError(
                f"{self.url} has a digest, expected a tag: publishing computes the digest."
            )
        if config.version and self.tag not in ("", config.version):
            raise OptionError(
                f"option 'version' is '{config.version}', but the address has the tag "
                f"'{self.tag}'.",
                do="Use only one of the two.",
            )
        tag = config.version or self.tag or LATEST
        if config.alias == tag:
            raise OptionError(
                f"option 'alias' is '{tag}', which is also the tag.", do="Leave out --alias."
            )
        client = self._connect()
        with progress.task(f"hashing layers of {package.name}"):
            image = build_image(package)
        notes = [f"{r.directory_name} is {r.hardware_target}" for r in package.engines]
        lock_key = hashlib.sha256(f"{self.host}/{self.repository}".encode()).hexdigest()
        # Registries have no atomic compare-and-set; the lock serializes writers of this machine.
        with file_lock(f"oci-{lock_key[:32]}"):
            existing = read_tag(client, tag, self.url)
            self._check_version_tags(client, tag, config, existing, package)
            is_same = existing is not None and package.has_content(
                existing.content, existing.without_rights
            )
            if (
                existing
                and is_same
                and self._is_complete(client, existing, config, package, progress)
            ):
                digest, is_new = existing.digest, False
            else:
                digest = image.index.digest
                is_new = not is_same and not client.has_manifest(digest)
                if existing and not is_same:
                    notes.append(f"{tag} pointed to {existing.digest} before")
                self._upload(client, image, package, progress)
                client.put_manifest(tag, image.index.media_type, image.index.content)
                if config.version and not is_same:
                    client.put_manifest(LATEST, image.index.media_type, image.index.content)
            if config.alias:
                content_bytes, media_type, _ = client.manifest(digest)
                client.put_manifest(config.alias, media_type, content_bytes)
        return Published(f"oci://{self.host}/{self.repository}@{digest}", tag, is_new, tuple(notes))

    def pull(self, out: Path, progress: Progress) -> Path:
        """Download the layers, check their digests and unpack them into `out`.

        Layers are downloaded to `$ENGINERY_HOME/pulls`, so that a pull can be resumed.

        Raises:
            RegistryError: the registry cannot be reached, rejects the request, or has no such
                image published by enginery.
            ArtifactError: a layer was changed; the message names it, and the file if possible.
        """
        client = self._connect()
        layers = parse_layers(self._manifest(client), self.url)
        home = enginery_home()
        pulls = home / "pulls"
        pulls.mkdir(parents=True, exist_ok=True)
        listing: Publication | None = None
        total_bytes = sum(layer.size_bytes for layer in layers)
        deadline = time.monotonic() + ResourceLimits.of_pull(size_bytes=total_bytes).seconds
        with progress.task(f"downloading {self.url}", len(layers)) as advance:
            for layer in layers:
                hexdigits = layer.digest.removeprefix("sha256:")
                path = pulls / f"{hexdigits}.tar"
                check_layer_size(layer, listing, pulls, self.url)
                note_made(path, home)
                with file_lock(f"pull-{hexdigits[:32]}"):
                    client.download(layer.digest, path, layer.size_bytes, deadline=deadline)
                    try:
                        check_layer(path, layer, self.url)
                        if listing is None:
                            unpack_listing(path, out, self.url)
                            listing = Publication.read(out, self.url)
                        unpack(path, out, listing.files, self.url)
                    finally:  # unpacked or invalid
                        path.unlink(missing_ok=True)
                advance()
        return out

    def _check_version_tags(
        self,
        client: OciClient,
        tag: str,
        config: PublishConfig,
        existing: TagTarget | None,
        package: Package,
    ) -> None:
        """Raise RegistryError if a tag that is a version would move."""
        if existing and not package.has_content(existing.content, existing.without_rights):
            name = f"oci://{self.host}/{self.repository}:{tag}"
            if config.version:
                raise RegistryError(
                    f"{name} exists with other content than {package.name}: found "
                    f"{existing.content[:12] or 'an image without a content digest'}, expected "
                    f"{package.content_sha256[:12]}.",
                    do="Choose another --version.",
                )
            if existing.is_version_tag:
                raise RegistryError(
                    f"{name} is a version with other content: found {existing.content[:12]}, "
                    f"expected {package.content_sha256[:12]}.",
                    do="Choose another tag: a version is never moved.",
                )
        if (
            config.alias
            and (other := read_tag(client, config.alias, self.url))
            and other.is_version_tag
        ):
            raise RegistryError(
                f"alias '{config.alias}' is the name of a version of {self.repository}.",
                do="Choose another --alias: a version is never moved.",
            )

    def _is_complete(
        self,
        client: OciClient,
        existing: TagTarget,
        config: PublishConfig,
        package: Package,
        progress: Progress,
    ) -> bool:
        """Return True if nothing has to be uploaded: the image is complete and marked as needed."""
        lost = missing_blobs(client, existing, self.url)
        if lost:
            package.check_rights_known(
                f"{self.url}: the registry has lost {lost}", existing.content
            )
            progress.say(f"publish: uploading {existing.tag} again, the registry has lost {lost}")
        # An index that is not marked as a version is uploaded again, unless its digest would
        # change because the rights cannot be read here.
        is_marked = existing.is_version_tag or existing.content != package.content_sha256
        return not lost and (not config.version or is_marked)

    def _upload(
        self, client: OciClient, image: Image, package: Package, progress: Progress
    ) -> None:
        """Upload everything except the tag."""
        with progress.task(f"uploading {package.name}", len(image.layers)) as advance:
            for layer in image.layers:
                if not client.has_blob(layer.digest):
                    client.upload(layer)
                advance()
        for blob in image.configs:
            if not client.has_blob(blob.digest):
                client.upload(blob)
        for blob in image.manifests:
            client.put_manifest(blob.digest, blob.media_type, blob.content)

    def _manifest(self, client: OciClient) -> dict[str, Any]:
        """Return the image manifest of any architecture: all have the same layers."""
        reference = self.digest or self.tag or LATEST
        if not (self.digest or self.tag) and not client.has_manifest(LATEST):
            tags = client.tags()
            raise RegistryError(
                f"{self.url} has no tag, and {self.repository} has no tag '{LATEST}'.",
                do=f"Add one of its tags {', '.join(tags)}: {self.url}:{tags[0]}"
                if tags
                else "Add a tag to the address: oci://registry/name:tag.",
            )
        content, media_type, _ = client.manifest(reference)
        document = parse_json_object(content, self.url)
        manifests = document.get("manifests")
        if media_type == INDEX and manifests:
            first = manifests[0] if isinstance(manifests, list) else manifests
            digest, _ = parse_descriptor(first, self.url)
            document = parse_json_object(client.manifest(digest)[0], self.url)
        return document


@dataclass(frozen=True)
class TagTarget:
    """Manifest or index that a tag points to."""

    tag: str
    digest: str
    content: str
    """sha256 of the package's content; empty if enginery did not publish it."""
    without_rights: str
    """sha256 of the content without the rights."""
    is_version_tag: bool
    """True if the tag was set with --version."""
    manifests: tuple[Any, ...]
    """Descriptors of the manifests in the index."""


def read_tag(client: OciClient, tag: str, label: str) -> TagTarget | None:
    """Return the target of a tag; None if the tag does not exist.

    Raises:
        RegistryError: the registry cannot be reached, or does not send JSON.
    """
    if not client.has_manifest(tag):
        return None
    content, _, digest = client.manifest(tag)
    document = parse_json_object(content, label)
    annotations, manifests = document.get("annotations"), document.get("manifests")
    values = annotations if isinstance(annotations, Mapping) else {}
    return TagTarget(
        tag=tag,
        digest=digest,
        content=str(values.get(CONTENT, "")),
        without_rights=str(values.get(WITHOUT_RIGHTS, "")),
        is_version_tag=values.get(VERSION) == tag,
        manifests=tuple(manifests) if isinstance(manifests, list) else (),
    )


def missing_blobs(client: OciClient, target: TagTarget, label: str) -> str:
    """Return the titles or digests of lost blobs of a tag's image; empty if it is complete."""
    blobs: dict[str, str] = {}
    for descriptor in target.manifests:
        manifest, _ = parse_descriptor(descriptor, label)
        if not client.has_manifest(manifest):
            return manifest
        document = parse_json_object(client.manifest(manifest)[0], label)
        layers = document.get("layers")
        layers = layers if isinstance(layers, list) else []
        for blob in [document.get("config"), *layers]:
            digest, _ = parse_descriptor(blob, label)
            annotations = blob.get("annotations")
            values = annotations if isinstance(annotations, Mapping) else {}
            blobs[digest] = str(values.get(TITLE, digest))
    return ", ".join(title for digest, title in blobs.items() if not client.has_blob(digest))


def parse_json_object(content: bytes, label: str) -> dict[str, Any]:
    """Return a manifest or an index; raise RegistryError if it is not a JSON object."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RegistryError(f"{label}: the registry's manifest is not JSON: {error}.") from error
    if not isinstance(document, dict):
        raise RegistryError(f"{label}: the registry's manifest is not a JSON object.")
    return document
