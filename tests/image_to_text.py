"""Tiny models that read images: an image encoder with a text decoder.

save_image_to_text("trocr", directory)    # also `deit-trocr`, `vit-gpt2`, `donut`
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from enginery.core.json_file import json_bytes, read_json
from tests.tiny import _CONFIGS, _train

TASK_TOKEN = "<s_receipt>"
"""What starts the texts of `donut`."""
_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", TASK_TOKEN, "<s_total>", "</s_total>")
_DECODERS: dict[str, dict[str, Any]] = {
    "trocr": {
        "d_model": 48,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 32,
        "init_std": 0.3,
    },
    "gpt2": {**_CONFIGS["gpt2"], "n_positions": 32},
    "mbart": {**_CONFIGS["mbart"], "max_position_embeddings": 32},
}
_DONUT_SWIN = {
    "image_size": [64, 32],
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 4],
    "window_size": 4,
    "initializer_range": 0.3,
}
KINDS = {
    "trocr": ("vit", "trocr"),
    "deit-trocr": ("deit", "trocr"),
    "vit-gpt2": ("vit", "gpt2"),
    "donut": ("donut-swin", "mbart"),
}


def save_image_to_text(kind: str, directory: Path) -> Path:
    """Write the model, its image processor, tokenizer and generation_config.json."""
    import torch
    import transformers

    encoder, decoder = KINDS[kind]
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_train("bpe", _SPECIALS),
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=[TASK_TOKEN],
    )
    tokenizer.save_pretrained(directory)
    _processor(kind).save_pretrained(directory)
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    sizes = _DONUT_SWIN if encoder == "donut-swin" else _CONFIGS[encoder]
    auto = transformers.AutoConfig
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        auto.for_model(encoder, **{k: v for k, v in sizes.items() if k != "architectures"}),
        auto.for_model(decoder, **_DECODERS[decoder], **ids, vocab_size=len(tokenizer)),
        decoder_start_token_id=2,
        **ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = transformers.VisionEncoderDecoderModel(config).eval()
        for name, parameter in model.named_parameters():
            # Random decoders attend to all of an image alike, unless the weights are wide.
            if parameter.dim() > 1 and ("encoder_attn" in name or "crossattention" in name):
                torch.nn.init.normal_(parameter, std=0.8)
        model.save_pretrained(directory)
    file = directory / "generation_config.json"
    document = {**read_json(file), "decoder_start_token_id": 2, **ids}
    document.pop("_from_model_config", None)
    file.write_bytes(json_bytes(document))
    return directory


def _processor(kind: str) -> Any:
    import transformers

    square = {"height": 32, "width": 32}
    if kind == "deit-trocr":
        size = {"height": 40, "width": 40}
        return transformers.DeiTImageProcessor(size=size, crop_size=square)
    if kind == "donut":
        size = {"height": 64, "width": 32}
        return transformers.DonutImageProcessor(size=size, do_align_long_axis=True)
    return transformers.ViTImageProcessor(size=square)
