"""Describe what transformers makes of the files beside a model's weights.

It imports transformers, and runs in the child process of `TorchReference`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from transformers.utils import is_torchvision_available

from enginery.core.errors import ArtifactError, EngineryError, raise_system_error
from enginery.core.json_file import read_json
from enginery.core.model.files import PreprocessorConfig, read_logit_score
from enginery.core.versions import TRANSFORMERS5, transformers_family
from enginery.runtime.audio.processor import AudioProcessor
from enginery.runtime.builtin_inputs import synthetic_sounds
from enginery.runtime.image.processor import ImageProcessor
from enginery.runtime.pytorch.config import load_config
from enginery.runtime.pytorch.tokenizer import describe_tokenizer, load_reference_tokenizer
from enginery.runtime.pytorch.weights import RERANKER_LABELS
from enginery.runtime.text.tokenizer_files import failure_reason

_ROUNDING = 2e-3
"""Allowed difference of a processor's numbers, as a share of 1 plus the largest."""


def describe_side_files(
    directory: Path,
    *,
    limit: int,
    task: str = "",
    keys: Sequence[str] = (),
    processor: bool = False,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Return what transformers reads from a directory, as JSON data. Call this inside `guarded`.

    Args:
        directory: the directory of a model, or of files of an artifact.
        limit: the length in tokens at which long texts are truncated; 0 for no tokenizer.
        task: the task that a model is loaded for, which may change its config; empty for files of
            an artifact.
        keys: keys of tokenizer_config.json whose effect is asked for.
        processor: compare the runtime's processor with transformers'.
        trust_remote_code: run Python code that comes with the model.

    Returns:
        `tokenizer`, a `TokenizerDescription`, and `attributes` of the tokenizer by key;
        `processor`, from `compare_processor`; and the values by key of `config.json`,
        `generation_config.json` and `preprocessor_config.json`. What transformers cannot read is
        missing, and `errors` says why.
    """
    described: dict[str, Any] = {"errors": {}}

    def attempt(name: str, describe: Callable[[], Any]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                described[name] = describe()
        except EngineryError as error:
            raise_system_error(error)
            described["errors"][name] = error.message
        except BaseException as error:  # bad files can cause any error, anywhere in transformers
            raise_system_error(error)
            described["errors"][name] = " ".join(failure_reason(error).split())

    def tokenizer() -> dict[str, Any]:
        reference = load_reference_tokenizer(directory, trust_remote_code=trust_remote_code)
        described["attributes"] = {key: _plain(getattr(reference, key, None)) for key in keys}
        return asdict(describe_tokenizer(reference, limit=limit))

    if limit:
        attempt("tokenizer", tokenizer)
    if (directory / "config.json").is_file():
        attempt(
            "config.json",
            lambda: _config_values(directory, task, trust_remote_code=trust_remote_code),
        )
    if (directory / "generation_config.json").is_file():
        attempt("generation_config.json", lambda: _generation_values(directory))
    if (directory / PreprocessorConfig.FILE).is_file():
        attempt(PreprocessorConfig.FILE, lambda: _processor_values(directory))
        if processor:
            attempt("processor", lambda: compare_processor(directory))
    return described


def _config_values(directory: Path, task: str, *, trust_remote_code: bool) -> dict[str, Any]:
    config = load_config(directory, trust_remote_code=trust_remote_code).config
    if task == "text-classification" and read_logit_score(directory) is not None:
        config.num_labels = RERANKER_LABELS
    values: dict[str, Any] = _plain(config.to_dict())
    return values


def _generation_values(directory: Path) -> dict[str, Any]:
    config = transformers.GenerationConfig.from_pretrained(str(directory), local_files_only=True)
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values


def compare_processor(directory: Path) -> str:
    """Compare the runtime's processor of images or sounds with transformers', on raw inputs.

    Returns:
        The first difference; empty if there is none, and for a processor that either cannot open:
        the runtime refuses it then, or transformers has no such processor.
    """
    if not (directory / PreprocessorConfig.FILE).is_file():
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reference = _load_processor(directory)
        compare = _compare_sounds if hasattr(reference, "sampling_rate") else _compare_images
        return compare(directory, reference)
    except BaseException as error:
        raise_system_error(error)
        if isinstance(error, ArtifactError):
            return ""
        failure_reason(error)  # re-raises what is neither an error of transformers nor a panic
        return ""


def _compare_images(directory: Path, reference: Any) -> str:
    from PIL import Image

    processor = ImageProcessor.open(directory)
    name = str(read_json(directory / PreprocessorConfig.FILE).get("image_processor_type"))
    bases = [base.__name__ for base in type(reference).__mro__]
    if name.endswith("Fast") or bases[0].endswith("Fast") or "TorchvisionBackend" in bases:
        return ""  # these classes resize with torchvision, whose last bits differ
    # Wide, tall and small ones: crops and padding show in one, and not in another.
    shapes = ((96, 160), (160, 96), (40, 40), (31, 200), (333, 250))
    noise = np.random.default_rng(0)
    for height, width in shapes:
        steps = np.linspace(0, 200, height * width).reshape(height, width, 1)
        pixels = (steps + noise.integers(0, 55, (height, width, 3))).astype(np.uint8)
        image = Image.fromarray(pixels)
        try:
            expected = reference(images=[image], return_tensors="np")["pixel_values"][0]
        except Exception:
            return ""  # transformers takes other inputs
        difference = _largest_difference(processor(image), np.asarray(expected))
        if difference:
            return f"an image of {width} × {height} pixels: pixel_values {difference}"
    return ""


def _compare_sounds(directory: Path, reference: Any) -> str:
    processor = AudioProcessor.open(directory)
    rate = processor.sampling_rate
    if rate != reference.sampling_rate:
        return f"sampling_rate is {rate}, and {reference.sampling_rate} in transformers"
    sounds = [samples for samples, _ in synthetic_sounds(rate, 3)]
    if getattr(reference, "dither", 0):
        return ""  # random numbers
    # Whisper and AST pad to a length of their own.
    padding = {} if processor.kind in ("Whisper", "AST") else {"padding": True}
    expected = reference(sounds, sampling_rate=rate, return_tensors="np", **padding)
    for name, values in processor(sounds).items():
        if name not in expected:
            continue
        if difference := _largest_difference(values, np.asarray(expected[name])):
            return f"{len(sounds)} sounds: {name} {difference}"
    return ""


def _largest_difference(values: Any, expected: Any) -> str:
    """Return how two arrays differ by more than rounding; empty if they do not."""
    if values.shape != expected.shape:
        return f"have the shape {values.shape}, and {expected.shape} in transformers"
    largest = float(np.abs(values.astype(np.float64) - expected).max(initial=0.0))
    # A level of gray in 255 is 0.016 after normalization; filters of sound round more.
    return f"differ by {largest:.2g}" if largest > _ROUNDING * (1 + np.abs(expected).max()) else ""


def _load_processor(directory: Path) -> Any:
    """Load the image processor or the feature extractor of a directory."""
    document = read_json(directory / PreprocessorConfig.FILE)
    images = bool(document.get("image_processor_type")) or "feature_size" not in document
    auto = transformers.AutoImageProcessor if images else transformers.AutoFeatureExtractor
    if images and not is_torchvision_available():
        return load_pillow_processor(directory)
    return auto.from_pretrained(str(directory), local_files_only=True)


def load_pillow_processor(directory: Path, **options: Any) -> Any:
    """Load the image processor of a directory that computes with Pillow, not with torchvision.

    Args:
        directory: the directory of a model.
        options: further arguments of `from_pretrained`.
    """
    is_newer = transformers_family() == TRANSFORMERS5
    backend = {"backend": "pil"} if is_newer else {"use_fast": False}
    return transformers.AutoImageProcessor.from_pretrained(
        str(directory), **{"local_files_only": True, **backend, **options}
    )


def _processor_values(directory: Path) -> dict[str, Any]:
    """Return the settings of an image processor or a feature extractor, with all defaults."""
    values: dict[str, Any] = _plain(_load_processor(directory).to_dict())
    values.pop("mel_filters", None)  # computed from the others
    return values


def _plain(value: Any) -> Any:
    """Return a value as JSON data, with text in place of what JSON does not have."""
    return json.loads(json.dumps(value, default=str))
