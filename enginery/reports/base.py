"""Read and write the files in `reports/` of an artifact.

    report = ValidationReport.read(Path("minilm/reports/validation.json"))
    report.summary    # '23 outputs agree with PyTorch; largest error 1.4e-06 of 1.1e-05 …'

Reports may come with an untrusted artifact, so values are checked strictly against the types of
their fields: `"1"` is not a number. Unknown members are ignored, because a later version may write
more. JSON has neither NaN nor infinities: both are written as null, and null is read as NaN if a
number is expected.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NotRequired, Protocol, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import REPORTS
from enginery.core.errors import ArtifactError
from enginery.core.json_file import json_bytes, parse_json, read_document
from enginery.core.paths import resolve_inside
from enginery.core.table import NOTHING, Table, html_of


class StageOutput(Protocol):
    """What a stage returns that makes no artifact: for people and for programs."""

    def rows(self) -> list[Table | str]:
        """Return tables and lines of text, in the order in which people read them."""

    def as_json(self) -> Any:
        """Return JSON values."""


@dataclass(frozen=True)
class Report:
    """Base class of a JSON file in `reports/`."""

    FILE: ClassVar[str]
    """File name, without `reports/`."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {getattr(self, 'summary', self.FILE)}>"

    def rows(self) -> list[Table | str]:
        """Return tables and lines of text, in the order in which people read them."""
        notes: list[str] = getattr(self, "notes", [])
        return [str(getattr(self, "summary", self.FILE)), *(f"note: {note}" for note in notes)]

    def _repr_html_(self) -> str:
        """Return the rows as tables, for a notebook."""
        return html_of(self.rows())

    def to_json(self) -> bytes:
        """Return the content of the file, with null for NaN and infinities."""
        return json_bytes(asdict(self))

    def as_json(self) -> Any:
        """Return the content of the file as JSON values."""
        return json.loads(self.to_json())

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Parse the content of the file.

        Raises:
            ValueError: the content is not JSON, a member is missing, or a member has a wrong type;
                the message has the member, what was found and what was expected.
        """
        parse_json(content)  # raises ValueError for deeply nested content
        try:
            return TypeAdapter(cls).validate_json(content, strict=True)
        except ValidationError as error:
            raise ValueError(_first_problem(error)) from error

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a report.

        Raises:
            ArtifactError: the file cannot be read or is invalid; the message has the file, the
                member, what was found and what was expected.
        """
        try:
            return cls.from_json(read_document(file))
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else error
            raise ArtifactError(
                f"{file} cannot be read: {problem}.", do="Make it again, or remove it."
            ) from error

    @classmethod
    def of(cls, artifact: Artifact) -> Self | None:
        """Read the report that an artifact's manifest records; return None if it records none.

        Raises:
            ArtifactError: as `read` does.
        """
        file = artifact.report(cls.FILE)
        return cls.read(file) if file else None

    @classmethod
    def below(cls, path: Path) -> Self | None:
        """Read the report of the artifact at `path`; return None if it has none.

        Raises:
            ArtifactError: the path contains a symbolic link, or the report is invalid.
        """
        file = resolve_inside(path, f"{REPORTS}/{cls.FILE}", what=str(path))
        return cls.read(file) if file.is_file() else None


def _first_problem(error: ValidationError) -> str:
    """Describe pydantic's first problem: `cases.0.graph: found 3, expected a valid string`."""
    problem = error.errors()[0]
    where = ".".join(map(str, problem["loc"])) or "the document"
    if problem["type"] == "missing":
        return f"{where} is missing"
    if problem["type"] == "json_invalid":
        return f"it is not valid JSON: {problem['msg'].partition(': ')[2]}"
    value = json.dumps(problem["input"], default=str)
    value = value if len(value) <= 60 else f"{value[:60]}…"
    return f"{where}: found {value}, expected {problem['msg'].removeprefix('Input should be ')}"


@with_config(ConfigDict(extra="allow"))
class ProviderRecord(TypedDict):
    """An execution provider and the reason why it was used."""

    name: str
    reason: str
    options: NotRequired[dict[str, Any]]


def named_versions(tools: Mapping[str, str]) -> str:
    """Join names and versions.

    >>> named_versions({"torch": "2.13.0", "onnxruntime": "1.31.1"})
    'torch 2.13.0, onnxruntime 1.31.1'
    """
    return ", ".join(f"{tool} {version}" for tool, version in tools.items())


def format_cosine_limit(cosine: float) -> str:
    """Return the smallest cosine that passes, rounded down; a dash if there is no limit.

    >>> format_cosine_limit(0.9999999), format_cosine_limit(-1.0)
    ('0.999999', '–')
    """
    return f"{math.floor(cosine * 1e6) / 1e6:.6f}" if cosine > -1 else NOTHING
