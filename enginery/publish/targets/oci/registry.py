"""`oci://registry/name:tag`: an image in an OCI registry, for container runtimes to mount.

Publishing makes one layer for each group of files, and a tag:

    $ enginery publish minilm oci://ghcr.io/org/minilm:1
    oci://ghcr.io/org/minilm@sha256:5f0e…

The login is Docker's (`docker login`, its credential helpers included). A layer that the registry
has is not sent again, whichever version brought it; so a run that was killed goes on. The same
package has the same digest everywhere. A tag that --version made says so in its index, and is never
moved.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginery.core.errors import MissingPackageError, OptionError, RegistryError
from enginery.core.home import enginery_home, file_lock
from enginery.core.progress import Progress
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
    image_of,
)
from enginery.publish.targets.oci.layers import (
    REMEDY,
    check_layer,
    digest_and_size,
    layers_of,
    unpack,
    unpack_listing,
)

if TYPE_CHECKING:
    from enginery.publish.targets.oci.client import OciClient

# Repositories and tags as the distribution specification 1.1 has them.
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
        """Read the address; nothing is sent yet.

        Raises:
            OptionError: the address is not `oci://registry/name`, with `:tag`, `@tag` or
                `@sha256:…`.
            MissingPackageError: oras is not installed.
        """
        found = _ADDRESS.fullmatch(url)
        if not found:
            raise OptionError(
                f"address '{url}': expected oci://registry/name:tag or "
                "oci://registry/name@sha256:…, the name of small letters, digits, '.', '_', '-' "
                "and '/'."
            )
        self.url, self.host, self.repository = url, found["host"], found["repository"]
        self.tag, self.digest = found["tag"] or "", found["digest"] or ""
        if config.name and config.name != self.repository.rpartition("/")[2]:
            raise OptionError(
                f"option 'name' is '{config.name}', but the address says {self.repository}."
            )
        try:
            from enginery.publish.targets.oci.client import OciClient
        except ImportError as error:
            package = error.name or "oras"
            raise MissingPackageError(package, extra="oci", purpose=url) from error
        self._connect = partial(OciClient, self.host, self.repository, insecure=config.insecure)

    @property
    def remedy(self) -> str:
        """Say what to do about a damaged version."""
        return REMEDY

    def publish(self, package: Package, config: PublishConfig, progress: Progress) -> Published:
        """Upload the layers that are not there, then the manifests, then the tags.

        Raises:
            RegistryError: the registry cannot be reached or refuses, --version is another content
                there, or a tag that would move is a version.
            OptionError: the address has a digest, or both a tag and --version are named.
            ArtifactError: a file has changed since the package was made.
        """
        if self.digest:
            raise OptionError(f"{self.url}: a digest is what publishing makes; name a tag.")
        if config.version and self.tag not in ("", config.version):
            raise OptionError(
                f"option 'version' is '{config.version}', but the address says {self.tag}.",
                do="Name one of the two.",
            )
        tag = config.version or self.tag or LATEST
        if config.alias == tag:
            raise OptionError(f"alias and tag are both '{tag}'.", do="Leave out --alias.")
        client = self._connect()
        with progress.task(f"hashing layers of {package.name}"):
            image = image_of(package)
        notes = [f"{r.directory_name} is {r.hardware_target}" for r in package.engines]
        place = hashlib.sha256(f"{self.host}/{self.repository}".encode()).hexdigest()
        # A registry has no "if it is still so": writers of this machine take turns at least.
        with file_lock(f"oci-{place[:32]}"):
            there = tagged(client, tag, self.url)
            self._refuse_moving(client, tag, config, there, package)
            is_same = there is not None and package.is_same(there.content, there.without_rights)
            if there and is_same and self._is_whole(client, there, config, package, progress):
                digest, is_new = there.digest, False
            else:
                digest = image.index.digest
                is_new = not is_same and not client.has_manifest(digest)
                if there and not is_same:
                    notes.append(f"{tag} pointed to {there.digest} before")
                self._send(client, image, package, progress)
                client.put_manifest(tag, image.index.media_type, image.index.content)
                if config.version and not is_same:
                    client.put_manifest(LATEST, image.index.media_type, image.index.content)
            if config.alias:
                content_bytes, media_type, _ = client.manifest(digest)
                client.put_manifest(config.alias, media_type, content_bytes)
        return Published(f"oci://{self.host}/{self.repository}@{digest}", tag, is_new, tuple(notes))

    def pull(self, out: Path, progress: Progress) -> Path:
        """Download the layers, check their digests and unpack them into `out`.

        What was downloaded when a pull broke off is under `$ENGINERY_HOME/pulls`, and goes on
        from there.

        Raises:
            RegistryError: the registry cannot be reached, refuses, or has no such image of
                enginery.
            ArtifactError: a layer was altered; the message names it, and the file if it can be
                told.
        """
        client = self._connect()
        layers = layers_of(self._manifest(client), self.url)
        pulls = enginery_home() / "pulls"
        pulls.mkdir(parents=True, exist_ok=True)
        listing: Publication | None = None
        with progress.task(f"downloading {self.url}", len(layers)) as advance:
            for layer in layers:
                hexdigits = layer.digest.removeprefix("sha256:")
                path = pulls / f"{hexdigits}.tar"
                with file_lock(f"pull-{hexdigits[:32]}"):
                    client.download(layer.digest, path, layer.size_bytes)
                    try:
                        check_layer(path, layer, self.url)
                        if listing is None:
                            unpack_listing(path, out, self.url)
                            listing = Publication.read(out, self.url)
                        unpack(path, out, listing.files, self.url)
                    finally:  # whole or altered, it is of no use any more
                        path.unlink(missing_ok=True)
                advance()
        return out

    def _refuse_moving(
        self,
        client: OciClient,
        tag: str,
        config: PublishConfig,
        there: Tagged | None,
        package: Package,
    ) -> None:
        """Raise RegistryError if a tag that is a version would point elsewhere."""
        if there and not package.is_same(there.content, there.without_rights):
            name = f"oci://{self.host}/{self.repository}:{tag}"
            if config.version:
                raise RegistryError(
                    f"{name} is another content than {package.name}: "
                    f"{there.content[:12] or 'not of enginery'}, found "
                    f"{package.content_sha256[:12]}.",
                    do="Name another --version.",
                )
            if there.is_version:
                raise RegistryError(
                    f"{name} is a version with another content: {there.content[:12]}, found "
                    f"{package.content_sha256[:12]}.",
                    do="Name another tag: a version is never moved.",
                )
        if config.alias and (other := tagged(client, config.alias, self.url)) and other.is_version:
            raise RegistryError(
                f"alias '{config.alias}' is the name of a version of {self.repository}.",
                do="Name another --alias: a version is never moved.",
            )

    def _is_whole(
        self,
        client: OciClient,
        there: Tagged,
        config: PublishConfig,
        package: Package,
        progress: Progress,
    ) -> bool:
        """Whether the registry has all that a tag names; without it, what is here is sent again."""
        lost = missing_blobs(client, there, self.url)
        if lost:
            package.require_rights(f"{self.url}: the registry has lost {lost}", there.content)
            progress.say(f"publish: sends {there.tag} again, the registry has lost {lost}")
        # An index that is not marked as a version yet is sent again; not one without its rights.
        is_marked = there.is_version or there.content != package.content_sha256
        return not lost and (not config.version or is_marked)

    def _send(self, client: OciClient, image: Image, package: Package, progress: Progress) -> None:
        """Upload everything but the tag."""
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
        """Return the manifest with the layers; those of all architectures have the same."""
        reference = self.digest or self.tag or LATEST
        if not (self.digest or self.tag) and not client.has_manifest(LATEST):
            tags = client.tags()
            raise RegistryError(
                f"{self.url} names no tag, and {self.repository} has no '{LATEST}'.",
                do=f"It has {', '.join(tags)}: add one to the address, {self.url}:{tags[0]}"
                if tags
                else "Add a tag to the address, oci://registry/name:tag.",
            )
        content, media_type, _ = client.manifest(reference)
        document = parsed(content, self.url)
        manifests = document.get("manifests")
        if media_type == INDEX and manifests:
            first = manifests[0] if isinstance(manifests, list) else manifests
            digest, _ = digest_and_size(first, self.url)
            document = parsed(client.manifest(digest)[0], self.url)
        return document


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
    """Return what a tag points to, or None if there is no such tag.

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
    """Return what the registry has lost of a tag's image, by title or digest; empty if nothing."""
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
    """Return a manifest or an index as an object; raise RegistryError for anything else."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RegistryError(f"{what}: the registry's manifest is no JSON: {error}.") from error
    if not isinstance(document, dict):
        raise RegistryError(f"{what}: the registry's manifest is no object.")
    return document
