"""Raw tensors: a graph's own inputs and outputs, without preprocessing or postprocessing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import InputError
from enginery.core.model.feeds import FeedLimits
from enginery.core.model.files import ModelConfig
from enginery.core.shapes import Profile, choose_profile
from enginery.runtime.engines.padding import dim_sizes
from enginery.runtime.tasks.task import NO_LIMITS, Arrays, InputLimits, ModelInputs, Row, RowTask
from enginery.runtime.tasks.text import ComparedLengths


@dataclass
class Tensors(RowTask):
    """Pass tensors to a graph unchanged, row by row if the graph has a batch axis."""

    tables: Mapping[str, int]
    """Number of rows of the embedding table that an integer input indexes, by input name; 0 if
    config.json does not declare it."""
    max_positions: int
    profiles: Sequence[Profile] = field(default=(), kw_only=True)
    """The engines' profiles, which inputs have to fit; empty without engines."""
    lengths: ComparedLengths = field(default_factory=ComparedLengths, kw_only=True)

    @classmethod
    def open(cls, artifact: Artifact, record: GraphRecord, limits: InputLimits = NO_LIMITS) -> Self:
        """Read the sizes of the model's embedding tables; see `RowTask.open`."""
        config = ModelConfig.read(artifact.path)
        tables = {"input_ids": config.vocab_size, "token_type_ids": config.type_vocab_size}
        positions = FeedLimits.from_artifact(artifact).max_positions
        lengths = ComparedLengths.of(artifact, limits.unproved)
        return cls(record, tables, positions, lengths=lengths)

    @property
    def has_rows(self) -> bool:
        """True if every input and output starts with the same dynamic dim."""
        specs = (*self.record.inputs, *self.record.outputs)
        firsts = {spec.dims[0] if spec.dims else 1 for spec in specs}
        return len(firsts) == 1 and isinstance(next(iter(firsts)), str)

    def preprocess(self, inputs: Arrays, _options: Any) -> ModelInputs:
        """Check tensors by name and split them into rows; without a batch axis, into one row.

        Raises:
            InputError: an input is missing, unknown, of the wrong dtype, rank or size, out of the
                range of its embedding table, or holds NaN or infinity.
            ShapeError: no engine accepts the shapes.
        """
        self._check(inputs)
        if not self.has_rows:
            return ModelInputs([self._row(inputs)])
        count = next(iter(inputs.values())).shape[0]
        return ModelInputs(
            [
                self._row({name: array[index : index + 1] for name, array in inputs.items()})
                for index in range(count)
            ]
        )

    def collate(self, rows: Sequence[Row], _width: int) -> Arrays:
        """Concatenate the tensors of the rows along the batch axis."""
        if len(rows) == 1:
            feeds: Arrays = rows[0].content
            return feeds
        names = rows[0].content
        return {name: np.concatenate([row.content[name] for row in rows]) for name in names}

    def split(
        self, rows: Sequence[Row], feeds: Mapping[str, NDArray[Any]], outputs: Arrays
    ) -> list[Any]:
        """Return the outputs of each row, by name."""
        if len(rows) == 1:
            return [outputs]
        return [
            {name: values[index : index + 1] for name, values in outputs.items()}
            for index in range(len(rows))
        ]

    def postprocess(self, work: ModelInputs, outputs: Sequence[Any], _options: Any) -> Arrays:
        """Return the graph's outputs, by name."""
        if len(outputs) == 1:
            arrays: Arrays = outputs[0]
            return arrays
        return {name: np.concatenate([row[name] for row in outputs]) for name in outputs[0]}

    def _row(self, tensors: Arrays) -> Row:
        # An image counts as one token, however many pixels it has.
        pixels = any(array.ndim == 4 for array in tensors.values())
        return Row(tensors, 1 if pixels else max(int(array.size) for array in tensors.values()))

    def _check(self, feeds: Arrays) -> None:
        specs = {spec.name: spec for spec in self.record.inputs}
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
        sizes = dim_sizes(self.record.inputs, feeds)
        if sizes.get("sequence", 0) > self.max_positions:
            raise InputError(
                f"sequence is {sizes['sequence']}, the model takes at most {self.max_positions}."
            )
        self.lengths.check([sizes.get("sequence", 0)])
        if self.profiles:
            choose_profile(self.profiles, sizes)

    def _check_range(self, name: str, array: NDArray[Any]) -> None:
        """Raise InputError for indices outside an embedding table.

        Beyond its end, ONNX's Gather fails; negative indices count from the end without an error.
        """
        size = self.tables.get(name)
        if size and array.dtype.kind in "iu" and not (array.min() >= 0 and array.max() < size):
            outside = int(array.min()) if array.min() < 0 else int(array.max())
            raise InputError(f"{name} holds {outside}, expected 0 to {size - 1}.")
