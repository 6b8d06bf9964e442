"""Find the length up to which a graph does what its model does.

A graph is traced with a few tokens, so it has the one way of several that the model takes for short
texts.
"""

from __future__ import annotations

from typing import Any

from enginery.core.model.files import ModelConfig


def find_length_limit(model: Any, settings: ModelConfig) -> tuple[int | None, list[str]]:
    """Return the longest input of a graph in tokens, None for the model's own limit, and notes.

    Args:
        model: the loaded model, before it runs for the first time: a run may switch it.
        settings: its config.json.
    """
    limits: dict[int, str] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        rope_type = getattr(module, "rope_type", "")
        if isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope"):
            # As dynamic_rope_update of transformers.modeling_rope_utils has it.
            original = getattr(config, "original_max_position_embeddings", None)
            length = original or getattr(config, "max_position_embeddings", None)
            if length:
                limits[int(length)] = f"rotary positions ({rope_type}) have other frequencies"
        # The layers of BigBird know its kind of attention, too, but not its config.
        if config is not None and getattr(module, "attention_type", "") == "block_sparse":
            # As BigBirdModel and BigBirdPegasusEncoder compute it in forward.
            blocks = 5 + 2 * config.num_random_blocks
            limits[blocks * config.block_size] = "the attention is sparse"
    if not limits:
        return None, []
    length = min(limits)
    if length >= settings.merged().position_limit():
        return None, []
    reason = limits[length]
    return length, [f"inputs have at most {length} tokens: beyond them {reason} in the model"]
