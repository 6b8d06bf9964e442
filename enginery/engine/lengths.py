"""Shape profiles from data: a column of texts, through the artifact's own tokenizer.

Takes an artifact and a file of texts; leaves one profile for each bucket of token lengths.

    >>> profiles, buckets = profiles_from_data(artifact, record, Path("reviews.csv"), count=3)
    >>> [str(profile) for profile in profiles]
    ['batch=1:8:32,sequence=1:24:24', 'batch=1:8:32,sequence=25:64:64',
     'batch=1:8:32,sequence=65:136:512']
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact import Artifact
from enginery.core.datasets.samples import read_texts
from enginery.core.errors import OptionError, ShapeError
from enginery.core.manifest import GraphRecord
from enginery.core.model_files import ModelConfig
from enginery.core.shapes import DimRange, Profile, dim_terms, dynamic_dims
from enginery.engine.buckets import Buckets, bucket_lengths
from enginery.runtime.tokenizer import TextTokenizer

_CHUNK = 1024
"""Texts that are tokenized at a time: an encoding takes far more memory than its length."""


def token_lengths(artifact: Artifact, texts: Iterable[str]) -> NDArray[np.int32]:
    """How many tokens each text has, special tokens included, before it is cut at the limit.

    Returns:
        (texts,), in their order.

    Raises:
        ArtifactError: the artifact has no tokenizer, or it cannot be read.
        InputError: an item is not a text.
    """
    tokenizer = TextTokenizer.open(artifact.path)
    tokenizer.backend.no_truncation()
    remaining = iter(texts)
    lengths: list[int] = []
    while chunk := list(islice(remaining, _CHUNK)):
        encodings = tokenizer.encode([tokenizer.prepare(text) for text in chunk])
        lengths.extend(len(encoding.ids) for encoding in encodings)
    return np.array(lengths, dtype=np.int32)


def profiles_from_data(
    artifact: Artifact,
    record: GraphRecord,
    data: Path,
    *,
    column: str = "text",
    rows: int = 10_000,
    count: int = 3,
    batch: str = "1:8:32",
    multiple_of: int = 8,
    last: Literal["limit", "data"] = "limit",
    cost: Literal["tokens", "arithmetic"] = "tokens",
) -> tuple[list[Profile], Buckets]:
    """One profile a bucket: contiguous ranges of the sequence, each tuned for its upper boundary.

    Args:
        artifact: has the tokenizer, whose limit is the longest sequence.
        record: the graph that the profiles are for.
        data: CSV, TSV, JSONL, Parquet or text file.
        column: of `data`, with the texts.
        rows: how many of them are read, evenly spread over the file.
        count: the most profiles.
        batch: min:opt:max of the batch, the same in every profile. Not used where the graph's
            batch is fixed.
        multiple_of: boundaries between buckets are multiples of this.
        last: where the last profile ends. `limit`: at the longest input that the tokenizer lets
            through, so that inputs longer than all in `data` still fit. `data`: at the longest in
            `data`, which needs less memory.
        cost: what the split makes least. `tokens`: padded tokens. `arithmetic`: multiply-adds,
            with attention's, which grow with the square of the length.

    Raises:
        InputError: the file cannot be used or holds no text.
        ArtifactError: the artifact has no tokenizer, or it cannot be read.
        OptionError: a number cannot be used, or `arithmetic` needs a width that config.json lacks.
        ShapeError: the graph takes no texts, its sequence is fixed, or it has dynamic dims that
            do not follow from texts.
    """
    rows_dim, sequence = _text_dims(record)
    try:
        batch_range = DimRange.parse(batch)
    except ShapeError as error:
        raise OptionError(f"option 'batch' is '{batch}': {error.message}") from None
    if rows < 1:
        raise OptionError(f"option 'rows' is {rows}, expected 1 or more.")
    buckets = bucket_lengths(
        token_lengths(artifact, read_texts(data, column, rows=rows)),
        count,
        most=TextTokenizer.open(artifact.path).limit,
        multiple_of=multiple_of,
        hidden_size=_width(artifact) if cost == "arithmetic" else 0,
    )
    profiles = []
    for bucket in buckets.buckets:
        to_limit = last == "limit" and bucket is buckets.buckets[-1]
        end = buckets.most if to_limit else bucket.longest
        ranges = {rows_dim: batch_range} if rows_dim else {}
        ranges[sequence] = DimRange(bucket.shortest, bucket.longest, end)
        profiles.append(Profile({name: ranges[name] for name in dynamic_dims(record.inputs)}))
    return profiles, buckets


def _text_dims(record: GraphRecord) -> tuple[str, str]:
    """The graph's names of the batch, empty where it is fixed, and of the sequence."""
    remedy = "Give its profiles with --profile, as batch=1:8:32,sequence=8:128:512."
    dims = next((spec.dims for spec in record.inputs if spec.name == "input_ids"), ())
    if len(dims) != 2:
        inputs = ", ".join(str(spec) for spec in record.inputs)
        raise ShapeError(
            f"{record.file} takes no texts, so profiles cannot come from their lengths: it has no "
            f"input_ids (batch, sequence) among {inputs}.",
            do=remedy,
        )
    rows, sequence = dims
    if isinstance(sequence, int):
        raise ShapeError(
            f"{record.file}: the sequence is fixed at {sequence}, whatever the texts' lengths.",
            do="Leave --profiles-from out, or export the model with a dynamic sequence.",
        )
    derived = [*dim_terms(rows), *dim_terms(sequence)]
    others = [name for name in dynamic_dims(record.inputs) if name not in derived]
    if others or len(dim_terms(sequence)) != 1 or sequence != dim_terms(sequence)[0]:
        raise ShapeError(
            f"{record.file}: the lengths of texts say nothing of the dims "
            f"{', '.join(others) or sequence}.",
            do=remedy,
        )
    return (rows if isinstance(rows, str) else ""), sequence


def _width(artifact: Artifact) -> int:
    if width := ModelConfig.read(artifact.path).width:
        return width
    raise OptionError(
        "option 'cost' is arithmetic, but config.json has none of hidden_size, d_model, dim, "
        "n_embd.",
        do="Take tokens.",
    )
