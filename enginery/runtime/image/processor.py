"""Preprocess images into pixel_values, as the model's image processor in transformers does.

    processor = ImageProcessor.open(artifact.path)    # reads preprocessor_config.json
    pixels = processor(load_image("cat.jpg"))         # float32 (channels, height, width)

The steps are those of the class that the file names. The slow classes resize with Pillow, as is
done here; the fast ones resize with torchvision, and their results differ in the last bits. Rules
and defaults are from transformers 4.57, `models/*/image_processing_*.py`.
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
from enginery.runtime.image.sizes import size_keys, target_size

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ImageProcessor", "load_image"]

PIXELS = "pixel_values"
PIXEL_MASK = "pixel_mask"
"""Input of graphs that read which pixels are not padding."""

_HALF = [0.5, 0.5, 0.5]
_NEAREST, _BILINEAR, _BICUBIC = 0, 2, 3

_BASE: dict[str, Any] = {
    "do_resize": True,
    "resample": _BILINEAR,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": _HALF,
    "image_std": _HALF,
}
_IMAGENET: dict[str, Any] = {
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}
_DETECTOR: dict[str, Any] = {
    "size": {"shortest_edge": 800, "longest_edge": 1333},
    # Without a size, padding is up to the largest image of a batch: one image has none.
    "do_pad": True,
    "pad_size": None,
    **_IMAGENET,
}
_LONGEST_EDGE = 1333
_CROPPED = {"do_center_crop": True, "crop_size": 224}

_CLIP: dict[str, Any] = {
    "size": {"shortest_edge": 224},
    "resample": _BICUBIC,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    **_CROPPED,
}

# Defaults of each processor. A plain number as `size` means the shortest edge if the default has
# one, else a square.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "ViT": {"size": {"height": 224, "width": 224}},
    "LayoutLMv3": {"size": {"height": 224, "width": 224}},
    "DeiT": {"size": {"height": 256, "width": 256}, "resample": _BICUBIC, **_CROPPED},
    "Beit": {"size": {"height": 256, "width": 256}, "resample": _BICUBIC, **_CROPPED},
    "Siglip": {"size": {"height": 224, "width": 224}, "resample": _BICUBIC},
    "Pvt": {"size": {"height": 224, "width": 224}, **_IMAGENET},
    "ConvNext": {"size": {"shortest_edge": 384}, "crop_pct": 224 / 256},
    "CLIP": _CLIP,
    "Bit": _CLIP,
    "ChineseCLIP": _CLIP,
    "OwlViT": {
        **_CLIP,
        "size": {"height": 768, "width": 768},
        "do_center_crop": False,
        "crop_size": 768,
    },
    "Levit": {"size": {"shortest_edge": 224}, "resample": _BICUBIC, **_IMAGENET, **_CROPPED},
    "PoolFormer": {
        "size": {"shortest_edge": 224},
        "resample": _BICUBIC,
        "crop_pct": 0.9,
        **_IMAGENET,
        **_CROPPED,
    },
    "MobileViT": {
        "size": {"shortest_edge": 224},
        "do_normalize": False,
        "do_center_crop": True,
        "crop_size": 256,
        "do_flip_channel_order": True,
    },
    "Segformer": {"size": {"height": 512, "width": 512}, **_IMAGENET},
    "DPT": {
        "size": {"height": 384, "width": 384},
        "resample": _BICUBIC,
        "keep_aspect_ratio": False,
        "ensure_multiple_of": 1,
        "do_pad": False,
        "size_divisor": None,
    },
    "GLPN": {"size": {}, "size_divisor": 32, "do_normalize": False},
    "Swin2SR": {
        "size": {},
        "size_divisor": 8,
        "do_resize": False,
        "do_normalize": False,
        "do_pad": True,
    },
    "Sam": {
        "size": {"longest_edge": 1024},
        "do_pad": True,
        "pad_size": {"height": 1024, "width": 1024},
        **_IMAGENET,
    },
    "MaskFormer": {**_DETECTOR, "size_divisor": 32},
    "Mask2Former": {**_DETECTOR, "size_divisor": 32},
    "Detr": _DETECTOR,
    "ConditionalDetr": _DETECTOR,
    "DeformableDetr": _DETECTOR,
    "Yolos": _DETECTOR,
    "RTDetr": {
        **_DETECTOR,
        "size": {"height": 640, "width": 640},
        "do_normalize": False,
        "do_pad": False,
    },
    # Of .onnx files: the options of their import.
    "Raw": {
        "size": {"height": 224, "width": 224},
        "image_mean": 0.0,
        "image_std": 1.0,
        "channel_order": "rgb",
    },
    # Of timm: what export writes, because its models come without such a file.
    "Timm": {"size": {"shortest_edge": 256}, "resample": _BICUBIC, **_IMAGENET, **_CROPPED},
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
# Steps that the fast classes of these processors have, and the slow ones do not.
_FAST_CROPS = frozenset({"ViT", "Siglip", "Pvt", "ConvNext", "DPT"})
_FAST_PADS = frozenset(
    {"ViT", "DeiT", "Siglip", "Pvt", "CLIP", "Bit", "ChineseCLIP", "Levit", "MobileNetV1"}
)
# Steps that a processor does not have, whatever its file says.
_LACKS = {
    "GLPN": {"do_normalize", "size"},
    "MobileViT": {"do_normalize"},
    "Swin2SR": {"do_resize", "do_normalize", "size"},
}
_CHANNELS = 3
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
                do="Save the model's image processor in its directory and export again; an .onnx "
                "file with --resize, --mean and --std.",
            )
        config = PreprocessorConfig.read(directory)
        name = config.image_processor_type or config.feature_extractor_type
        kind = name
        # In this order, for `ViTImageProcessorFast`.
        for ending in ("Fast", "Pil", "ImageProcessor", "FeatureExtractor"):
            kind = kind.removesuffix(ending)
        # Another processor's arithmetic may differ in any step, so that nothing is guessed.
        if kind not in _DEFAULTS:
            raise ArtifactError(
                f"{file}: image processor '{name}' is not supported{nearest(kind, _DEFAULTS)}",
                do=f"Supported: {', '.join(f'{key}ImageProcessor' for key in _DEFAULTS)}.",
            )
        settings = {**_BASE, **_DEFAULTS[kind], "fast": name.endswith("Fast")}
        settings["pil"] = name.endswith("Pil")
        if settings["fast"] and kind in _FAST_CROPS:
            settings |= {"do_center_crop": False, "crop_size": None}
        if settings["fast"] and kind in _FAST_PADS:
            settings |= {"do_pad": False, "pad_size": None}
        # Ignore keys that the processor does not have: ViT, for example, never crops.
        supported = settings.keys() - _LACKS.get(kind, set()) - {"fast", "pil"}
        values = {name: getattr(config, name) for name in supported}
        settings |= {name: value for name, value in values.items() if value is not None}
        default = _DEFAULTS[kind]["size"]
        if config.size is not None and "size" in supported:
            longest = config.max_size or _LONGEST_EDGE
            settings["size"] = _parse_size(file, "size", config.size, default, longest)
            if settings["size"].keys() not in size_keys(kind):
                accepted = ", or ".join(" and ".join(sorted(keys)) for keys in size_keys(kind))
                raise ArtifactError(f"{file}: size is {settings['size']}, expected {accepted}.")
        if config.pad_size is not None and "pad_size" in settings:
            settings["pad_size"] = _parse_size(file, "pad_size", config.pad_size, _SQUARE)
        if settings.get("do_center_crop"):
            crop = config.crop_size or ImageSize(edge=settings["crop_size"])
            if not crop.longest:
                raise ArtifactError(f"{file}: do_center_crop is true, but crop_size is missing.")
            settings["crop_size"] = _parse_size(file, "crop_size", crop, _SQUARE)
        if kind in ("GLPN", "Swin2SR") and not settings["size_divisor"]:
            raise ArtifactError(f"{file}: size_divisor is 0, expected a number from 1.")
        for name in ("image_mean", "image_std"):
            if np.ndim(settings[name]) and len(settings[name]) not in (1, _CHANNELS):
                raise ArtifactError(
                    f"{file}: {name} has {len(settings[name])} numbers, expected {_CHANNELS}, one "
                    "per channel of an RGB image."
                )
        return cls(kind, settings)

    def __call__(self, image: Image, *, name: str = "image") -> NDArray[np.float32]:
        """Preprocess one RGB image.

        Args:
            image: the image.
            name: what error messages call it.

        Returns:
            float32 (3, height, width); (1, height, width) for a graph of gray images.

        Raises:
            InputError: the image is so narrow that an intermediate image would be too large.
        """
        settings = self.settings
        # The order of the steps is that of the processors of transformers.
        if settings.get("do_align_long_axis"):
            image = _turned(image, settings["size"])
        if settings["do_resize"]:
            image = self._resize(image, name)
        if settings.get("do_thumbnail"):
            image = self._thumbnail(image)
        order = settings.get("channel_order")
        pixels = np.asarray(image.convert("L"))[..., None] if order == "gray" else np.asarray(image)
        # Donut pads with black before it normalizes, most others with 0 after it.
        if self.kind == "Donut" and settings["do_pad"]:
            return self._normalize(_pad(pixels, settings["size"], name)).transpose(2, 0, 1)
        if self.kind == "ConvNext" and settings["do_resize"]:
            edge = settings["size"]["shortest_edge"]
            # No effect from 384 pixels on, where the image was resized to this square.
            pixels = center_crop(pixels, edge, edge, name)
        if settings.get("do_center_crop"):
            crop = settings["crop_size"]
            crop_like = torchvision_crop if self.kind == "Timm" else center_crop
            crop_like = fast_crop if settings["fast"] else crop_like
            pixels = crop_like(pixels, crop["height"], crop["width"], name)
        if settings.get("do_flip_channel_order") or order == "bgr":
            pixels = pixels[..., ::-1]
        normalized = self._normalize(pixels)
        if settings.get("do_pad"):
            normalized = self._pad(normalized, name)
        return np.ascontiguousarray(normalized.transpose(2, 0, 1))

    def mask(self, image: Image, pixels: NDArray[Any]) -> NDArray[np.int64]:
        """Return the mask of an image that a detector's processor has padded.

        Args:
            image: the image.
            pixels: its pixels, (channels, height, width).

        Returns:
            int64 (height, width), 1 for pixels of the image and 0 for padding below and beside it.
        """
        width, height = image.size
        if self.settings["do_resize"]:
            width, height = target_size(self.kind, self.settings, image.size)
        mask = np.zeros(pixels.shape[1:], np.int64)
        mask[:height, :width] = 1
        return mask

    def _resize(self, image: Image, name: str) -> Image:
        size = target_size(self.kind, self.settings, image.size)
        if self.settings["fast"] and self.settings["resample"] == _NEAREST:
            return _nearest(image, size)
        return resize(image, size, self.settings["resample"], name)

    def _thumbnail(self, image: Image) -> Image:
        """Shrink an image to fit into `size`, as Donut's processor does."""
        settings = self.settings
        size, (width, height) = settings["size"], image.size
        fitting = min(width, size["width"]), min(height, size["height"])
        if fitting == image.size:
            return image
        if height > width:
            fitting = int(width * fitting[1] / height), fitting[1]
        elif width > height:
            fitting = fitting[0], int(height * fitting[0] / width)
        fitting = max(fitting[0], 1), max(fitting[1], 1)
        if settings["pil"]:
            return image.resize(fitting, resample=settings["resample"])
        # `reducing_gap` lets Pillow shrink by a whole number first, which changes pixels: it is
        # that of the slow class of transformers 4.
        gap = None if settings["fast"] else 2.0
        return image.resize(fitting, resample=_BICUBIC, reducing_gap=gap)

    def _pad(self, pixels: NDArray[np.float32], name: str) -> NDArray[np.float32]:
        """Pad normalized pixels (rows, columns, channels) as the processor does."""
        rows, columns = pixels.shape[:2]
        # Swin2SR pads even an edge that the divisor divides, by a whole divisor.
        if self.kind == "Swin2SR":
            divisor = self.settings["size_divisor"]
            missing = [divisor - rows % divisor, divisor - columns % divisor]
            return np.pad(pixels, ((0, missing[0]), (0, missing[1]), (0, 0)), mode="symmetric")
        if self.kind == "DPT":
            divisor = self.settings["size_divisor"] or 1
            # An odd row or column goes to the end, as in transformers' DPT processor.
            halves = [divmod(-length % divisor, 2) for length in (rows, columns)]
            (top, odd_row), (left, odd_column) = halves
            return np.pad(pixels, ((top, top + odd_row), (left, left + odd_column), (0, 0)))
        if (size := self.settings["pad_size"]) is None:
            return pixels
        missing = _missing(pixels, size, name)
        return np.pad(pixels, ((0, missing[0]), (0, missing[1]), (0, 0)))

    def _normalize(self, pixels: NDArray[Any]) -> NDArray[np.float32]:
        settings = self.settings
        scaled = pixels.astype(np.float32)
        if settings["do_rescale"]:
            # In float64 and then rounded to float32, as in transformers.
            scaled = (pixels.astype(np.float64) * settings["rescale_factor"]).astype(np.float32)
            if settings.get("rescale_offset"):
                # With a factor of 1 / 127.5 this gives -1 to 1.
                scaled = scaled - np.float32(1)
        mean = np.asarray(settings["image_mean"], dtype=np.float32)
        std = np.asarray(settings["image_std"], dtype=np.float32)
        if settings["do_normalize"]:
            scaled = (scaled - mean) / std
        if settings.get("include_top"):
            # EfficientNet's processor normalizes once more here, with a mean of 0.
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
    if min(size) < 1:
        raise InputError(
            f"{name} has {image.width} × {image.height} pixels, of which the model's processor "
            f"makes {width} × {height}.",
            do="Give a larger image.",
        )
    # Pillow resizes the rows first: between its two passes an image still has its old height.
    _check_pixels(name, image.size, width, max(height, image.height))
    return image.resize(size, resample=resample)


