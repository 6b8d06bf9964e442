"""An artifact: a directory that any stage takes and any stage leaves.

Takes a path; leaves a whole directory with `manifest.json`, or nothing.

    >>> artifact = Artifact.open("minilm")
    >>> artifact.manifest.task, artifact.model.name
    ('feature-extraction', 'model.onnx')
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from enginery.core.errors import ArtifactError, RejectedArtifactError
from enginery.core.fingerprint import combined_sha256, sha256_of
from enginery.core.locks import named_lock
from enginery.core.manifest import SCHEMA_VERSION, FileRecord, GraphRecord, Manifest, Verdict
from enginery.core.staging import (
    CARD,
    MANIFEST,
    STAGING_PREFIX,
    refuse_foreign,
    staging,
    write_beside,
)

REPORTS = "reports"

__all__ = [
    "MANIFEST",
    "REPORTS",
    "Artifact",
    "commit_artifact",
    "link_or_copy",
    "refuse_foreign",
    "staging",
]


@dataclass(frozen=True)
class Artifact:
    """A whole artifact on disk, every file of it as its manifest says."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = False) -> Artifact:
        """Opens an artifact and checks every file against the manifest.

        A file whose hash was computed earlier and whose size, inode and times are unchanged is
        not read again; `verify` reads them all.

        Raises:
            ArtifactError: not an artifact, made by a newer enginery, or a file of it is missing,
                truncated or altered; the message names the file.
        """
        path = Path(path)
        manifest = _read_manifest(path)
        _check_graphs(path, manifest)
        for name, record in manifest.files.items():
            _check_file(path, name, record, verify=verify)
        return cls(path, manifest)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def model(self) -> Path:
        """The path of the only graph, or of the first of several."""
        return self.path / self.manifest.graphs[0].file

    def graph(self, file: str) -> GraphRecord:
        """The record of one ONNX file; raises ArtifactError where there is none of that name."""
        for graph in self.manifest.graphs:
            if graph.file == file:
                return graph
        files = ", ".join(graph.file for graph in self.manifest.graphs)
        raise ArtifactError(f"{self.path} has no graph '{file}'; it has {files}.")

    def content_sha256(self) -> str:
        """One digest over the model: all files but the manifest, reports and engines.

        Engines are made from the graphs, and what was found about those holds with and without.
        """
        files = self.manifest.files
        return combined_sha256(
            {n: record.sha256 for n, record in files.items() if not n.startswith("engines/")}
        )

    def failed(self) -> Verdict | None:
        """The verdict that closes this artifact to later stages, if there is one."""
        newest = {verdict.stage: verdict for verdict in self.manifest.verdicts}
        return next((verdict for verdict in newest.values() if not verdict.passed), None)

    def require_passed(self, *, allow_failed: bool) -> None:
        """Raises RejectedArtifactError if a check of this artifact failed."""
        verdict = self.failed()
        if verdict and not allow_failed:
            raise RejectedArtifactError(
                f"{self.path} failed its validation: {verdict.summary}",
                do=f"Read {self.path / verdict.report}, or pass --allow-failed to go on anyway.",
            )

    def annotate(self, verdict: Verdict, report: bytes) -> Artifact:
        """Adds a verdict and its report in place; a verdict of the same stage is replaced.

        One process at a time: each takes over the verdicts that are there by then.

        Raises:
            ArtifactError: the artifact is gone, or its manifest is damaged.
            EngineryError: the store, where the lock is, cannot be written.
        """
        # The lock is no file of the artifact's own, which would have to be whole without it.
        place = hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()
        with named_lock(f"annotate-{place[:16]}"):
            reports = self.path / REPORTS
            reports.mkdir(exist_ok=True)
            write_beside(self.path / verdict.report, report)
            current = _read_manifest(self.path)
            others = tuple(v for v in current.verdicts if v.stage != verdict.stage)
            manifest = current.model_copy(update={"verdicts": (*others, verdict)})
            write_beside(self.path / MANIFEST, _manifest_bytes(manifest))
        return Artifact(self.path, manifest)

    def copy_side_files(self, directory: Path) -> None:
        """Copies everything but graphs, engines and reports: tokenizer, configuration, pooling."""
        graphs = {n for graph in self.manifest.graphs for n in (graph.file, *graph.data_files)}
        for name in self.manifest.files:
            if name not in graphs and not name.startswith("engines/"):
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.path / name, directory / name)

    def copy_to(self, out: Path) -> Artifact:
        """Leaves the same artifact at `out`, which is never overwritten unless it is one itself.

        Large files are hard-linked where the file system allows: artifacts are never edited in
        place, and an edit by hand is noticed on opening.
        """
        with staging(out) as directory:
            for source in sorted(self.path.rglob("*")):
                # A killed `annotate` can leave such a file; it is no part of the artifact.
                if source.is_file() and not source.name.startswith(STAGING_PREFIX):
                    link_or_copy(source, directory / source.relative_to(self.path))
        return Artifact(out, self.manifest)


