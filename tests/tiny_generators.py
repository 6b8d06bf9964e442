"""Tiny models that generate texts: translators with languages, and one that reads images."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.tiny import save_tiny

_SIZES = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
    "init_std": 0.3,
}
_READER_SIZES = {
    "d_model": 32,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
    "init_std": 0.3,
}


def save_translator(model_type: str, tokenizer_directory: Path, directory: Path) -> tuple[Any, Any]:
    """Write a translation model with the tokenizer of a directory; return both."""
    import torch
    import transformers

    shutil.copytree(tokenizer_directory, directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, use_fast=False)
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        forced_eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=(
            tokenizer.pad_token_id if model_type == "marian" else tokenizer.eos_token_id
        ),
        **_SIZES,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
        model.save_pretrained(directory)
    return model, tokenizer


def save_image_reader(directory: Path) -> Path:
    """Write a model that generates the text of an image: ViT's encoder and TrOCR's decoder."""
    import torch
    import transformers

    texts = save_tiny("gpt2", "text-generation", directory.with_name("texts"))
    images = save_tiny("vit", "image-classification", directory.with_name("images"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(texts)
    tokenizer.save_pretrained(directory)
    shutil.copy(images / "preprocessor_config.json", directory)
    encoder = transformers.AutoConfig.from_pretrained(images)
    encoder._name_or_path = ""
    special = {"decoder_start_token_id": 1, "pad_token_id": 0, "eos_token_id": 0}
    decoder = transformers.TrOCRConfig(
        vocab_size=len(tokenizer),
        is_decoder=True,
        add_cross_attention=True,
        cross_attention_hidden_size=encoder.hidden_size,
        **_READER_SIZES,
        **special,
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = transformers.VisionEncoderDecoderModel(config).eval()
    model.generation_config = transformers.GenerationConfig(**special)
    model.save_pretrained(directory)
    return directory


def reference_tokens(
    source: Path, texts: Sequence[str], **options: Any
) -> tuple[list[list[int]], list[float], int]:
    """Return what transformers generates for each text alone.

    Returns:
        The new tokens, the scores of beam search, and the padding token.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    has_encoder = AutoConfig.from_pretrained(source).is_encoder_decoder
    tokenizer = AutoTokenizer.from_pretrained(source)
    auto = AutoModelForSeq2SeqLM if has_encoder else AutoModelForCausalLM
    model = auto.from_pretrained(source).eval()
    pad = model.config.pad_token_id if has_encoder else 0
    tokens, scores = [], []
    for text in texts:
        inputs = tokenizer([text], return_tensors="pt", return_token_type_ids=False)
        prompt = 1 if has_encoder else inputs.input_ids.shape[1]
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            generated = model.generate(
                **inputs,
                pad_token_id=pad,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
                **options,
            )
        tokens += [row[prompt:].tolist() for row in generated.sequences]
        scores += getattr(generated, "sequences_scores", torch.zeros(0)).tolist()
    return tokens, scores, pad


def filled(tokens: Sequence[int], length: int, pad: int) -> list[int]:
    """Return tokens up to a length: transformers fills results of one input up to the longest."""
    return [*tokens, *[pad] * (length - len(tokens))]
