"""Language models that embed: the state of the last token, with a prompt in front."""

import json
import shutil

import numpy as np
import pytest

from enginery import export_model, load_model, validate_model

TEXTS = ["The engine is warm.", "A small cat sleeps on the boat under the tree.", " Paris \n"]
PROMPT = "Instruct: find passages\nQuery:"


@pytest.fixture
def source(tiny_model, tmp_path):
    """A tiny Qwen3 with the files that Qwen3-Embedding has."""
    directory = shutil.copytree(tiny_model("qwen3", "text-generation"), tmp_path / "embedder")
    package = "sentence_transformers.models"
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    files = {
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": f"{package}.{kind}"}
            for i, (path, kind) in enumerate(kinds)
        ],
        "1_Pooling/config.json": {"pooling_mode_lasttoken": True, "include_prompt": True},
        "config_sentence_transformers.json": {"prompts": {"query": PROMPT, "document": ""}},
    }
    (directory / "1_Pooling").mkdir()
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def reference_vectors(source, texts):
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModel.from_pretrained(source).eval()
    with torch.no_grad():
        states = [
            model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0, -1].numpy()
            for text in texts
        ]
    return np.stack([state / np.linalg.norm(state) for state in states])


@pytest.mark.more
@pytest.mark.parametrize("left", [True, False])
def test_vectors_are_the_last_tokens_states(source, home, left):
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings["padding_side"] = "left" if left else "right"
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    artifact = export_model(str(source))
    assert artifact.manifest.task == "feature-extraction"
    assert not any("past" in spec.name for spec in artifact.manifest.graphs[0].inputs)
    with load_model(artifact) as model:
        np.testing.assert_allclose(model.embed(TEXTS), reference_vectors(source, TEXTS), atol=1e-5)
        queries = reference_vectors(source, [PROMPT + text for text in TEXTS])
        np.testing.assert_allclose(model.embed(TEXTS, prompt_name="query"), queries, atol=1e-5)


@pytest.mark.more
def test_an_embedder_validates_with_its_embeddings(source, home):
    report = validate_model(export_model(str(source)))
    assert report.passed
    assert report.embeddings.min_cosine > 0.999999
