"""Derive shape profiles from data: tokenize texts and split their lengths into buckets."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.datasets.samples import read_texts
from enginery.core.errors import OptionError, ShapeError
from enginery.core.shapes import DimRange, Profile, dim_terms, dynamic_dims
from enginery.engine.profiles.buckets import LengthBuckets, bucket_lengths
from enginery.runtime.text.tokenizer import TextTokenizer

_MAX_ROWS = 10_000
"""Number of rows to read, evenly spread over the file."""
_CHUNK = 1024
"""Texts to tokenize at a time; an encoding takes far more memory than its length."""


def token_lengths(artifact: Artifact, texts: Iterable[str]) -> NDArray[np.int32]:
    """Count the tokens of each text with special tokens, before truncation.

    Returns:
        int32 (texts,), in their order.

    Raises:
        ArtifactError: the tokenizer is missing or cannot be loaded.
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
    count: int = 3,
    batch: str = "1:8:32",
) -> tuple[list[Profile], LengthBuckets]:
    """Return one profile per bucket of token lengths, each tuned for the bucket's upper end.

    Args:
        artifact: has the tokenizer, whose limit is the maximum sequence length.
        record: the graph that the profiles are for.
        data: CSV, TSV, JSONL, Parquet or text file.
        column: column of the data with the texts.
        count: maximum number of profiles.
        batch: min:opt:max of the batch in every profile. Ignored if the graph's batch is fixed.

    Returns:
        The profiles, and the buckets they were made from.

    Raises:
        InputError: the file cannot be used or holds no text.
        ArtifactError: the tokenizer is missing or cannot be loaded.
        OptionError: `batch` or `count` is out of range.
        ShapeError: the graph takes no texts, its sequence is fixed, or it has dynamic dims that
            text lengths do not determine.
    """
    rows_dim, sequence = _text_dims(record)
    try:
        batch_range = DimRange.parse(batch)
    except ShapeError as error:
        raise OptionError(f"option 'batch' is '{batch}': {error.message}") from None
    buckets = bucket_lengths(
        token_lengths(artifact, read_texts(data, column, rows=_MAX_ROWS)),
        count,
        most=TextTokenizer.open(artifact.path).limit,
    )
    profiles = []
    for bucket in buckets.buckets:
        # The last one ends at the limit, so that inputs longer than all in the data still fit.
        end = buckets.most if bucket is buckets.buckets[-1] else bucket.longest
        # A batch that is fixed has no name, and no range.
        ranges = {
            rows_dim: batch_range,
            sequence: DimRange(bucket.shortest, bucket.longest, end),
        }
        profiles.append(Profile({name: ranges[name] for name in dynamic_dims(record.inputs)}))
    return profiles, buckets


def _text_dims(record: GraphRecord) -> tuple[str, str]:
    """Return the graph's names of the batch dim (empty if fixed) and of the sequence dim."""
    remedy = "Set its profiles with --profile, such as batch=1:8:32,sequence=8:128:512."
    dims = next((spec.dims for spec in record.inputs if spec.name == "input_ids"), ())
    if len(dims) != 2:
        inputs = ", ".join(str(spec) for spec in record.inputs)
        raise ShapeError(
            f"{record.file} takes no texts, so profiles cannot be derived from their lengths: "
            f"expected input_ids (batch, sequence), found {inputs}.",
            do=remedy,
        )
    rows, sequence = dims
    if isinstance(sequence, int):
        raise ShapeError(
            f"{record.file}: the sequence is fixed at {sequence}, so text lengths do not matter.",
            do="Remove --data, or export the model with a dynamic sequence.",
        )
    derived = [*dim_terms(rows), *dim_terms(sequence)]
    others = [name for name in dynamic_dims(record.inputs) if name not in derived]
    if others or len(dim_terms(sequence)) != 1 or sequence != dim_terms(sequence)[0]:
        raise ShapeError(
            f"{record.file}: text lengths do not determine the dims "
            f"{', '.join(others) or sequence}.",
            do=remedy,
        )
    return (rows if isinstance(rows, str) else ""), sequence
