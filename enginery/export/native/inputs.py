"""Describe the inputs of a graph: those that a tokenizer or processor gives, with named dims.

Names and dims are those of Optimum's graphs, so that profiles, recipes and published artifacts fit
a graph whoever exported it. Inputs follow from the model's main input: a model of images may accept
an `attention_mask`, too, which nobody gives it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from enginery.core.errors import ExportError, SourceError
from enginery.core.json_file import read_json
from enginery.core.model.feeds import FeedLimits, make_feeds
from enginery.core.model.files import ImageSize, ModelConfig, PreprocessorConfig
from enginery.core.shapes import TensorSpec, dynamic_dims
from enginery.export.model_inputs import TYPES, compare_inputs
from enginery.runtime.image.processor import PIXEL_MASK, PIXELS

_TOKENS = ("batch", "sequence")
_IMAGE = ("batch", "channels", "height", "width")
_IMAGE_SIZES = ("height", "width")
_TOWERS = ("feature-extraction", "zero-shot-image-classification", "zero-shot-object-detection")
"""Tasks whose model compares texts with images or sounds, as many of each as one likes."""
_FRAMES = "frames"
_SAMPLES = "num_samples"
"""Samples of a wave that an encoder shortens to states, which its decoder counts."""
_SAMPLING_RATE = 16_000
"""Samples in a second, unless the processor has another rate."""
_CLAP_PROCESSOR: Mapping[str, int] = {
    "max_length_s": 10,
    "sampling_rate": 48_000,
    "hop_length": 480,
}
"""Defaults of CLAP's processor; source: transformers, `feature_extraction_clap.py`."""
_PROCESSOR = PreprocessorConfig.FILE
_PATCHES = "num_patches"
_PATCH_MASK, _PATCH_SHAPES = "pixel_attention_mask", "spatial_shapes"
"""Inputs of a model whose images are patches: which are real, and their rows and columns."""
_FLOATS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_LAYOUTLMV3_EDGE = 224
"""Height and width of LayoutLMv3's images, unless its config.json has an `input_size`."""
_ROWS, _LENGTH = 3, 13
"""Example sizes: torch takes 0 and 1 for constants and equal sizes for one dim, and a model may
compute with another path at a multiple of its window, chunk or patch grid."""


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of a graph, and examples of them."""

    specs: tuple[TensorSpec, ...]
    limits: FeedLimits
    sizes: Mapping[str, int]
    """Example sizes of the dynamic dims."""

    @property
    def takes_images(self) -> bool:
        """True if an input has a dynamic height and width."""
        return set(_IMAGE_SIZES) <= set(self.sizes)

    @property
    def masks_frames(self) -> bool:
        """True if a mask says which frames of a spectrogram are padding."""
        return any(spec.name == "attention_mask" and _FRAMES in spec.dims for spec in self.specs)

    def dims(self) -> dict[str, dict[int, str]]:
        """Return the names of the dynamic axes by input."""
        return {
            spec.name: {axis: dim for axis, dim in enumerate(spec.dims) if isinstance(dim, str)}
            for spec in self.specs
        }

    def feeds(self, model: Any) -> dict[str, torch.Tensor]:
        """Return example inputs in the type of a model's weights, on its device."""
        arrays = make_feeds(self.specs, self.sizes, self.limits, seed=0)
        tensors = {name: torch.from_numpy(array).to(model.device) for name, array in arrays.items()}
        return {
            name: tensor.to(model.dtype) if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }

    def with_fixed_images(self) -> ModelInputs:
        """Return the inputs with images of the example size alone."""
        fixed = {name: self.sizes[name] for name in _IMAGE_SIZES if name in self.sizes}
        specs = tuple(
            replace(spec, dims=tuple(fixed.get(str(dim), dim) for dim in spec.dims))
            for spec in self.specs
        )
        rest = {name: size for name, size in self.sizes.items() if name not in fixed}
        return replace(self, specs=specs, sizes=rest)

    def with_larger_images(self) -> ModelInputs:
        """Return the inputs with wide images, larger than usual."""
        sizes = dict(self.sizes)
        for name, step in zip(_IMAGE_SIZES, (32, 64), strict=True):
            sizes[name] += step
        return replace(self, sizes=sizes)


