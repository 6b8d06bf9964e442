"""The size that each image processor resizes an image to.

>>> target_size("Detr", {"size": {"shortest_edge": 800, "longest_edge": 1333}}, (640, 480))
(1066, 800)

Sizes are (width, height) in pixels. The rules are those of transformers 4.57,
`models/*/image_processing_*.py`, to the pixel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

PixelSize = tuple[int, int]
Settings = Mapping[str, Any]

_EDGES = frozenset({"shortest_edge", "longest_edge"})
_SIDES = frozenset({"height", "width"})
_LIMITS = frozenset({"max_height", "max_width"})
_SHORTEST = frozenset({"shortest_edge"})
_ANY = (_SIDES, _SHORTEST)
_DETECTOR = (_SIDES, _EDGES, _LIMITS)

# The keys that `size` may have. Others have `_ANY`.
_SIZE_KEYS: dict[str, tuple[frozenset[str], ...]] = {
    "ConvNext": (_SHORTEST,),
    "Detr": _DETECTOR,
    "ConditionalDetr": _DETECTOR,
    "DeformableDetr": _DETECTOR,
    "RTDetr": _DETECTOR,
    "Yolos": _DETECTOR,
    "MaskFormer": (_SIDES, _EDGES),
    "Mask2Former": (_SIDES, _EDGES),
    "Donut": (_SIDES,),
    "DPT": (_SIDES,),
    "Segformer": (_SIDES,),
    "OwlViT": (_SIDES,),
    "Sam": (frozenset({"longest_edge"}),),
}
# ConvNeXt crops only below this size; from this size on it resizes the whole image to a square.
_CONVNEXT_CROPS_BELOW = 384


def size_keys(kind: str) -> tuple[frozenset[str], ...]:
    """Return the sets of keys that the `size` of a processor may have."""
    return _SIZE_KEYS.get(kind, _ANY)


def target_size(kind: str, settings: Settings, size: PixelSize) -> PixelSize:
    """Return the size that a processor resizes an image of a size to."""
    return _RULES.get(kind, _plain)(settings, size)


def _plain(settings: Settings, size: PixelSize) -> PixelSize:
    target = settings["size"]
    if "height" in target:
        return target["width"], target["height"]
    return _by_shortest_edge(size, target["shortest_edge"])


def _by_shortest_edge(size: PixelSize, edge: int) -> PixelSize:
    width, height = size
    other = int(edge * max(size) / min(size))
    return (edge, other) if width <= height else (other, edge)


def _convnext(settings: Settings, size: PixelSize) -> PixelSize:
    edge = settings["size"]["shortest_edge"]
    if edge >= _CONVNEXT_CROPS_BELOW:
        return edge, edge
    return _by_shortest_edge(size, int(edge / settings["crop_pct"]))


def _levit(settings: Settings, size: PixelSize) -> PixelSize:
    target = settings["size"]
    if "height" in target:
        return _plain(settings, size)
    # LeViT crops 224 of 256 pixels; other sizes keep this proportion, as in transformers.
    return _by_shortest_edge(size, int(256 / 224 * target["shortest_edge"]))


def _pool_former(settings: Settings, size: PixelSize) -> PixelSize:
    target, share = settings["size"], settings["crop_pct"]
    if "shortest_edge" in target:
        return _by_shortest_edge(size, int(target["shortest_edge"] / share))
    if target["height"] == target["width"]:
        return _by_shortest_edge(size, int(target["height"] / share))
    return int(target["width"] / share), int(target["height"] / share)


def _donut(settings: Settings, size: PixelSize) -> PixelSize:
    return _by_shortest_edge(size, min(settings["size"].values()))


def _detector(settings: Settings, size: PixelSize) -> PixelSize:
    target = settings["size"]
    if "height" in target:
        return _plain(settings, size)
    if "max_height" in target:
        width, height = size
        scale = min(target["max_height"] / height, target["max_width"] / width)
        return int(width * scale), int(height * scale)
    return _between_edges(size, target["shortest_edge"], target["longest_edge"])


def _between_edges(
    size: PixelSize, shortest: int, longest: int, *, keep_upright: bool = True
) -> PixelSize:
    """Return the size with this shortest edge, or a smaller one with this longest edge.

    An image that has this shortest edge stays as it is; Yolos computes the height of an upright one
    again, which can be one pixel less.
    """
    width, height = size
    short, long = float(min(size)), float(max(size))
    exact: float = shortest
    if long / short * shortest > longest:
        exact = longest * short / long
        shortest = round(exact)
    if min(size) == shortest and (width >= height or keep_upright):
        return size
    if width < height:
        return shortest, int(exact * height / width)
    return int(exact * width / height), shortest


def _yolos(settings: Settings, size: PixelSize) -> PixelSize:
    target = settings["size"]
    if "shortest_edge" not in target:
        return _detector(settings, size)
    edges = target["shortest_edge"], target["longest_edge"]
    width, height = _between_edges(size, *edges, keep_upright=False)
    # `mod_size` of transformers' Yolos processor.
    return width - width % 16, height - height % 16


def _mask_former(settings: Settings, size: PixelSize) -> PixelSize:
    target, divisor = settings["size"], settings["size_divisor"]
    if "height" in target:
        width, height = _plain(settings, size)
    else:
        width, height = _to_longest_edge(size, target["shortest_edge"], target["longest_edge"])
    if divisor > 0:
        return math.ceil(width / divisor) * divisor, math.ceil(height / divisor) * divisor
    return width, height


def _to_longest_edge(size: PixelSize, shortest: int, longest: int) -> PixelSize:
    width, height = size
    short, long = shortest, int(shortest * max(size) / min(size))
    if long > longest:
        short, long = int(longest * short / long), longest
    return (short, long) if width <= height else (long, short)


def _dpt(settings: Settings, size: PixelSize) -> PixelSize:
    target, multiple = settings["size"], settings["ensure_multiple_of"]
    wide, high = target["width"] / size[0], target["height"] / size[1]
    if settings["keep_aspect_ratio"]:  # as little scaling as possible
        wide = high = wide if abs(1 - wide) < abs(1 - high) else high

    width, height = (round(length / multiple) for length in (wide * size[0], high * size[1]))
    return width * multiple, height * multiple


def _glpn(settings: Settings, size: PixelSize) -> PixelSize:
    divisor = settings["size_divisor"]
    return size[0] // divisor * divisor, size[1] // divisor * divisor


def _sam(settings: Settings, size: PixelSize) -> PixelSize:
    scale = settings["size"]["longest_edge"] * 1.0 / max(size)
    # transformers rounds halves up here, where Python's `round` takes the even number.
    return int(size[0] * scale + 0.5), int(size[1] * scale + 0.5)


_RULES: dict[str, Callable[[Settings, PixelSize], PixelSize]] = {
    "ConvNext": _convnext,
    "Levit": _levit,
    "PoolFormer": _pool_former,
    "Donut": _donut,
    "Detr": _detector,
    "ConditionalDetr": _detector,
    "DeformableDetr": _detector,
    "RTDetr": _detector,
    "Yolos": _yolos,
    "MaskFormer": _mask_former,
    "Mask2Former": _mask_former,
    "DPT": _dpt,
    "GLPN": _glpn,
    "Sam": _sam,
}
