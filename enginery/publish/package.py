"""An artifact prepared for a registry: its files, a model card, and a digest of its content.

>>> config = PublishConfig(name="minilm", allow_failed=True)
>>> package = Package.of(artifact, config, tmp_path)
>>> package.name, [file.name for file in package.files][:2]
('minilm', ['README.md', 'config.json'])

The card and the listing are written into a scratch directory. Packages with the same content are
the same version. The content is the model's files and engines, the verdicts of its checks, its
benchmark, and the rights on the card. Dates, durations and the wording of the card do not count. If
the rights cannot be read, they are not compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from enginery.core.artifact.artifact import MANIFEST, Artifact
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.engine_record import ENGINES, EngineRecord, engine_directories
from enginery.core.artifact.fingerprint import combined_sha256
from enginery.core.artifact.manifest import FileRecord
from enginery.core.errors import (
    ArtifactError,
    EngineryError,
    RegistryError,
    RejectedArtifactError,
)
from enginery.core.json_file import json_bytes
from enginery.core.paths import portable_name
from enginery.core.trust.onnx_structure import read_structure
from enginery.publish.card.figures import Reports, metrics
from enginery.publish.card.model_card import CardFacts, model_card
from enginery.publish.card.source import SourceCard, read_source_card
from enginery.publish.config import PublishConfig
from enginery.publish.layout import read_variants
from enginery.publish.package_files import PackageFile, collect_files, package_file
from enginery.publish.publication import (
    CARD,
    LISTING,
    Publication,
    PublishedEngine,
    Rights,
    without_rights,
)

__all__ = ["Package", "PackageFile"]

_PLOTS = (".svg", ".png")


@dataclass(frozen=True)
class Package:
    """A verified artifact with its card and its listing."""

    artifact: Artifact
    name: str
    """A name that every registry accepts."""
    content_sha256: str
    """Digest over `content`."""
    content: dict[str, str]
    """Part of the content -> digest."""
    files: tuple[PackageFile, ...]
    """All files with card and listing, sorted by name."""
    card: str
    """Text of `README.md`."""
    engines: tuple[EngineRecord, ...]
    """Engines; each of them is bound to its hardware."""
    metrics: dict[str, float]
    """`validation.max_abs_error`, `latency_ms_p50.enginery-cpu.batch_1-sequence_16`, …; the names
    have the characters that MLflow accepts."""
    plots: tuple[PackageFile, ...]
    """SVG and PNG files of the reports."""
    problem: str = ""
    """Reason why publishing needs --allow-failed; empty if it does not."""
    notes: tuple[str, ...] = ()
    """Messages for the publisher, such as the files that are left out."""
    rights_known: bool = True
    """False if the source's card could not be read and no option gives the rights."""
    version: str = ""
    """Value of --version."""

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
        opened = Artifact.open(artifact.path, verify=True)
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
        opened_engines = [Engine.open(path) for path in engine_directories(opened.path)]
        engines = tuple(engine.record for engine in opened_engines)
        reports = Reports.of(opened)
        rights = resolve_rights(opened, config)
        name = config.name or portable_name(opened.manifest.source.name)
        card = model_card(CardFacts(opened, name, rights, reports, engines, problem, variants))
        stated = _rights_record(rights)
        content = _content(opened, variants, reports, stated, problem)
        (scratch / CARD).write_text(card, encoding="utf-8")
        files, left_out = collect_files(opened, scratch / CARD, variants)
        publication = Publication(
            name=name,
            version=config.version,
            content_sha256=combined_sha256(content),
            content=content,
            validated=not problem,
            rights=stated,
            engines=tuple(_published_engine(engine) for engine in opened_engines),
            files={f.name: FileRecord(sha256=f.sha256, size_bytes=f.size_bytes) for f in files},
        )
        listing = scratch / "publication.json"
        listing.write_bytes(publication.to_json())
        files.append(package_file(LISTING, listing, "report"))
        return cls(
            artifact=opened,
            name=name,
            content_sha256=publication.content_sha256,
            content=content,
            files=tuple(sorted(files, key=lambda file: file.name)),
            card=card,
            engines=engines,
            metrics=metrics(reports),
            plots=tuple(file for file in files if PurePosixPath(file.name).suffix in _PLOTS),
            problem=problem,
            notes=(*_notes(opened, left_out), *rights.notes),
            rights_known=stated is not None,
            version=config.version,
        )

    @property
    def without_rights_sha256(self) -> str:
        """Digest over `content` without the rights."""
        return without_rights(self.content)

    def has_content(self, content_sha256: str, without_rights_sha256: str) -> bool:
        """Return True if a version with these digests has the same content."""
        if content_sha256 == self.content_sha256:
            return True
        # The version was published where the rights could be read; here they cannot be.
        return not self.rights_known and without_rights_sha256 == self.without_rights_sha256

    def matches(self, listing: Publication | None) -> bool:
        """Return True if the listing of a version has the same content."""
        return listing is not None and self.has_content(
            listing.content_sha256, without_rights(listing.content)
        )

    def check_rights_known(self, damage: str, content_sha256: str) -> None:
        """Raise RegistryError if a damaged version states rights that cannot be read here."""
        if content_sha256 != self.content_sha256:
            raise RegistryError(
                f"{damage}. It cannot be repaired from here, because the card of the model's "
                "source cannot be read.",
                do="Publish it from a machine that can read the source.",
            )


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
    rights = read_source_card(artifact.manifest.source)
    if not rights.is_read and (published := _published_rights(artifact)):
        note = "licence and limitations are taken from the listing that it was pulled with"
        notes = (*rights.notes, note)
        rights = replace(rights, **published.model_dump(), is_read=True, notes=notes)
    return rights.with_options(config)


def _rights_record(rights: SourceCard) -> Rights | None:
    """Return the rights for the listing; None if they are not known."""
    if not rights.is_read:
        return None
    return Rights(**{name: getattr(rights, name) for name in Rights.model_fields})


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


def _published_engine(engine: Engine) -> PublishedEngine:
    record = engine.record
    return PublishedEngine(
        directory=f"{ENGINES}/{engine.name}",
        flavor=record.flavor,
        tensorrt=record.tensorrt,
        capabilities=record.capabilities,
        gpu=record.gpu.name,
        hardware_compatibility=record.hardware_compatibility,
        version_compatible=record.version_compatible,
        profiles=record.profiles,
        graph=record.graph,
    )


def _notes(artifact: Artifact, left_out: list[str]) -> list[str]:
    notes = []
    if left_out:
        more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        notes.append(
            f"left out, because the manifest does not list them: {', '.join(left_out[:3])}{more}"
        )
    if artifact.manifest.source.kind in ("directory", "onnx"):
        notes.append(f"{MANIFEST} contains a path of this machine: {artifact.manifest.source.id}")
    return notes
