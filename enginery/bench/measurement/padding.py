"""Share of padding in batches of a file's texts.

>>> compute_padding([10, 100, 15, 90], batch=2)
Padding(batch=2, in_order=0.4342105263157895, sorted=0.06521739130434778)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from enginery.bench.config import AUTO, BenchConfig, read_sizes
from enginery.bench.target import Target
from enginery.core.datasets.samples import read_texts
from enginery.core.errors import OptionError
from enginery.reports.benchmark import Padding
from enginery.runtime.sample_inputs import TextFeeder, takes_texts


def measure_padding(target: Target, config: BenchConfig) -> list[Padding]:
    """Measure the padding of `config.data` at each batch size; return an empty list without data.

    Raises:
        OptionError: the graph does not take texts.
        InputError: the file or the column cannot be read.
        ArtifactError: the artifact has no tokenizer.
    """
    if not config.data:
        return []
    if not takes_texts(target.record) or target.is_onnx_file:
        raise OptionError(
            f"option 'data': {target.name} does not take texts, its inputs are "
            f"{'; '.join(str(spec) for spec in target.record.inputs)}."
        )
    texts = read_texts(Path(config.data).expanduser(), config.column, rows=config.rows)
    lengths = TextFeeder.open(target.artifact, target.record).lengths(texts)
    sizes = read_sizes(BenchConfig.batch if config.batch == AUTO else config.batch, "batch")
    return [compute_padding(lengths, batch=size) for size in sizes]


def compute_padding(lengths: Sequence[int], *, batch: int) -> Padding:
    """Compute the share of padding, in the given order and sorted by length.

    Args:
        lengths: the texts' lengths in tokens.
        batch: texts per batch.
    """
    return Padding(batch, _share(lengths, batch), _share(sorted(lengths), batch))


def _share(lengths: Sequence[int], batch: int) -> float:
    parts = [lengths[start : start + batch] for start in range(0, len(lengths), batch)]
    padded = sum(len(part) * max(part) for part in parts)
    return 1 - sum(lengths) / padded if padded else 0.0
