"""One quantization of an artifact: what it takes and what it gives, static or dynamic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import OptionError
from enginery.core.progress import Progress
from enginery.passes.qdq.scheme import FP8, INT8, Scheme
from enginery.quantize.calibration.data import CalibrationData
from enginery.quantize.config import QuantizeConfig
from enginery.reports.quantization import QuantizationReport


@dataclass(frozen=True)
class QuantizeJob:
    """One quantization of an artifact."""

    source: Artifact
    """The FP32 artifact."""
    config: QuantizeConfig
    data: CalibrationData | None
    """The calibration inputs; None for dynamic INT8 without inputs."""
    fields: Mapping[str, str]
    """Fields of the stage's fingerprint, for the report."""
    directory: Path
    """Directory of the new artifact."""
    scratch: Path
    """A temporary directory. FP32's outputs go there, which may take gigabytes."""
    progress: Progress

    @property
    def scheme(self) -> Scheme:
        """The scheme of static quantization that the options select."""
        return scheme_from_config(self.config)

    def require_data(self) -> CalibrationData:
        """Return the calibration inputs.

        Raises:
            OptionError: there are none.
        """
        if self.data is None:
            raise OptionError(
                "no calibration inputs were given.",
                do="Name a file: --data FILE",
            )
        return self.data

    def in_folder(self, name: str) -> QuantizeJob:
        """Return the same job with an own, new folder of `scratch`."""
        folder = self.scratch / name
        folder.mkdir()
        return replace(self, scratch=folder)


@dataclass(frozen=True)
class QuantizeResult:
    """What a quantization has written to the directory of the new artifact."""

    graphs: tuple[GraphRecord, ...]
    report: QuantizationReport
    notes: list[str]
    """Notes of the stage."""


def scheme_from_config(config: QuantizeConfig) -> Scheme:
    """Return the scheme of static quantization that the options select."""
    kind = FP8 if config.scheme == "fp8" else INT8
    return replace(kind, per_channel=config.per_channel, unsigned=config.target == "cpu")
