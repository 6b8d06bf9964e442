"""Built-in inputs for when the user gives no data: sentences in many languages, synthetic images.

    >>> len(SENTENCES), synthetic_images(2)[0].shape
    (16, (96, 160, 3))

The sentences differ in script, length and punctuation, so that batches are ragged. Use them to
compare two implementations of a model, not to calibrate one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SENTENCES = (
    "The engine starts at the first turn of the key.",
    "At the first turn of the key, the motor comes to life.",
    "Prices fell by 3.7% in March, to $1,204 a tonne.",
    "Yes.",
    "Der Zug nach Hamburg hat heute leider vierzig Minuten Verspätung.",
    "Le musée est fermé le lundi, mais le jardin reste ouvert.",
    "¿Dónde queda la estación de metro más cercana?",
    "今日はとても寒いので、家で本を読みます。",
    "这家餐馆的面条很好吃，价格也不贵。",
    "Завтра утром мы поедем на дачу, если не будет дождя.",
    "القطار يصل إلى المحطة في الساعة التاسعة.",
    "मुझे सुबह की चाय के बिना काम करना अच्छा नहीं लगता।",
    "İstanbul'da yaşayan kuzenim her yaz bizi ziyarete gelir.",
    "def area(r): return 3.14159 * r ** 2  # a circle",
    "She read the letter twice, folded it, put it back into the drawer, and for the rest of the "
    "evening spoke of nothing but the weather, the harvest and the price of coal.",
    "🎉 Congratulations!!! You've won… (terms & conditions apply)",
)


def synthetic_images(count: int = 6) -> list[NDArray[np.uint8]]:
    """Return RGB images, uint8 (height, width, 3), of different sizes; the same in every call."""
    generator = np.random.default_rng(0)
    images = []
    for index in range(count):
        height, width = 96 + 40 * index, 160 - 12 * index
        y, x = np.mgrid[0:height, 0:width].astype(np.float64)
        waves = np.stack(
            [
                np.sin(x / (5 + index) + channel) + np.cos(y / (9 - index) - channel)
                for channel in range(3)
            ],
            axis=-1,
        )
        disc = ((x - width / 2) ** 2 + (y - height / 2) ** 2 < (20 + 6 * index) ** 2)[..., None]
        noise = generator.normal(0, 12, (height, width, 3))
        pixels = 128 + 50 * waves + 40 * disc + noise
        images.append(np.clip(pixels, 0, 255).astype(np.uint8))
    return images
