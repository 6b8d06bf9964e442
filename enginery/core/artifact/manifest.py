"""The manifest of an artifact, `manifest.json`, as pydantic models.

>>> Manifest.from_bytes((artifact.path / "manifest.json").read_bytes()).task
'feature-extraction'

The last member of the file, `self_sha256`, is the sha256 of everything before it, so that every
changed byte is found. The JSON schema is generated from these models:

    $ python -m enginery.core.artifact.manifest > docs/manifest.schema.json
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from enginery.core.artifact.fingerprint import Fingerprint
from enginery.core.artifact.staging import MANIFEST
from enginery.core.errors import ArtifactError
from enginery.core.json_file import CHECKSUM_KEY, append_checksum, verify_checksum
from enginery.core.options import changed_options, options_dict
from enginery.core.paths import require_relative_path, source_name
from enginery.core.shapes import TensorSpec, one_of

SCHEMA_VERSION: Literal[2] = 2

REPORTS = "reports"


def _require_below_reports(name: str) -> str:
    if not name.startswith(f"{REPORTS}/"):
        raise ValueError(f"{name!r} is not below {REPORTS}/")
    return name


Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""A size in bytes or a number of items, which fits into a signed 64-bit integer."""

Precision = Annotated[str, Field(pattern=one_of("fp32", "fp16", "bf16", "fp64", "int8", "fp8"))]
Residual = Annotated[str, Field(pattern=one_of("", "fp32", "fp16", "bf16"))]
Target = Annotated[str, Field(pattern=one_of("onnx", "cuda", "tensorrt", "cpu"))]

RelativePath = Annotated[str, AfterValidator(require_relative_path)]
"""A normalized relative path, with `/` between its parts."""

