"""An artifact prepared for a registry: its files, a model card, and a digest of its content.

>>> config = PublishConfig(name="minilm", allow_failed=True)
>>> package = Package.of(artifact, config, tmp_path)
>>> package.name, [file.name for file in package.files][:2]
('minilm', ['README.md', 'config.json'])

The card and the listing are written into a scratch directory. Packages with the same content are
the same version. The content is the model's files and engines, the verdicts of its checks, its
benchmark, and the rights on the card. Dates, durations and the wording of the card do not count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from enginery.core.artifact.artifact import MANIFEST, Artifact
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.engine_record import ENGINES, EngineRecord, engine_directories
from enginery.core.artifact.fingerprint import combined_sha256, sha256_of
from enginery.core.artifact.manifest import FileRecord
from enginery.core.errors import ArtifactError, EngineryError, RejectedArtifactError
from enginery.core.json_file import json_bytes
from enginery.core.paths import list_tree, portable_name
from enginery.core.trust.onnx_structure import read_structure
from enginery.publish.card.figures import Reports
from enginery.publish.card.model_card import CardFacts, model_card
from enginery.publish.card.source import SourceCard, read_source_card
from enginery.publish.config import PublishConfig
from enginery.publish.layout import read_variants
from enginery.publish.publication import CARD, LISTING, Publication, Rights

CONTENT = "enginery.content_sha256"
"""Tag of a version with the digest of its content."""


@dataclass(frozen=True)
class PackageFile:
    """A file of a package."""

    name: str
    """Path below the package's root, with `/` as separator."""
    path: Path
    """Path of the file on this machine."""
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Package:
    """A verified artifact with its card and its listing."""

    artifact: Artifact
    publication: Publication
    """The listing, with the package's name, version and content."""
    files: tuple[PackageFile, ...]
    """All files with card and listing, sorted by name."""
    reports: Reports
    engines: tuple[EngineRecord, ...]
    """Engines; each of them is bound to its hardware."""
    problem: str = ""
    """Reason why publishing needs --allow-failed; empty if it does not."""
    notes: tuple[str, ...] = ()
    """Messages for the publisher, such as the files that are left out."""

    @property
    def name(self) -> str:
        """A name that every registry accepts."""
        return self.publication.name

    @property
    def content_sha256(self) -> str:
        """Digest of the content; packages with the same digest are the same version."""
        return self.publication.content_sha256

    @property
    def description(self) -> str:
        """What the artifact is, in a phrase."""
        manifest = self.artifact.manifest
        return (
            f"{manifest.source.id}: {manifest.task}, {manifest.describe_precision()}, for "
            f"{manifest.target}"
        )

    @property
    def tags(self) -> dict[str, str]:
        """What registries show and are searched for, as tags or annotations."""
        manifest = self.artifact.manifest
        engines = {f"enginery.engine.{e.directory_name}": e.hardware_target for e in self.engines}
        return {
            CONTENT: self.content_sha256,
            "enginery.task": manifest.task,
            "enginery.precision": manifest.precision,
            "enginery.target": manifest.target,
            "enginery.source": f"{manifest.source.id}@{manifest.source.revision}".rstrip("@"),
            "enginery.validated": "false" if self.problem else "true",
            **engines,
        }

    @classmethod
    def of(cls, artifact: Artifact, config: PublishConfig, scratch: Path) -> Package:
        """Verify every file of an artifact, and write its card and listing into `scratch`.

        Args:
            artifact: the artifact.
            config: the options.
            scratch: an empty directory that exists as long as the package.

        Raises:
            ArtifactError: a file is missing or was changed, and the message names it; or a file of
                the model has the card's name.
            RejectedArtifactError: the validation failed, is missing, or was of other content.
        """
        # Other processes may validate or measure the artifact while its files are sent.
        kept = scratch / "as-it-was"
        opened = Artifact.open(artifact.path, verify=True).copy_reports(kept)
        if CARD in opened.manifest.files:
            raise ArtifactError(
                f"{opened.path / MANIFEST} lists {CARD} as a file of the model, but the card of a "
                "published model has this name.",
                do=f"Remove {CARD} from the source, and export the model again.",
            )
        variants = read_variants(opened)
        for other in (opened, *variants.values()):
            _require_own_graphs(other)
        problem = require_validated(opened, allow_failed=config.allow_failed)
        for variant, other in variants.items():
            if variant_problem := require_validated(other, allow_failed=config.allow_failed):
                problem = problem or f"{variant}: {variant_problem}"
        engines = tuple(Engine.open(path).record for path in engine_directories(opened.path))
        try:
            reports = Reports.of(Artifact(kept, opened.manifest))
        except ArtifactError:
            Reports.of(opened)  # raises the error with the path that the caller knows
            raise
        source_card = resolve_rights(opened, config)
        rights = source_card.rights
        name = config.name or portable_name(opened.manifest.source.name)
        card = model_card(CardFacts(opened, name, rights, reports, engines, problem, variants))
        stated = rights if source_card.is_read else None
        content = _content(opened, variants, reports, stated, problem)
        (scratch / CARD).write_text(card, encoding="utf-8")
        files, left_out = _collect_files(opened, kept, scratch / CARD)
        publication = Publication(
            name=name,
            version=config.version,
            content_sha256=combined_sha256(content),
            content=content,
            validated=not problem,
            rights=stated,
            files={f.name: FileRecord(sha256=f.sha256, size_bytes=f.size_bytes) for f in files},
        )
        listing = scratch / "publication.json"
        listing.write_bytes(publication.to_json())
        files.append(_package_file(LISTING, listing))
        return cls(
            artifact=opened,
            publication=publication,
            files=tuple(sorted(files, key=lambda file: file.name)),
            reports=reports,
            engines=engines,
            problem=problem,
            notes=(*_notes(opened, engines, left_out), *source_card.notes),
        )

    def matches(self, listing: Publication | None) -> bool:
        """Return True if the listing of a version has the same content."""
        return listing is not None and listing.content_sha256 == self.content_sha256


