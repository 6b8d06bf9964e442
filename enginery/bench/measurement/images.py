"""Inputs from a folder of images of any size.

    inputs = ImageInputs.open(target, BenchConfig(images="photos"))
    inputs.feeds(inputs.files[0])["x"].shape  # (1, 3, 704, 960)

Images are preprocessed by the artifact's own processor if it has one. Otherwise the graph gets RGB
or gray values from 0 to 1. If height and width are dynamic, the image keeps its size, rounded to
the nearest multiple; otherwise the image is scaled to the fixed size. The values do not matter for
speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from enginery.bench.config import BenchConfig
from enginery.bench.target import IMAGE_AXES, Target, image_layout
from enginery.core.datasets.folders import list_images
from enginery.core.errors import OptionError, ShapeError
from enginery.core.model.feeds import Feeds
from enginery.core.shapes import TensorSpec
from enginery.runtime.image.files import load_image
from enginery.runtime.image.processor import PIXEL_MASK, ImageProcessor, resize

if TYPE_CHECKING:
    from PIL.Image import Image

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


@dataclass(frozen=True)
class ImageInputs:
    """The images of a folder and their conversion to inputs of a graph."""

    files: list[Path]
    spec: TensorSpec
    """The graph's input of pixels."""
    layout: Literal["first", "last"]
    multiple: int
    processor: ImageProcessor | None
    """The artifact's own processor; None if it has none."""
    masked: bool = False
    """True if the graph takes a mask of the pixels, too."""

    @classmethod
    def open(cls, target: Target, config: BenchConfig) -> ImageInputs:
        """List the images, and check that the graph accepts them.

        Raises:
            OptionError: the graph does not have a single image input.
            ShapeError: the graph has a fixed batch of several images.
            InputError: the folder does not exist or contains no images.
        """
        inputs = [spec for spec in target.record.inputs if spec.name != PIXEL_MASK]
        if len(inputs) != 1:
            listed = "; ".join(str(spec) for spec in inputs)
            raise OptionError(
                f"option 'images': {target.name} takes {listed}, expected a single image input."
            )
        (spec,) = inputs
        layout = image_layout(spec)
        if isinstance(spec.dims[0], int) and spec.dims[0] != 1:
            raise ShapeError(
                f"option 'images': {target.name} has a fixed batch of {spec.dims[0]}, expected 1 "
                "or a dynamic batch: images of different sizes cannot share one."
            )
        files = list_images(Path(config.images).expanduser(), rows=config.rows)
        has_processor = (target.artifact.path / "preprocessor_config.json").is_file()
        processor = None
        if has_processor and not target.is_onnx_file:
            processor = ImageProcessor.open(target.artifact.path)
        masked = len(inputs) < len(target.record.inputs)
        return cls(files, spec, layout, config.multiple, processor, masked)

    def feeds(self, file: Path) -> Feeds:
        """Return an image as the graph's input.

        Returns:
            Input name -> array (1, channels, height, width) or (1, height, width, channels).

        Raises:
            InputError: the image cannot be read.
        """
        image = load_image(file)
        name = f"image ({file})"
        pixels = (
            self.processor(image, name=name)[None] if self.processor else self._pixels(image, name)
        )
        feeds = {self.spec.name: np.ascontiguousarray(pixels.astype(self.spec.dtype, copy=False))}
        if self.masked and self.processor:
            feeds[PIXEL_MASK] = self.processor.mask(image, pixels[0])[None]
        elif self.masked:
            feeds[PIXEL_MASK] = np.ones((1, *pixels.shape[2:]), np.int64)
        return feeds

    def _pixels(self, image: Image, name: str) -> NDArray[Any]:
        dims = dict(zip(IMAGE_AXES[self.layout], self.spec.dims, strict=True))
        channels = dims["channels"] if isinstance(dims["channels"], int) else 3
        sizes = {"width": image.width, "height": image.height}
        for side, size in sizes.items():
            fixed = dims[side]
            rounded = max(1, round(size / self.multiple)) * self.multiple
            sizes[side] = fixed if isinstance(fixed, int) else rounded
        converted = image.convert(_MODES[channels])
        scaled = resize(converted, (sizes["width"], sizes["height"]), None, name)
        pixels = np.asarray(scaled).reshape(sizes["height"], sizes["width"], channels)[None]
        if self.spec.dtype != "uint8":
            pixels = pixels.astype("float32") / 255
        return pixels.transpose(0, 3, 1, 2) if self.layout == "first" else pixels
