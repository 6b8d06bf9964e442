"""Raw inputs as users have them: texts, pairs, pictures and sounds, 20 of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from tests import sounds

_LONG = (
    "The engine is warm and the pump runs again, but nobody in Köln knows who built the bridge "
    "over the river, and Ada Lovelace wrote that Marie Curie lived in Paris, not far from the "
    "Seine, where a small cat sleeps on the boat under the tree while the rain is cold. "
)
TEXTS = (
    "The engine is warm.",
    "Who built the bridge over the river in London?",
    "Marie Curie lived in Paris",
    "THE CAT SLEEPS ON THE BOAT!",
    "Où est la clé du bateau ? Elle est tombée à l'eau, hélas.",
    "Über die Brücke in Köln fährt kein Zug, sagt Jürgen.",
    "de\u0301ja\u0300 vu, A\u030angstro\u0308m",
    "Двигатель прогрет, насос снова работает.",
    "引擎已经热了,水泵又开始工作了。",
    "Thanks 🙂🎉 👩‍👩‍👧 ❤️",
    "  two  spaces,\ta tab and\na new line  ",
    "[CLS] a [SEP] b </s> c <s> [MASK] d <|endoftext|>",
    "It's 12:30, 3.5% of £1,000 is £35 – isn't it? ada@example.com https://example.com/a?b=c",
    "ﬁne ＦＵＬＬ ½ x² İstanbul ǅ",
    "a",
    "",
    _LONG,
    _LONG * 4,
    "المحرك دافئ والمضخة تعمل.",
    "0000 11 2026-11-27 64x64",
)
PAIRS = (
    ("Who built it?", "Ada Lovelace built the bridge."),
    ("", "Nobody knows."),
    (_LONG, "The rain is cold."),
    ("The rain is cold.", _LONG * 2),
)
PROMPTS = (
    *TEXTS[:10],
    *TEXTS[12:15],
    "The pump",
    "Où est",
    " leading",
    "trailing ",
    "The engine is warm and the pump runs again. Marie Curie lived",
    "1 2 3 4",
    '"yes" — ',
)
MASKED = (
    "The engine is {mask}.",
    "{mask} engine is warm",
    "Le {mask} est chaud et la pompe {mask}.",
    "WHO BUILT THE {mask}?",
    "Der Motor ist{mask}, die Pumpe läuft",
    "a {mask}",
    "{mask}",
    "{mask}{mask}",
    "Über die {mask} in Köln",
    "引擎已经{mask}了",
    "Thanks 🙂 {mask}",
    "  {mask}  two spaces",
    "Marie Curie lived in {mask}, not far from the {mask}, near the {mask}.",
    "3.5% of {mask} is £35",
    "rain\n{mask}\tcold",
    "The {mask} is cold and the rain is {mask}!",
    "Nobody knows, but Ada {mask} wrote about it.",
    "The bell rings at {mask} <s> b",
    "x{mask}y",
    "de\u0301ja\u0300 {mask}",
)
_CONTEXTS = (
    "Ada Lovelace wrote about the bridge in London, and Marie Curie lived in Paris.",
    _LONG,
    _LONG * 4,
    "Über die Brücke in Köln fährt kein Zug, sagt Jürgen. Où est la clé ?",
    "  two  spaces,\nand new lines\n\nin the context ",
)
QUESTIONS = tuple(
    (question, context)
    for context in _CONTEXTS
    for question in ("Who lived in Paris?", "WHERE is the cat", "Où est la clé ?", "what")
)


def images(folder: Path) -> list[Any]:
    """Return pictures of many shapes and modes, and paths of files that are stored another way."""
    sizes = [(32, 32), (31, 57), (180, 60), (60, 180), (224, 224), (640, 480), (33, 32), (500, 17)]
    pictures: list[Any] = [_picture(size, seed) for seed, size in enumerate(sizes)]
    base = _picture((90, 70), 50)
    pictures += [base.convert(mode) for mode in ("L", "RGBA", "P", "CMYK", "1", "LA")]
    transparent = base.convert("RGBA")
    transparent.putalpha(Image.linear_gradient("L").resize(base.size))
    pictures.append(transparent)
    pictures.append(Image.fromarray(np.full((40, 40, 3), 255, np.uint8)))
    rotated = folder / "rotated.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    base.save(rotated, exif=exif, quality=95)
    gray = folder / "gray.png"
    base.convert("L").save(gray)
    palette = folder / "palette.gif"
    base.save(palette)
    webp = folder / "picture.webp"
    base.save(webp, lossless=True)
    return [*pictures, *(str(file) for file in (rotated, gray, palette, webp))]


def _picture(size: tuple[int, int], seed: int) -> Image.Image:
    """Return a picture of smooth colors with shapes and noise on it."""
    generator = np.random.default_rng(seed)
    small = generator.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    picture = Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)
    canvas = ImageDraw.Draw(picture)
    for _ in range(4):
        x, y = (int(generator.integers(0, side)) for side in size)
        color = tuple(int(value) for value in generator.integers(0, 256, 3))
        canvas.ellipse((x, y, x + size[0] // 3, y + size[1] // 3), fill=color)
    pixels = np.asarray(picture).astype(int) + generator.integers(-20, 20, (*size[::-1], 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def recordings() -> list[np.ndarray]:
    """Return sounds of many lengths at 16 kHz."""
    lengths = (0.3, 0.4, 0.5, 0.61, 0.7, 0.83, 1.0, 1.2, 1.5, 2.0)
    spoken = [sounds.speech(seconds, seed=index) for index, seconds in enumerate(lengths)]
    others = [
        sounds.sine(0.5),
        sounds.chirp(0.9),
        sounds.noise(0.6),
        sounds.noise(0.4, amplitude=0.9),
        sounds.speech(1.1, seed=20) * 3,
        sounds.speech(0.8, seed=21) * 0.001,
        sounds.sine(0.35, hertz=7000),
        np.concatenate([sounds.silence(0.3), sounds.speech(0.4, seed=22)]),
        sounds.chirp(0.45) + 0.3,
        sounds.noise(0.3125, seed=9),
    ]
    return [samples.astype(np.float32) for samples in (*spoken, *others)]
