"""Images into pixel_values, as the model's own transformers processor makes them.

Takes `preprocessor_config.json`; leaves float32 (channels, height, width) for each image.

    >>> processor = ImageProcessor.open(artifact.path)
    >>> processor(load_image("cat.jpg")).shape
    (3, 224, 224)

The steps are those of the slow processors, which resize with Pillow; the fast ones resize with
torchvision and differ in the last bits. Rules and
defaults: transformers 4.57, `models/*/image_processing_*.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import ArtifactError, InputError, nearest
from enginery.core.model_files import MAX_IMAGE_EDGE, ImageSize, PreprocessorConfig
from enginery.runtime.image_files import load_image

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ImageProcessor", "load_image"]

_HALF = [0.5, 0.5, 0.5]
_IMAGENET_MEAN, _IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
_BILINEAR, _BICUBIC = 2, 3

_BASE: dict[str, Any] = {
    "do_resize": True, "resample": _BILINEAR, "do_rescale": True, "rescale_factor": 1 / 255,
    "do_normalize": True, "image_mean": _HALF, "image_std": _HALF,
}  # fmt: skip
_CROPPED = {"do_center_crop": True, "crop_size": 224}

# What each processor assumes where its config is silent. A bare number as `size` is the shortest
# edge where the default is one, else a square.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "ViT": {"size": {"height": 224, "width": 224}},
    "DeiT": {"size": {"height": 256, "width": 256}, "resample": _BICUBIC, **_CROPPED},
    "Beit": {"size": {"height": 256, "width": 256}, "resample": _BICUBIC, **_CROPPED},
    "Siglip": {"size": {"height": 224, "width": 224}, "resample": _BICUBIC},
    "Pvt": {
        "size": {"height": 224, "width": 224},
        "image_mean": _IMAGENET_MEAN,
        "image_std": _IMAGENET_STD,
    },
    "ConvNext": {"size": {"shortest_edge": 384}, "crop_pct": 224 / 256},
    "CLIP": {
        "size": {"shortest_edge": 224},
        "resample": _BICUBIC,
        "image_mean": _CLIP_MEAN,
        "image_std": _CLIP_STD,
        **_CROPPED,
    },
    "Bit": {
        "size": {"shortest_edge": 224},
        "resample": _BICUBIC,
        "image_mean": _CLIP_MEAN,
        "image_std": _CLIP_STD,
        **_CROPPED,
    },
    "MobileNetV1": {"size": {"shortest_edge": 256}, **_CROPPED},
    "MobileNetV2": {"size": {"shortest_edge": 256}, **_CROPPED},
    "EfficientNet": {
        "size": {"height": 346, "width": 346},
        "resample": 0,
        "do_center_crop": False,
        "crop_size": 289,
        "rescale_offset": False,
        "include_top": True,
    },
}
_CHANNELS = 3
# ConvNeXt's rule: from this size on the whole image is squeezed into the square.
_CROP_BELOW = 384
_MAX_PREPARED_PIXELS = MAX_IMAGE_EDGE**2
"""Of an image between two steps, unless it comes with more: the largest size in a config."""


@dataclass(frozen=True)
class ImageProcessor:
    """One model's image preprocessing."""

    kind: str
    """The processor's name without its ending: ViT, ConvNext, …"""
    settings: Mapping[str, Any]
    """preprocessor_config.json over the processor's defaults."""

    @classmethod
    def open(cls, directory: Path) -> ImageProcessor:
        """Reads preprocessor_config.json.

        Raises:
            ArtifactError: it is missing or malformed, names a processor that is not known here,
                or asks for sizes that the processor cannot make.
        """
        file = directory / PreprocessorConfig.FILE
        if not file.is_file():
            raise ArtifactError(
                f"{directory} has no preprocessor_config.json, so it is not known how images "
                "become pixels.",
                do="Save the model's image processor in its directory and export again.",
            )
        found = PreprocessorConfig.read(directory)
        name = found.image_processor_type or found.feature_extractor_type
        kind = name
        for ending in ("Fast", "ImageProcessor", "FeatureExtractor"):
            kind = kind.removesuffix(ending)
        if kind not in _DEFAULTS:
            raise ArtifactError(
                f"{file}: image processor '{name}' is not known{nearest(kind, _DEFAULTS)}",
                do=f"Known: {', '.join(f'{known}ImageProcessor' for known in _DEFAULTS)}.",
            )
        settings = {**_BASE, **_DEFAULTS[kind]}
        # Keys that the processor does not read have no effect: ViT never crops.
        given = {name: getattr(found, name) for name in settings}
        settings |= {name: value for name, value in given.items() if value is not None}
        by_edge = "shortest_edge" in _DEFAULTS[kind]["size"]
        if found.size is not None:
            settings["size"] = _size(file, "size", found.size, by_edge=by_edge)
        if settings.get("do_center_crop"):
            crop = found.crop_size or ImageSize(edge=settings["crop_size"])
            settings["crop_size"] = _size(file, "crop_size", crop, by_edge=False)
        for name in ("image_mean", "image_std"):
            if np.ndim(settings[name]) and len(settings[name]) not in (1, _CHANNELS):
                raise ArtifactError(
                    f"{file}: {name} has {len(settings[name])} numbers, expected {_CHANNELS}, one "
                    "for each channel of an RGB image."
                )
        if kind == "ConvNext" and "shortest_edge" not in settings["size"]:
            raise ArtifactError(f"{file}: size {settings['size']}, expected a shortest_edge.")
        return cls(kind, settings)

    def __call__(self, image: Image, *, name: str = "image") -> NDArray[np.float32]:
        """Return the pixels of one RGB image; messages call it `name`.

        Returns:
            float32 (3, height, width).

        Raises:
            InputError: the image is so narrow that a step would make far more pixels of it.
        """
        settings = self.settings
        if settings["do_resize"]:
            image = self._resized(image, name)
        pixels = np.asarray(image)
        if self.kind == "ConvNext" and settings["do_resize"]:
            edge = settings["size"]["shortest_edge"]
            pixels = center_crop(pixels, edge, edge, name)
        elif settings.get("do_center_crop"):
            crop = settings["crop_size"]
            pixels = center_crop(pixels, crop["height"], crop["width"], name)
        return self._scaled(pixels).transpose(2, 0, 1)

    def _resized(self, image: Image, name: str) -> Image:
        size = self.settings["size"]
        if "height" in size:
            width, height = size["width"], size["height"]
        else:
            edge = int(size["shortest_edge"])
            if self.kind == "ConvNext" and edge >= _CROP_BELOW:
                width, height = edge, edge
            else:
                if self.kind == "ConvNext":
                    edge = int(edge / self.settings["crop_pct"])
                short, long = sorted(image.size)
                other = int(edge * long / short)
                width, height = (edge, other) if image.width <= image.height else (other, edge)
        return resized(image, (width, height), self.settings["resample"], name)

    def _scaled(self, pixels: NDArray[Any]) -> NDArray[np.float32]:
        settings = self.settings
        scaled = pixels.astype(np.float32)
        if settings["do_rescale"]:
            # In float64 and then down to float32, as transformers does it.
            scaled = (pixels.astype(np.float64) * settings["rescale_factor"]).astype(np.float32)
            if settings.get("rescale_offset"):
                scaled = scaled - np.float32(1)
        mean = np.asarray(settings["image_mean"], dtype=np.float32)
        std = np.asarray(settings["image_std"], dtype=np.float32)
        if settings["do_normalize"]:
            scaled = (scaled - mean) / std
        if settings.get("include_top"):
            scaled = scaled / std
        return np.asarray(scaled, dtype=np.float32)


