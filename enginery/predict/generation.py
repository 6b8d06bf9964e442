"""Generate a text for each row of a window.

runner = GenerationRunner(generator, options, batch_rows=8)
runner(["The engine"], Counts())[0][0].text
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from itertools import takewhile
from typing import Any

from enginery.core.closing import Closeable
from enginery.core.errors import InputError, OptionError
from enginery.core.options import read_assignments
from enginery.predict.config import PredictConfig
from enginery.predict.report import Counts
from enginery.runtime.tasks.generate import GenerateOptions, Generation
from enginery.runtime.tasks.task import ModelInputs
from enginery.runtime.tasks.text_generator import TextGenerator


def read_generation_options(config: PredictConfig) -> GenerateOptions:
    """Return the options of generation; without `num_return_sequences` each row has one text.

    Raises:
        OptionError: one is not of the form NAME=VALUE.
    """
    values = read_assignments(config.generation, "generation")
    return GenerateOptions.read({"num_return_sequences": 1, **values})


class GenerationRunner(Closeable):
    """A generator for windows of rows, with the interface of `WindowRunner`."""

    dim = 0
    """Embeddings have one."""

    def __init__(
        self, generator: TextGenerator, options: GenerateOptions, *, batch_rows: int
    ) -> None:
        """Take a generator, which is closed with this.

        Raises:
            OptionError: an option of generation is unknown or invalid.
        """
        self.task = generator.task
        self._generator, self._options = generator, options
        try:
            _, chosen = self.task.resolve(options)
        except InputError as error:
            raise OptionError(error.message, do=error.do, option="generation") from error
        self._batch_rows = max(1, batch_rows // chosen.num_beams)
        self.stopped = threading.Event()
        """Is set when nobody waits for a window any more."""

    def __call__(self, inputs: Sequence[Any], counts: Counts) -> list[list[Generation]]:
        """Return the results of each input; rows of similar length run together.

        Raises:
            InputError: an input cannot be used.
            CancelledError: `stopped` is set.
        """
        length = len if all(isinstance(item, str) for item in inputs) else (lambda _: 0)
        order = sorted(range(len(inputs)), key=lambda index: length(inputs[index]))
        rows = self.task.read_rows([inputs[index] for index in order], self._options)
        rows = takewhile(lambda _: not self.stopped.is_set(), rows)
        results: list[list[Generation]] = [[] for _ in inputs]
        outputs = self._generator.run_stream(rows, batch_rows=self._batch_rows)
        if self.stopped.is_set():
            raise CancelledError
        texts = self.task.postprocess(ModelInputs([]), outputs, self._options)
        for index, generations in zip(order, texts, strict=True):
            results[index] = generations
            counts.tokens += sum(len(generation.tokens) for generation in generations)
        return results

    def close(self) -> None:
        """Free the sessions."""
        self._generator.close()