def commit_artifact(directory: Path, manifest: Manifest) -> None:
    """Hashes every file of a staged directory and writes its manifest, last of all."""
    files = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name not in (MANIFEST, CARD) and not name.startswith(f"{REPORTS}/"):
            files[name] = FileRecord(sha256=sha256_of(path), size_bytes=path.stat().st_size)
    complete = manifest.model_copy(update={"files": files})
    (directory / MANIFEST).write_bytes(_manifest_bytes(complete))


def _read_manifest(path: Path) -> Manifest:
    file = path / MANIFEST
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        found = "does not exist" if not path.exists() else f"has no {MANIFEST}"
        raise ArtifactError(
            f"{path} is not an artifact: it {found}.",
            do="Make one with: enginery export MODEL --out DIR",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{file} cannot be read: {error}.") from error
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        hint = "It may come from a newer enginery." if where == "schema_version" else ""
        raise ArtifactError(
            f"{file}: {where}: {first['msg']} (expected manifest version {SCHEMA_VERSION}).",
            do=hint,
        ) from error


def _check_graphs(root: Path, manifest: Manifest) -> None:
    """Every graph and its external data must be among the files that are hashed."""
    if not manifest.graphs:
        raise ArtifactError(f"{root / MANIFEST} names no graph.")
    for graph in manifest.graphs:
        for name in (graph.file, *graph.data_files):
            if name not in manifest.files:
                raise ArtifactError(f"{root / MANIFEST}: {name} has no hash among the files.")


def _check_file(root: Path, name: str, record: FileRecord, *, verify: bool) -> None:
    path = root / name
    remedy = "Make it again from what it was made from; the directory cannot be trusted."
    if not path.resolve().is_relative_to(root.resolve()):
        raise ArtifactError(f"{name} lies outside the artifact {root}.")
    if not path.is_file():
        raise ArtifactError(f"{path} is missing from the artifact.", do=remedy)
    size = path.stat().st_size
    if size != record.size_bytes:
        raise ArtifactError(
            f"{path} has {size} bytes, the manifest says {record.size_bytes}.", do=remedy
        )
    try:
        found = sha256_of(path, trust_stat=not verify)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}.") from error
    if found != record.sha256:
        raise ArtifactError(
            f"{path} was altered: its sha256 is {found[:12]}…, "
            f"the manifest says {record.sha256[:12]}….",
            do=remedy,
        )


def _manifest_bytes(manifest: Manifest) -> bytes:
    return (manifest.model_dump_json(indent=2) + "\n").encode()


def link_or_copy(source: Path, target: Path) -> None:
    """A large file becomes a hard link where the file system allows; a small one is copied."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.stat().st_size >= 1 << 20:
        try:
            os.link(source, target)
            return
        except OSError:
            pass  # another file system, or one without links: copy
    shutil.copy2(source, target)
