"""Generate synthetic inputs for a graph, within the limits that the model's config.json sets.

>>> limits = FeedLimits.from_artifact(artifact)
>>> inputs = artifact.manifest.graphs[0].inputs
>>> feeds = make_feeds(inputs, {"batch": 4, "sequence": 17}, limits, seed=0, ragged=True)
>>> feeds["input_ids"].shape
(4, 17)

Token ids are drawn from the whole vocabulary. `ragged` pads every row but the first by a different
amount, so that masks matter: on the right for encoders, on the left for decoders (graphs that take
past keys or position ids). Use these inputs to compare two implementations of a model, not to
measure its accuracy or to calibrate it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import ShapeError
from enginery.core.model.files import ModelConfig
from enginery.core.shapes import TensorSpec, dim_terms, is_batch

if TYPE_CHECKING:
    from enginery.core.artifact.artifact import Artifact

Feeds = dict[str, NDArray[Any]]

MAX_ELEMENTS = 2**30
"""Largest number of elements of all inputs of one run: 8 GiB, as they are drawn in 8 bytes each. 64
images of 1024 x 1024 pixels have a fifth of it, texts a thousandth."""


@dataclass(frozen=True)
class FeedLimits:
    """Limits on the values and sizes of a model's inputs, from its config.json."""

    vocab_size: int = 100
    pad_token_id: int = 0
    special_ids: tuple[int, ...] = ()
    """Ids that heads search for (end of sequence); they are never drawn."""
    end_id: int | None = None
    """Id that ends every row: a classifier with an encoder and a decoder reads its state there, and
    rejects rows without one. None for other models."""
    image_token_id: int | None = None
    """Id that stands for a patch of an image, in graphs that take both ids and pixels; it is drawn
    nowhere else. None for other models."""
    image_tokens: int = 0
    """Number of such ids at the start of each row."""
    codebooks: int = 1
    """Rows of tokens for each row of the batch: an audio decoder has one for each codebook."""
    type_vocab_size: int = 1
    min_sequence: int = 1
    """Shortest sequence; for raw audio, the samples that the convolutions need."""
    max_positions: int = 512
    """Longest sequence to try, in the model's unit: tokens, or samples of audio."""
    position_limit: int | None = None
    """Longest sequence that the position embeddings cover; None if there is no limit."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Usual sizes of other dims: an image's height and width, a spectrogram's bins."""

    def up_to(self, length: int | None) -> FeedLimits:
        """Return the limits for inputs of at most so many tokens; None for no further limit."""
        if length is None:
            return self
        return replace(
            self,
            max_positions=min(self.max_positions, length),
            position_limit=min(self.position_limit or length, length),
        )

    @property
    def max_sizes(self) -> dict[str, int]:
        """Largest allowed size of each dim: of `sequence`, if the position embeddings limit it."""
        return {} if self.position_limit is None else {"sequence": self.position_limit}

    def rows(self, dim: str, batch: int) -> int | None:
        """Return the size of a dim that counts rows, for a batch of this size; None for others.

        >>> FeedLimits(codebooks=4).rows("total_batch_size_x_num_codebooks", 2)  # MusicGen
        8
        """
        if dim.endswith("_x_num_codebooks"):
            return batch * self.codebooks
        return batch if is_batch(dim) else None

    @classmethod
    def from_artifact(cls, artifact: Artifact) -> FeedLimits:
        """Derive the limits from an artifact's config.json and the records of its graphs."""
        graphs = artifact.manifest.graphs
        sizes = {name: size for graph in graphs for name, size in graph.sample_sizes.items()}
        limits = cls.from_config(ModelConfig.read(artifact.path), sizes)
        limits = limits.up_to(artifact.manifest.length_limit)
        padding = graphs[0].padding
        if padding is None or padding.side == "none":
            return limits
        return replace(limits, pad_token_id=padding.token_id)

    @classmethod
    def from_config(
        cls, config: ModelConfig, sample_sizes: Mapping[str, int] | None = None
    ) -> FeedLimits:
        """Derive the limits from a model's config.json and its text and vision parts.

        Args:
            config: the config.json.
            sample_sizes: sizes of other dims, of which the config says nothing.
        """
        merged = config.merged()
        pad, eos = merged.pad_token_id, merged.eos_token_id
        ends = eos if isinstance(eos, tuple) else () if eos is None else (eos,)
        frames = 1 if _is_text_to_speech(merged) else merged.audio_samples
        limit = merged.position_limit()
        vision = config.vlm_config
        patches = vision.image_tokens if vision else 0
        return cls(
            vocab_size=merged.vocab_size or 100,
            pad_token_id=max(pad or 0, 0),
            special_ids=ends,
            end_id=ends[0] if ends and merged.reads_the_end else None,
            image_token_id=vision.image_token_index if vision and patches else None,
            image_tokens=patches,
            codebooks=merged.num_codebooks or 1,
            type_vocab_size=merged.type_vocab_size or 1,
            min_sequence=patches + 1 if patches else frames,
            max_positions=16 * frames if frames > 1 else limit,
            position_limit=limit if _has_position_limit(merged) else None,
            sizes={**_natural_sizes(merged), **(sample_sizes or {})},
        )


