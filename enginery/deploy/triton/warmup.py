"""Warm-up of a graph in Triton: requests at the optima of its profiles, before it is ready.

    >>> samples, files = warmup_samples(record, profiles, limits, max_batch_size=32)
    >>> samples[0]["batch_size"], list(files)
    (8, ['warmup/0-input_ids', 'warmup/0-attention_mask'])

Whole numbers come from files: Triton's random bytes would be token ids that no vocabulary has, and
the graph would fail on them. Source: `GenerateWarmupData` in src/backend_model_instance.cc of
triton-inference-server/core; a file has one row, which Triton repeats up to the batch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from enginery.core.artifact.manifest import GraphRecord
from enginery.core.model.feeds import FeedLimits, make_feeds
from enginery.core.shapes import Profile, canonical_dim, dynamic_dims
from enginery.deploy.triton.tensors import DATA_TYPES, batch_dim
from enginery.deploy.triton.text_format import EnumValue, map_entries

_FOLDER = "warmup"
_TOKENS = 16
"""Of a text where no profile says how long texts are."""


def warmup_samples(
    record: GraphRecord, profiles: Sequence[Profile], limits: FeedLimits, *, max_batch_size: int
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """The samples, and the files that they name, below the model's folder.

    Args:
        record: the graph.
        profiles: one sample each; none for a single small row.
        limits: what the model's config.json says of its inputs.
        max_batch_size: of the model; 0 where it takes no batches.

    Raises:
        ShapeError: a profile has no size for a dim, or an input cannot be made up.
    """
    samples: list[dict[str, Any]] = []
    files: dict[str, bytes] = {}
    for index, profile in enumerate(profiles or [Profile({})]):
        made, named = _sample(record, profile, limits, max_batch_size, index)
        samples.append(made)
        files |= named
    return samples, files


def _sample(
    record: GraphRecord, profile: Profile, limits: FeedLimits, max_batch_size: int, index: int
) -> tuple[dict[str, Any], dict[str, bytes]]:
    specs = [s for s in record.inputs if s.dtype not in ("string", "bfloat16")]
    sizes, batch = _optimum(record, profile, limits), batch_dim(record)
    rows = min(sizes.get(batch, 1), max_batch_size) if max_batch_size else 1
    if max_batch_size:
        sizes = {name: 1 if canonical_dim(name) == batch else n for name, n in sizes.items()}
    feeds = make_feeds(specs, sizes, limits, seed=0)
    inputs: dict[str, dict[str, Any]] = {}
    files = {}
    for spec in record.inputs:
        shape = spec.shape(sizes)
        entry: dict[str, Any] = {
            "data_type": EnumValue(DATA_TYPES[spec.dtype]),
            "dims": list(shape[1:] if max_batch_size else shape) or [1],
        }
        array = feeds.get(spec.name)
        if array is None or array.dtype.kind == "f":
            entry["zero_data"] = True
        else:
            name = f"{index}-{re.sub(r'[^A-Za-z0-9._-]+', '-', spec.name)}"
            # Triton reads the bytes as they lie: little-endian, rows first.
            files[f"{_FOLDER}/{name}"] = np.ascontiguousarray(array).tobytes()
            entry["input_data_file"] = name
        inputs[spec.name] = entry
    name = f"the optimum of {profile}" if profile.dims else "one row"
    return {"name": name, "batch_size": rows, "inputs": map_entries(inputs)}, files


def _optimum(record: GraphRecord, profile: Profile, limits: FeedLimits) -> dict[str, int]:
    """The size of each dynamic dim."""
    length = max(limits.min_sequence, min(_TOKENS, limits.max_positions))
    batch = batch_dim(record)
    sizes = {}
    for name in dynamic_dims(record.inputs):
        plain = canonical_dim(name)
        natural = 1 if plain == batch else limits.sizes.get(plain, length)
        sizes[name] = profile.dims[plain].opt if plain in profile.dims else natural
    return sizes
