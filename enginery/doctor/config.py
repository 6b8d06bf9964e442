"""Options of the doctor. Imports are light, so that `enginery --help` is fast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DoctorConfig:
    """Options of the examination."""

    require: str = ""
    """Execution provider that must run; otherwise the exit status is 1."""
    timeout_seconds: float = 60.0
    """Time limit of one probe, in seconds. TensorRT builds an engine in it."""
