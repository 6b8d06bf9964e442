"""Run the searches of generation with a model's graphs, several in one batch.

    task = Generate.open(artifact, artifact.manifest.graphs[0])
    generator = TextGenerator(task, open_graph)
    rows = task.read_rows(["The engine"], task.Options())
    generator.run_stream(rows)[0][0].text

`load_model` opens one for a model that generates text. Needs only onnxruntime, tokenizers and
numpy; no torch or transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any

from enginery.core.closing import Closeable
from enginery.core.errors import InputError
from enginery.runtime.generation.batch import RunningBatch
from enginery.runtime.generation.decoder import CachedDecoder
from enginery.runtime.generation.fixed_cache import FixedCacheDecoder
from enginery.runtime.generation.inputs import GenerationRow
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.tasks.batch_runner import BatchRunner
from enginery.runtime.tasks.generate import Generate, TextSearch
from enginery.runtime.tasks.task import Row, RowTask

_BATCH_ROWS = 8
OpenGraph = Callable[[str], OrtRunner]
"""Opens the graph of a file."""


class TextGenerator(Closeable):
    """The sessions of a model that generates text. A context manager; closing it frees them.

    It runs the rows of `Generate` in many steps, as `BatchRunner` runs those of other tasks in one.
    """

    def __init__(self, task: Generate, open_graph: OpenGraph, *, fixed_cache: bool = False) -> None:
        """Open the graphs of a task.

        Args:
            task: the task.
            open_graph: opens the graph of a file; the generator closes it.
            fixed_cache: generate with the decoder's graph with a fixed cache, if there is one;
                that is the faster one on CUDA.
        """
        graphs, pad_id = task.graphs, task.tokenizer.pad_id or 0
        decoding = graphs.fixed if fixed_cache and graphs.fixed is not None else graphs.later
        self.decoder: CachedDecoder | FixedCacheDecoder
        with ExitStack() as stack:
            # The stack closes what is open if a later graph cannot be opened.
            records = [decoding, *([graphs.encoder] if graphs.encoder else [])]
            runners = {
                record.file: stack.enter_context(open_graph(record.file)) for record in records
            }
            if decoding is graphs.fixed:
                self.decoder = FixedCacheDecoder(
                    graphs, runners, pad_id=pad_id, limit=task.positions
                )
                stack.callback(self.decoder.close)
                # Prompts are padded behind.
                task = replace(task, graphs=replace(graphs, counts_padding=False))
            else:
                self.decoder = CachedDecoder(graphs, runners, pad_id=pad_id)
            self.task = task
            self.runner = runners[decoding.file]
            """The decoder's graph."""
            self._open = stack.pop_all()

    def run_stream(self, rows: Iterable[Row], *, batch_rows: int = _BATCH_ROWS) -> list[list[Any]]:
        """Run rows from an iterable; return what `Task.split` gives of each, in order.

        Args:
            rows: the rows; only those of one batch are in memory.
            batch_rows: largest number of rows that run together; results do not depend on it.

        Raises:
            InputError: an input is invalid, or the graph fails.
        """
        rows, texts = iter(rows), list[list[Any]]()
        batch: list[tuple[int, Row]] = []
        """Rows, each with the place of its result."""
        while True:
            for row in islice(rows, batch_rows - len(batch)):
                batch.append((len(texts), row))
                texts.append([])
            if not batch:
                return texts
            lengths = [len(row.content.row.prompt) for _, row in batch]
            for indices in self.task.graphs.batches(lengths):
                for _ in self._steps([batch[index][1] for index in indices]):
                    pass
            running, batch = batch, []
            for place, row in running:
                if (following := self.task.following(row)) is not None:
                    batch.append((place, following))
                else:
                    (texts[place],) = self.task.split([row], {}, {})

    def stream(self, row: Row) -> Iterator[str]:
        """Yield the text of one row, piece by piece; together they are that of `run_stream`.

        A piece ends between characters, and what may be the beginning of a stop string is held
        back.

        Raises:
            InputError: the row has several texts.
        """
        content: TextSearch = row.content
        if content.options.num_return_sequences > 1:
            raise InputError("num_return_sequences is above 1, but a stream has one text.")
        return self._pieces(row)

    def batch_key(self, row: Row) -> Hashable:
        """Return what inputs that begin together have in common, such as the size of an image."""
        prepared: GenerationRow = row.content.row
        same_length = len(prepared.prompt) if self.task.graphs.counts_padding else 0
        return same_length, *prepared.shapes

    def padded_length(self, row: Row) -> int:
        """Return the number of tokens of a row."""
        return row.tokens

    def record_rungs(self, *, max_rows: int = _BATCH_ROWS, longest: int = 0) -> None:
        """Record the usual steps in the current thread, for batches of up to `max_rows`."""
        self.decoder.warm_up(max_rows)

    def close(self) -> None:
        """Free the sessions."""
        self._open.close()

    def _pieces(self, row: Row) -> Iterator[str]:
        following: Row | None = row
        while following is not None:
            row, content = following, following.content
            for _ in self._steps([row]):
                if content.search.done:
                    following = self.task.following(row)
                if not content.has_pieces:
                    continue
                for _, piece in content.pieces(content.search.results()):
                    if piece:
                        yield piece

    def _steps(self, rows: Sequence[Row]) -> Iterator[None]:
        """Run rows in one batch until their searches are done; yield after each step."""
        searches = [row.content.search for row in rows]
        batch = RunningBatch(self.decoder)
        batch.add(searches, self.task.collate(rows, 0) or None)
        while True:
            for search in searches:
                if search.error is not None:
                    raise search.error
            yield
            if not batch.searches:
                return
            batch.step()


def open_rows(
    task: RowTask, open_graph: OpenGraph, *, on_cuda: bool
) -> BatchRunner | TextGenerator:
    """Open the graphs of a task; return what runs its rows.

    Args:
        task: the task.
        open_graph: opens the graph of a file; of the first graph without a name.
        on_cuda: graphs run on CUDA, where a decoder with a fixed cache is the faster one.
    """
    if isinstance(task, Generate):
        return TextGenerator(task, open_graph, fixed_cache=on_cuda)
    return BatchRunner(task, open_graph(""))