def _collect_files(
    artifact: Artifact, kept: Path, card: Path
) -> tuple[list[PackageFile], list[str]]:
    """Return the package's files without its listing, and the names of files left out.

    Args:
        artifact: the artifact.
        kept: copy of its manifest and reports.
        card: path of the card.

    Raises:
        ArtifactError: the card or the manifest cannot be read.
    """
    root, manifest = artifact.path, artifact.manifest
    files = [_package_file(CARD, card), _package_file(MANIFEST, kept / MANIFEST)]
    files += [
        PackageFile(name, where / name, record.sha256, record.size_bytes)
        for where, records in ((root, manifest.files), (kept, manifest.reports))
        for name, record in records.items()
    ]
    listed = {file.name for file in files} | {LISTING}
    names = [path.relative_to(root).as_posix() for path in list_tree(root) if not path.is_dir()]
    return files, sorted(name for name in names if name not in listed)


def _package_file(name: str, path: Path) -> PackageFile:
    """Return a file with its digest and size; raise ArtifactError if it cannot be read."""
    try:
        return PackageFile(name, path, sha256_of(path), path.stat().st_size)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}.") from error


def _require_own_graphs(artifact: Artifact) -> None:
    """Raise ArtifactError if a graph has other inputs or outputs than the manifest says.

    A card, a registry's signature and a server are made from the manifest.
    """
    for record in artifact.manifest.graphs:
        path = artifact.path / record.file
        record.require_interface(path, *read_structure(path).interface())


def resolve_rights(artifact: Artifact, config: PublishConfig) -> SourceCard:
    """Return the rights for the card: from the source's card, the artifact's listing, the options.

    A pulled artifact is often published again from a machine that does not have its source. Its
    listing then has what the source's card said.

    Returns:
        The rights; `is_read` is False if they are not known.
    """
    card = read_source_card(artifact.manifest.source)
    if not card.is_read and (published := _published_rights(artifact)):
        note = "licence and limitations are taken from the listing that it was pulled with"
        card = SourceCard(published, (*card.notes, note))
    return card.with_options(config)


def _published_rights(artifact: Artifact) -> Rights | None:
    """Return the rights in the listing of a pulled artifact, if its model files are unchanged."""
    try:
        listing = Publication.read(artifact.path, str(artifact.path))
    except EngineryError:  # it was never published, or the listing is damaged
        return None
    # Engines that were built later have the rights of their graphs.
    model = {
        n: r.sha256 for n, r in artifact.manifest.files.items() if not n.startswith(f"{ENGINES}/")
    }
    is_same = all(listing.content.get(name) == digest for name, digest in model.items())
    return listing.rights if is_same else None


def require_validated(artifact: Artifact, *, allow_failed: bool) -> str:
    """Return why an artifact counts as not validated; empty if it is validated.

    Raises:
        RejectedArtifactError: it is not validated, and `allow_failed` is off.
    """
    problem = _validation_problem(artifact)
    if problem and not allow_failed:
        raise RejectedArtifactError(
            f"{artifact.path} was not published: {problem}.",
            do=f"Validate it with: enginery validate {artifact.path}. Or pass "
            "--allow-failed; the card will say so.",
        )
    return problem


def _validation_problem(artifact: Artifact) -> str:
    """Return why the artifact counts as not validated; empty if it is validated."""
    if failed := artifact.failed_verdict():
        return f"its validation failed: {failed.summary.rstrip('.')}"
    verdict = artifact.manifest.verdict("validate")
    if verdict is None:
        return "it was never validated"
    if verdict.fields.get("artifact", "") != artifact.content_sha256():
        return "its validation was of other content"
    return ""


def _content(
    artifact: Artifact,
    variants: Mapping[str, Artifact],
    reports: Reports,
    rights: Rights | None,
    problem: str,
) -> dict[str, str]:
    """Return the parts of the content with their digests, without dates and durations."""
    manifest = artifact.manifest
    model_fields = {
        "source": manifest.source.sha256,
        "task": manifest.task,
        "precision": manifest.describe_precision(),
        "target": manifest.target,
    }
    return {
        **{name: record.sha256 for name, record in manifest.files.items()},
        "model": _sha256(model_fields),
        "verdicts": _sha256(_verdicts(artifact)),
        **{f"verdicts of {name}": _sha256(_verdicts(other)) for name, other in variants.items()},
        "benchmark": reports.benchmark_sha256 or "none",
        # A validated package is never the same version as one that is not.
        "validated": "no" if problem else "yes",
        "rights": _sha256(rights.model_dump()) if rights else "not read",
    }


def _verdicts(artifact: Artifact) -> list[tuple[str, bool, str]]:
    return sorted((v.stage, v.passed, v.summary) for v in artifact.manifest.verdicts)


def _sha256(value: object) -> str:
    return hashlib.sha256(json_bytes(value)).hexdigest()


def _notes(
    artifact: Artifact, engines: Sequence[EngineRecord], left_out: Sequence[str]
) -> Iterator[str]:
    for engine in engines:
        yield f"{engine.directory_name} is {engine.hardware_target}"
    if left_out:
        more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        names = ", ".join(left_out[:3])
        yield f"left out, because the manifest does not list them: {names}{more}"
    if artifact.manifest.source.kind in ("directory", "onnx"):
        yield f"{MANIFEST} contains a path of this machine: {artifact.manifest.source.id}"