def resized(image: Image, size: tuple[int, int], resample: int | None, name: str) -> Image:
    """Return an image of this (width, height); `resample` is Pillow's number of the filter.

    Raises:
        InputError: one of the sizes on the way is too large.
    """
    width, height = size
    # Pillow resizes rows first: between the two passes an image has its old height.
    _require_fit(name, image.size, width, max(height, image.height))
    return image.resize(size, resample=resample)


def center_crop(pixels: NDArray[Any], height: int, width: int, name: str = "image") -> NDArray[Any]:
    """Return the middle of (rows, columns, channels), black around it where it is too small.

    Raises:
        InputError: the image with what is put around it is too large.
    """
    rows, columns = pixels.shape[:2]
    padded_rows, padded_columns = max(rows, height), max(columns, width)
    _require_fit(name, (columns, rows), padded_columns, padded_rows)
    # The rounding here and below is that of transformers' center_crop.
    row_before = math.ceil((padded_rows - rows) / 2)
    column_before = math.ceil((padded_columns - columns) / 2)
    padded = np.zeros((padded_rows, padded_columns, pixels.shape[2]), dtype=pixels.dtype)
    padded[row_before : row_before + rows, column_before : column_before + columns] = pixels
    top = (rows - height) // 2 + row_before
    left = (columns - width) // 2 + column_before
    return padded[max(0, top) : top + height, max(0, left) : left + width]


def _require_fit(name: str, size: tuple[int, int], width: int, height: int) -> None:
    """Raise InputError where a step would make too many pixels of an image of this size."""
    most = max(_MAX_PREPARED_PIXELS, size[0] * size[1])
    if width * height > most:
        raise InputError(
            f"{name} has {size[0]} × {size[1]} pixels and would become {width} × {height} on its "
            f"way to the model's size; at most {most:,} pixels are made.",
            do="Cut it to about the proportions of the model's images.",
        )


def _size(file: Path, name: str, size: ImageSize, *, by_edge: bool) -> dict[str, int]:
    """Return a size as {height, width} or {shortest_edge}."""
    if size.longest > MAX_IMAGE_EDGE:
        raise ArtifactError(
            f"{file}: {name} is {size.longest}, expected {MAX_IMAGE_EDGE} pixels at most."
        )
    if size.edge is not None:
        by_name = {"shortest_edge": size.edge}
        return by_name if by_edge else {"height": size.edge, "width": size.edge}
    if size.height is not None and size.width is not None:
        return {"height": size.height, "width": size.width}
    if size.shortest_edge is not None and name == "size":
        return {"shortest_edge": size.shortest_edge}
    raise ArtifactError(
        f"{file}: {name} is {size.model_dump(exclude_none=True)}, expected a number, height and "
        "width, or a shortest_edge."
    )
