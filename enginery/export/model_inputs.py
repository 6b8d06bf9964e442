"""Choose the inputs of a graph: those that transformers' tokenizer or processor gives to the model.

Optimum and the dynamo exporter choose them by the model type alone. But a classifier of GPT-2 whose
tokenizer sends token types adds an embedding for them, a RoBERTa can have two types, and a BERT
whose tokenizer sends none gets zeros. A DETR whose processor pads pictures to one size looks at
its mask of pixels.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from enginery.core.errors import ExportError
from enginery.core.model.files import PreprocessorConfig
from enginery.runtime.image.processor import PIXEL_MASK
from enginery.runtime.pytorch.side_files import load_pillow_processor
from enginery.runtime.pytorch.tokenizer import load_tokenizer

TYPES = "token_type_ids"
_TOKENS = frozenset({"input_ids", "attention_mask", TYPES, "position_ids"})
_PICTURES = ((60, 180), (180, 60), (120, 120))
"""Height and width of pictures: wide, tall and square."""
_EFFECT = 1e-5
"""Largest difference of two outputs that count as equal, as a share of the largest number."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class InputChanges:
    """How the inputs of a graph differ from those that an exporter chooses."""

    added: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()


def compare_inputs(
    model: Any, source: Path, task: str, declared: Collection[str], *, trust_remote_code: bool
) -> InputChanges:
    """Compare the inputs of a graph with what transformers gives to the model.

    Args:
        model: the model.
        source: the model directory.
        task: the task, by Optimum's name.
        declared: names of the inputs that the exporter chooses.
        trust_remote_code: run a tokenizer's Python code that comes with the model.

    Raises:
        ExportError: the model uses an input that the exporter cannot add.
    """
    # Pipelines that generate pass tokens and their mask alone.
    if "generation" not in task and "input_ids" in declared and _TOKENS.issuperset(declared):
        return _compare_tokens(model, source, task, declared, trust_remote_code=trust_remote_code)
    if set(declared) == {"pixel_values"}:
        return _compare_pixels(model, source)
    return InputChanges()


def _compare_tokens(
    model: Any, source: Path, task: str, declared: Collection[str], *, trust_remote_code: bool
) -> InputChanges:
    try:
        tokenizer = load_tokenizer(
            source, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception:  # no tokenizer, or one that cannot be read: clients send tensors
        return InputChanges()
    accepted = inspect.signature(model.forward).parameters
    sent = [name for name in tokenizer.model_input_names if name in accepted]
    dropped = frozenset({TYPES} & (set(declared) - set(sent)))
    added = set()
    # Without a mask, every token counts, as in the mask of a text alone.
    for name in sorted(set(sent) - set(declared) - {"attention_mask"}):
        if not any(
            _has_effect(model, tensors, name)
            for tensors in _sample_texts(model, tokenizer, sent, task)
        ):
            continue
        if name != TYPES:
            raise ExportError(
                f"{type(model).__name__} uses the input {name} of its tokenizer, which the graph "
                f"would not have: its inputs are {', '.join(declared)}.",
                do="Use a model and a tokenizer without this input.",
            )
        added.add(name)
    return InputChanges(frozenset(added), dropped)


def _sample_texts(model: Any, tokenizer: Any, names: list[str], task: str) -> Iterator[Tensors]:
    """Yield what the tokenizer gives for a text and for a pair of texts."""
    for texts in (("The engine is warm.",), ("Is it warm?", "The engine is.")):
        with suppress(Exception):  # some take no plain texts, others no pairs
            encoded = tokenizer(*texts, return_tensors="pt", truncation=True)
            tensors = {name: encoded[name].to(model.device) for name in names if name in encoded}
            # Of several choices, each row has one.
            is_choice = task == "multiple-choice"
            yield {name: t[:, None] if is_choice else t for name, t in tensors.items()}


def _compare_pixels(model: Any, source: Path) -> InputChanges:
    accepted = inspect.signature(model.forward).parameters
    if PIXEL_MASK not in accepted or not (source / PreprocessorConfig.FILE).is_file():
        return InputChanges()
    try:
        processor = load_pillow_processor(source)
    except Exception:  # pictures are then refused by the runtime, too
        return InputChanges()
    generator = np.random.default_rng(0)
    for height, width in _PICTURES:
        picture = generator.integers(0, 255, (height, width, 3), dtype=np.uint8)
        encoded = processor(picture, return_tensors="pt")
        tensors = {
            "pixel_values": encoded["pixel_values"].to(model.device, model.dtype),
            **({PIXEL_MASK: encoded[PIXEL_MASK].to(model.device)} if PIXEL_MASK in encoded else {}),
        }
        # A mask of ones leaves nothing out.
        padded = PIXEL_MASK in tensors and not bool(tensors[PIXEL_MASK].all())
        if padded and _has_effect(model, tensors, PIXEL_MASK):
            return InputChanges(frozenset({PIXEL_MASK}))
    return InputChanges()


def _has_effect(model: Any, tensors: Mapping[str, torch.Tensor], name: str) -> bool:
    """Return True if an input changes the outputs of a model; False if the model rejects it."""
    if name not in tensors:
        return False
    others = {key: tensor for key, tensor in tensors.items() if key != name}
    with torch.inference_mode():
        try:
            outputs = model(**tensors, return_dict=True)
        except (RuntimeError, LookupError, ValueError, TypeError, AssertionError):
            return False  # pairs of a model with one type fail in transformers, too
        expected = model(**others, return_dict=True)
    return any(
        not torch.allclose(tensor, expected[key], rtol=0, atol=_EFFECT * float(tensor.abs().max()))
        for key, tensor in outputs.items()
        if isinstance(tensor, torch.Tensor)
    )
