"""Warm-up requests for a graph in Triton, with the optimum shapes of its profiles.

>>> graph = artifact.manifest.graphs[0]
>>> profile = Profile.parse("batch=1:8:32,sequence=8:16:64")
>>> samples, files = warmup_samples(graph, [profile], FeedLimits(), max_batch_size=32)
>>> samples[0]["batch_size"], sorted(files)[-1]
(8, 'warmup/0-token_type_ids')

Integer inputs are read from files: Triton's random bytes would be token ids outside the vocabulary,
on which the graph fails. A file has one row, which Triton repeats for the batch. Source:
`GenerateWarmupData` in src/backend_model_instance.cc of triton-inference-server/core.
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
"""Length of a text if no profile has it."""


def warmup_samples(
    record: GraphRecord, profiles: Sequence[Profile], limits: FeedLimits, *, max_batch_size: int
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Return the warm-up samples, and the files that they need below the model's folder.

    Args:
        record: the graph.
        profiles: profiles with one sample each; if empty, the sample is one short row.
        limits: limits of the inputs, from the model's config.json.
        max_batch_size: maximum batch size of the model; 0 if it has no batches.

    Raises:
        ShapeError: a profile has no size for a dim, or an input cannot be generated.
    """
    samples: list[dict[str, Any]] = []
    files: dict[str, bytes] = {}
    for index, profile in enumerate(profiles or [Profile({})]):
        sample, named = _sample(record, profile, limits, max_batch_size, index)
        samples.append(sample)
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
            # Triton reads raw bytes: little-endian, row-major.
            files[f"{_FOLDER}/{name}"] = np.ascontiguousarray(array).tobytes()
            entry["input_data_file"] = name
        inputs[spec.name] = entry
    name = f"the optimum of {profile}" if profile.dims else "one row"
    return {"name": name, "batch_size": rows, "inputs": map_entries(inputs)}, files


def _optimum(record: GraphRecord, profile: Profile, limits: FeedLimits) -> dict[str, int]:
    """Return the size of each dynamic dim at the profile's optimum."""
    length = max(limits.min_sequence, min(_TOKENS, limits.max_positions))
    batch = batch_dim(record)
    sizes = {}
    for name in dynamic_dims(record.inputs):
        plain = canonical_dim(name)
        natural = 1 if plain == batch else limits.sizes.get(plain, length)
        sizes[name] = profile.dims[plain].opt if plain in profile.dims else natural
    return sizes
