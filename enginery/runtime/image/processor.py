"""Preprocess images into pixel_values, as the model's image processor in transformers does.

    processor = ImageProcessor.open(artifact.path)    # reads preprocessor_config.json
    pixels = processor(load_image("cat.jpg"))         # float32 (channels, height, width)

The steps are those of the slow processors, which resize with Pillow. The fast ones resize with
torchvision, and their results differ in the last bits. Rules and defaults are from transformers
4.57, `models/*/image_processing_*.py`.
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
from enginery.core.model.files import MAX_IMAGE_EDGE, ImageSize, PreprocessorConfig
from enginery.runtime.image.files import load_image

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ImageProcessor", "load_image"]

_HALF = [0.5, 0.5, 0.5]
_IMAGENET_MEAN, _IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
_BILINEAR, _BICUBIC = 2, 3

_BASE: dict[str, Any] = {
    "do_resize": True,
    "resample": _BILINEAR,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": _HALF,
    "image_std": _HALF,
}
_CROPPED = {"do_center_crop": True, "crop_size": 224}

# Defaults of each processor. A plain number as `size` means the shortest edge if the default has
# one, else a square.
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
    "Donut": {
        "size": {"height": 2560, "width": 1920},
        "do_align_long_axis": False,
        "do_thumbnail": True,
        "do_pad": True,
    },
}
_CHANNELS = 3
# ConvNeXt crops only below this size; from this size on it resizes the whole image to a square.
_CROP_BELOW = 384
_MAX_INTERMEDIATE_PIXELS = MAX_IMAGE_EDGE**2
"""Maximum number of pixels of an intermediate image, unless the image itself has more."""


@dataclass(frozen=True)
class ImageProcessor:
    """The image preprocessing of one model."""

    kind: str
    """Name of the processor's class without `ImageProcessor`: ViT, ConvNext, …"""
    settings: Mapping[str, Any]
    """The settings of preprocessor_config.json, completed by the processor's defaults."""

    @classmethod
    def open(cls, directory: Path) -> ImageProcessor:
        """Read preprocessor_config.json.

        Raises:
            ArtifactError: the file is missing or malformed, its processor is not supported, or the
                processor cannot produce its sizes.
        """
        file = directory / PreprocessorConfig.FILE
        if not file.is_file():
            raise ArtifactError(
                f"{directory} has no preprocessor_config.json, which is needed to preprocess "
                "images.",
                do="Save the model's image processor in its directory and export again.",
            )
        found = PreprocessorConfig.read(directory)
        name = found.image_processor_type or found.feature_extractor_type
        kind = name
        for ending in ("Fast", "ImageProcessor", "FeatureExtractor"):
            kind = kind.removesuffix(ending)
        if kind not in _DEFAULTS:
            raise ArtifactError(
                f"{file}: image processor '{name}' is not supported{nearest(kind, _DEFAULTS)}",
                do=f"Supported: {', '.join(f'{known}ImageProcessor' for known in _DEFAULTS)}.",
            )
        settings = {**_BASE, **_DEFAULTS[kind]}
        # Ignore keys that the processor does not have: ViT, for example, never crops.
        given = {name: getattr(found, name) for name in settings}
        settings |= {name: value for name, value in given.items() if value is not None}
        by_edge = "shortest_edge" in _DEFAULTS[kind]["size"]
        if found.size is not None:
            settings["size"] = _parse_size(file, "size", found.size, by_edge=by_edge)
        if settings.get("do_center_crop"):
            crop = found.crop_size or ImageSize(edge=settings["crop_size"])
            settings["crop_size"] = _parse_size(file, "crop_size", crop, by_edge=False)
        for name in ("image_mean", "image_std"):
            if np.ndim(settings[name]) and len(settings[name]) not in (1, _CHANNELS):
                raise ArtifactError(
                    f"{file}: {name} has {len(settings[name])} numbers, expected {_CHANNELS}, one "
                    "per channel of an RGB image."
                )
        if kind == "Donut" and "height" not in settings["size"]:
            raise ArtifactError(f"{file}: size is {settings['size']}, expected height and width.")
        if kind == "ConvNext" and "shortest_edge" not in settings["size"]:
            raise ArtifactError(f"{file}: size is {settings['size']}, expected a shortest_edge.")
        return cls(kind, settings)

    def __call__(self, image: Image, *, name: str = "image") -> NDArray[np.float32]:
        """Preprocess one RGB image.

        Args:
            image: the image.
            name: what error messages call it.

        Returns:
            float32 (3, height, width).

        Raises:
            InputError: the image is so narrow that an intermediate image would be too large.
        """
        settings = self.settings
        if settings.get("do_align_long_axis"):
            image = _turned(image, settings["size"])
        if settings["do_resize"]:
            image = self._resize(image, name)
        if settings.get("do_thumbnail"):
            image = _thumbnail(image, settings["size"])
        pixels = np.asarray(image)
        if settings.get("do_pad"):
            return self._normalize(_pad(pixels, settings["size"], name)).transpose(2, 0, 1)
        if self.kind == "ConvNext" and settings["do_resize"]:
            edge = settings["size"]["shortest_edge"]
            pixels = center_crop(pixels, edge, edge, name)
        elif settings.get("do_center_crop"):
            crop = settings["crop_size"]
            pixels = center_crop(pixels, crop["height"], crop["width"], name)
        return self._normalize(pixels).transpose(2, 0, 1)

    def _resize(self, image: Image, name: str) -> Image:
        size = self.settings["size"]
        if self.kind == "Donut":
            size = {"shortest_edge": min(size.values())}
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
        return resize(image, (width, height), self.settings["resample"], name)

    def _normalize(self, pixels: NDArray[Any]) -> NDArray[np.float32]:
        settings = self.settings
        scaled = pixels.astype(np.float32)
        if settings["do_rescale"]:
            # In float64 and then rounded to float32, as in transformers.
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


