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

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from enginery.core.artifact.artifact import Artifact, staging
from enginery.core.artifact.engine_record import engine_directories
from enginery.core.errors import (
    ArtifactError,
    EngineryError,
    OptionError,
    RegistryError,
    os_errors_as,
)
from enginery.core.paths import list_tree
from enginery.core.progress import SILENT, Progress
from enginery.core.scratch import PREFIX, temporary_directory
from enginery.publish.config import PublishConfig
from enginery.publish.destination import Published, open_destination
from enginery.publish.layout import arrange, extract_variant
from enginery.publish.package import Package, require_validated
from enginery.publish.publication import LISTING, Publication


def run(
    artifact: Artifact,
    url: str,
    config: PublishConfig,
    *,
    variants: Sequence[Artifact] = (),
    progress: Progress = SILENT,
) -> Published:
    """Publish an artifact; return the existing version if its content is published already.

    Args:
        artifact: the artifact, which is not changed.
        url: address of the registry; `destination` has the kinds.
        config: the options.
        variants: artifacts of the same model in other precisions, for the layout `hub`.
        progress: receives progress messages.

    Raises:
        OptionError: the address or an option cannot be used.
        ArtifactError: a file of an artifact is missing or was changed, or the artifacts are of
            different models.
        RejectedArtifactError: the artifact's validation failed or is missing.
        RegistryError: the registry cannot be reached, rejects the request, or has other content
            under this name.
        MissingPackageError: the registry's client is not installed.
    """
    if variants and config.layout != "hub":
        raise OptionError(
            f"{len(variants) + 1} artifacts were given, but the layout '{config.layout}' has one.",
            do="Publish them together with --layout hub, or one by one.",
            option="layout",
        )
    destination = open_destination(url, config)
    with (
        os_errors_as(EngineryError, f"{artifact.path} cannot be published"),
        temporary_directory("publish") as scratch,
    ):
        with progress.task(f"checking {artifact.name}"):
            if config.layout == "hub":
                artifact = _arranged([artifact, *variants], scratch / "layout", config, progress)
            package = Package.of(artifact, config, scratch)
        if package.problem:
            progress.say(
                f"publish: {package.problem}; published with --allow-failed, as the card says"
            )
        for note in package.notes:
            progress.say(f"publish: {note}")
        published = destination.publish(package, config, progress)
    for note in published.notes:
        progress.say(f"publish: {note}")
    return replace(published, notes=(*package.notes, *published.notes))


def _arranged(
    artifacts: Sequence[Artifact], out: Path, config: PublishConfig, progress: Progress
) -> Artifact:
    """Return the artifacts in the layout of the Hub, written to `out`."""
    for artifact in artifacts:
        # Here, because a message about the new files would name the scratch directory.
        require_validated(artifact, allow_failed=config.allow_failed)
        if engine_directories(artifact.path):
            progress.say(f"publish: left out the engines of {artifact.path}")
    arranged = arrange(artifacts, out)
    if arranged.manifest.precision != "fp32":
        progress.say(
            "publish: no artifact is FP32, so there is no onnx/model.onnx, which readers open "
            "unless they are given another name"
        )
    return arranged


def pull(
    url: str,
    out: Path,
    config: PublishConfig,
    *,
    variant: str = "",
    progress: Progress = SILENT,
) -> Artifact:
    """Download a version, verify every file with its listing, and write it to `out`.

    Nothing is written if a file is missing or was changed. An existing artifact is replaced.

    Args:
        url: the address that `run` returned, one with an alias, or one without a version for the
            newest.
        out: directory of the artifact.
        config: the options of the registry.
        variant: name of one artifact of several that were published together, such as `fp16`, to
            get as it was, with its graphs in the root; empty for the whole version.
        progress: receives progress messages.

    Raises:
        OptionError: the address cannot be used, or the version has no such variant.
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
            opened = Artifact.open(directory)
            if variant:
                _keep_variant(opened, variant)
        except ArtifactError as error:
            raise RegistryError(
                f"{url} is not a complete artifact: {error.message.replace(f'{directory}/', '')}",
                do=error.do,
            ) from error
    if not publication.validated:
        progress.say(f"pull: {url} was published with --allow-failed; see its README.md")
    return Artifact.open(out)


def _keep_variant(artifact: Artifact, variant: str) -> None:
    """Replace the content of an artifact's directory by one of its variants."""
    directory = artifact.path
    fresh = directory / f"{PREFIX}{variant}"
    extract_variant(artifact, variant, fresh)
    for path in directory.iterdir():
        if path != fresh:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in fresh.iterdir():
        path.rename(directory / path.name)
    fresh.rmdir()


def _remove_unlisted_files(directory: Path, publication: Publication, progress: Progress) -> None:
    """Remove files that are not in the listing; a registry may add files of its own."""
    for path in sorted(list_tree(directory), reverse=True):
        name = path.relative_to(directory).as_posix()
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif name not in publication.files and name != LISTING:
            path.unlink()
            progress.say(f"pull: left out {name}, which is not in {LISTING}")