ReportName = Annotated[RelativePath, AfterValidator(_require_below_reports)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileRecord(_Record):
    """Hash and size of one file."""

    sha256: str
    size_bytes: Count


class SourceRecord(_Record):
    """The source model, with everything that is needed to load it in PyTorch again."""

    kind: Literal["hub", "directory", "package", "onnx"]
    id: str
    revision: str
    """Commit on the Hub; empty for files on disk."""
    sha256: str
    """Digest of `files`; see `combined_sha256`."""
    files: dict[str, str]
    """Name of each source file -> sha256."""

    @property
    def name(self) -> str:
        """Short name for directories and reports."""
        return source_name(self.id)


class PaddingRecord(_Record):
    """How texts of different lengths share a batch of a graph, as its export has measured it."""

    side: Literal["left", "right", "none"]
    """`none`: the outputs of a text depend on padding, so only texts of one length share a batch.
    """
    token_id: Count = 0
    """The token of padding."""


class GraphRecord(_Record):
    """One ONNX file with its inputs and outputs. A sequence-to-sequence model has several."""

    file: RelativePath
    opset: Count
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    data_files: tuple[RelativePath, ...]
    """External data files, relative to the artifact."""
    sample_sizes: dict[str, Count] = {}
    """Sizes of dims that need more than a few elements, as the graph was traced: audio samples."""
    padding: PaddingRecord | None = None
    """How texts are padded; None if it was not measured: the model's files say it then."""

    @property
    def data_beside(self) -> set[str]:
        """External data files, relative to the folder of the graph."""
        folder = PurePosixPath(self.file).parent
        files = map(PurePosixPath, self.data_files)
        return {str(file.relative_to(folder)) for file in files if file.is_relative_to(folder)}

    def require_interface(
        self, path: Path, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> None:
        """Check that the inputs and outputs of a file are those of this record.

        Names, dtypes, ranks and fixed sizes are compared, but not the names of dims. The manifest
        may fix a size that is dynamic in the graph, and ONNX Runtime may know the rank or a size of
        an output that the manifest does not have.

        Args:
            path: the file, for the message.
            inputs: its inputs; `?` stands for a dim without a name.
            outputs: its outputs; one without dims may have any rank.

        Raises:
            ArtifactError: they differ; the message has the tensor.
        """
        for kind, values, specs in (
            ("input", inputs, self.inputs),
            ("output", outputs, self.outputs),
        ):
            actuals = {value.name: value for value in values}
            expected = {spec.name: spec for spec in specs}
            if set(actuals) != set(expected):
                raise ArtifactError(
                    f"{path} has the {kind}s {_listed(actuals)}; "
                    f"{MANIFEST} says {_listed(expected)}.",
                    do=_OTHER_GRAPH,
                )
            for name, spec in expected.items():
                actual = actuals[name]
                same_dims = _same_dims(actual, spec, exact=kind == "input")
                if actual.dtype != spec.dtype or not same_dims:
                    raise ArtifactError(
                        f"{path}: the {kind} {actual} differs from {MANIFEST}, which says {spec}.",
                        do=_OTHER_GRAPH,
                    )


_OTHER_GRAPH = "The manifest belongs to another graph; make the artifact again."


def _same_dims(actual: TensorSpec, spec: TensorSpec, *, exact: bool) -> bool:
    """Return True if ranks and fixed sizes match; unless `exact`, unknown ones are ignored."""
    if not exact and not (actual.dims and spec.dims):
        return True  # an unknown rank is written as no dims
    return len(actual.dims) == len(spec.dims) and all(
        a == b if isinstance(a, int) and isinstance(b, int) else isinstance(a, str) or not exact
        for a, b in zip(actual.dims, spec.dims, strict=True)
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "(none)"


class StageRecord(_Record):
    """One of the stages that made this artifact."""

    stage: str
    key: str
    """Digest of the fingerprint."""
    fields: dict[str, str]
    """Fields of the fingerprint, so that a later cache miss can report which field changed."""
    options: dict[str, Any]
    changed_options: tuple[str, ...]
    """Names of the options that differed from their defaults."""
    tools: dict[str, str]
    finished: str
    """Time in UTC, ISO 8601."""
    seconds: float
    peak_rss_bytes: Count
    notes: tuple[str, ...] = ()
    """Decisions of the stage, with their reasons."""

    @classmethod
    def of(
        cls,
        key: Fingerprint,
        config: Any,
        *,
        started: float,
        tools: Mapping[str, str],
        peak_rss_bytes: int,
        notes: Iterable[str] = (),
    ) -> Self:
        """Return the record of a run that ends now.

        Args:
            key: the run's fingerprint.
            config: the options as they were given, a dataclass.
            started: `time.monotonic()` at its start.
            tools: name -> version of what it worked with.
            peak_rss_bytes: largest resident set of its processes.
            notes: decisions of the stage, with their reasons.
        """
        return cls(
            stage=key.stage,
            key=key.key,
            fields=key.fields,
            options=options_dict(config),
            changed_options=changed_options(config),
            tools=dict(tools),
            finished=_now(),
            seconds=round(time.monotonic() - started, 3),
            peak_rss_bytes=peak_rss_bytes,
            notes=tuple(notes),
        )

    def with_resolved(self, **options: Any) -> Self:
        """Return the record with the values that the stage has found for options such as `auto`."""
        return self.model_copy(update={"options": {**self.options, **options}})


class Verdict(_Record):
    """Result of a checking stage. Later stages reject an artifact with `passed=False`."""

    stage: str
    key: str
    fields: dict[str, str]
    passed: bool
    summary: str
    report: ReportName
    """Path of the full report in the artifact, below `reports/`."""
    finished: str
    longest: Count | None = None
    """Longest input, in tokens, that was compared; None if the model takes none that is longer."""

    @classmethod
    def of(
        cls,
        key: Fingerprint,
        *,
        passed: bool,
        summary: str,
        report: str,
        longest: int | None = None,
    ) -> Self:
        """Return the verdict of a run with this fingerprint, with the current time."""
        return cls(
            stage=key.stage,
            key=key.key,
            fields=key.fields,
            passed=passed,
            summary=summary,
            report=report,
            finished=_now(),
            longest=longest,
        )


def _now() -> str:
    """Return the time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Manifest(_Record):
    """The content of `manifest.json`, without its checksum."""

    schema_version: Literal[2] = SCHEMA_VERSION
    source: SourceRecord
    task: str
    model_type: str
    library: str
    precision: Precision
    """fp32, fp16, bf16, int8 or fp8: the type in which the weights are multiplied."""
    residual: Residual = ""
    """fp32 or fp16: the type of a quantized graph's float tensors; empty if it is not quantized."""
    target: Target
    """`onnx` for a plain export; `optimize` and `quantize` set cuda, tensorrt or cpu."""
    trust_remote_code: bool = False
    """True if the export was allowed to run the model's own code. This grants no permission."""
    length_limit: Count | None = None
    """Longest input, in tokens, for which the graphs do what the model does; None if they do at
    every length that config.json allows."""
    graphs: tuple[GraphRecord, ...]
    stages: tuple[StageRecord, ...]
    files: dict[RelativePath, FileRecord]
    """All files except manifest.json and those under reports/."""
    reports: dict[ReportName, FileRecord] = {}
    """Files under reports/. They change when checks run again; the model does not."""
    verdicts: tuple[Verdict, ...] = ()

    @property
    def is_quantized(self) -> bool:
        """True if the quantize stage made the artifact, with any scheme."""
        return bool(self.residual)

    @property
    def float_precision(self) -> str:
        """The type of the graph's float tensors: fp32, fp16 or bf16."""
        return self.residual or self.precision

    def describe_precision(self) -> str:
        """Return the precision in words, such as `int8, fp16 elsewhere`."""
        if not self.residual:
            return self.precision
        schemes = [s.options.get("scheme") for s in self.stages if s.stage == "quantize"]
        dynamic = "dynamic" in schemes
        return f"{'dynamic ' if dynamic else ''}{self.precision}, {self.residual} elsewhere"

    @model_validator(mode="after")
    def _require_residual(self) -> Self:
        quantized = any(stage.stage == "quantize" for stage in self.stages)
        if quantized != self.is_quantized:
            raise ValueError(
                "has a quantize stage, but no residual precision"
                if quantized
                else f"has the residual precision {self.residual}, but no quantize stage"
            )
        return self

    def verdict(self, stage: str) -> Verdict | None:
        """Return the newest verdict of a stage; None if there is none."""
        return next((v for v in reversed(self.verdicts) if v.stage == stage), None)

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Parse the content of a manifest.json.

        Raises:
            ValueError: the checksum is missing or does not match (`ChecksumError`), or a value is
                invalid (pydantic's `ValidationError`).
        """
        return cls.model_validate_json(verify_checksum(content))

    def to_bytes(self) -> bytes:
        """Return the content of a manifest.json, with its checksum."""
        return append_checksum(self.model_dump_json(indent=2))


def read_length_limit(directory: Path) -> int | None:
    """Return the `length_limit` of an artifact; None for a model's directory."""
    path = directory / MANIFEST
    if not path.is_file():
        return None
    try:
        return Manifest.from_bytes(path.read_bytes()).length_limit
    except ValueError:  # a model's file of this name: an artifact's was checked as it was opened
        return None


def schema_json() -> str:
    """Return the JSON schema of manifest.json, the content of docs/manifest.schema.json."""
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