def resize(image: Image, size: tuple[int, int], resample: int | None, name: str) -> Image:
    """Resize an image.

    Args:
        image: the image.
        size: (width, height) in pixels.
        resample: Pillow's number of the filter.
        name: what error messages call the image.

    Raises:
        InputError: the result, or the image between Pillow's two passes, is too large.
    """
    width, height = size
    # Pillow resizes the rows first: between its two passes an image still has its old height.
    _check_pixels(name, image.size, width, max(height, image.height))
    return image.resize(size, resample=resample)


def _turned(image: Image, size: Mapping[str, int]) -> Image:
    """Turn an image clockwise if it lies where `size` stands, or stands where that lies."""
    from PIL.Image import Transpose

    lies, stands = image.width > image.height, image.width < image.height
    if (size["width"] < size["height"] and lies) or (size["width"] > size["height"] and stands):
        return image.transpose(Transpose.ROTATE_270)
    return image


def _thumbnail(image: Image, size: Mapping[str, int]) -> Image:
    """Shrink an image to fit into `size`."""
    width, height = min(image.width, size["width"]), min(image.height, size["height"])
    if (width, height) == image.size:
        return image
    if image.height > image.width:
        width = int(image.width * height / image.height)
    elif image.width > image.height:
        height = int(image.height * width / image.width)
    return image.resize((max(width, 1), max(height, 1)), resample=_BICUBIC, reducing_gap=2.0)


def _pad(pixels: NDArray[Any], size: Mapping[str, int], name: str) -> NDArray[Any]:
    """Pad pixels (rows, columns, channels) with black on all sides.

    Raises:
        InputError: the image is larger than `size`.
    """
    missing = [size["height"] - pixels.shape[0], size["width"] - pixels.shape[1]]
    if min(missing) < 0:
        raise InputError(
            f"{name} has {pixels.shape[1]} × {pixels.shape[0]} pixels, expected at most "
            f"{size['width']} × {size['height']}.",
            do="Shrink it: the model's image processor does not.",
        )
    rows, columns = ((total // 2, total - total // 2) for total in missing)
    return np.pad(pixels, (rows, columns, (0, 0)))


def center_crop(pixels: NDArray[Any], height: int, width: int, name: str = "image") -> NDArray[Any]:
    """Crop the centre of pixels (rows, columns, channels); pad with black if they are too few.

    Raises:
        InputError: the padded image is too large.
    """
    rows, columns = pixels.shape[:2]
    padded_rows, padded_columns = max(rows, height), max(columns, width)
    _check_pixels(name, (columns, rows), padded_columns, padded_rows)
    # The rounding here and below follows transformers' center_crop.
    row_before = math.ceil((padded_rows - rows) / 2)
    column_before = math.ceil((padded_columns - columns) / 2)
    padded = np.zeros((padded_rows, padded_columns, pixels.shape[2]), dtype=pixels.dtype)
    padded[row_before : row_before + rows, column_before : column_before + columns] = pixels
    top = (rows - height) // 2 + row_before
    left = (columns - width) // 2 + column_before
    return padded[max(0, top) : top + height, max(0, left) : left + width]


def _check_pixels(name: str, size: tuple[int, int], width: int, height: int) -> None:
    """Raise InputError if a step would turn an image of `size` into one with too many pixels."""
    most = max(_MAX_INTERMEDIATE_PIXELS, size[0] * size[1])
    if width * height > most:
        raise InputError(
            f"{name} has {size[0]} × {size[1]} pixels; to resize it, an image of {width} × "
            f"{height} pixels would be needed, expected at most {most:,} pixels.",
            do="Crop it to about the proportions of the model's images.",
        )


def _parse_size(file: Path, name: str, size: ImageSize, *, by_edge: bool) -> dict[str, int]:
    """Return a size as {height, width} or {shortest_edge}."""
    if size.longest > MAX_IMAGE_EDGE:
        raise ArtifactError(
            f"{file}: {name} is {size.longest}, expected at most {MAX_IMAGE_EDGE} pixels."
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
