"""An artifact made ready for a registry: its files, a model card, and one digest of its content.

Takes an artifact; leaves the card and the listing in a scratch directory, and nothing else.

    >>> package = Package.of(Artifact.open("minilm"), PublishConfig(), scratch)
    >>> package.name, package.content_sha256[:12], [file.name for file in package.files][:2]
    ('minilm', '9c1f5e0b7a24', ['README.md', 'config.json'])

Two packages of the same content are one version. Content is the model's files and engines, what its
checks said, its benchmark, and the rights that the card states; when and how long something ran is
not, nor is the card's wording. Rights that nobody could read are not known to differ.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from enginery.core.artifact.artifact import MANIFEST, Artifact
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.engine_record import ENGINES, EngineRecord, engine_directories
from enginery.core.artifact.fingerprint import combined_sha256
from enginery.core.artifact.manifest import FileRecord
from enginery.core.artifact.reports import Reports
from enginery.core.errors import ArtifactError, RegistryError, RejectedArtifactError
from enginery.core.json_file import json_bytes
from enginery.core.paths import portable_name
from enginery.publish.card.metrics import metrics
from enginery.publish.card.model_card import CardFacts, model_card
from enginery.publish.config import PublishConfig
from enginery.publish.package_files import PackageFile, files_of, package_file
from enginery.publish.package_rights import rights_of, rights_record
from enginery.publish.publication import (
    CARD,
    LISTING,
    EngineMark,
    Publication,
    Rights,
    without_rights,
)

__all__ = ["Package", "PackageFile"]

_PLOTS = (".svg", ".png")


@dataclass(frozen=True)
class Package:
    """What a registry gets, whole and checked."""

    artifact: Artifact
    name: str
    """Fit for every registry."""
    content_sha256: str
    content: dict[str, str]
    """What counts as content, by digest."""
    files: tuple[PackageFile, ...]
    """Card and listing included, by name."""
    card: str
    """The text of `README.md`."""
    engines: tuple[EngineRecord, ...]
    """All of them are bound to their hardware."""
    metrics: dict[str, float]
    """`validation.max_abs_error`, `latency_ms_p50.enginery-cpu.batch_1-sequence_16`, …; names of
    letters, digits, `_`, `-` and `.`, as MLflow takes them."""
    plots: tuple[PackageFile, ...]
    """SVG and PNG of the reports."""
    problem: str = ""
    """Why it would have been refused without --allow-unvalidated."""
    notes: tuple[str, ...] = ()
    """What was left out, and what somebody who publishes should know."""
    knows_rights: bool = True
    """False where the source's card could not be read, and nothing else states the rights."""
    version: str = ""
    """What --version named."""

    @classmethod
    def of(cls, artifact: Artifact, config: PublishConfig, scratch: Path) -> Package:
        """Checks every hash of an artifact, and writes its card and listing into `scratch`.

        Args:
            artifact: what to publish; opened anew, and every file read.
            config: the options.
            scratch: an empty directory that outlives the package.

        Raises:
            ArtifactError: a file is missing or was altered, the message names it; or a file of
                the model has the card's name.
            RejectedArtifactError: its validation failed, is missing, or was of another content.
        """
        opened = Artifact.open(artifact.path, verify=True)
        if CARD in opened.manifest.files:
            raise ArtifactError(
                f"{opened.path / MANIFEST} counts {CARD} among the model's files, and a published "
                "model's card has that name.",
                do=f"Move {CARD} away where the artifact comes from, and make it again.",
            )
        problem = _validation_problem(opened)
        if problem and not config.allow_unvalidated:
            raise RejectedArtifactError(
                f"{opened.path} is not published: {problem}.",
                do=f"Validate it with: enginery validate {opened.path}. Or pass "
                "--allow-unvalidated, which its card will say.",
            )
        found = [Engine.open(path) for path in engine_directories(opened.path)]
        engines = tuple(engine.record for engine in found)
        reports = Reports.of(opened)
        rights = rights_of(opened, config)
        name = config.name or portable_name(opened.manifest.source.name)
        card = model_card(CardFacts(opened, name, rights, reports, engines, problem))
        stated = rights_record(rights)
        content = _content(opened, reports, stated, problem)
        (scratch / CARD).write_text(card, encoding="utf-8")
        files, left_out = files_of(opened, scratch / CARD)
        publication = Publication(
            name=name,
            version=config.version,
            content_sha256=combined_sha256(content),
            content=content,
            validated=not problem,
            rights=stated,
            engines=tuple(_mark(engine) for engine in found),
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
            knows_rights=stated is not None,
            version=config.version,
        )

    @property
    def without_rights_sha256(self) -> str:
        """Over `content` but the rights."""
        return without_rights(self.content)

    def is_same(self, content_sha256: str, without_rights_sha256: str) -> bool:
        """Whether a version with these digests is this content."""
        if content_sha256 == self.content_sha256:
            return True
        # What could not be read now was read when the version was made.
        return not self.knows_rights and without_rights_sha256 == self.without_rights_sha256

    def is_version(self, there: Publication | None) -> bool:
        """Whether a listing is of this content."""
        return there is not None and self.is_same(
            there.content_sha256, without_rights(there.content)
        )

    def require_rights(self, damage: str, content_sha256: str) -> None:
        """Raises RegistryError where a damaged version has rights that cannot be read here."""
        if content_sha256 != self.content_sha256:
            raise RegistryError(
                f"{damage}, and the card of the model's source, which the version has to state "
                "again, cannot be read here.",
                do="Publish it from where the source can be read.",
            )


def _validation_problem(artifact: Artifact) -> str:
    """Why the artifact's outputs cannot be relied on; empty where they can."""
    if failed := artifact.failed_verdict():
        return f"its validation failed: {failed.summary.rstrip('.')}"
    verdict = artifact.manifest.verdict("validate")
    if verdict is None:
        return "it was never validated"
    if verdict.fields.get("artifact", "") != artifact.content_sha256():
        return "its validation was of another content"
    return ""


def _content(
    artifact: Artifact, reports: Reports, rights: Rights | None, problem: str
) -> dict[str, str]:
    """What makes two packages the same version, by digest; without dates and durations."""
    manifest = artifact.manifest
    made = {
        "source": manifest.source.sha256,
        "task": manifest.task,
        "precision": manifest.precision,
        "target": manifest.target,
    }
    said = sorted((v.stage, v.passed, v.summary) for v in manifest.verdicts)
    return {
        **{name: record.sha256 for name, record in manifest.files.items()},
        "model": _sha256(made),
        "verdicts": _sha256(said),
        "benchmark": reports.benchmark_sha256 or "none",
        # A version that may not be relied on is never the answer to one that may.
        "validated": "no" if problem else "yes",
        "rights": _sha256(rights.model_dump()) if rights else "not read",
    }


def _sha256(value: object) -> str:
    return hashlib.sha256(json_bytes(value)).hexdigest()


def _mark(engine: Engine) -> EngineMark:
    record = engine.record
    return EngineMark(
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
        notes.append(f"left out, as no file of the artifact: {', '.join(left_out[:3])}{more}")
    if artifact.manifest.source.kind in ("directory", "onnx"):
        notes.append(f"{MANIFEST} names a path of this machine: {artifact.manifest.source.id}")
    return notes
