"""Real inputs as cases: the user's texts or images, or the built-in ones.

    >>> cases, notes = real_cases(artifact, graph, ValidateConfig(data="reviews.csv"))
    >>> [case.name for case in cases]
    ['rows 1–16', 'rows 17–32', …]

They go through the artifact's own tokenizer or image processor, as answers do. A graph without
either (audio, a decoder, a bare graph) has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import numpy as np

from enginery.core.artifact import Artifact
from enginery.core.data import list_images, read_texts
from enginery.core.errors import ArtifactError, InputError
from enginery.core.feeds import Feeds
from enginery.core.manifest import GraphRecord
from enginery.runtime.images import ImageProcessor, load_image
from enginery.runtime.tokenizer import TextTokenizer, fixed_sequence
from enginery.validate.builtin import CONTEXT, QUESTION, SENTENCES, made_images
from enginery.validate.cases import Case
from enginery.validate.config import ValidateConfig

_ROWS = 16
"""Texts of one case: enough to be ragged, few enough for any machine."""
_IMAGES = 4

_TEXT_NAMES = {"input_ids", "attention_mask", "token_type_ids", "position_ids"}


def real_cases(
    artifact: Artifact, record: GraphRecord, config: ValidateConfig
) -> tuple[list[Case], list[str]]:
    """Cases of real inputs for a graph that takes texts or images, with notes on what was left out.

    Raises:
        InputError: the data cannot be read, or cannot be made to fit the graph.
        ArtifactError: there are data, and the tokenizer or processor for them cannot be used.
    """
    if not takes_real_inputs(artifact, record):
        return [], []
    make = _image_cases if _names(record) == {"pixel_values"} else _text_cases
    try:
        return make(artifact, record, config), []
    except (ArtifactError, InputError) as error:
        if config.data:
            raise
        return [], [f"no real inputs were compared: {error.message}"]


def takes_real_inputs(artifact: Artifact, record: GraphRecord) -> bool:
    """Whether the graph's inputs are made from texts or images, by files that the artifact has."""
    names = _names(record)
    if names == {"pixel_values"}:
        return (artifact.path / "preprocessor_config.json").is_file()
    takes_texts = "input_ids" in names and names <= _TEXT_NAMES
    return takes_texts and (artifact.path / "tokenizer.json").is_file()


def require_use_for_data(artifact: Artifact, config: ValidateConfig) -> None:
    """Raises InputError where data are given and no graph of the artifact takes them."""
    graphs = artifact.manifest.graphs
    if config.data and not any(takes_real_inputs(artifact, record) for record in graphs):
        raise InputError(
            f"data '{config.data}' cannot be used: the artifact takes "
            f"{', '.join(sorted(_names(graphs[0])))}, and has no tokenizer or image processor "
            "for them.",
            do="Leave the data out; the shape sweep still compares the outputs.",
        )


def _names(record: GraphRecord) -> set[str]:
    return {spec.name for spec in record.inputs}


def _text_cases(artifact: Artifact, record: GraphRecord, config: ValidateConfig) -> list[Case]:
    tokenizer = TextTokenizer.open(artifact.path)
    what, texts = "sentences", list(SENTENCES)
    if config.data:
        path = Path(config.data).expanduser()
        what, texts = "rows", read_texts(path, config.column, rows=config.rows)
    if artifact.manifest.task == "question-answering" and not config.data:
        pairs = [(QUESTION, context) for context in (CONTEXT, *SENTENCES)]
        what, encodings = "questions", tokenizer.encode_pairs(pairs)
    else:
        encodings = tokenizer.encode([tokenizer.prepare(text) for text in texts])
    if width := fixed_sequence(record.inputs):
        for encoding in encodings:
            encoding.truncate(width)
    # Without padding, one by one.
    rows = _ROWS if tokenizer.can_pad(record.inputs) else 1
    return _cases(what, encodings, rows, record, partial(_text_feeds, tokenizer, record))


def _text_feeds(tokenizer: TextTokenizer, record: GraphRecord, encodings: Sequence[Any]) -> Feeds:
    return tokenizer.feeds(encodings, record.inputs)


def _image_cases(artifact: Artifact, record: GraphRecord, config: ValidateConfig) -> list[Case]:
    processor = ImageProcessor.open(artifact.path)
    images: list[Any] = made_images()
    if config.data:
        images = list(list_images(Path(config.data).expanduser(), rows=config.rows))
    # A processor without a fixed size gives each image its own, and those cannot share a batch.
    # Every image is read here once, so that a damaged file is known before PyTorch has started.
    by_shape: dict[tuple[int, ...], list[Any]] = {}
    for image in images:
        by_shape.setdefault(processor(load_image(image)).shape, []).append(image)
    cases = []
    for shape, group in by_shape.items():
        what = "images" if len(by_shape) == 1 else f"images of {shape[1]} × {shape[2]},"
        cases += _cases(what, group, _IMAGES, record, partial(_image_feeds, processor))
    return cases


def _image_feeds(processor: ImageProcessor, images: Sequence[Any]) -> Feeds:
    return {"pixel_values": np.stack([processor(load_image(image)) for image in images])}


def _cases(
    what: str, items: Sequence[Any], rows: int, record: GraphRecord, feeds: Any
) -> list[Case]:
    """Cases of `rows` items; of exactly as many as the graph takes, where its batch is fixed."""
    batch = record.inputs[0].dims[0]
    rows = batch if isinstance(batch, int) else rows
    cases = []
    for start in range(0, len(items), rows):
        part = list(items[start : start + rows])
        name = f"{what} {start + 1}–{start + len(part)}" if len(part) > 1 else f"{what} {start + 1}"
        if isinstance(batch, int):
            part += islice(repeat(part[-1]), batch - len(part))
        cases.append(Case(name, "real", partial(_typed, record, feeds, part)))
    return cases


def _typed(record: GraphRecord, feeds: Any, part: Sequence[Any]) -> Feeds:
    """The feeds in the graph's own dtypes: an FP16 graph may take FP16 pixels."""
    dtypes = {spec.name: spec.dtype for spec in record.inputs}
    return {name: array.astype(dtypes[name], copy=False) for name, array in feeds(part).items()}
