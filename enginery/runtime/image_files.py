"""Whatever a person has as an image, as an upright RGB image.

    >>> load_image("cat.jpg").mode
    'RGB'

As transformers' pipelines load images: turned as the camera's EXIF says, then converted to RGB,
which drops transparency. What RGB cannot hold (16 bits, floats) is an error instead of a black or
white picture. Only the formats in `FORMATS` are read: for others Pillow starts programs, as
Ghostscript for EPS, or has parsers that models have no use for.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from enginery.core.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

# Grey, palette, print and camera modes that Pillow converts to RGB without loss of meaning.
_CONVERTED = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB", "La",
              "RGBa")  # fmt: skip

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""Pillow's names; PPM stands for PBM and PGM too."""

_NO_IMAGE = (OSError, SyntaxError, ValueError)
"""What Pillow raises for a damaged file."""


def load_image(source: Any, *, name: str = "image", max_pixels: int = 0) -> Image:
    """An upright RGB image.

    Args:
        source: a path, the bytes of a file, a Pillow image, or a uint8 array (height, width),
            (height, width, 1), 3 or 4 channels.
        name: what the message calls it, `image 3`.
        max_pixels: the most pixels of an image from a file; 0 for Pillow's own limit.

    Raises:
        InputError: the file is missing or not a whole image, or the pixels are not 8 bits deep.
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
    if image.mode not in _CONVERTED:
        raise InputError(
            f"{name} has Pillow's mode {image.mode}: more than 8 bits a channel, "
            "which the model's pixels do not have.",
            do="Convert it to 8 bits first, with the range that your images have.",
        )
    if 0 in image.size:
        raise InputError(f"{name} is empty: {image.width} × {image.height} pixels.")
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:  # Pillow reads the pixels only now
        raise InputError(f"{name} cannot be decoded: {error}.") from error


def _from_file(path: Path, name: str, max_pixels: int) -> Image:
    if path.exists() and not path.is_file():  # opening a named pipe waits for a writer
        raise InputError(f"{name}: {path} is not a regular file.")
    try:
        return _opened(path, name, max_pixels)
    except FileNotFoundError:
        raise InputError(f"{name}: there is no file {path}.") from None
    except _NO_IMAGE as error:
        raise InputError(f"{name}: {path} is not a whole image: {error}.") from error


def _from_bytes(content: bytes, name: str, max_pixels: int) -> Image:
    from PIL import UnidentifiedImageError

    try:
        return _opened(BytesIO(content), name, max_pixels)
    except UnidentifiedImageError:  # its message has an address of memory
        raise InputError(
            f"{name} is not an image of a format that is read.", do=f"Known: {', '.join(FORMATS)}."
        ) from None
    except _NO_IMAGE as error:
        raise InputError(f"{name} is not a whole image: {error}.") from error


def _opened(source: Path | BytesIO, name: str, max_pixels: int) -> Image:
    from PIL import Image as Pillow
    from PIL import ImageOps

    try:
        with Pillow.open(source, formats=FORMATS) as opened:
            if max_pixels and opened.width * opened.height > max_pixels:
                raise InputError(
                    f"{name} has {opened.width} × {opened.height} pixels, at most {max_pixels:,} "
                    "are read."
                )
            opened.load()
            # While the file is open: some formats read their EXIF late.
            return ImageOps.exif_transpose(opened)
    except Pillow.DecompressionBombError as error:
        raise InputError(f"{name} has more pixels than are read: {error}") from error


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
