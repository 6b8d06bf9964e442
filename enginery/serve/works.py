"""What a model is asked: texts, images or tensors, each into rows of a batch and back.

    >>> work = TextWork(texts, runner)
    >>> work.run([waiting, other])          # in a worker's thread
    [array([0.01, …]), array([0.02, …])]

A work knows how its inputs are put together into what the graph takes, and what the graph's outputs
say of each; when and with which others an input runs is the queue's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import InputError
from enginery.core.feeds import FeedLimits
from enginery.core.model_files import ModelConfig
from enginery.core.profile_choice import choose_profile
from enginery.core.shapes import canonical_dim
from enginery.runtime.image_model import ImageModel
from enginery.runtime.ort import OrtRunner
from enginery.runtime.profiles import sizes_of
from enginery.runtime.text_model import fill_rows, first_rows
from enginery.runtime.text_rows import TextRows
from enginery.serve.queue import Waiting


class Work(Protocol):
    """One way to ask a model."""

    def run(self, batch: Sequence[Waiting]) -> list[Any]:
        """What the graph says of each input of a batch.

        Raises:
            InputError, ShapeError: the graph does not take them.
        """


class TextWork:
    """Rows of tokens, padded to one length."""

    kind = "texts"

    def __init__(self, texts: TextRows, runner: OrtRunner) -> None:
        self._texts, self._runner = texts, runner
        self._inputs = runner.record.inputs
        self._fixed = next((s.dims[0] for s in self._inputs if isinstance(s.dims[0], int)), 0)
        self._shape_counts = bool(runner.profiles)

    @property
    def can_pad(self) -> bool:
        """Whether texts of different length can share a batch."""
        return self._texts.tokenizer.can_pad(self._inputs)

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return int(self._texts.tokenizer.texts.get_vocab_size(with_added_tokens=True))

    @property
    def most_rows(self) -> int:
        """The most rows of a batch that the graph's inputs allow; 0 where they do not say."""
        return self._fixed

    def padded_length(self, tokens: int) -> int:
        """The tokens of a row after padding, as an engine takes it.

        Raises:
            ShapeError: no engine takes so many.
        """
        if not self._shape_counts:
            return tokens
        rows, width = self._runner.padded_shape(self._inputs[0], (1, max(tokens, 1)))
        names = (canonical_dim(dim) for dim in self._inputs[0].dims if isinstance(dim, str))
        # Raises with the nearest profile where none takes it.
        choose_profile(self._runner.profiles, dict(zip(names, (rows, width), strict=False)))
        return width

    def run(self, batch: Sequence[Waiting]) -> list[Any]:
        """Logits, vectors or whatever the task's answers are made of."""
        encodings = [item.content for item in batch]
        longest = max(map(len, encodings))
        rows, width = len(batch), longest
        if self._shape_counts:
            rows, width = self._runner.padded_shape(self._inputs[0], (rows, max(longest, 1)))
        feeds = self._texts.tokenizer.feeds(encodings, self._inputs, width=width)
        outputs = self._runner(fill_rows(feeds, self._fixed or rows))
        if self._fixed or rows > len(batch):
            outputs = first_rows(outputs, len(batch))
        prompts = [item.prompt_tokens for item in batch]
        return self._texts.rows(
            encodings, feeds, outputs, prompt_tokens=prompts if any(prompts) else ()
        )


class ImageWork:
    """Pixels of one size."""

    def __init__(self, images: ImageModel) -> None:
        self._images = images

    def run(self, batch: Sequence[Waiting]) -> list[Any]:
        """Logits or vectors."""
        return self._images.run([item.content for item in batch])


class TensorWork:
    """The graph's own inputs, as a client sends them."""

    def __init__(self, runner: OrtRunner, config: ModelConfig) -> None:
        """Takes the model's config.json for the sizes of its tables."""
        self._runner = runner
        self._positions = FeedLimits.from_config(config).max_positions
        self._tables = {
            "input_ids": config.vocab_size, "token_type_ids": config.type_vocab_size,
        }  # fmt: skip
        """The rows of the tables that inputs are places in; 0 where config.json does not say."""
        record = runner.record
        firsts = {spec.dims[0] if spec.dims else 1 for spec in (*record.inputs, *record.outputs)}
        self.batches = len(firsts) == 1 and isinstance(next(iter(firsts)), str)
        """Whether requests of one row can share a batch: one free dim comes first everywhere."""

    def check(self, feeds: dict[str, NDArray[Any]]) -> None:
        """Raises what is wrong with tensors before they wait.

        Raises:
            InputError: an input is missing, unknown, or of the wrong dtype, rank or size; or holds
                NaN or infinity.
            ShapeError: no engine takes the shapes.
        """
        specs = {spec.name: spec for spec in self._runner.record.inputs}
        if unknown := [name for name in feeds if name not in specs]:
            expected = ", ".join(map(str, specs.values()))
            raise InputError(f"unknown input '{unknown[0]}'; the graph takes {expected}.")
        for name, spec in specs.items():
            if name not in feeds:
                raise InputError(f"input '{name}' is missing; the graph takes {spec}.")
            array = feeds[name]
            if array.dtype.name != spec.dtype or array.ndim != len(spec.dims):
                raise InputError(
                    f"{name}: found {array.dtype.name} {array.shape}, expected {spec}."
                )
            for size, dim in zip(array.shape, spec.dims, strict=True):
                if size == 0 or (isinstance(dim, int) and size != dim):
                    raise InputError(f"{name}: found the shape {array.shape}, expected {spec}.")
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise InputError(f"{name} holds NaN or infinity.")
            self._check_range(name, array)
        sizes = sizes_of(self._runner.record.inputs, feeds)
        if sizes.get("sequence", 0) > self._positions:
            raise InputError(
                f"sequence is {sizes['sequence']}, the model takes at most {self._positions}."
            )
        if self._runner.profiles:
            choose_profile(self._runner.profiles, sizes)

    def kind(self, feeds: dict[str, NDArray[Any]]) -> Any:
        """What the tensors of other requests have to be to share a batch with these."""
        if not self.batches:
            return object()  # nothing is the same as this
        return ("tensors", *((name, feeds[name].shape[1:]) for name in sorted(feeds)))

    def rows(self, feeds: dict[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]]:
        """What runs by itself: the rows of a request, or all of it where they cannot be told."""
        if not self.batches:
            return [feeds]
        count = next(iter(feeds.values())).shape[0]
        return [
            {name: array[row : row + 1] for name, array in feeds.items()} for row in range(count)
        ]

    def _check_range(self, name: str, array: NDArray[Any]) -> None:
        """Indices beyond a table run into an error of the graph, and negative ones from its end."""
        size = self._tables.get(name)
        if size and array.dtype.kind in "iu" and not (array.min() >= 0 and array.max() < size):
            found = int(array.min()) if array.min() < 0 else int(array.max())
            raise InputError(f"{name} holds {found}, expected 0 to {size - 1}.")

    def run(self, batch: Sequence[Waiting]) -> list[Any]:
        """The graph's outputs of each request."""
        if len(batch) == 1:
            return [self._runner(batch[0].content)]
        feeds = {
            name: np.concatenate([item.content[name] for item in batch])
            for name in batch[0].content
        }
        outputs = self._runner(feeds)
        return [
            {name: values[row : row + 1] for name, values in outputs.items()}
            for row in range(len(batch))
        ]