def _nearest(image: Image, size: tuple[int, int]) -> Image:
    """Resize an image as torch does in `nearest-exact`: Pillow rounds otherwise between pixels."""
    from PIL import Image as Images

    # torch computes in float32, which decides between two pixels that are as near.
    columns, rows = (
        (np.arange(after, dtype=np.float32) + np.float32(0.5)) * np.float32(before / after)
        for before, after in zip(image.size, size, strict=True)
    )
    return Images.fromarray(np.asarray(image)[rows.astype(int)][:, columns.astype(int)])


def _turned(image: Image, size: Mapping[str, int]) -> Image:
    """Rotate an image by 90° clockwise if one of it and `size` is wide, and the other tall."""
    from PIL.Image import Transpose

    is_wide, is_tall = image.width > image.height, image.width < image.height
    if (size["width"] < size["height"] and is_wide) or (size["width"] > size["height"] and is_tall):
        return image.transpose(Transpose.ROTATE_270)
    return image


def _pad(pixels: NDArray[Any], size: Mapping[str, int], name: str) -> NDArray[Any]:
    """Pad pixels (rows, columns, channels) with black on all sides.

    Raises:
        InputError: the image is larger than `size`.
    """
    missing = _missing(pixels, size, name)
    rows, columns = ((total // 2, total - total // 2) for total in missing)
    return np.pad(pixels, (rows, columns, (0, 0)))


def _missing(pixels: NDArray[Any], size: Mapping[str, int], name: str) -> list[int]:
    """Return the rows and columns that pixels lack; InputError if there are too many."""
    missing = [size["height"] - pixels.shape[0], size["width"] - pixels.shape[1]]
    if min(missing) < 0:
        raise InputError(
            f"{name} has {pixels.shape[1]} × {pixels.shape[0]} pixels, expected at most "
            f"{size['width']} × {size['height']}.",
            do="Shrink it: the model's image processor does not.",
        )
    return missing


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


def torchvision_crop(
    pixels: NDArray[Any], height: int, width: int, name: str = "image"
) -> NDArray[Any]:
    """Crop like `center_crop`, with torchvision's rounding of halves to even numbers."""
    rows, columns = pixels.shape[:2]
    if rows < height or columns < width:
        return center_crop(pixels, height, width, name)
    top, left = round((rows - height) / 2), round((columns - width) / 2)
    return pixels[top : top + height, left : left + width]


def fast_crop(pixels: NDArray[Any], height: int, width: int, name: str = "image") -> NDArray[Any]:
    """Crop like `center_crop`, with the rounding of transformers' fast processors."""
    rows, columns = pixels.shape[:2]
    _check_pixels(name, (columns, rows), max(columns, width), max(rows, height))
    missing = [max(height - rows, 0), max(width - columns, 0)]
    halves = [(total // 2, total - total // 2) for total in missing]
    padded = np.pad(pixels, (*halves, (0, 0)))
    top, left = (padded.shape[0] - height) // 2, (padded.shape[1] - width) // 2
    return padded[top : top + height, left : left + width]


def _check_pixels(name: str, size: tuple[int, int], width: int, height: int) -> None:
    """Raise InputError if a step would turn an image of `size` into one with too many pixels."""
    max_pixels = max(_MAX_INTERMEDIATE_PIXELS, size[0] * size[1])
    if width * height > max_pixels:
        raise InputError(
            f"{name} has {size[0]} × {size[1]} pixels; to resize it, an image of {width} × "
            f"{height} pixels would be needed, expected at most {max_pixels:,} pixels.",
            do="Crop it to about the proportions of the model's images.",
        )


_SQUARE = {"height": 0, "width": 0}


def _parse_size(
    file: Path,
    name: str,
    size: ImageSize,
    default: Mapping[str, int],
    longest: int = _LONGEST_EDGE,
) -> dict[str, int]:
    """Return the numbers of a size by their keys.

    Args:
        file: preprocessor_config.json.
        name: the key of the size.
        size: what it says.
        default: the processor's own size, whose keys say what a plain number means.
        longest: longest edge, if the number is the shortest one.
    """
    if size.longest > MAX_IMAGE_EDGE:
        raise ArtifactError(
            f"{file}: {name} is {size.longest}, expected at most {MAX_IMAGE_EDGE} pixels."
        )
    if size.edge is not None:
        if "shortest_edge" in default and "longest_edge" in default:
            return {"shortest_edge": size.edge, "longest_edge": longest}
        return dict.fromkeys(default, size.edge)
    numbers: dict[str, int] = size.model_dump(exclude_none=True)
    if default is _SQUARE and numbers.keys() != _SQUARE.keys():
        raise ArtifactError(f"{file}: {name} is {numbers}, expected a number, or height and width.")
    return numbers
