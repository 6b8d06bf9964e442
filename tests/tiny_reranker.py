"""A tiny language model with the files of a sentence-transformers reranker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from enginery.core.json_file import read_json
from tests.tiny import save_tiny

TRUE_TOKEN, FALSE_TOKEN = 301, 402
INSTRUCTION = "Find the passage that answers the question."
TEMPLATE = """\
{%- for message in messages if message.role == "system" -%}
<Instruct>: {{ message.content }}
{% endfor -%}
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}
{%- if add_generation_prompt %}<|endoftext|>Answer:{% endif %}"""
SUFFIX = "<|endoftext|>Answer:"
_PACKAGE = "sentence_transformers"


def save_reranker(directory: Path, *, scored_by_two: bool, pad_left: bool) -> Path:
    """Write the model directory: Qwen3 with tied embeddings, as Qwen3-Reranker has them."""
    save_tiny("qwen3", "text-generation", directory)
    files: dict[str, Any] = {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": f"{_PACKAGE}.base.modules.Transformer"},
            {
                "idx": 1,
                "name": "1",
                "path": "1_LogitScore",
                "type": f"{_PACKAGE}.cross_encoder.modules.logit_score.LogitScore",
            },
        ],
        "1_LogitScore/config.json": {
            "true_token_id": TRUE_TOKEN,
            "false_token_id": FALSE_TOKEN if scored_by_two else None,
            "module_input_name": "causal_logits",
        },
        "config_sentence_transformers.json": {
            "prompts": {"search": INSTRUCTION},
            "default_prompt_name": "search",
            "model_type": "CrossEncoder",
        },
        "sentence_bert_config.json": {
            "transformer_task": "text-generation",
            "modality_config": {
                "text": {"method": "forward", "method_output_name": "logits"},
                "message": {"method": "forward", "method_output_name": "logits", "format": "flat"},
            },
            "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
        },
    }
    settings = read_json(directory / "tokenizer_config.json")
    files["tokenizer_config.json"] = {
        **settings,
        "padding_side": "left" if pad_left else "right",
    }
    (directory / "1_LogitScore").mkdir()
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory
