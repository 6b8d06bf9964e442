"""`oci://registry/name:tag`: an image in an OCI registry, for container runtimes to mount.

Takes a package; leaves one layer for each group of files, and a tag.

    >>> OciRegistry("oci://ghcr.io/org/minilm:1", config).publish(package, config, SILENT).url
    'oci://ghcr.io/org/minilm@sha256:5f0e…'

The login is Docker's (`docker login`, its credential helpers included). A layer that the registry
has is not sent again, whichever version brought it; so a run that was killed goes on. The same
package has the same digest everywhere.
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from pathlib import Path, PurePosixPath
from typing import IO, Any

from enginery.core.errors import ArtifactError, MissingPackageError, OptionError, RegistryError
from enginery.core.home import enginery_home
from enginery.core.locks import named_lock
from enginery.core.progress import Progress
from enginery.publish.config import LATEST, PublishConfig
from enginery.publish.destination import Published
from enginery.publish.engine_bond import bound_to
from enginery.publish.oci_client import OciClient, check_blob
from enginery.publish.oci_image import CONTENT, FILES, INDEX, LAYER, TITLE, image_of
from enginery.publish.package import Package

# Repositories and tags as the distribution specification 1.1 has them.
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_ADDRESS = re.compile(
    r"oci://(?P<host>(?:[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?::\d+)?)/"
    rf"(?P<repository>{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)
_GZIP_LAYER = f"{LAYER}+gzip"


class OciRegistry:
    """A repository of an OCI registry."""

    def __init__(self, url: str, config: PublishConfig) -> None:
        """Reads the address; nothing is sent yet.

        Raises:
            OptionError: the address is not `oci://registry/name`, with `:tag` or `@sha256:…`.
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
            import oras.provider  # noqa: F401 - the rest of this module cannot do without
        except ImportError as error:
            package = error.name or "oras"
            raise MissingPackageError(package, extra="oci", purpose=url) from error
        self._insecure = config.insecure

    def publish(self, package: Package, config: PublishConfig, progress: Progress) -> Published:
        """Sends the layers that are not there, then the manifests, then the tags.

        Raises:
            RegistryError: the registry cannot be reached or refuses, or --version is another
                content there.
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
        client = OciClient(self.host, self.repository, insecure=self._insecure)
        tag = config.version or self.tag or LATEST
        with progress.task(f"hashing layers of {package.name}"):
            image = image_of(package)
        there, content = self._tagged(client, tag)
        notes = [f"{r.directory_name} is {bound_to(r)}" for r in package.engines]
        if content == package.content_sha256:
            digest, is_new = there, False
        elif there and config.version:
            raise RegistryError(
                f"oci://{self.host}/{self.repository}:{tag} is another content than "
                f"{package.name}: {content[:12] or 'not of enginery'}, found "
                f"{package.content_sha256[:12]}.",
                do="Name another --version.",
            )
        else:
            digest, is_new = image.index.digest, not client.has_manifest(image.index.digest)
            if there:
                notes.append(f"{tag} pointed to {there} before")
            with progress.task(f"uploading {package.name}", len(image.layers)) as advance:
                for layer in image.layers:
                    if not client.has_blob(layer.digest):
                        client.upload(layer.digest, layer.size_bytes, layer.pieces)
                    advance()
            for blob in image.configs:
                if not client.has_blob(blob.digest):
                    client.upload(blob.digest, len(blob.content), blob.pieces)
            for blob in image.manifests:
                client.put_manifest(blob.digest, blob.media_type, blob.content)
            client.put_manifest(tag, image.index.media_type, image.index.content)
        if config.alias:
            content_bytes, media_type, _ = client.manifest(digest)
            client.put_manifest(config.alias, media_type, content_bytes)
        return Published(f"oci://{self.host}/{self.repository}@{digest}", tag, is_new, tuple(notes))

    def pull(self, out: Path, progress: Progress) -> Path:
        """Downloads the layers, checks their digests and unpacks them into `out`.

        What was downloaded when a pull broke off is under `$ENGINERY_HOME/pulls`, and goes on
        from there.

        Raises:
            RegistryError: the registry cannot be reached, refuses, or has no such image of
                enginery.
            ArtifactError: a layer was altered; the message names it, and the file if it can be
                told.
        """
        client = OciClient(self.host, self.repository, insecure=self._insecure)
        manifest = self._manifest(client, self.digest or self.tag or LATEST)
        layers = manifest["layers"]
        pulls = enginery_home() / "pulls"
        pulls.mkdir(parents=True, exist_ok=True)
        with progress.task(f"downloading {self.url}", len(layers)) as advance:
            for layer in layers:
                hexdigits = str(layer["digest"]).removeprefix("sha256:")
                path = pulls / f"{hexdigits}.tar"
                with named_lock(f"pull-{hexdigits[:32]}"):
                    client.download(layer["digest"], path)
                    try:
                        self._check(path, layer)
                        unpack(path, out, self.url)
                    finally:  # whole or altered, it is of no use any more
                        path.unlink(missing_ok=True)
                advance()
        return out

    def _tagged(self, client: OciClient, tag: str) -> tuple[str, str]:
        """The digest that a tag points to and the content there; empty where there is none."""
        if not client.has_manifest(tag):
            return "", ""
        content, _, digest = client.manifest(tag)
        return digest, str((json.loads(content).get("annotations") or {}).get(CONTENT, ""))

    def _manifest(self, client: OciClient, reference: str) -> dict[str, Any]:
        """The manifest with the layers; those of all architectures have the same."""
        content, media_type, _ = client.manifest(reference)
        document = _parsed(content, self.url)
        if media_type == INDEX and document.get("manifests"):
            content, _, _ = client.manifest(document["manifests"][0]["digest"])
            document = _parsed(content, self.url)
        layers = document.get("layers") or []
        known = all(layer.get("mediaType") in (LAYER, _GZIP_LAYER) for layer in layers)
        if CONTENT not in (document.get("annotations") or {}) or not layers or not known:
            raise RegistryError(
                f"{self.url} was not published by enginery: it has no annotation {CONTENT}.",
                do="Fetch it by other means, such as oras pull or docker create.",
            )
        return document

    def _check(self, path: Path, layer: dict[str, Any]) -> None:
        """Raises ArtifactError for an altered layer, and names the file where that can be told."""
        annotations = layer.get("annotations") or {}
        title = annotations.get(TITLE, layer["digest"])
        try:
            check_blob(path, layer["digest"], f"{self.url}: the layer {title}")
        except ArtifactError as error:
            altered = _altered(path, json.loads(annotations.get(FILES, "{}")))
            if not altered:
                raise
            raise ArtifactError(
                f"{self.url}: {', '.join(altered)} was altered, in the layer {title}.", do=error.do
            ) from error


def unpack(path: Path, out: Path, what: str) -> None:
    """Writes the files and directories of a tar into `out`.

    Raises:
        ArtifactError: it is no tar, or a member is a link, or lies outside.
    """
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = PurePosixPath(member.name)
                is_plain = member.isreg() or member.isdir()
                if not is_plain or name.is_absolute() or ".." in name.parts:
                    raise ArtifactError(f"{what}: {member.name} is no plain file of the package.")
                target = out / name
                if member.isdir():
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                stream = archive.extractfile(member)
                with target.open("wb") as written:
                    while stream and (piece := stream.read(1 << 20)):
                        written.write(piece)
    except tarfile.TarError as error:
        raise ArtifactError(f"{what}: a layer is no tar: {error}.") from error


def _altered(path: Path, files: dict[str, str]) -> list[str]:
    """The files of a damaged tar that are not as the registry's manifest says."""
    found: dict[str, str] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if stream := archive.extractfile(member):
                    found[member.name] = _sha256(stream)
    except (tarfile.TarError, OSError, EOFError):
        return []
    return [name for name, digest in files.items() if found.get(name) != digest]


def _sha256(stream: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while piece := stream.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()


def _parsed(content: bytes, what: str) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except ValueError as error:
        raise RegistryError(f"{what}: the registry's manifest is no JSON: {error}.") from error
    if not isinstance(document, dict):
        raise RegistryError(f"{what}: the registry's manifest is no object.")
    return document
