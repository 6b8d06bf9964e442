"""Real inputs as cases: the user's texts or images, or the built-in ones.

    >>> [case.name for case in real_cases(artifact, graph, ValidateConfig(data="reviews.csv"))]
    ['rows 1–16', 'rows 17–32', …]

They go through the artifact's own tokenizer or image processor, as answers do. An artifact without
either (audio, a bare graph) has none; asking for data is an error then.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from enginery.core.artifact import Artifact
from enginery.core.data import list_images, read_texts
from enginery.core.errors import InputError
from enginery.core.feeds import Feeds
from enginery.core.manifest import GraphRecord
from enginery.runtime.images import ImageProcessor, load_image
from enginery.runtime.tokenizer import TextTokenizer
from enginery.validate.builtin import CONTEXT, QUESTION, SENTENCES, made_images
from enginery.validate.cases import Case
from enginery.validate.config import ValidateConfig

_ROWS = 16
"""Texts of one case: enough to be ragged, few enough for any machine."""
_IMAGES = 4

_TEXT_NAMES = {"input_ids", "attention_mask", "token_type_ids"}


def real_cases(artifact: Artifact, record: GraphRecord, config: ValidateConfig) -> list[Case]:
    """Cases of real inputs for a graph that takes texts or images; none for others.

    Raises:
        InputError: the data cannot be read, or the artifact takes neither texts nor images.
        ArtifactError: the tokenizer or processor of the artifact cannot be used.
    """
    names = {spec.name for spec in record.inputs}
    path = Path(config.data).expanduser()
    if names == {"pixel_values"} and _has(artifact, "preprocessor_config.json"):
        images: Sequence[Any] = (
            list_images(path, rows=config.rows) if config.data else made_images()
        )
        return _image_cases(artifact, images)
    if "input_ids" in names and names <= _TEXT_NAMES and _has(artifact, "tokenizer.json"):
        given = read_texts(path, config.column, rows=config.rows) if config.data else None
        return _text_cases(artifact, record, given)
    if config.data:
        raise InputError(
            f"data '{config.data}' cannot be used: the artifact takes "
            f"{', '.join(sorted(names))}, and has no tokenizer or image processor for them.",
            do="Leave the data out; the shape sweep still compares the outputs.",
        )
    return []


def _text_cases(artifact: Artifact, record: GraphRecord, given: list[str] | None) -> list[Case]:
    tokenizer = TextTokenizer.open(artifact.path)
    texts = list(SENTENCES) if given is None else given
    rows = _ROWS if tokenizer.pad_id is not None else 1  # without a padding token, one by one
    if artifact.manifest.task == "question-answering" and given is None:
        pairs = tokenizer.encode_pairs([(QUESTION, CONTEXT)])
        return [
            Case("question and context", "real", partial(tokenizer.feeds, pairs, record.inputs))
        ]
    cases = []
    for start in range(0, len(texts), rows):
        part = texts[start : start + rows]
        cases.append(
            Case(_name("sentences" if given is None else "rows", start, len(part)), "real",
                 partial(_tokenized, tokenizer, part, record))
        )  # fmt: skip
    return cases


def _image_cases(artifact: Artifact, images: Sequence[Any]) -> list[Case]:
    processor = ImageProcessor.open(artifact.path)
    return [
        Case(_name("images", start, len(part)), "real", partial(_processed, processor, part))
        for start in range(0, len(images), _IMAGES)
        for part in [images[start : start + _IMAGES]]
    ]


def _tokenized(tokenizer: TextTokenizer, texts: Sequence[str], record: GraphRecord) -> Feeds:
    return tokenizer.feeds(tokenizer.encode(texts), record.inputs)


def _processed(processor: ImageProcessor, images: Sequence[Any]) -> Feeds:
    # A processor without a fixed size gives each image its own: they cannot share a batch.
    pixels = [processor(load_image(image)) for image in images]
    first = [array for array in pixels if array.shape == pixels[0].shape]
    return {"pixel_values": np.stack(first)}


def _has(artifact: Artifact, name: str) -> bool:
    return (artifact.path / name).is_file()


def _name(what: str, start: int, count: int) -> str:
    return f"{what} {start + 1}–{start + count}"
