"""Image classification and image embedding."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError
from enginery.core.model.files import ModelConfig
from enginery.runtime.image.files import load_image
from enginery.runtime.image.processor import PIXEL_MASK, ImageProcessor
from enginery.runtime.tasks.classify import LabelOptions, LabelResults
from enginery.runtime.tasks.embed import VectorOptions, finish_vectors, require_dimensions
from enginery.runtime.tasks.task import (
    NO_LIMITS,
    Arrays,
    InputField,
    InputLimits,
    MediaTask,
    ModelInputs,
    Row,
    output_rows,
    require_outputs,
    require_shapes,
)
from enginery.runtime.text.pooling import Vectors

_VECTOR_OUTPUTS = ("image_embeds", "pooler_output")
EXAMPLE_SIDE = 64
# Model types whose first token (CLS) represents the whole image.
_FIRST_TOKEN = ("vit", "deit", "beit", "data2vec-vision", "dinov2", "vit_mae", "vit_msn")


@dataclass
class ImageTask(MediaTask):
    """Base of tasks on images: a graph with its image processor and config.json."""

    modality = "image"
    inputs = (InputField("image"),)

    processor: ImageProcessor
    config: ModelConfig
    max_pixels: int = 0
    """Maximum number of pixels of an image file; 0 for Pillow's own limit."""

    @classmethod
    def open(cls, artifact: Artifact, record: GraphRecord, limits: InputLimits = NO_LIMITS) -> Self:
        """Read preprocessor_config.json and config.json; see `RowTask.open`."""
        inputs = [spec for spec in record.inputs if spec.name != PIXEL_MASK]
        if len(inputs) != 1 or len(inputs[0].dims) != 4 or inputs[0].dims[1] not in (3, "channels"):
            declared = "; ".join(str(spec) for spec in record.inputs)
            raise ArtifactError(
                f"{artifact.path}: the graph takes {declared}; "
                "expected one input, pixel_values (batch, 3, height, width)."
            )
        require_outputs(artifact.manifest.task, record, cls.graph_outputs)
        processor = ImageProcessor.open(artifact.path)
        config = ModelConfig.read(artifact.path)
        notes = (f"images are preprocessed as by {processor.kind}ImageProcessor with Pillow",)
        return cls(
            record=record,
            processor=processor,
            config=config,
            notes=notes,
            max_pixels=limits.max_pixels,
        )

    def read_row(self, item: Any, index: int = 0) -> Row:
        """Preprocess an image: a path, a file's content, a Pillow image, or a uint8 array."""
        name = f"image {index}"
        opened = load_image(item, name=name, max_pixels=self.max_pixels)
        array = self.processor(opened, name=name)
        content = {
            spec.name: self.processor.mask(opened, array)
            if spec.name == PIXEL_MASK
            else array.astype(spec.dtype)
            for spec in self.record.inputs
        }
        require_shapes(
            content,
            self.record,
            name,
            do="Export the model with an image processor that produces the graph's size.",
        )
        return Row(content, image_size=(opened.height, opened.width))


@dataclass
class ClassifyImages(LabelResults, ImageTask):
    """Classify images."""

    verb = "classify_images"
    purpose = "classifies images"
    tasks = ("image-classification",)
    Options = LabelOptions


@dataclass
class EmbedImages(ImageTask):
    """Embed images; `notes` states which output of the graph the vectors come from."""

    verb = "embed_images"
    purpose = "embeds images"
    tasks = ("feature-extraction",)
    result_type = Vectors
    Options = VectorOptions

    @classmethod
    def open(cls, artifact: Artifact, record: GraphRecord, limits: InputLimits = NO_LIMITS) -> Self:
        """Read the model's files and choose the output for vectors; see `RowTask.open`."""
        task = super().open(artifact, record, limits)
        task.notes += (f"the vector of an image is {_vector_rule(record, task.config)[1]}",)
        return task

    @property
    def graph_dim(self) -> int:
        """The size of a vector, from the graph or config.json; 0 if neither declares it."""
        output, _ = _vector_rule(self.record, self.config)
        dims = next(spec.dims for spec in self.record.outputs if spec.name == output)
        dim = dims[1] if len(dims) == 4 else dims[-1]
        return dim if isinstance(dim, int) else self.config.hidden_size

    def preprocess(self, inputs: Sequence[Any], options: VectorOptions) -> ModelInputs:
        """Preprocess each image into one row."""
        if options.dimensions:
            require_dimensions(options, self.graph_dim)
        return super().preprocess(inputs, options)

    def split(
        self, rows: Sequence[Row], feeds: Mapping[str, NDArray[Any]], outputs: Arrays
    ) -> list[Any]:
        """Return the vector of each image: float32 (dim,)."""
        vectors = output_rows(outputs, _vector_rule(self.record, self.config)[0], rows)
        return [self._vector(row.astype(np.float32, copy=False)) for row in vectors]

    def postprocess(
        self, work: ModelInputs, outputs: Sequence[Any], options: VectorOptions
    ) -> NDArray[Any]:
        """Return the vectors, (images, dim)."""
        return finish_vectors(outputs, options, dim=self.graph_dim, model_normalizes=False)

    def describe(self, result: Vectors) -> str:
        """Return the number of dims."""
        return f"{len(result)} dims"

    def _vector(self, output: NDArray[np.float32]) -> NDArray[np.float32]:
        if output.ndim == 3:  # a feature map: (channels, height, width)
            return np.asarray(output.mean(axis=(1, 2)))
        if output.ndim == 2:  # tokens: (sequence, dim)
            first = self.config.model_type in _FIRST_TOKEN
            return np.asarray(output[0] if first else output.mean(axis=0))
        return output


def _vector_rule(record: GraphRecord, config: ModelConfig) -> tuple[str, str]:
    """Return the output to compute vectors from, and a description of the rule."""
    names = [spec.name for spec in record.outputs]
    for name in _VECTOR_OUTPUTS:
        if name in names:
            return name, f"the graph's {name}"
    if "last_hidden_state" not in names:
        raise ArtifactError(
            f"the graph has the outputs {', '.join(names)}, expected "
            f"{', '.join(_VECTOR_OUTPUTS)} or last_hidden_state to embed images."
        )
    if config.model_type in _FIRST_TOKEN:
        return "last_hidden_state", "the first token of last_hidden_state"
    return "last_hidden_state", "the mean over all positions of last_hidden_state"


def example_png(height: int = EXAMPLE_SIDE, width: int = EXAMPLE_SIDE) -> bytes:
    """Return a small PNG of colored stripes."""
    from PIL import Image

    stripes = np.zeros((height, width, 3), np.uint8)
    for channel in range(3):  # equal rows, which PNG stores in a few hundred bytes
        stripes[:, channel * width // 3 : (channel + 1) * width // 3, channel] = 200
    content = io.BytesIO()
    Image.fromarray(stripes).save(content, "png")
    return content.getvalue()
