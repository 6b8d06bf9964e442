"""Calibrate an encoder and its decoder on what they are run with when they generate.

feeder = StepFeeder.open(artifact)
feeder.encoder(["Where is the station?"])    # the encoder's inputs
feeder.step(["Where is the station?"], 4)    # the decoder's inputs in the fifth step

The tokens are those of greedy search, and with them the cache is what the decoder itself computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError
from enginery.core.model.feeds import Feeds
from enginery.runtime.decoder_graphs import find_encoder_decoder
from enginery.runtime.generation.inputs import GenerationRow
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.tasks.generate import Generate, GenerateOptions
from enginery.runtime.tasks.text_generator import TextGenerator


class _StepRecorder(OrtRunner):
    """A decoder's graph that keeps what it is given in one of its runs."""

    wanted = -1
    """The run to keep, counted from 0; it counts down."""
    feeds: Mapping[str, NDArray[Any]] = {}

    @override
    def run_values(self, feeds: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
        if self.wanted == 0:
            self.feeds = {
                name: np.array(value if isinstance(value, np.ndarray) else value.numpy())
                for name, value in feeds.items()
            }
        self.wanted -= 1
        return super().run_values(feeds, outputs)


class StepFeeder:
    """Turn texts, images or sounds into the inputs of an encoder and of its decoder's steps."""

    def __init__(
        self, generator: TextGenerator, encoder: GraphRecord, decoder: _StepRecorder
    ) -> None:
        """Take the model, the record of its encoder, and its decoder's graph."""
        self._generator = generator
        self.encoder_record = encoder
        self._decoder = decoder
        self._arguments = generator.task.reader.fallback(generator.task.defaults)
        # The beginning of a text that is too long calibrates as well.
        generator.task.reader.truncates = True

    @property
    def max_steps(self) -> int | None:
        """The largest number of steps that the decoder's positions allow; None for no limit."""
        return self._generator.task.positions

    @classmethod
    def open(cls, artifact: Artifact) -> StepFeeder:
        """Load the graphs, and the tokenizer or processor.

        Raises:
            ArtifactError: a file cannot be loaded, or the graphs do not generate.
        """
        graphs = find_encoder_decoder(artifact.manifest.graphs)
        if graphs is None or graphs.encoder is None:
            raise ArtifactError(f"{artifact.path} has no encoder with a decoder for every step.")
        opened: dict[str, _StepRecorder] = {}

        def open_graph(file: str) -> OrtRunner:
            return opened.setdefault(file, _StepRecorder(artifact, graph=file))

        generator = TextGenerator(Generate.open(artifact, graphs.later), open_graph)
        return cls(generator, graphs.encoder, opened[graphs.later.file])

    def shapes(self, items: Sequence[Any]) -> list[tuple[int, ...]]:
        """Return the shape of the encoder's input for each item, without the batch.

        Raises:
            InputError: an item cannot be read, or a sound is too long; the message has its index.
        """
        return [next(iter(row.arrays.values())).shape for row in self._rows(items)]

    def encoder(self, items: Sequence[Any]) -> Feeds:
        """Return the encoder's inputs, of its dtypes; the items have the same shape."""
        arrays = self._generator.task.reader.join(list(self._rows(items))) or {}
        return {
            spec.name: arrays[spec.name].astype(spec.dtype) for spec in self.encoder_record.inputs
        }

    def step(self, items: Sequence[Any], step: int) -> Feeds:
        """Return the decoder's inputs in one step, 0 for the first, which has an empty cache."""
        self._decoder.wanted, self._decoder.feeds = step, {}
        options = GenerateOptions.read(
            {
                **self._arguments,
                "num_beams": 1,
                "num_return_sequences": 1,
                "do_sample": False,
                # A text that ends before would not reach the step.
                "min_new_tokens": step + 1,
                "max_new_tokens": step + 1,
                "stop_strings": (),
            }
        )
        rows = self._generator.task.read_rows(items, options)
        self._generator.run_stream(rows, batch_rows=len(items))
        return dict(self._decoder.feeds)

    def _rows(self, items: Sequence[Any]) -> Iterator[GenerationRow]:
        task = self._generator.task
        arguments, options = task.resolve(GenerateOptions.read(self._arguments))
        return task.reader.rows(items, options, **arguments)
