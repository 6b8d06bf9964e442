"""Made-up inputs for a graph at given sizes, and the limits that the model sets to them.

    >>> limits = FeedLimits.from_config(json.loads(Path("config.json").read_text()))
    >>> feeds = make_feeds(graph.inputs, {"batch": 4, "sequence": 17}, limits, seed=0, ragged=True)
    >>> feeds["input_ids"].shape
    (4, 17)

Token ids are drawn from the whole vocabulary; `ragged` pads every row but the first by a different
amount, so that masks matter. These inputs are for comparing two implementations of one model:
nothing is measured or calibrated on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import ShapeError
from enginery.core.shapes import TensorSpec, dim_terms

Feeds = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class FeedLimits:
    """What a model's config.json says about the values that its inputs may take."""

    vocab_size: int = 100
    pad_token_id: int = 0
    special_ids: tuple[int, ...] = ()
    """Ids that heads look for (end of sequence); never drawn at random."""
    type_vocab_size: int = 1
    min_sequence: int = 1
    """The shortest sequence; for raw audio, what the convolutions need for one frame."""
    max_positions: int = 512
    """The longest sequence, in tokens, that the position embeddings cover."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The natural size of other dims: an image's height and width, a spectrogram's bins."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FeedLimits:
        """Reads a Hugging Face config.json, and the text and vision parts inside it."""
        merged = {**config.get("vision_config", {}), **config.get("text_config", {}), **config}
        pad = merged.get("pad_token_id")
        eos = merged.get("eos_token_id")
        eos_ids = eos if isinstance(eos, list) else [eos]
        frames = _audio_frame(merged)
        return cls(
            vocab_size=int(merged.get("vocab_size") or 100),
            pad_token_id=0 if pad is None else int(pad),
            special_ids=tuple(i for i in eos_ids if isinstance(i, int)),
            type_vocab_size=int(merged.get("type_vocab_size") or 1),
            min_sequence=frames,
            max_positions=16 * frames if frames > 1 else position_limit(merged),
            sizes=_natural_sizes(merged),
        )


def _audio_frame(config: Mapping[str, Any]) -> int:
    """Samples that a convolutional audio encoder needs for eight frames; 1 for other models."""
    kernels, strides = config.get("conv_kernel"), config.get("conv_stride")
    if not isinstance(kernels, list) or not isinstance(strides, list):
        return 1
    samples = 8
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
        samples = (samples - 1) * stride + kernel
    return samples


def _natural_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    size = config.get("image_size") or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    sizes = {"height": int(height), "width": int(width)}
    if "max_source_positions" in config:  # Whisper: the encoder halves the frames once
        sizes["nb_max_frames"] = 2 * int(config["max_source_positions"])
    if "num_mel_bins" in config:
        sizes["feature"] = sizes["num_mel_bins"] = int(config["num_mel_bins"])
    if config.get("model_type") == "audio-spectrogram-transformer":
        sizes["max"] = int(config["max_length"])
    return sizes


# Position ids of these start behind the padding index, so that many embeddings are never used.
# Source: transformers' create_position_ids_from_input_ids in each model's own module.
_OFFSET_POSITIONS = (
    "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer", "mpnet", "esm",
    "roberta-prelayernorm", "data2vec-text", "ibert", "luke", "xmod", "markuplm", "lilt",
    "layoutlmv3",
)  # fmt: skip


def position_limit(config: Mapping[str, Any]) -> int:
    """The longest sequence, in tokens, that a model of this config.json takes.

    512 where the model has no limit of its own (relative positions).
    """
    limit = config.get("max_position_embeddings") or config.get("n_positions") or 512
    if config.get("model_type") in _OFFSET_POSITIONS:
        pad = config.get("pad_token_id")
        limit -= (1 if pad is None else pad) + 1
    return int(limit)


def make_feeds(
    inputs: Iterable[TensorSpec],
    sizes: Mapping[str, int],
    limits: FeedLimits,
    *,
    seed: int,
    ragged: bool = False,
) -> Feeds:
    """One array for every input, of its dtype and of the shape that `sizes` gives it.

    Raises:
        ShapeError: a dim has no size, or an input's dtype is not one that can be made up.
    """
    specs = tuple(inputs)
    generator = np.random.default_rng(seed)
    feeds: Feeds = {}
    for spec in specs:
        shape = spec.shape(sizes)
        feeds[spec.name] = _values(spec, shape, sizes, limits, generator)
    if ragged:
        _pad_rows(feeds, specs, limits)
    return feeds


def _values(
    spec: TensorSpec,
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
    limits: FeedLimits,
    generator: np.random.Generator,
) -> NDArray[Any]:
    name = spec.name
    if spec.dtype.startswith(("float", "bfloat")):
        dtype = "float32" if spec.dtype == "bfloat16" else spec.dtype
        return generator.standard_normal(shape).astype(dtype)
    if spec.dtype == "bool":
        return np.ones(shape, dtype=bool)
    if not spec.dtype.startswith(("int", "uint")):
        raise ShapeError(f"{spec}: inputs of type {spec.dtype} cannot be made up.")
    values: NDArray[Any]
    if name.endswith("mask"):
        values = np.ones(shape)
    elif name == "position_ids":
        past = next((sizes[n] for n in sizes if n.startswith("past_")), 0)
        values = np.broadcast_to(np.arange(past, past + shape[-1]), shape)
    elif name == "token_type_ids":
        second = np.arange(shape[-1]) >= (shape[-1] + 1) // 2
        values = np.broadcast_to(second & (limits.type_vocab_size > 1), shape)
    elif name.endswith("input_ids"):
        avoid = {limits.pad_token_id, *limits.special_ids}
        allowed = np.setdiff1d(np.arange(limits.vocab_size), list(avoid))
        values = generator.choice(allowed, shape)
    elif name == "bbox":
        # Boxes are x0, y0, x1, y1 in thousandths of the page; the corners must be in order.
        corners = np.sort(generator.integers(0, 1000, (*shape[:-1], 2, 2)), axis=-2)
        values = corners.reshape(shape)
    else:
        values = generator.integers(0, 2, shape)
    return np.ascontiguousarray(values, dtype=spec.dtype)


def _pad_rows(feeds: Feeds, specs: tuple[TensorSpec, ...], limits: FeedLimits) -> None:
    """Shortens each row but the first, in the mask and in the ids that the mask covers."""
    masks = {spec.dims: spec.name for spec in specs if _is_paddable_mask(spec)}
    for dims, mask_name in masks.items():
        mask = feeds[mask_name]
        rows, length = mask.shape
        kept = np.linspace(length, max(1, length // 3), rows).round().astype(int)
        mask[np.arange(length)[None, :] >= kept[:, None]] = 0
        for spec in specs:
            if spec.dims == dims and spec.name.endswith("input_ids"):
                feeds[spec.name][mask == 0] = limits.pad_token_id


def _is_paddable_mask(spec: TensorSpec) -> bool:
    two_plain_dims = len(spec.dims) == 2 and all(len(dim_terms(dim)) == 1 for dim in spec.dims)
    return spec.name.endswith("attention_mask") and two_plain_dims