def describe_inputs(
    model: Any, source: Path, task: str, settings: ModelConfig, *, trust_remote_code: bool
) -> ModelInputs:
    """Return the inputs of a model's graph for a task.

    Args:
        model: the model.
        source: its directory.
        task: the task.
        settings: config.json, with the image size of the processor.
        trust_remote_code: run a tokenizer's Python code that comes with the model.

    Raises:
        ExportError: the model has a main input that no tokenizer or processor is known to give.
    """
    processor = read_json(source / _PROCESSOR) if (source / _PROCESSOR).is_file() else {}
    known = _known_inputs(model, task, settings, processor)
    names = _chosen_inputs(model, task, settings, known, processor)
    changes = compare_inputs(model, source, task, names, trust_remote_code=trust_remote_code)
    names = [name for name in names if name not in changes.dropped] + sorted(changes.added)
    specs = tuple(known[name] for name in names)
    limits = FeedLimits.from_config(settings)
    # A config may say nothing of the convolutions, so that a wave is as long as usual ones are.
    second = _example_length(processor.get("sampling_rate", _SAMPLING_RATE) // 2, 10**6)
    return ModelInputs(specs, limits, _example_sizes(specs, limits, {_SAMPLES: second}))


def _known_inputs(
    model: Any, task: str, settings: ModelConfig, processor: Mapping[str, Any]
) -> dict[str, TensorSpec]:
    """Return all inputs that a tokenizer or processor gives to models like this, by name."""
    floats = next(n for n in _FLOATS.values() if getattr(torch, n) == model.dtype)
    merged = settings.merged()
    tokens: tuple[str, ...] = _TOKENS
    image: tuple[str | int, ...] = ("batch", merged.num_channels or 3, *_IMAGE_SIZES)
    if task == "multiple-choice":
        tokens = ("batch", "num_choices", "sequence")
    elif task in _TOWERS and {"input_ids", PIXELS} <= _accepted(model):
        tokens, image = ("text_batch", "sequence"), ("image_batch", *image[1:])
    elif task in _TOWERS and {"input_ids", "input_features"} <= _accepted(model):
        tokens = ("text_batch", "sequence")
    spectrogram = _spectrogram_dims(model, merged, processor)
    mask: tuple[str, ...] = tokens
    if model.main_input_name == "input_features":
        mask = ("batch", _FRAMES)
    images = image[0]
    if _PATCH_SHAPES in _accepted(model):
        image = (images, _PATCHES, _patch_width(model))
    specs = [
        TensorSpec("input_ids", "int64", tokens),
        TensorSpec("bbox", "int64", (*tokens, 4)),
        TensorSpec(PIXELS, floats, image),
        TensorSpec(PIXEL_MASK, "int64", ("batch", *_IMAGE_SIZES)),
        TensorSpec(_PATCH_MASK, "int64", (images, _PATCHES)),
        TensorSpec(_PATCH_SHAPES, "int64", (images, 2)),
        TensorSpec("attention_mask", "int64", mask),
        TensorSpec(TYPES, "int64", tokens),
        TensorSpec("position_ids", "int64", tokens),
        TensorSpec("input_values", floats, _sound_dims(model, merged)),
        TensorSpec("input_features", floats, spectrogram),
        TensorSpec("past_values", floats, _series_dims(model)),
    ]
    return {spec.name: spec for spec in specs}


def _sound_dims(model: Any, merged: ModelConfig) -> tuple[str | int, ...]:
    """Return the dims of a wave, or of the spectrogram of an audio spectrogram transformer."""
    if merged.spectrogram_frames:
        return ("batch", merged.spectrogram_frames, merged.num_mel_bins or 128)
    if getattr(model.config, "is_encoder_decoder", False):
        return ("batch", _SAMPLES)
    return _TOKENS


def _spectrogram_dims(
    model: Any, merged: ModelConfig, processor: Mapping[str, Any]
) -> tuple[str | int, ...]:
    """Return the dims of a spectrogram.

    Whisper's has a fixed length, and its bins come first. CLAP's has channels, and the length that
    its processor cuts or repeats all sounds to.
    """
    configs = [vars(part).get("config") for part in model.modules()]
    bins = next(filter(None, (getattr(c, "num_mel_bins", None) for c in configs)), "feature")
    if merged.max_source_positions:
        return ("batch", bins, 2 * merged.max_source_positions)
    if "is_longer" in _accepted(model):
        if getattr(model.config, "audio_config", model.config).enable_fusion:
            raise ExportError(
                f"{type(model).__name__} fuses parts of sounds that are longer than its window, "
                "and which sounds are is not known before it runs.",
                do="Use a model without `enable_fusion`, such as laion/clap-htsat-unfused.",
            )
        settings = {**_CLAP_PROCESSOR, **processor}
        seconds, rate = settings["max_length_s"], settings["sampling_rate"]
        frames = int(seconds * rate) // settings["hop_length"] + 1
        batch = "audio_batch" if "input_ids" in _accepted(model) else "batch"
        return (batch, 1, frames, bins)
    return ("batch", _FRAMES, bins)


def _patch_width(model: Any) -> int:
    """Return the numbers of a patch: its pixels in all channels."""
    config = getattr(model.config, "vision_config", model.config)
    return int(config.num_channels * config.patch_size**2)


def _series_dims(model: Any) -> tuple[str | int, ...]:
    """Return the dims of a time series, whose length the patches of a model fix."""
    lengths = (getattr(model.config, key, 1) for key in ("context_length", "num_input_channels"))
    return ("batch", *lengths)


def _chosen_inputs(
    model: Any,
    task: str,
    settings: ModelConfig,
    known: Iterable[str],
    processor: Mapping[str, Any],
) -> list[str]:
    """Return the names of the inputs that the main input brings with it.

    Raises:
        ExportError: the main input is not known.
    """
    accepted, main = _accepted(model), model.main_input_name
    if main not in known:
        raise ExportError(
            f"the inputs {', '.join(known)} are supported, but the main input of "
            f"{type(model).__name__} is {main}."
        )
    images = (PIXELS, _PATCH_MASK, _PATCH_SHAPES) if _PATCH_SHAPES in accepted else (PIXELS,)
    groups: dict[str, Sequence[str]] = {
        "input_ids": ("input_ids", "bbox", *images, "input_features", "attention_mask", TYPES),
        # Texts for a model that compares them with images, or reads them off one.
        PIXELS: (*images, "input_ids", "attention_mask") if "input_ids" in accepted else images,
        "input_values": ("input_values",),
        "input_features": ("input_features", "attention_mask"),
        "past_values": ("past_values",),
    }
    names = [name for name in groups[main] if name in accepted]
    if not settings.merged().type_vocab_size and TYPES in names:
        names.remove(TYPES)  # unless the model uses it all the same: `compare_inputs` finds out
    # The tokenizer of SigLIP makes no mask: padding is attended to.
    if "siglip" in settings.model_type and "attention_mask" in names:
        names.remove("attention_mask")
    # Processors of spectrograms make a mask of the frames, unless they pad to a fixed length.
    is_masked = processor.get("return_attention_mask", True)
    if main == "input_features" and (model.config.is_encoder_decoder or not is_masked):
        names = [main]
    if task == "text-generation" and "position_ids" in accepted:
        names.append("position_ids")
    return names


def _accepted(model: Any) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _example_sizes(
    specs: Sequence[TensorSpec], limits: FeedLimits, own: Mapping[str, int]
) -> dict[str, int]:
    """Return sizes of the dynamic dims that have no common divisor; `own` are of this model."""
    sizes = {"batch": _ROWS, "image_batch": _ROWS, "audio_batch": _ROWS, "text_batch": 2 * _ROWS}
    sizes["num_choices"] = 5
    longest = limits.position_limit or limits.max_positions
    sizes["sequence"] = _example_length(limits.min_sequence, longest)
    sizes[_FRAMES] = 97
    usual = {**limits.sizes, **sizes, **own}
    return {name: usual.get(name, _LENGTH) for name in dynamic_dims(specs)}


def _example_length(shortest: int, longest: int) -> int:
    """Return a prime length: 13, or twice the samples that a model of sounds needs.

    >>> _example_length(1, 512), _example_length(1, 8), _example_length(400, 10**6)
    (13, 7, 809)
    """
    length = max(_LENGTH, 2 * shortest) if shortest > 1 else _LENGTH
    step = 1
    if length > longest:
        length, step = longest, -1
    while any(length % divisor == 0 for divisor in range(2, int(length**0.5) + 1)):
        length += step
    return length


def with_image_size(settings: ModelConfig, source: Path) -> ModelConfig:
    """Return the config with an `image_size`: its own, or that of the image processor."""
    if settings.model_type == "layoutlmv3":
        edge = read_json(source / ModelConfig.FILE).get("input_size", _LAYOUTLMV3_EDGE)
        return settings.model_copy(update={"image_size": ImageSize(edge=edge)})
    merged = settings.merged()
    if merged.image_size is not None:
        return settings
    processor = PreprocessorConfig.read(source, error=SourceError)
    # A config may name the channels in a part of a part alone, as SAM 2's does.
    if not merged.num_channels and not processor.image_processor_type:
        return settings
    size = (processor.crop_size if processor.do_center_crop else None) or processor.size
    return settings.model_copy(update={"image_size": size}) if size else settings
