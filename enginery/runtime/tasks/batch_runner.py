"""Run the rows of one task in batches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from enginery.core.shapes import canonical_dim, choose_profile
from enginery.runtime.onnxruntime.ladder import BATCH, SEQUENCE
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.tasks.task import Arrays, MediaTask, ModelInputs, Row, RowTask, RowValues
from enginery.runtime.tasks.tensors import Tensors
from enginery.runtime.text.batching import (
    GPU_BATCH_COST,
    GPU_MAX_ROWS,
    GPU_MAX_TOKENS,
    MAX_ROWS,
    MAX_TOKENS,
    Rungs,
    fill_rows,
    first_rows,
    plan_batches,
)

_CPU_BATCH_COST = 32
"""Tokens that take as long as starting one more batch on the CPU.

Measured with MiniLM in FP32 on two cores: lists of 8, 32 and 64 sentences were embedded 1.30, 1.52
and 1.38 times as fast as in the fewest batches; with 8 or 64 tokens, about the same.
"""

_MAX_VALUES = 1 << 24
"""Numbers in the inputs of a batch of arrays, 64 MiB in FP32: 32 images of 384 × 384 pixels, or 5
of the 800 × 1333 of detectors, whose activations take a hundred times as much."""


class BatchRunner:
    """A session that runs rows of a task: plans batches, pads them, splits the outputs by row."""

    def __init__(self, task: RowTask, runner: OrtRunner) -> None:
        self.task, self.runner = task, runner
        # Of a graph for texts and images, the task's record has the inputs of one kind.
        self._spec = task.record.inputs[0]
        dims = (spec.dims[0] for spec in task.record.inputs if spec.dims)
        self.fixed_rows = next((dim for dim in dims if isinstance(dim, int)), 0)
        """The graph's fixed batch size; 0 if it is dynamic."""
        dynamic = any(isinstance(dim, str) for dim in self._spec.dims[1:])
        self._has_rows = not isinstance(task, Tensors) or task.has_rows
        self._pads_rows = task.can_pad and len(self._spec.dims) == 2
        self._batch_cost = 0
        if runner.ladder is not None:
            self._batch_cost = GPU_BATCH_COST
        elif dynamic and runner.device.kind == "cpu":
            self._batch_cost = _CPU_BATCH_COST

    def batch_key(self, row: Row) -> Hashable:
        """Return a key; only rows of equal keys may share a batch.

        Texts are padded. Arrays are stacked as they are, so their shapes have to be equal.
        """
        if not self._has_rows:
            return row  # equal to no other
        shapes: list[tuple[int, ...]] = []
        if isinstance(row.content, Mapping):
            shapes = [row.content[spec.name].shape for spec in self.task.record.inputs]
        return (type(self.task), row.reads_raw, row.form, row.group, *shapes)

    def _padded_sizes(self, row: Row) -> tuple[int, ...]:
        """Return the sizes of a row that are padded for engines; empty for no padding."""
        if isinstance(self.task, Tensors):
            return ()  # a client's tensors stay as they are
        if isinstance(row.content, Mapping):
            return tuple(row.content[self._spec.name].shape)
        return (max(row.tokens, 1),)

    def padded_length(self, row: Row) -> int:
        """Return the number of tokens of a row after padding, if the task can pad it.

        Raises:
            ShapeError: no engine accepts a row of this length.
        """
        if not self.runner.pads:
            return row.tokens
        if self.runner.profiles:
            return self._length_in_profile(row)
        if not self._pads_rows:
            return row.tokens
        return self.runner.padded_shape(self._spec, (1, max(row.tokens, 1)))[1]

    def _length_in_profile(self, row: Row) -> int:
        shape = self._padded_sizes(row)
        if len(shape) != 1:
            return row.tokens
        rows, width = self.runner.padded_shape(self._spec, (1, *shape))
        names = (canonical_dim(dim) for dim in self._spec.dims if isinstance(dim, str))
        # If no profile accepts the row, this raises an error that names the nearest one.
        choose_profile(self.runner.profiles, dict(zip(names, (rows, width), strict=False)))
        return width if self.task.can_pad else row.tokens

    def max_rows(self, row: Row) -> int:
        """Return the maximum batch size if this row is the longest of the batch."""
        if self.fixed_rows:
            return self.fixed_rows
        ladder = self.runner.ladder
        if not self.runner.pads or (ladder is not None and SEQUENCE not in ladder.sizes):
            largest = MAX_TOKENS // max(row.tokens, 1)
            if isinstance(row.content, Mapping):
                values = sum(array.size for array in row.content.values())
                largest = min(largest, _MAX_VALUES // max(values, 1))
            return min(MAX_ROWS, max(largest, 1))
        return self.runner.max_rows(self._spec, self._padded_sizes(row)) or 1

    def record_rungs(self, *, max_rows: int = GPU_MAX_ROWS, longest: int = 0) -> int:
        """Run each rung of the ladder once in the current thread; see `OrtRunner.record_rungs`."""
        return self.runner.record_rungs(
            max_rows=max_rows, longest=longest, outputs=self.task.outputs_read()
        )

    def feeds(self, rows: Sequence[Row]) -> Arrays:
        """Return the feeds of a batch, padded to the shape of its graph, engine or rung."""
        longest = max(rows, key=lambda row: row.tokens)
        count, width = len(rows), longest.tokens
        shape = self._padded_sizes(longest) if self.runner.pads else ()
        if shape:
            count, padded, *_ = self.runner.padded_shape(self._spec, (count, *shape))
            if self.runner.profiles or self.task.can_pad:
                width = padded
        feeds = self.task.collate(rows, max(width, 1))
        if not self._has_rows:
            return feeds
        count = self.fixed_rows or count
        return fill_rows(feeds, count) if count > len(rows) else feeds

    def split(self, rows: Sequence[Row], feeds: Arrays, outputs: Arrays) -> RowValues:
        """Split the outputs of a run on `feeds` by row."""
        if self._has_rows and len(next(iter(feeds.values()))) > len(rows):  # padded batch
            outputs = first_rows(outputs, len(rows))
        return self.task.split(rows, feeds, outputs)

    def run(self, rows: Sequence[Row]) -> list[Any]:
        """Run rows of one batch key as one batch; return the outputs of each row.

        Raises:
            InputError, ShapeError: the graph does not accept the rows.
        """
        feeds = self.feeds(rows)
        # Rows of one batch read the same outputs, since `reads_raw` is in their key.
        outputs = self.runner(feeds, self.task.outputs_read(raw=rows[0].reads_raw))
        return list(self.split(rows, feeds, outputs))

    def run_all(self, rows: Sequence[Row]) -> list[Any]:
        """Run any number of rows, batch by batch; return outputs in the order of the rows."""
        outputs: list[Any] = [None] * len(rows)
        for batch in self.plan(rows):
            for index, output in zip(batch, self.run([rows[i] for i in batch]), strict=True):
                outputs[index] = output
        return outputs

    def answer_stream(self, rows: Iterable[Row], options: Any, work: ModelInputs) -> Any:
        """Run rows of images or audio from an iterable; return the task's results in their order.

        Args:
            rows: the rows, of which only those of incomplete batches are in memory.
            options: options of the task.
            work: what `MediaTask.read_rows` keeps for the results.
        """
        finish = partial(self.task.postprocess, work, options=options)
        if isinstance(self.task, MediaTask) and self.task.has_large_outputs:
            return self.run_stream(rows, finish)
        return finish(self.run_stream(rows))

    def run_stream(
        self, rows: Iterable[Row], finish: Callable[[list[Any]], list[Any]] = list
    ) -> list[Any]:
        """Run rows from an iterable; return outputs in the order of the rows.

        Each batch runs as soon as it is full, so only the rows of incomplete batches are in memory.
        Use it for large rows, such as images and audio.

        Args:
            rows: the rows.
            finish: turns the outputs of each batch into what is returned.
        """
        outputs: list[Any] = []
        waiting: dict[Any, dict[int, Row]] = {}

        def run(batch: dict[int, Row]) -> None:
            results = finish(self.run(list(batch.values())))
            for index, output in zip(batch, results, strict=True):
                outputs[index] = output

        for index, row in enumerate(rows):
            outputs.append(None)
            key = self.batch_key(row)
            batch = waiting.setdefault(key, {})
            batch[index] = row
            if len(batch) >= self.max_rows(row):
                run(waiting.pop(key))
        for batch in waiting.values():
            run(batch)
        return outputs

    def close(self) -> None:
        """Free the session."""
        self.runner.close()

    def plan(
        self, rows: Sequence[Row], *, max_rows: int = 0, max_tokens: int = 0
    ) -> list[list[int]]:
        """Return the indices of the rows of each batch.

        Args:
            rows: rows of one or more batch keys; only rows of one key share a batch.
            max_rows: maximum batch size, unless the graph or an engine sets another one; 0 for 256
                on a ladder, else 32.
            max_tokens: maximum number of padded tokens of a batch; 0 for the engine's own maximum,
                8192 on a ladder, or 4096 without either.
        """
        if len(rows) == 1:
            return [[0]]
        groups: dict[Any, list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault(self.batch_key(row), []).append(index)
        engines, ladder = bool(self.runner.profiles), self.runner.ladder
        usual_tokens = sys.maxsize if engines else GPU_MAX_TOKENS if ladder else MAX_TOKENS
        largest = max_rows or (GPU_MAX_ROWS if ladder else MAX_ROWS)
        # A graph that cannot pad has no use for rungs.
        rungs = None
        if ladder is not None and self.task.can_pad:
            rungs = Rungs(ladder.sizes[BATCH], ladder.sizes.get(SEQUENCE, ()))
        batches = []
        for indices in groups.values():
            content = rows[indices[0]].content

            # An engine's profile may take fewer rows of longer inputs.
            @cache
            def max_rows_at(tokens: int, content: Any = content) -> int:
                return min(self.max_rows(Row(content, tokens)), largest)

            planned = plan_batches(
                [rows[index].tokens for index in indices],
                max_rows=self.fixed_rows or (max_rows_at if self.runner.pads else largest),
                max_tokens=max_tokens or usual_tokens,
                equal_lengths=not self.task.can_pad,
                # Fixed batches and engines: the cost of a batch was not measured there.
                batch_cost=self._batch_cost if not self.fixed_rows and not engines else 0,
                rungs=rungs,
            )
            batches += [[indices[index] for index in batch] for batch in planned]
        return batches
