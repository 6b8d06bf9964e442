"""The record of an artifact: `manifest.json`.

The last member of the file, `self_sha256`, is the sha256 of everything before it, so that a changed
byte anywhere in the file is found. The schema is generated from these models:

    $ python -m enginery.core.artifact.manifest > docs/manifest.schema.json
    >>> Manifest.from_bytes(Path("minilm/manifest.json").read_bytes()).task
    'feature-extraction'
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from enginery.core.artifact.fingerprint import Fingerprint
from enginery.core.json_file import CHECKSUM_KEY, append_checksum, verify_checksum
from enginery.core.paths import require_relative_path
from enginery.core.shapes import TensorSpec

SCHEMA_VERSION: Literal[2] = 2

REPORTS = "reports"


def _require_below_reports(name: str) -> str:
    if not name.startswith(f"{REPORTS}/"):
        raise ValueError(f"{name!r} is not below {REPORTS}/")
    return name


Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""A number of bytes or of things, in 64 bits as other programs hold it."""

RelativePath = Annotated[str, AfterValidator(require_relative_path)]
"""A normalized relative path, with `/` between its parts."""

ReportName = Annotated[RelativePath, AfterValidator(_require_below_reports)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileRecord(_Record):
    """One file of the artifact, by content."""

    sha256: str
    size_bytes: Count


class SourceRecord(_Record):
    """Where the model came from, exactly enough to load it in PyTorch again."""

    kind: Literal["hub", "directory", "package", "onnx"]
    id: str
    revision: str
    """The Hub commit; empty for files on disk."""
    sha256: str
    """Over the names and contents of `files`."""
    files: dict[str, str]
    """Name -> sha256 of each source file that was read."""

    @property
    def name(self) -> str:
        """A short readable name, for directories and reports."""
        tail = self.id.partition(":")[2] or self.id
        return PurePath(tail).stem if self.kind == "onnx" else PurePath(tail).name


class GraphRecord(_Record):
    """One ONNX file with its interface. A sequence-to-sequence model has several."""

    file: RelativePath
    opset: Count
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    data_files: tuple[RelativePath, ...]
    """External data, beside the graph."""


class StageRecord(_Record):
    """One stage that made this artifact."""

    stage: str
    key: str
    """The fingerprint's digest."""
    fields: dict[str, str]
    """What went into the fingerprint, so that a later miss can say which field changed."""
    options: dict[str, Any]
    tools: dict[str, str]
    finished: str
    """UTC, ISO 8601."""
    seconds: float
    peak_rss_bytes: Count
    notes: tuple[str, ...] = ()
    """Choices that the stage made, with their reasons."""


class Verdict(_Record):
    """What a checking stage found. `passed=False` closes the artifact to later stages."""

    stage: str
    key: str
    fields: dict[str, str]
    passed: bool
    summary: str
    report: ReportName
    """Path of the full report inside the artifact, below `reports/`."""
    finished: str

    @classmethod
    def of(cls, key: Fingerprint, *, passed: bool, summary: str, report: str) -> Self:
        """The verdict of the run with this fingerprint, finished now."""
        return cls(
            stage=key.stage,
            key=key.key,
            fields=key.fields,
            passed=passed,
            summary=summary,
            report=report,
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
        )


class Manifest(_Record):
    """The whole of `manifest.json` but its own hash."""

    schema_version: Literal[2] = SCHEMA_VERSION
    source: SourceRecord
    task: str
    model_type: str
    library: str
    precision: str
    """fp32, fp16 or bf16: what the graph's float tensors are."""
    target: str
    """`onnx` for a plain export; the optimize and quantize stages set cuda, tensorrt or cpu."""
    trust_remote_code: bool = False
    """The export was allowed to run the model's own Python code. A record, never a permission."""
    graphs: tuple[GraphRecord, ...]
    stages: tuple[StageRecord, ...]
    files: dict[RelativePath, FileRecord]
    """Every file but manifest.json and those under reports/."""
    reports: dict[ReportName, FileRecord] = {}
    """The files under reports/. They change as checks are run again; the model does not."""
    verdicts: tuple[Verdict, ...] = ()

    def verdict(self, stage: str) -> Verdict | None:
        """The newest verdict of `stage`."""
        return next((v for v in reversed(self.verdicts) if v.stage == stage), None)

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Read the content of a manifest.json.

        Raises:
            ValueError: its hash of itself is missing or does not match (`ChecksumError`), or a
                value is not what is expected (pydantic's `ValidationError`).
        """
        return cls.model_validate_json(verify_checksum(content))

    def to_bytes(self) -> bytes:
        """Return the content of a manifest.json, its hash of itself included."""
        return append_checksum(self.model_dump_json(indent=2))


def schema_json() -> str:
    """The JSON schema of manifest.json, as `docs/manifest.schema.json` holds it."""
    schema = Manifest.model_json_schema()
    schema["properties"][CHECKSUM_KEY] = {
        "description": "sha256 of the file's text before this member, closed with a brace.",
        "pattern": "^[0-9a-f]{64}$",
        "type": "string",
    }
    schema["required"].append(CHECKSUM_KEY)
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_json())
