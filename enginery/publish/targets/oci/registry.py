"""`oci://registry/name:tag`: publish to and pull from an OCI registry.

The package is an image that container runtimes can mount. Publishing uploads one layer per group of
files, and sets a tag:

    $ enginery publish minilm oci://ghcr.io/org/minilm:1
    oci://ghcr.io/org/minilm@sha256:5f0e…

The credentials are Docker's (`docker login`, with credential helpers). A layer that the registry
already has, from any version, is not uploaded again, so that a killed run can be resumed. The same
package has the same digest everywhere. A tag set with --version is marked in its manifest and never
moved.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from enginery.core.errors import OptionError, RegistryError
from enginery.core.extras import require_packages
from enginery.core.home import file_lock
from enginery.core.progress import Progress
from enginery.core.scratch import PREFIX
from enginery.core.table import human_bytes
from enginery.core.trust.resource_limits import ResourceLimits
from enginery.publish.config import LATEST, PublishConfig
from enginery.publish.destination import Published
from enginery.publish.package import Package
from enginery.publish.publication import LISTING
from enginery.publish.targets.oci.image import (
    TITLE,
    VERSION,
    Image,
    ImageManifest,
    Layer,
    build_image,
    digest_of,
    foreign_image,
    layers_of,
    read_listing,
)

if TYPE_CHECKING:
    from enginery.publish.targets.oci.client import OciClient

REMEDY = (
    "It cannot be trusted. A registry does not accept a layer again that it already has: delete it "
    "there, or use another registry, and publish the artifact again."
)
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
        """Upload missing layers and the config, then the manifest under its tags.

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
        notes = []
        lock_key = hashlib.sha256(f"{self.host}/{self.repository}".encode()).hexdigest()
        # Registries have no atomic compare-and-set; the lock serializes writers of this machine.
        with file_lock(f"oci-{lock_key[:32]}"):
            manifest = client.manifest(tag)
            existing = ImageManifest.read(manifest)
            is_same = existing is not None and existing.content_sha256 == package.content_sha256
            if manifest and not is_same:
                self._require_movable(tag, existing, package, config)
                notes.append(f"{tag} pointed to {digest_of(manifest)} before")
            self._check_alias(client, config.alias)
            is_new = not is_same and client.manifest(image.manifest.digest) is None
            lost = missing_blobs(client, existing) if existing and is_same else ""
            if lost:
                progress.say(f"publish: uploading {tag} again, the registry has lost {lost}")
            # A tag that becomes a version gets a manifest that is marked as one.
            is_marked = not config.version or _is_version(existing, tag)
            if not (manifest and is_same and is_marked) or lost:
                manifest = image.manifest.content
                self._upload(client, image, package, progress)
                client.put_manifest(tag, manifest)
                if config.version and not is_same:
                    client.put_manifest(LATEST, manifest)
            if config.alias:
                client.put_manifest(config.alias, manifest)
        url = f"oci://{self.host}/{self.repository}@{digest_of(manifest)}"
        return Published(url, tag, is_new, tuple(notes))

    def pull(self, out: Path, progress: Progress) -> Path:
        """Download the layers and unpack them into `out`; the caller verifies every file.

        Raises:
            RegistryError: the registry cannot be reached, rejects the request, or has no such
                image published by enginery.
            ArtifactError: a layer is not the tar of its files; the message names it.
        """
        client = self._connect()
        manifest = self._manifest(client)
        sizes = read_listing(client.config(manifest.config.digest), out, self.url)
        layers = layers_of(sizes)
        expected = [layer.size_bytes for layer in layers]
        if (sizes_bytes := [descriptor.size for descriptor in manifest.layers]) != expected:
            raise RegistryError(
                f"{self.url}: the layers have {sizes_bytes} bytes, expected {expected} for the "
                f"files in {LISTING}.",
                do=REMEDY,
            )
        path = out / f"{PREFIX}layer.tar"
        deadline = time.monotonic() + ResourceLimits.of_pull(size_bytes=sum(expected)).seconds
        with progress.task(f"downloading {self.url}", len(layers)) as advance:
            for layer, digest in zip(layers, (d.digest for d in manifest.layers), strict=True):
                require_space(layer, out, self.url)
                client.download(digest, path, layer.size_bytes, deadline=deadline)
                layer.unpack(path, out, self.url, do=REMEDY)
                path.unlink()
                advance()
        return out

    def _require_movable(
        self, tag: str, existing: ImageManifest | None, package: Package, config: PublishConfig
    ) -> None:
        """Raise RegistryError if a tag with other content is a version, or would become one."""
        if not config.version and not _is_version(existing, tag):
            return
        content = existing.content_sha256[:12] if existing else "an image without a content digest"
        raise RegistryError(
            f"oci://{self.host}/{self.repository}:{tag} exists with other content than "
            f"{package.name}: found {content}, expected {package.content_sha256[:12]}.",
            do="Choose another name: a version is never moved.",
        )

    def _check_alias(self, client: OciClient, alias: str) -> None:
        """Raise RegistryError if an alias is the name of a version."""
        if alias and _is_version(ImageManifest.read(client.manifest(alias)), alias):
            raise RegistryError(
                f"alias '{alias}' is the name of a version of {self.repository}.",
                do="Choose another --alias: a version is never moved.",
            )

    def _upload(
        self, client: OciClient, image: Image, package: Package, progress: Progress
    ) -> None:
        """Upload everything except the tag."""
        with progress.task(f"uploading {package.name}", len(image.layers)) as advance:
            for layer in image.layers:
                if not client.has_blob(layer.digest):
                    client.upload(layer)
                advance()
        if not client.has_blob(image.config.digest):
            client.upload(image.config)

    def _manifest(self, client: OciClient) -> ImageManifest:
        """Return the image manifest that the address names."""
        if content := client.manifest(self.digest or self.tag or LATEST):
            if manifest := ImageManifest.read(content):
                return manifest
            raise foreign_image(self.url)
        tags = ", ".join(client.tags()) or "none"
        name = self.digest or self.tag or LATEST
        raise RegistryError(
            f"the registry {self.host} has no {self.repository} with the tag or digest {name}.",
            do=f"Name one of its tags: {tags}.",
        )


def require_space(layer: Layer, directory: Path, label: str) -> None:
    """Raise RegistryError if a layer and its files do not fit on the directory's disk."""
    free, needed = shutil.disk_usage(directory).free, 2 * layer.size_bytes
    if needed > free:
        raise RegistryError(
            f"{label}: the layer {layer.title} and its files need {human_bytes(needed)}, and "
            f"{directory} has {human_bytes(free)} free.",
            do="Free disk space, or pull to a directory on another disk.",
        )


def _is_version(manifest: ImageManifest | None, tag: str) -> bool:
    """Return True if a tag was set with --version, so that it is never moved."""
    return manifest is not None and manifest.annotations.get(VERSION) == tag


def missing_blobs(client: OciClient, manifest: ImageManifest) -> str:
    """Return the titles or digests of lost blobs of an image; empty if it is complete."""
    blobs = (manifest.config, *manifest.layers)
    lost = [blob for blob in blobs if not client.has_blob(blob.digest)]
    return ", ".join(blob.annotations.get(TITLE) or blob.digest for blob in lost)
