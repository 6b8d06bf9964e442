"""The report of build, `reports/engines.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from enginery.core.artifact.manifest import Count
from enginery.reports.base import Report


@with_config(ConfigDict(extra="allow"))
class BuiltEngine(TypedDict):
    """The record of an engine with its directory; see `EngineRecord` for the other members."""

    directory: str
    from_store: NotRequired[bool]
    capabilities: list[str]
    profiles: list[str]
    layers: dict[str, Count]
    plan_size_bytes: Count


@dataclass(frozen=True)
class BuildReport(Report):
    """The content of `reports/engines.json`."""

    FILE = "engines.json"

    summary: str
    notes: list[str]
    engines: list[BuiltEngine]
    earlier_engines: list[str] = field(default_factory=list)
    """The artifact's other engines, from earlier builds."""
    left_out: list[dict[str, Any]] = field(default_factory=list)
    """Graphs without an engine, with reasons."""
    profiles: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, Any] | None = None
    """Length buckets of the data that the profiles were made from."""
    fields: dict[str, str] = field(default_factory=dict)
    """Fields of the stage's fingerprint."""
