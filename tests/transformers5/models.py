"""Tiny models with rotary positions, the same in transformers 4 and 5.

It imports what both versions have, and nothing of the package, so that it also runs in an
environment with transformers 5 alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSpeechSeq2Seq,
)

ANSWERS = Path(__file__).with_name("answers.json")
"""Configurations as version 5 saves them, and what it computes; `save.py --stored` writes it."""
VOCABULARY, POSITIONS, LENGTH, STEPS = 99, 48, 20, 16
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": POSITIONS,
    "sliding_window": 6,
    "local_attention": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "moe_topk": 2,
    "shared_expert_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "query_pre_attn_scalar": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
"""Sizes of configurations, of those keys that a model type has."""


def scalings(dims: int) -> dict[str, dict[str, Any]]:
    """Return the parameters of each type of scaling, for a number of rotated dims."""
    half = dims // 2
    return {
        "default": {},
        "linear": {"factor": 2.0},
        "dynamic": {"factor": 2.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 12, "beta_fast": 16.0},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 12,
        },
        # Twice: with the factor that version 4 computes itself, and with another.
        "longrope": {
            "short_factor": [1.0 + 0.1 * index for index in range(half)],
            "long_factor": [2.0 + 0.3 * index for index in range(half)],
            "original_max_position_embeddings": 12,
        },
        "longrope-factor": {
            "short_factor": [1.0 + 0.1 * index for index in range(half)],
            "long_factor": [2.0 + 0.3 * index for index in range(half)],
            "original_max_position_embeddings": 12,
            "factor": 3.0,
        },
    }


def auto_class(config: Any) -> Any:
    """Return the Auto class that loads a model of a configuration."""
    for choice in (AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSpeechSeq2Seq):
        if type(config) in choice._model_mapping:
            return choice
    return AutoModel


def set_weights(model: Any) -> dict[str, torch.Tensor]:
    """Set weights that depend on their names and shapes alone, and return them."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            draw = np.random.default_rng(zlib.crc32(name.encode()))
            values = draw.normal(size=tuple(weight.shape)).astype(np.float32)
            scale = 1.6 / weight.shape[-1] ** 0.5 if weight.ndim > 1 else 0.1
            weight.copy_(torch.from_numpy(values * scale) + (weight.ndim == 1))
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def prompt() -> torch.Tensor:
    """Return token ids: int64 (2, LENGTH)."""
    draw = np.random.default_rng(7)
    return torch.from_numpy(draw.integers(3, VOCABULARY, size=(2, LENGTH)))


def answers(model: Any, *, steps: int = STEPS) -> dict[str, Any]:
    """Return the logits of the last position, and the tokens of greedy search without a cache."""
    model.eval()
    ids = prompt()
    with torch.no_grad():
        if model.main_input_name == "input_values":  # of speech, with a decoder
            sound = np.random.default_rng(7).normal(size=(2, 6_000)).astype(np.float32)
            first = model(input_values=torch.from_numpy(sound), decoder_input_ids=ids)[0]
        else:
            first = model(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
        values = {"logits": [[round(x, 6) for x in row] for row in first[:, -1].tolist()]}
        if steps and first.shape[-1] == VOCABULARY:
            tokens = ids
            for _ in range(steps):
                logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens))[0]
                tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
            values["tokens"] = tokens[:, LENGTH:].tolist()
    return values


def rotary_types() -> Iterator[str]:
    """Yield the model types of transformers 5 whose configurations have rotary positions."""
    for kind in sorted(transformers.CONFIG_MAPPING.keys()):
        try:
            config = transformers.CONFIG_MAPPING[kind]()
        except Exception:
            continue
        if isinstance(getattr(config, "rope_parameters", None), dict):
            yield kind