def _is_text_to_speech(config: ModelConfig) -> bool:
    """Return True for SpeechT5's text-to-speech model, which does not use its audio encoder."""
    return any(name.endswith("ForTextToSpeech") for name in config.architectures)


_IMAGE_EDGE = 224


def _natural_sizes(config: ModelConfig) -> dict[str, int]:
    size = config.image_size
    height, width = size.sides(_IMAGE_EDGE) if size else (_IMAGE_EDGE, _IMAGE_EDGE)
    sizes = {"height": height, "width": width}
    if config.max_source_positions is not None:  # Whisper: the encoder halves the frames once
        sizes["nb_max_frames"] = 2 * config.max_source_positions
    if config.num_mel_bins is not None:
        sizes["feature"] = sizes["num_mel_bins"] = config.num_mel_bins
    if config.spectrogram_frames is not None:
        sizes["max"] = config.spectrogram_frames
    return sizes


# These model types use relative positions, whatever length their config.json gives.
_RELATIVE_POSITIONS = (
    "t5",
    "mt5",
    "umt5",
    "longt5",
    "switch_transformers",
    "xlnet",
    "bloom",
    "mpt",
)


def _has_position_limit(config: ModelConfig) -> bool:
    """Return True if the model cannot process sequences above the length in its config.json."""
    relative = (
        config.model_type in _RELATIVE_POSITIONS
        or not config.position_biased_input  # DeBERTa
        or config.audio_samples > 1
    )
    return not relative and bool(config.positions)


def make_feeds(
    inputs: Iterable[TensorSpec],
    sizes: Mapping[str, int],
    limits: FeedLimits,
    *,
    seed: int,
    ragged: bool = False,
) -> Feeds:
    """Return an array for every input, of its dtype and of the shape for `sizes`.

    Raises:
        ShapeError: a dim has no size, inputs of this dtype or rank cannot be generated, or all
            inputs have more than `MAX_ELEMENTS` elements.
    """
    specs = tuple(inputs)
    generator = np.random.default_rng(seed)
    shapes = [spec.shape(sizes) for spec in specs]
    elements = sum(math.prod(shape) for shape in shapes)
    if elements > MAX_ELEMENTS:
        largest = max(specs, key=lambda spec: math.prod(spec.shape(sizes)))
        raise ShapeError(
            f"{largest}: the inputs have {elements:,} elements at {dict(sizes)}, expected up to "
            f"{MAX_ELEMENTS:,}.",
            do="Choose smaller sizes; if the graph fixes them, export it again.",
        )
    feeds: Feeds = {}
    try:
        for spec, shape in zip(specs, shapes, strict=True):
            feeds[spec.name] = _values(spec, shape, sizes, limits, generator)
        if ragged:
            _pad_rows(feeds, specs, limits)
        if "spatial_shapes" in feeds:
            _arrange_patches(feeds)
        if limits.image_token_id is not None and {"input_ids", "pixel_values"} <= feeds.keys():
            feeds["input_ids"][:, : limits.image_tokens] = limits.image_token_id
        if limits.end_id is not None:
            _end_rows(feeds, specs, limits.end_id)
        if {"input_ids", "max_length"} <= feeds.keys():
            # MusicGen's pattern holds the tokens, those of each codebook a step later.
            feeds["max_length"][:] = feeds["input_ids"].shape[1] + limits.codebooks + 1
    except (TypeError, ValueError, IndexError) as error:  # `bbox` of 5 numbers, `float7`
        listed = ", ".join(str(spec) for spec in specs)
        raise ShapeError(f"cannot generate inputs for {listed}: {error}.") from error
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
        numbers = generator.standard_normal(shape)
        if name == "flattened_patches":  # Pix2Struct: row and column, from 1, then the pixels
            width = math.ceil(math.sqrt(shape[1]))
            numbers[..., 0], numbers[..., 1] = 1 + np.stack(divmod(np.arange(shape[1]), width))
        return numbers.astype(dtype)
    if spec.dtype == "bool":
        return np.ones(shape, dtype=bool)
    if not spec.dtype.startswith(("int", "uint")):
        raise ShapeError(f"{spec}: cannot generate inputs of type {spec.dtype}.")
    values: NDArray[Any]
    if name.endswith("mask"):
        values = np.ones(shape)
    elif name == "position_ids":
        past = next((sizes[n] for n in sizes if n.startswith("past_")), 0)
        values = np.broadcast_to(np.arange(past, past + shape[-1]), shape)
    elif name == "token_type_ids":
        in_second_text = np.arange(shape[-1]) >= (shape[-1] + 1) // 2
        values = np.broadcast_to(in_second_text & (limits.type_vocab_size > 1), shape)
    elif name.endswith("input_ids"):
        avoid = {limits.pad_token_id, limits.image_token_id, *limits.special_ids}
        values = generator.choice(_ordinary_ids(limits.vocab_size, frozenset(avoid)), shape)
    elif name == "audio_codes":
        values = generator.integers(0, limits.vocab_size, shape)
    elif name == "bbox":
        # Boxes are x0, y0, x1, y1 in thousandths of the page, with x0 <= x1 and y0 <= y1.
        corners = np.sort(generator.integers(0, 1000, (*shape[:-1], 2, 2)), axis=-2)
        values = corners.reshape(shape)
    else:
        values = generator.integers(0, 2, shape)
    # Not ascontiguousarray, which gives scalars a dim.
    return np.asarray(values, dtype=spec.dtype, order="C")


