"""The publish stage: an artifact into a registry, and back.

Takes an artifact and an address; leaves a version in the registry, once for each content.

    >>> published = run(Artifact.open("minilm"), "file:///srv/models", PublishConfig())
    >>> published.url, published.is_new
    ('file:///srv/models/minilm/1', True)
    >>> pull(published.url, Path("there"), PublishConfig()).manifest.task
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
    """Publishes an artifact; the same content is the same version, however often.

    Args:
        artifact: what to publish. It stays as it is.
        url: the registry's address; `open_destination` says which there are.
        config: the options.
        progress: receives progress messages.

    Raises:
        OptionError: the address or an option cannot be used.
        ArtifactError: a file of the artifact is missing or was altered.
        RejectedArtifactError: its validation failed or is missing.
        RegistryError: the registry cannot be reached, refuses, or holds something else.
        MissingPackageError: the registry's client is not installed.
    """
    destination = open_destination(url, config)
    with tempfile.TemporaryDirectory(prefix="enginery-publish-") as scratch:
        with progress.task(f"checking {artifact.name}"):
            package = Package.of(artifact, config, Path(scratch))
        if package.problem:
            progress.say(
                f"publish: {package.problem}; published all the same, and the card says so"
            )
        for note in package.notes:
            progress.say(f"publish: {note}")
        published = destination.publish(package, config, progress)
    for note in published.notes:
        if note not in package.notes:
            progress.say(f"publish: {note}")
    return published


def pull(url: str, out: Path, config: PublishConfig, *, progress: Progress = SILENT) -> Artifact:
    """Fetches a version, reads every byte of it against its listing, and leaves it at `out`.

    Nothing is left where a file is missing or was altered. An artifact that is there is replaced;
    anything else is not.

    Args:
        url: the address that `run` returned, or one with an alias or without a version.
        out: where the artifact goes.
        config: the options; the address's own.
        progress: receives progress messages.

    Raises:
        OptionError: the address cannot be used.
        RegistryError: the registry cannot be reached, refuses, or has no such version.
        ArtifactError: a file is missing or was altered, the message names it; or `out` holds
            something else.
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
                f"{url} is not a whole artifact: {error.message.replace(f'{directory}/', '')}",
                do=error.do,
            ) from error
    if not publication.validated:
        progress.say(f"pull: {url} was published with --allow-unvalidated, see its README.md")
    return Artifact.open(out)


def _remove_unlisted_files(directory: Path, publication: Publication, progress: Progress) -> None:
    """Removes what the listing does not have: a registry may keep files of its own beside."""
    for path in sorted(directory.rglob("*"), reverse=True):
        name = path.relative_to(directory).as_posix()
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif name not in publication.files and name != LISTING:
            path.unlink()
            progress.say(f"pull: left out {name}, which is not in {LISTING}")
