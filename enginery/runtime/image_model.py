"""Images through a graph, in batches of one size, and what its outputs say of them.

>>> images = ImageModel.open(artifact, runner)
>>> images.classify(["cat.jpg"], top_k=1)[0].label
'cat'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact import Artifact
from enginery.core.errors import ArtifactError, InputError
from enginery.core.model_files import ModelConfig
from enginery.runtime.answers import Classification
from enginery.runtime.batching import MAX_ROWS
from enginery.runtime.classification import Activation, classify_logits
from enginery.runtime.image_files import load_image
from enginery.runtime.images import ImageProcessor
from enginery.runtime.ort import OrtRunner
from enginery.runtime.text_model import fill_rows, first_rows
from enginery.runtime.text_rows import require_outputs

_VECTOR_OUTPUTS = ("image_embeds", "pooler_output")
# Models whose first token stands for the whole image.
_FIRST_TOKEN = ("vit", "deit", "beit", "data2vec-vision", "dinov2", "vit_mae", "vit_msn")


@dataclass(frozen=True)
class ImageModel:
    """A graph over pixels, with its processor and the model's own settings."""

    runner: OrtRunner
    task: str
    processor: ImageProcessor
    config: ModelConfig
    notes: tuple[str, ...]

    @classmethod
    def open(cls, artifact: Artifact, runner: OrtRunner) -> ImageModel:
        """Reads the model's files beside the graph.

        Raises:
            ArtifactError: a file is missing, the graph takes more than pixels, or not RGB.
        """
        inputs = runner.record.inputs
        if len(inputs) != 1 or len(inputs[0].dims) != 4 or inputs[0].dims[1] not in (3, "channels"):
            found = "; ".join(str(spec) for spec in inputs)
            raise ArtifactError(
                f"{artifact.path}: the graph takes {found}; "
                "expected pixel_values (batch, 3, height, width) alone."
            )
        require_outputs(artifact.manifest.task, runner.record)
        processor = ImageProcessor.open(artifact.path)
        config = ModelConfig.read(artifact.path)
        notes = [f"images are prepared as {processor.kind}ImageProcessor does it with Pillow"]
        if artifact.manifest.task == "feature-extraction":
            notes.append(f"the vector of an image is {_vector_rule(runner, config)[1]}")
        return cls(runner, artifact.manifest.task, processor, config, tuple(notes))

    def classify(
        self, images: Sequence[Any], *, top_k: int, activation: Activation
    ) -> list[Classification]:
        """One classification an image."""
        return self.labels(self._rows(images), top_k=top_k, activation=activation)

    def embed(self, images: Sequence[Any]) -> NDArray[np.float32]:
        """float32 (len(images), dim)."""
        rows = self._rows(images)
        return np.stack(rows) if rows else np.empty((0, self._dim()), np.float32)

    def pixels(self, image: Any, index: int = 0, *, max_pixels: int = 0) -> NDArray[Any]:
        """One image as the graph takes it: (channels, height, width), of the graph's dtype.

        Args:
            image: what `load_image` takes.
            index: its place, for messages.
            max_pixels: the most pixels of an image from a file; 0 for Pillow's own limit.

        Raises:
            InputError: the image cannot be used; the message calls it by its index.
        """
        array = self.processor(load_image(image, name=f"image {index}", max_pixels=max_pixels))
        self._require_fit(array, index)
        return array.astype(self.runner.record.inputs[0].dtype)

    def run(self, arrays: Sequence[NDArray[Any]]) -> list[Any]:
        """One batch of pixels of the same shape: logits, or vectors, of each."""
        spec = self.runner.record.inputs[0]
        fixed = spec.dims[0] if isinstance(spec.dims[0], int) else 0
        rows = self.runner.padded_shape(spec, (len(arrays), *arrays[0].shape))[0]
        outputs = self.runner(fill_rows({spec.name: np.stack(arrays)}, fixed or rows))
        name = "logits"
        if self.task == "feature-extraction":
            name = _vector_rule(self.runner, self.config)[0]
        found = first_rows(outputs, len(arrays))[name]
        if not found.ndim or len(found) != len(arrays):
            raise ArtifactError(
                f"the graph gave {name} with the shape {found.shape} for {len(arrays)} images, "
                "expected a row for each."
            )
        if self.task == "feature-extraction":
            return [self._vector(row.astype(np.float32, copy=False)) for row in found]
        return list(found)

    def labels(
        self, rows: Sequence[Any], *, top_k: int, activation: Activation
    ) -> list[Classification]:
        """One classification a row of `run`."""
        if not rows:
            return []
        return classify_logits(np.stack(rows), self.config, activation, top_k=top_k)

    def most_rows(self, shape: tuple[int, ...]) -> int:
        """The most images of a batch of this (channels, height, width)."""
        spec = self.runner.record.inputs[0]
        if isinstance(spec.dims[0], int):
            return spec.dims[0]
        if not self.runner.profiles:
            return MAX_ROWS
        return self.runner.most_rows(spec, shape) or 1

    def _dim(self) -> int:
        """The size of a vector, from the graph or else from config.json; 0 if neither says it."""
        output, _ = _vector_rule(self.runner, self.config)
        dims = next(s.dims for s in self.runner.record.outputs if s.name == output)
        dim = dims[1] if len(dims) == 4 else dims[-1]
        return dim if isinstance(dim, int) else self.config.hidden_size

    def _vector(self, found: NDArray[np.float32]) -> NDArray[np.float32]:
        if found.ndim == 3:  # a feature map: (channels, height, width)
            return np.asarray(found.mean(axis=(1, 2)))
        if found.ndim == 2:  # tokens: (sequence, dim)
            first = self.config.model_type in _FIRST_TOKEN
            return np.asarray(found[0] if first else found.mean(axis=0))
        return found

    def _rows(self, images: Sequence[Any]) -> list[Any]:
        """What `run` gives for each image, in their order."""
        _require_list(images)
        rows: list[Any] = [None] * len(images)
        waiting: dict[tuple[int, ...], dict[int, NDArray[Any]]] = {}
        for index, image in enumerate(images):
            array = self.pixels(image, index)
            batch = waiting.setdefault(array.shape, {})
            batch[index] = array
            # Pixels are large: a full batch runs before more images are read.
            if len(batch) >= self.most_rows(array.shape):
                self._fill(rows, waiting.pop(array.shape))
        for batch in waiting.values():
            self._fill(rows, batch)
        return rows

    def _fill(self, rows: list[Any], batch: dict[int, NDArray[Any]]) -> None:
        for index, row in zip(batch, self.run(list(batch.values())), strict=True):
            rows[index] = row

    def _require_fit(self, array: NDArray[Any], index: int) -> None:
        spec = self.runner.record.inputs[0]
        for size, dim in zip(array.shape, spec.dims[1:], strict=True):
            if isinstance(dim, int) and size != dim:
                raise InputError(
                    f"image {index} becomes {' × '.join(map(str, array.shape))} by "
                    f"preprocessor_config.json, but the graph takes {spec}.",
                    do="Export the model with a processor that makes the graph's size.",
                )


def _require_list(images: Any) -> None:
    if isinstance(images, str | bytes) or not isinstance(images, Sequence):
        raise InputError(
            f"found one {type(images).__name__}, expected a list of images.", do="Send [image]."
        )


def _vector_rule(runner: OrtRunner, config: ModelConfig) -> tuple[str, str]:
    """The output that vectors are made from, and the rule in words."""
    names = [spec.name for spec in runner.record.outputs]
    for name in _VECTOR_OUTPUTS:
        if name in names:
            return name, f"the graph's {name}"
    if "last_hidden_state" not in names:
        raise ArtifactError(
            f"the graph has the outputs {', '.join(names)}; vectors are made from "
            f"{', '.join(_VECTOR_OUTPUTS)} or last_hidden_state."
        )
    if config.model_type in _FIRST_TOKEN:
        return "last_hidden_state", "the first token of last_hidden_state"
    return "last_hidden_state", "the mean over all places of last_hidden_state"
