"""Photographs with lines of text drawn onto them, for models that find or read text."""

import inspect
import json
import random
import subprocess
import textwrap
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

_COLORS = [(255, 255, 255), (0, 0, 0), (200, 30, 30), (20, 60, 200)]
_SIZE = 416


def photographs():
    """Return scikit-learn's two photographs."""
    from sklearn.datasets import load_sample_images

    return [Image.fromarray(pixels) for pixels in load_sample_images().images]


def save_pages(folder, count, *, photos=(), seed=0, size=_SIZE):
    """Write crops of photographs, of `size` × `size` pixels, with text on them.

    Args:
        folder: the folder, which is made.
        count: number of images.
        photos: Pillow images; those of scikit-learn if there are none.
        seed: draws crops, lines, fonts and places.
        size: height and width.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    draw, lines = random.Random(seed), _lines()
    photos = photos or photographs()
    for index in range(count):
        photo = photos[index % len(photos)]
        width, height = (int(side * draw.uniform(0.4, 1)) for side in photo.size)
        left = draw.randint(0, photo.size[0] - width)
        top = draw.randint(0, photo.size[1] - height)
        page = photo.convert("RGB").crop((left, top, left + width, top + height))
        page = page.resize((size, size), Image.Resampling.BICUBIC)
        _write(ImageDraw.Draw(page), draw, lines, size)
        page.save(folder / f"{index:03}.png")
    return folder


def _write(canvas, draw, lines, size):
    for _ in range(draw.randint(1, 6)):
        font = ImageFont.load_default(draw.randint(14, 48))
        text = draw.choice(lines)[: draw.choice([4, 8, 60])]
        place = draw.randint(0, size // 2), draw.randint(0, size - 50)
        canvas.text(place, text, font=font, fill=draw.choice(_COLORS))


def _lines():
    """Return lines of code of Python's standard library."""
    sources = [inspect.getsource(module) for module in (textwrap, json, subprocess)]
    found = (line.strip() for source in sources for line in source.splitlines())
    return [line for line in found if 8 < len(line) < 60]
