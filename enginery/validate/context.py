"""What all comparisons of one validation share: the reference, the options, limits, a directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.model.feeds import FeedLimits
from enginery.core.progress import SILENT, Progress
from enginery.runtime.decoder_graphs import has_fixed_cache
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions
from enginery.runtime.providers.specification import ProviderSpec, parse_providers
from enginery.validate.cases.sweep import ValidationCase
from enginery.validate.compare import ComparisonLimits
from enginery.validate.config import ValidateConfig
from enginery.validate.reference import Reference, ReferenceRun, run_reference


def providers_of(config: ValidateConfig) -> tuple[ProviderSpec, ...]:
    """Return the providers from the options or the environment."""
    return parse_providers(config.providers, config.provider_option, default="cpu")


@dataclass(frozen=True)
class ValidationContext:
    """What all comparisons of one validation share."""

    reference: Reference
    config: ValidateConfig
    limits: ComparisonLimits
    """The tolerances."""
    feed_limits: FeedLimits
    """Limits on generated inputs."""
    scratch: Path
    """Directory for the reference's outputs and for graphs that are made from the artifact's."""
    progress: Progress = SILENT

    @property
    def artifact(self) -> Artifact:
        """The artifact that is validated."""
        return self.reference.artifact

    @property
    def graphs(self) -> list[GraphRecord]:
        """The graphs that are compared case by case, and not only by what they decode."""
        records = self.artifact.manifest.graphs
        return [record for record in records if not has_fixed_cache(record)]

    def unrounded(self, record: GraphRecord) -> Path | None:
        """Return the graph without rounding, which the comparison of weights has written.

        None if it could not: not enough weights were traced.
        """
        path = self.scratch / record.file
        return path if path.exists() else None

    def run_reference(
        self, record: GraphRecord, directory: str, cases: Sequence[ValidationCase], *, noise: bool
    ) -> ReferenceRun:
        """Run the reference of a graph; its outputs are in a directory below `scratch`."""
        return run_reference(
            self.reference,
            record,
            cases,
            self.scratch / directory,
            progress=self.progress,
            noise=noise,
        )

    def open_runner(
        self, file: str, options: RunnerOptions, artifact: Artifact | None = None
    ) -> OrtRunner:
        """Open a graph on the requested providers.

        Args:
            file: its file.
            options: those of the session.
            artifact: another artifact that has the graph; None for the one that is validated.
        """
        return OrtRunner(
            artifact or self.artifact,
            options,
            graph=file,
            providers=providers_of(self.config),
            allow_fallback=self.config.allow_fallback,
        )