@lru_cache(maxsize=4)
def _ordinary_ids(vocab_size: int, avoid: frozenset[int | None]) -> NDArray[Any]:
    """Return the ids that are not special, or all of them if there are no others."""
    everything = np.arange(vocab_size)
    allowed = np.setdiff1d(everything, [token_id for token_id in avoid if token_id is not None])
    return allowed if allowed.size else everything


def _pad_rows(feeds: Feeds, specs: tuple[TensorSpec, ...], limits: FeedLimits) -> None:
    """Pad each row but the first, in the masks and in the ids and positions that they cover.

    In a graph with past keys only past positions are padded, as in batched generation.
    """
    decodes = any(spec.name == "position_ids" or spec.name.startswith("past_") for spec in specs)
    for mask_spec in specs:
        if not is_padding_mask(mask_spec):
            continue
        mask = feeds[mask_spec.name]
        rows, length = mask.shape
        covered = [spec for spec in specs if spec is not mask_spec and covers(mask_spec, spec)]
        new = min((feeds[spec.name].shape[1] for spec in covered), default=length)
        shortest = max(limits.image_tokens + 1, length // 3, new + 1 if new < length else 0)
        shortest = min(shortest, length)
        real_lengths = np.linspace(length, shortest, rows).round().astype(int)[:, None]
        pads_left = decodes and not mask_spec.name.startswith("encoder_")
        columns = np.arange(length)[None, :]
        mask[columns < length - real_lengths if pads_left else columns >= real_lengths] = 0
        for spec in covered:
            values = feeds[spec.name]
            width = values.shape[1]
            if spec.name.endswith("input_ids"):
                values[mask[:, length - width :] == 0] = limits.pad_token_id
            elif spec.name == "position_ids":
                positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
                values[...] = positions[:, length - width :]


def _arrange_patches(feeds: Feeds) -> None:
    """Give images of patches, such as SigLIP 2's, rows and columns that their real patches fill."""
    shapes, patches = feeds["spatial_shapes"], feeds["pixel_values"].shape[1]
    mask = feeds.get("pixel_attention_mask", np.ones((len(shapes), patches), np.int64))
    counts = mask.sum(axis=1).clip(1)
    heights = np.sqrt(counts).astype(shapes.dtype)
    # Every other image is wide.
    heights[1::2] = 1
    shapes[:, 0], shapes[:, 1] = heights, counts // heights
    if "pixel_attention_mask" in feeds:
        mask[...] = np.arange(patches) < shapes.prod(axis=1, keepdims=True)


def _end_rows(feeds: Feeds, specs: tuple[TensorSpec, ...], end_id: int) -> None:
    """Set the last id of each row that is not padding."""
    for spec in specs:
        if spec.name == "input_ids" and feeds[spec.name].size:
            ids = feeds[spec.name]
            masks = [m for m in specs if is_padding_mask(m) and covers(m, spec)]
            real = feeds[masks[0].name] != 0 if masks else np.ones(ids.shape, bool)
            last = ids.shape[1] - 1 - real[:, ::-1].argmax(axis=1)
            ids[np.arange(len(ids)), last] = end_id


def is_padding_mask(spec: TensorSpec) -> bool:
    """Return True if an input is a padding mask of shape (batch, sequence)."""
    return spec.name.endswith("attention_mask") and len(spec.dims) == 2


def covers(mask: TensorSpec, spec: TensorSpec) -> bool:
    """Return True if `spec` is (batch, sequence, …) over the mask's positions or the last of them.

    A mask over `past_sequence + sequence` ends with the positions of `sequence`.
    """
    if len(spec.dims) < 2 or spec.dims[0] != mask.dims[0]:
        return False
    return spec.dims[1] == mask.dims[1] or spec.dims[1] in dim_terms(mask.dims[1])
