"""Publish stage: upload an artifact to a registry, and pull it from there.

The same content is published as one version only.

>>> config = PublishConfig(name="minilm", allow_failed=True)
>>> published = run(artifact, str(tmp_path / "registry"), config)
>>> published.version, published.is_new
('1', True)
>>> pull(published.url, tmp_path / "pulled", config).manifest.task
'feature-extraction'
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from enginery.core.artifact.artifact import Artifact, staging
from enginery.core.errors import ArtifactError, RegistryError
from enginery.core.progress import SILENT, Progress
from enginery.publish.config import PublishConfig
from enginery.publish.destination import Published, open_destination
from enginery.publish.package import Package
from enginery.publish.publication import LISTING, Publication


def run(
    artifact: Artifact, url: str, config: PublishConfig, *, progress: Progress = SILENT
) -> Published:
    """Publish an artifact; return the existing version if its content is published already.

    Args:
        artifact: the artifact, which is not changed.
        url: address of the registry; `destination` has the kinds.
        config: the options.
        progress: receives progress messages.

    Raises:
        OptionError: the address or an option cannot be used.
        ArtifactError: a file of the artifact is missing or was changed.
        RejectedArtifactError: the artifact's validation failed or is missing.
        RegistryError: the registry cannot be reached, rejects the request, or has other content
            under this name.
        MissingPackageError: the registry's client is not installed.
    """
    destination = open_destination(url, config)
    with tempfile.TemporaryDirectory(prefix="enginery-publish-") as scratch:
        with progress.task(f"checking {artifact.name}"):
            package = Package.of(artifact, config, Path(scratch))
        if package.problem:
            progress.say(
                f"publish: {package.problem}; published with --allow-failed, as the card says"
            )
        for note in package.notes:
            progress.say(f"publish: {note}")
        published = destination.publish(package, config, progress)
    for note in published.notes:
        if note not in package.notes:
            progress.say(f"publish: {note}")
    return published


def pull(url: str, out: Path, config: PublishConfig, *, progress: Progress = SILENT) -> Artifact:
    """Download a version, verify every file with its listing, and write it to `out`.

    Nothing is written if a file is missing or was changed. An existing artifact is replaced.

    Args:
        url: the address that `run` returned, one with an alias, or one without a version for the
            newest.
        out: directory of the artifact.
        config: the options of the registry.
        progress: receives progress messages.

    Raises:
        OptionError: the address cannot be used.
        RegistryError: the registry cannot be reached, rejects the request, or has no such version.
        ArtifactError: a file is missing or was changed, and the message names it; or `out` exists
            and is not an artifact.
        MissingPackageError: the registry's client is not installed.
    """
    destination = open_destination(url, config)
    with staging(out) as directory:
        destination.pull(directory, progress)
        with progress.task(f"checking {out.name}"):
            publication = Publication.read(directory, url)
            publication.verify(directory, url, do=destination.remedy)
        _remove_unlisted_files(directory, publication, progress)
        try:
            Artifact.open(directory)
        except ArtifactError as error:
            raise RegistryError(
                f"{url} is not a complete artifact: {error.message.replace(f'{directory}/', '')}",
                do=error.do,
            ) from error
    if not publication.validated:
        progress.say(f"pull: {url} was published with --allow-failed; see its README.md")
    return Artifact.open(out)


def _remove_unlisted_files(directory: Path, publication: Publication, progress: Progress) -> None:
    """Remove files that are not in the listing; a registry may add files of its own."""
    for path in sorted(directory.rglob("*"), reverse=True):
        name = path.relative_to(directory).as_posix()
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif name not in publication.files and name != LISTING:
            path.unlink()
            progress.say(f"pull: left out {name}, which is not in {LISTING}")
