"""Measure the accuracy of each artifact on labelled texts.

    labelled = LabelledTexts.read(targets, BenchConfig(data="reviews.csv", label_column="label"))
    labelled.measure(config).accuracies[0].describe()    # '91.4 % (88.7 to 93.5 %)'

The answers are those of `load_model`, on the benchmark's providers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from enginery.bench.config import BenchConfig
from enginery.bench.target import Target
from enginery.core.accuracy import LabelMetrics, measure_accuracy
from enginery.core.datasets.labels import read_labelled_texts, require_classifier
from enginery.core.model.files import ModelConfig
from enginery.core.progress import Progress
from enginery.runtime.model import load_model
from enginery.runtime.tasks.classify import Classification


@dataclass(frozen=True)
class LabelledTexts:
    """The texts of a file with the class index of each, for each target."""

    texts: Sequence[str]
    labels: Mapping[str, Sequence[int]]
    """Name of a target -> its class index of each text."""
    targets: Sequence[Target]

    @classmethod
    def read(cls, targets: Sequence[Target], config: BenchConfig) -> LabelledTexts | None:
        """Read the file that the options name; None without a column of labels.

        Raises:
            OptionError: a target does not classify texts.
            InputError: the file cannot be read, or a target has no such label.
        """
        if not config.label_column:
            return None
        texts: list[str] = []
        labels = {}
        for target in targets:
            require_classifier(target.artifact, config.data, config.label_column)
            texts, labels[target.name] = read_labelled_texts(
                target.artifact,
                Path(config.data).expanduser(),
                config.column,
                config.label_column,
                rows=config.rows,
                reading=config.label_values,
            )
        return cls(texts, labels, targets)

    def measure(self, config: BenchConfig, progress: Progress) -> LabelMetrics:
        """Classify the texts with every target.

        Raises:
            EngineryError: an artifact cannot be loaded.
        """
        right = {}
        with progress.task("accuracy", total=len(self.targets)) as advance:
            for target in self.targets:
                right[target.name] = self._classify(target, config)
                advance()
        return measure_accuracy(config.label_column, right)

    def _classify(self, target: Target, config: BenchConfig) -> list[bool]:
        model = load_model(
            target.artifact,
            providers=config.providers,
            provider_options=config.provider_option,
            allow_fallback=config.allow_fallback,
            allow_failed=True,  # bench has checked it
            threads=config.threads,
            io_binding=config.io_binding,
        )
        try:
            answers: list[Classification] = model.classify(self.texts, top_k=1)
        finally:
            model.close()
        names = ModelConfig.read(target.artifact.path).id2label
        return [
            math.isfinite(answer.score) and answer.label == names.get(label, f"LABEL_{label}")
            for answer, label in zip(answers, self.labels[target.name], strict=True)
        ]
