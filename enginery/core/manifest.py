"""What an artifact says of itself: `manifest.json`.

Takes and leaves JSON. The schema is generated from these models:

    $ python -m enginery.core.manifest > docs/manifest.schema.json
    >>> Manifest.model_validate_json(Path("minilm/manifest.json").read_text()).task
    'feature-extraction'
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict

from enginery.core.fingerprint import Fingerprint
from enginery.core.shapes import TensorSpec

SCHEMA_VERSION: Literal[1] = 1


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileRecord(_Record):
    """One file of the artifact, by content."""

    sha256: str
    size_bytes: int


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

    file: str
    opset: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    data_files: tuple[str, ...]
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
    peak_rss_bytes: int
    notes: tuple[str, ...] = ()
    """Choices that the stage made, with their reasons."""


class Verdict(_Record):
    """What a checking stage found. `passed=False` closes the artifact to later stages."""

    stage: str
    key: str
    fields: dict[str, str]
    passed: bool
    summary: str
    report: str
    """Path of the full report inside the artifact."""
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
    """The whole of `manifest.json`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    source: SourceRecord
    task: str
    model_type: str
    library: str
    precision: str
    """fp32, fp16 or bf16: what the graph's float tensors are."""
    target: str
    """`onnx` for a plain export; the optimize and quantize stages set cuda, tensorrt or cpu."""
    trust_remote_code: bool = False
    """The model's own Python code is needed to load it in PyTorch, and was allowed."""
    graphs: tuple[GraphRecord, ...]
    stages: tuple[StageRecord, ...]
    files: dict[str, FileRecord]
    """Every file but manifest.json and those under reports/."""
    verdicts: tuple[Verdict, ...] = ()

    def verdict(self, stage: str) -> Verdict | None:
        """The newest verdict of `stage`."""
        return next((v for v in reversed(self.verdicts) if v.stage == stage), None)


def schema_json() -> str:
    """The JSON schema of manifest.json, as `docs/manifest.schema.json` holds it."""
    return json.dumps(Manifest.model_json_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_json())
