"""Tiny encoders that are parts of other models: towers of CLIP, DPR's encoders, T5's encoder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

_SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
_LAYERS = {**_SIZES, "intermediate_size": 64}
_PIXELS = {**_LAYERS, "image_size": 32, "patch_size": 8}
IMAGE_CLASSES = ("CLIPVisionModel", "CLIPVisionModelWithProjection")
BOTH_CLASSES = ("CLIPModel", "ChineseCLIPModel", "SiglipModel")


def save_encoder(name: str, tokenizer_directory: Path, directory: Path) -> Any:
    """Write a model of a class with a tokenizer or an image processor, and return the model.

    Args:
        name: the class of transformers.
        tokenizer_directory: a model whose tokenizer is copied.
        directory: the new model's directory.
    """
    import torch
    import transformers
    from transformers import AutoTokenizer, CLIPImageProcessor

    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_directory))
    ids = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
    }
    texts = {**_LAYERS, **ids, "max_position_embeddings": 64}
    projected = {"projection_dim": 24}
    t5 = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, **ids}
    configs: dict[str, dict[str, Any]] = {
        "CLIPTextModel": texts,
        "CLIPTextModelWithProjection": texts | projected,
        "CLIPVisionModel": _PIXELS,
        "CLIPVisionModelWithProjection": _PIXELS | projected,
        "DPRQuestionEncoder": texts | {"projection_dim": 16},
        "DPRContextEncoder": texts,
        "DPRReader": texts,
        "T5EncoderModel": t5,
        "MT5EncoderModel": t5,
        "T5ForConditionalGeneration": t5 | {"decoder_start_token_id": 0},
        "CLIPModel": {"text_config": texts, "vision_config": _PIXELS, **projected},
        "ChineseCLIPModel": {"text_config": texts, "vision_config": _PIXELS, **projected},
        "SiglipModel": {"text_config": texts, "vision_config": _PIXELS},
    }
    model_class = getattr(transformers, name)
    config = model_class.config_class(**configs[name])
    directory.mkdir(parents=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = model_class(config).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0, 0.2)
    model.save_pretrained(directory)
    if name not in IMAGE_CLASSES:
        # transformers 5 saves a tokenizer without its vocab.txt.
        for pattern in ("*token*", "vocab.txt"):
            for file in tokenizer_directory.glob(pattern):
                shutil.copy(file, directory)
    if name in (*IMAGE_CLASSES, *BOTH_CLASSES):
        size = {"height": 32, "width": 32}
        processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size)
        processor.save_pretrained(directory)
    return model
