"""The options of the doctor. They import nothing, so that `enginery --help` is quick."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DoctorConfig:
    """What is examined, and what must work."""

    require: str = ""
    """An execution provider that must run: the exit status is 1 when it does not."""
    timeout_seconds: float = 60.0
    """How long one provider may take to run one operation. TensorRT builds an engine for it."""
