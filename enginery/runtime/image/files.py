"""Load images from paths, bytes, arrays or Pillow images as upright RGB images.

Images are loaded as in transformers' pipelines: rotated by their EXIF orientation, then converted
to RGB, which drops transparency. Images with more than 8 bits per channel are an error; Pillow
would convert them to black or white. Only the formats in `FORMATS` are read, because for others
Pillow starts programs (Ghostscript for EPS) or uses rarely tested parsers.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from enginery.core.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

# Pillow's modes of 8 bits per channel, which convert to RGB.
_SUPPORTED_MODES = (
    "1",
    "L",
    "LA",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "RGBX",
    "CMYK",
    "YCbCr",
    "HSV",
    "LAB",
    "La",
    "RGBa",
)

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""Pillow's names of the supported formats; PPM includes PBM and PGM."""

_DECODE_ERRORS = (OSError, SyntaxError, ValueError)
"""Errors that Pillow raises for a damaged file."""


def load_image(source: Any, *, name: str = "image", max_pixels: int = 0) -> Image:
    """Load an image as an upright RGB image.

    Args:
        source: a path, the contents of a file, a Pillow image, or a uint8 array (height, width) or
            (height, width, channels) with 1, 3 or 4 channels.
        name: what error messages call the image, such as `image 3`.
        max_pixels: maximum number of pixels of an image file; 0 for Pillow's own limit.

    Raises:
        InputError: the file is missing or not a complete image, the image has more than
            `max_pixels` pixels, or it has more than 8 bits per channel.
    """
    from PIL import Image as Pillow
    from PIL import ImageOps

    if isinstance(source, str | Path):
        image = _from_file(Path(source), name, max_pixels)
        name = f"{name} ({source})"
    elif isinstance(source, bytes):
        image = _from_bytes(source, name, max_pixels)
    elif isinstance(source, np.ndarray):
        image = _from_array(source, name)
    elif isinstance(source, Pillow.Image):
        image = source
    else:
        raise InputError(
            f"{name} is a {type(source).__name__}, expected a path, a file's "
            "bytes, a Pillow image or an array."
        )
    # Pillow would clip 16 bits per channel to 8 instead of scaling them.
    if image.mode not in _SUPPORTED_MODES:
        raise InputError(
            f"{name} has Pillow's mode {image.mode}, expected 8 bits per channel.",
            do="Convert it to 8 bits first, scaled from the value range of your images.",
        )
    if 0 in image.size:
        raise InputError(f"{name} is empty: {image.width} × {image.height} pixels.")
    try:
        # Cameras store how the image must be turned, and models see upright ones.
        return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:  # Pillow reads the pixels only now
        raise InputError(f"{name} cannot be decoded: {error}.") from error


def _from_file(path: Path, name: str, max_pixels: int) -> Image:
    if path.exists() and not path.is_file():  # opening a named pipe would block
        raise InputError(f"{name}: {path} is not a regular file.")
    try:
        return _open(path, name, max_pixels)
    except FileNotFoundError:
        raise InputError(f"{name}: file {path} does not exist.") from None
    except _DECODE_ERRORS as error:
        raise InputError(f"{name}: {path} is not a complete image: {error}.") from error


def _from_bytes(content: bytes, name: str, max_pixels: int) -> Image:
    from PIL import UnidentifiedImageError

    try:
        return _open(BytesIO(content), name, max_pixels)
    except UnidentifiedImageError:  # its message contains a memory address
        raise InputError(
            f"{name} is not an image of a supported format.",
            do=f"Supported: {', '.join(FORMATS)}.",
        ) from None
    except _DECODE_ERRORS as error:
        raise InputError(f"{name} is not a complete image: {error}.") from error


def _open(source: Path | BytesIO, name: str, max_pixels: int) -> Image:
    from PIL import Image as Pillow
    from PIL import ImageOps

    try:
        with Pillow.open(source, formats=FORMATS) as opened:
            if max_pixels and opened.width * opened.height > max_pixels:
                raise InputError(
                    f"{name} has {opened.width} × {opened.height} pixels, expected at most "
                    f"{max_pixels:,}."
                )
            opened.load()
            # While the file is still open, because some formats read their EXIF late.
            return ImageOps.exif_transpose(opened)
    except Pillow.DecompressionBombError as error:
        raise InputError(f"{name} has too many pixels: {error}") from error


def _from_array(array: np.ndarray[Any, Any], name: str) -> Image:
    from PIL import Image as Pillow

    if array.dtype != np.uint8:
        raise InputError(
            f"{name} is an array of {array.dtype}, expected uint8 with values from 0 to 255."
        )
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim != 2 and not (array.ndim == 3 and array.shape[2] in (3, 4)):
        raise InputError(
            f"{name} is an array of shape {array.shape}, "
            "expected (height, width) or (height, width, channels) with 1, 3 or 4 channels."
        )
    return Pillow.fromarray(np.ascontiguousarray(array))
