"""Tiny models whose tokenizers are generic, as people save them, and exports in this process."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from enginery.core.artifact.artifact import Artifact

WORDS = ("<pad>", "<eos>", "<unk>", "<s>", "the", "engine", "starts", "at", "first", "turn", "of")
WORDS += ("key", "a", "list", "is", "warm", "cold", "pump", "runs")
TOKENS_AND_MASK = ["input_ids", "attention_mask"]

_SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 34,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "camembert", "data2vec-text", "llama", "modernbert"),
        _SIZES,
    ),
    "qwen2": {**_SIZES, "num_key_value_heads": 2},
    "mistral": {**_SIZES, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "gpt_neo": {
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
        "max_position_embeddings": 32,
    },
    "opt": {
        "hidden_size": 16,
        "ffn_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "word_embed_proj_dim": 16,
        "max_position_embeddings": 34,
    },
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "xlm": {"emb_dim": 16, "n_layers": 2, "n_heads": 2, "pad_index": 0, "eos_index": 1},
    "deberta": {**_SIZES, "type_vocab_size": 0},
    "convbert": {**_SIZES, "embedding_size": 16, "conv_kernel_size": 3},
    "bart": {
        # It is traced with random tokens, each row of which must have as many ends.
        "vocab_size": 1000,
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "max_position_embeddings": 32,
        "decoder_start_token_id": 1,
        "forced_eos_token_id": 1,
    },
}


def save_with_generic_tokenizer(
    kind: str,
    directory: Path,
    *,
    auto: str = "AutoModelForSequenceClassification",
    special: str = "around",
    tokenizer: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Save a model with large weights, and a `PreTrainedTokenizerFast`.

    Args:
        kind: the model type.
        directory: where to.
        auto: the class of the model.
        special: where the tokenizer adds special tokens: `around` texts, at their `end`, or
            `nowhere`.
        tokenizer: settings of the tokenizer, besides its special tokens.
        config: settings of config.json.
    """
    import tokenizers
    import torch
    import transformers

    words = {word: index for index, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    template = tokenizers.processors.TemplateProcessing
    if special == "around":
        backend.post_processor = template(
            single="<s> $A <eos>",
            pair="<s> $A <eos> $B:1 <eos>:1",
            special_tokens=[("<s>", 3), ("<eos>", 1)],
        )
    elif special == "end":
        backend.post_processor = template(single="$A <eos>", special_tokens=[("<eos>", 1)])
    settings = {
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "model_max_length": 30,
        **(tokenizer or {}),
    }
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **settings).save_pretrained(
        directory
    )
    values = {
        "vocab_size": len(WORDS),
        "num_labels": 3,
        "pad_token_id": 0,
        "bos_token_id": 3,
        "eos_token_id": 1,
        **_CONFIGS[kind],
        **config,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = getattr(transformers, auto).from_config(
            transformers.AutoConfig.for_model(kind, **values)
        )
        for weight in model.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.5)
    model.eval().save_pretrained(directory)
    return directory


def export_here(source: Path, out: Path, monkeypatch: Any, **options: Any) -> Artifact:
    """Export a model in this process, without the confinement of the stage's child process."""
    import torch

    from enginery.core.model.source import resolve_source
    from enginery.export import stage
    from enginery.export.config import ExportConfig
    from enginery.export.worker import handle_request

    def run(
        request: stage.WorkerRequest, name: str, environment: Any, progress: Any
    ) -> stage.WorkerResult:
        values = asdict(request)
        # Trusted models are not confined; there is no code in these.
        values["config"]["trust_remote_code"] = True
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            warnings.simplefilter("ignore")  # the tracer's, about code that is not ours
            return stage.WorkerResult(**handle_request(values))

    monkeypatch.setattr(stage, "_run_worker", run)
    return stage.run(resolve_source(str(source)), ExportConfig(**options), out)
