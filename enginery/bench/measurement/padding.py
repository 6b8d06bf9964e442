"""How much of a batch is padding, by the lengths of a file's own texts.

>>> padding_of([10, 100, 12, 90], batch=2)
Padding(batch=2, in_order=0.44…, sorted=0.05…)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from enginery.bench.config import AUTO, BenchConfig, read_sizes
from enginery.bench.target import Subject
from enginery.core.artifact.reports import Padding
from enginery.core.datasets.samples import read_texts
from enginery.core.errors import OptionError
from enginery.runtime.sample_inputs import TextFeeder, takes_texts


def measure_padding(subject: Subject, config: BenchConfig) -> list[Padding]:
    """The padding at each batch size, largest share last; none where no data are named.

    Raises:
        OptionError: the graph takes no texts.
        InputError: the file or the column cannot be read.
        ArtifactError: there is no tokenizer.
    """
    if not config.data:
        return []
    if not takes_texts(subject.record) or subject.is_bare:
        raise OptionError(
            f"option 'data': {subject.name} takes no texts: "
            f"{'; '.join(str(spec) for spec in subject.record.inputs)}."
        )
    texts = read_texts(Path(config.data).expanduser(), config.column, rows=config.rows)
    lengths = TextFeeder.open(subject.artifact, subject.record).lengths(texts)
    sizes = read_sizes(BenchConfig.batch if config.batch == AUTO else config.batch, "batch")
    return [padding_of(lengths, batch=size) for size in sizes]


def padding_of(lengths: Sequence[int], *, batch: int) -> Padding:
    """Of texts with these lengths in tokens, batched as they come, and sorted by length."""
    return Padding(batch, _share(lengths, batch), _share(sorted(lengths), batch))


def _share(lengths: Sequence[int], batch: int) -> float:
    parts = [lengths[start : start + batch] for start in range(0, len(lengths), batch)]
    padded = sum(len(part) * max(part) for part in parts)
    return 1 - sum(lengths) / padded if padded else 0.0
