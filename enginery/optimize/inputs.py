"""Real feeds for one graph: the user's texts or images, else built-in ones, else made-up numbers.

    >>> batches, origin = range_feeds(artifact, record, OptimizeConfig())
    >>> origin, batches[0]["input_ids"].shape
    ('built-in sentences', (4, 31))

Ranges are measured on them, so they go through the artifact's own tokenizer or image processor.
Batches are small: every inner tensor of one is in memory, though not of all of the graph at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from enginery.core.artifact import Artifact
from enginery.core.data import list_images, read_texts
from enginery.core.errors import ArtifactError, InputError
from enginery.core.feeds import FeedLimits, Feeds, make_feeds
from enginery.core.json_file import read_json
from enginery.core.manifest import GraphRecord
from enginery.core.shapes import canonical_dim, dynamic_dims
from enginery.optimize.config import OptimizeConfig
from enginery.runtime.images import ImageProcessor, load_image
from enginery.runtime.tokenizer import TextTokenizer, fixed_sequence

SENTENCES = (
    "The pump starts as soon as the pressure falls below two bar.",
    "Nobody answered the door, although the light in the kitchen was on.",
    "No.",
    "Revenue rose 12.4% to $3.1 billion; costs fell (again) by 0.7%.",
    "Die Brücke wird im Herbst für drei Wochen gesperrt.",
    "Nous avons attendu le bus pendant une heure sous la pluie.",
    "明日の会議は午後三時に始まります。",
    "Книга лежит на столе рядом с окном.",
    "for i in range(10): print(i ** 2, end=' ')",
    "LOUD NOISES!!! 😀😀 http://example.com/?q=1&r=2 #tag @name",
    "When the committee met for the last time that year, it had before it eleven proposals, four "
    "of which contradicted one another, and a letter from the auditors that everyone had read and "
    "no one wished to mention before the chairman did.",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z 0 1 2 3 4 5 6 7 8 9",
)
_ROWS = 4
_TEXT_NAMES = {"input_ids", "attention_mask", "token_type_ids", "position_ids"}


def range_feeds(
    artifact: Artifact, record: GraphRecord, config: OptimizeConfig
) -> tuple[list[Feeds], str]:
    """Feeds for one graph, and in words where they come from.

    Raises:
        InputError: data are given and cannot be read, or the graph takes neither texts nor images.
        ArtifactError: data are given, and the tokenizer or processor for them cannot be used.
    """
    names = {spec.name for spec in record.inputs}
    images = names == {"pixel_values"}
    texts = "input_ids" in names and names <= _TEXT_NAMES
    needed = "preprocessor_config.json" if images else "tokenizer.json"
    if (images or texts) and (artifact.path / needed).is_file():
        make: Callable[..., tuple[list[Feeds], str]] = _image_feeds if images else _text_feeds
        try:
            return make(artifact, record, config)
        except (ArtifactError, InputError):
            if config.data:
                raise
    elif config.data and len(artifact.manifest.graphs) == 1:
        raise InputError(
            f"data '{config.data}' cannot be used: {record.file} takes {', '.join(sorted(names))}, "
            "and the artifact has no tokenizer or image processor for them.",
            do="Leave the data out; ranges are measured on made-up inputs then.",
        )
    return _made_feeds(artifact, record), "made-up numbers"


def _text_feeds(
    artifact: Artifact, record: GraphRecord, config: OptimizeConfig
) -> tuple[list[Feeds], str]:
    tokenizer = TextTokenizer.open(artifact.path)
    texts, origin = list(SENTENCES), "built-in sentences"
    if config.data:
        path = Path(config.data).expanduser()
        texts, origin = read_texts(path, config.column, rows=config.rows), f"rows of {path.name}"
    else:
        texts.append(" ".join(SENTENCES) * 4)  # as long as the model takes
    # Texts of about one length share a batch, and padding is seen, too.
    encodings = tokenizer.encode([tokenizer.prepare(text) for text in texts])
    if width := fixed_sequence(record.inputs):
        for encoding in encodings:
            encoding.truncate(width)
    encodings.sort(key=lambda encoding: len(encoding.ids))
    rows = _ROWS if tokenizer.can_pad(record.inputs) else 1
    parts = _parts(encodings, rows, record)
    return [tokenizer.feeds(part, record.inputs) for part in parts], origin


def _image_feeds(
    artifact: Artifact, record: GraphRecord, config: OptimizeConfig
) -> tuple[list[Feeds], str]:
    processor = ImageProcessor.open(artifact.path)
    images: list[Any] = _made_images()
    origin = "built-in images"
    if config.data:
        path = Path(config.data).expanduser()
        images, origin = list(list_images(path, rows=config.rows)), f"images of {path.name}"
    by_shape: dict[tuple[int, ...], list[Any]] = {}
    for image in images:
        pixels = processor(load_image(image))
        by_shape.setdefault(pixels.shape, []).append(pixels)
    return [
        {"pixel_values": np.stack(part).astype(record.inputs[0].dtype)}
        for group in by_shape.values()
        for part in _parts(group, _ROWS, record)
    ], origin


def _made_feeds(artifact: Artifact, record: GraphRecord) -> list[Feeds]:
    """Two batches of made-up numbers: one padded, one of a single row."""
    limits = FeedLimits.from_config(read_json(artifact.path / "config.json"))
    names = dynamic_dims(record.inputs)
    batches = []
    for batch, tokens, ragged in ((3, 24, True), (1, 8, False)):
        sizes = {}
        for name in names:
            length = min(tokens * limits.min_sequence, limits.max_positions)
            # Past and present share the positions.
            length = max(1, length // 2) if "past" in "".join(names) else length
            natural = limits.sizes.get(canonical_dim(name))
            sizes[name] = batch if name == "batch" else natural or length
        batches.append(make_feeds(record.inputs, sizes, limits, seed=batch, ragged=ragged))
    return batches


def _made_images() -> list[Any]:
    """RGB images, uint8: a gradient, noise, a checkerboard and black, each of another size."""
    generator = np.random.default_rng(0)
    y, x = np.mgrid[0:180, 0:240]
    gradient = np.stack([x % 256, y % 256, (x + y) % 256], axis=-1)
    board = np.repeat((((x // 12 + y // 12) % 2) * 255)[..., None], 3, axis=-1)[:160, :150]
    noise = generator.integers(0, 256, (200, 130, 3))
    black = np.zeros((96, 96, 3))
    return [image.astype(np.uint8) for image in (gradient, noise, board, black)]


def _parts(items: Sequence[Any], rows: int, record: GraphRecord) -> list[list[Any]]:
    """Lists of `rows` items; of exactly as many as the graph takes, where its batch is fixed."""
    batch = record.inputs[0].dims[0]
    if not isinstance(batch, int):
        return [list(items[start : start + rows]) for start in range(0, len(items), rows)]
    parts = [list(items[start : start + batch]) for start in range(0, len(items), batch)]
    return [[*part, *([items[-1]] * (batch - len(part)))] for part in parts]
