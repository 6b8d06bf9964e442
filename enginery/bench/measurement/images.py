"""A folder of images of any sizes, each as the input of a graph by itself.

>>> inputs = ImageInputs.of(subject, BenchConfig(images="photos"))
>>> inputs.feeds(inputs.files[0])["x"].shape
(1, 3, 704, 960)

An artifact with a processor prepares its images by that. Any other graph gets RGB (or gray) from
0 to 1 at the image's own size, scaled to the nearest multiple where height and width are free, and
to the graph's own size where they are fixed: what the numbers mean does not matter for time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from enginery.bench.config import BenchConfig
from enginery.bench.target import Subject, image_layout
from enginery.core.datasets.images import list_images
from enginery.core.errors import OptionError, ShapeError
from enginery.core.model.feeds import Feeds
from enginery.core.shapes import TensorSpec
from enginery.runtime.image.files import load_image
from enginery.runtime.image.processor import ImageProcessor, resize

if TYPE_CHECKING:
    from PIL.Image import Image

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


@dataclass(frozen=True)
class ImageInputs:
    """The images of a folder, and how they become inputs."""

    files: list[Path]
    spec: TensorSpec
    layout: Literal["first", "last"]
    multiple: int
    processor: ImageProcessor | None

    @classmethod
    def of(cls, subject: Subject, config: BenchConfig) -> ImageInputs:
        """Lists the images and looks at the graph.

        Raises:
            OptionError: the graph has other inputs than one image.
            ShapeError: it takes several images at once, and no single one.
            InputError: there is no such folder, or no image in it.
        """
        inputs = subject.record.inputs
        if len(inputs) != 1:
            found = "; ".join(str(spec) for spec in inputs)
            raise OptionError(
                f"option 'images': {subject.name} takes {found}, expected one image alone."
            )
        (spec,) = inputs
        layout = image_layout(spec)
        if isinstance(spec.dims[0], int) and spec.dims[0] != 1:
            raise ShapeError(
                f"option 'images': {subject.name} takes {spec.dims[0]} images at once, and images "
                "of different sizes cannot share a batch."
            )
        files = list_images(Path(config.images).expanduser(), rows=config.rows)
        has_processor = (subject.artifact.path / "preprocessor_config.json").is_file()
        processor = None
        if has_processor and not subject.is_bare:
            processor = ImageProcessor.open(subject.artifact.path)
        return cls(files, spec, layout, config.multiple, processor)

    def feeds(self, file: Path) -> Feeds:
        """One image, (1, channels, height, width) or with the channels last.

        Raises:
            InputError: it cannot be read.
        """
        image = load_image(file)
        name = f"image ({file})"
        pixels = (
            self.processor(image, name=name)[None] if self.processor else self._pixels(image, name)
        )
        return {self.spec.name: np.ascontiguousarray(pixels.astype(self.spec.dtype, copy=False))}

    def _pixels(self, image: Image, name: str) -> NDArray[Any]:
        dims: dict[str, int | str] = dict(
            zip(
                ("batch", "channels", "height", "width")
                if self.layout == "first"
                else ("batch", "height", "width", "channels"),
                self.spec.dims,
                strict=True,
            )
        )
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
