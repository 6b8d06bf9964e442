"""The head of models that transformers 5 has saved."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

from enginery.runtime.pytorch.config import load_config
from enginery.runtime.pytorch.weights import restore_head
from tests.transformers5.models import set_weights

T5 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "transformers_version": "5.24.0",
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_heads": 2,
    "num_layers": 1,
    "vocab_size": 32,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("scales", [True, False])
@pytest.mark.parametrize("has_head", [True, False])
def test_head_is_tied_if_the_files_have_one_matrix(tmp_path, scales, has_head):
    document = {**T5, "scale_decoder_outputs": scales}
    (tmp_path / "config.json").write_text(json.dumps(document), encoding="utf-8")
    config = load_config(tmp_path, trust_remote_code=False).config
    weights = set_weights(transformers.T5ForConditionalGeneration(config))
    weights.pop("lm_head.weight", None)
    if has_head:
        weights["lm_head.weight"] = torch.full((32, 16), 0.5)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, info = transformers.T5ForConditionalGeneration.from_pretrained(
        tmp_path, config=config, output_loading_info=True
    )
    missing = set(info["missing_keys"])
    assert missing - restore_head(model, tmp_path, missing) == set()
    expected = torch.full((32, 16), 0.5) if has_head else model.shared.weight
    assert torch.equal(model.lm_head.weight, expected)
    assert model.config.tie_word_embeddings is scales  # version 4 scales the states by it
