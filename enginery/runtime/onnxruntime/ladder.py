"""Round the sizes of inputs up to a few, so that no shape is new to the GPU.

>>> ladder = Ladder({"batch": (1, 2, 4, 8), "sequence": (16, 32, 64)}, max_tokens=256)
>>> ladder.round_up({"batch": 3, "sequence": 20})
{'batch': 4, 'sequence': 32}
>>> ladder.max_rows({"sequence": 40})
4

The first run of a shape costs a GPU tens of milliseconds: cuDNN plans its attention for each
shape. A rung, one combination of sizes, is planned once, and its run is recorded as a CUDA graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from enginery.core.shapes import TensorSpec, canonical_dim

BATCH, SEQUENCE = "batch", "sequence"

# Powers of two and, for lengths, what lies half-way: at most a third of a row is padding.
_BATCHES = tuple(1 << power for power in range(9))
_LENGTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_MAX_TOKENS = 16_384
"""An H200 computes no more tokens per second in larger batches than in 32 rows of 512."""


@dataclass(frozen=True)
class Ladder:
    """The sizes of each dim that runs are rounded up to."""

    sizes: Mapping[str, tuple[int, ...]]
    """Ascending sizes by the dim's name in profiles; dims that are not listed keep theirs."""
    max_tokens: int = _MAX_TOKENS
    """Maximum number of tokens of a batch of several rows."""
    max_graphs: int = 256
    """Maximum number of rungs that are recorded as CUDA graphs."""
    max_bytes: int = 2 << 30
    """Maximum size of the buffers of inputs and outputs of all recorded rungs."""

    @classmethod
    def of(cls, inputs: Sequence[TensorSpec], *, longest: int | None = None) -> Ladder | None:
        """Return the ladder of a graph; None if its batch is fixed.

        Lengths are rounded only if the graph takes token ids with a mask of (batch, sequence), so
        that padding has no effect.

        Args:
            inputs: inputs of the graph.
            longest: maximum length that the model accepts; None if it has no limit.
        """
        names = {canonical_dim(dim) for spec in inputs for dim in spec.dims if isinstance(dim, str)}
        if BATCH not in names:
            return None
        sizes = {BATCH: _BATCHES}
        masked = any(
            spec.name == "attention_mask"
            and [canonical_dim(d) for d in spec.dims if isinstance(d, str)] == [BATCH, SEQUENCE]
            for spec in inputs
        )
        if masked and any(spec.name == "input_ids" for spec in inputs):
            sizes[SEQUENCE] = _lengths(longest)
        return cls(sizes)

    def round_up(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes of the rung; above the top of the ladder, the sizes themselves.

        A length above the top is rounded up to a multiple of half the top.
        """
        rounded = {name: self._rounded(name, size) for name, size in sizes.items()}
        if sizes.get(BATCH, 1) > self.max_rows(sizes):
            return dict(sizes)
        return rounded

    def max_rows(self, sizes: Mapping[str, int]) -> int:
        """Return the largest batch of the ladder at these sizes of the other dims, 1 or more."""
        length = self._rounded(SEQUENCE, sizes.get(SEQUENCE, 1))
        batches = self.sizes[BATCH]
        fitting = [rows for rows in batches if rows * length <= self.max_tokens]
        return fitting[-1] if fitting else batches[0]

    def is_rung(self, sizes: Mapping[str, int]) -> bool:
        """Return True if a run of these sizes is on the ladder."""
        on_ladder = all(self._rounded(name, size) == size for name, size in sizes.items())
        return on_ladder and sizes.get(BATCH, 1) <= self.max_rows(sizes)

    def rungs(self, *, max_rows: int, longest: int = 0) -> Iterator[dict[str, int]]:
        """Yield the sizes of each rung that inputs up to these sizes are rounded up to.

        The largest come first: their memory is then there for the others.

        Args:
            max_rows: maximum batch size.
            longest: maximum length; 0 for the ladder's.
        """
        lengths: Sequence[int] = self.sizes.get(SEQUENCE, (0,))
        if longest and SEQUENCE in self.sizes:
            top = self._rounded(SEQUENCE, longest)
            lengths = [length for length in lengths if length <= top]
        batches = self.sizes[BATCH]
        largest = next((rows for rows in batches if rows >= max_rows), batches[-1])
        for length, rows in itertools.product(reversed(lengths), reversed(batches)):
            sizes = {SEQUENCE: length} if length else {}
            if rows <= min(largest, self.max_rows(sizes)):
                yield {BATCH: rows, **sizes}

    def _rounded(self, name: str, size: int) -> int:
        rungs = self.sizes.get(name)
        if not rungs:
            return size
        if size <= rungs[-1]:
            return next(rung for rung in rungs if rung >= size)
        if name == BATCH:
            return size
        step = max(rungs[-1] // 2, 1)
        return -(-size // step) * step


def _lengths(longest: int | None) -> tuple[int, ...]:
    """Return the lengths up to the model's limit, which is the last one."""
    if longest is None:
        return (*_LENGTHS, 768, 1024, 1536, 2048)
    top = [*_LENGTHS]
    while top[-1] < longest:  # 768, 1024, 1536, 2048, …
        top.append(top[-1] * 3 // 2 if top[-1] & (top[-1] - 1) == 0 else top[-1] * 4 // 3)
    return (*(length for length in top if length < longest), longest)
