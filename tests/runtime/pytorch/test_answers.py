"""Raw inputs are answered in PyTorch by transformers' pipelines and sentence-transformers' rule."""

import json

import numpy as np
import pytest

from enginery.core.errors import InputError
from tests.tiny import save_tiny

TEXT = "Ada Lovelace lived in London, not far from the river."


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny BERT without a head, and its directory."""
    from transformers import AutoModel

    path = save_tiny("bert", "feature-extraction", tmp_path_factory.mktemp("bert") / "model")
    return AutoModel.from_pretrained(path).eval(), path


@pytest.fixture
def embed(model, tmp_path):
    """`embed(TEXT, {"1_Pooling/config.json": {…}})`: the vector by the rule of these files."""
    from shutil import copytree

    from enginery.runtime.pytorch.answers import TorchAnswers

    network, path = model

    def make(text, files):
        folder = copytree(path, tmp_path / str(len(list(tmp_path.iterdir()))))
        for name, content in files.items():
            file = folder / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(content))
        (answer,) = TorchAnswers(network, folder, lambda _: {}, restore=bool)(
            "embed", [{"text": text}]
        )
        assert not answer.problem
        return answer.arrays["vector"]

    return make


def token_vectors(model, text):
    """Return the token vectors of a text: (tokens, dim)."""
    import torch
    from transformers import AutoTokenizer

    network, path = model
    with torch.no_grad():
        feeds = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt")
        return network(**feeds).last_hidden_state[0].numpy()


def modules(*kinds):
    return [
        {"type": f"sentence_transformers.models.{kind}", "path": "" if not i else f"{i}_{kind}"}
        for i, kind in enumerate(kinds)
    ]


def pooling(mode, **others):
    return {
        "modules.json": modules("Transformer", "Pooling"),
        "1_Pooling/config.json": {f"pooling_mode_{mode}": True, **others},
    }


def test_without_modules_vectors_are_the_mean(model, embed):
    np.testing.assert_allclose(embed(TEXT, {}), token_vectors(model, TEXT).mean(0), rtol=1e-4)


@pytest.mark.parametrize(
    ("mode", "rule"),
    [
        ("cls_token", lambda t: t[0]),
        ("lasttoken", lambda t: t[-1]),
        ("max_tokens", lambda t: t.max(0)),
        ("mean_tokens", lambda t: t.mean(0)),
        ("mean_sqrt_len_tokens", lambda t: t.sum(0) / np.sqrt(len(t))),
        ("weightedmean_tokens", lambda t: np.average(t, 0, np.arange(len(t)) + 1)),
    ],
)
def test_pooling_modes(model, embed, mode, rule):
    expected = rule(token_vectors(model, TEXT))
    np.testing.assert_allclose(embed(TEXT, pooling(mode)), expected, rtol=1e-4, atol=1e-6)
    named = {"modules.json": modules("Transformer", "Pooling")}
    name = mode.removesuffix("_token").removesuffix("_tokens").replace("mean_sqrt_len", mode)
    named["1_Pooling/config.json"] = {"pooling_mode": name}
    np.testing.assert_allclose(embed(TEXT, named), expected, rtol=1e-4, atol=1e-6)


def test_prompt_normalization_length_and_case(model, embed):
    files = pooling("mean_tokens", include_prompt=False)
    files["modules.json"] = modules("Transformer", "Pooling", "Normalize")
    files["config_sentence_transformers.json"] = {
        "prompts": {"query": "Find: "},
        "default_prompt_name": "query",
        "truncate_dim": 8,
    }
    tokens = token_vectors(model, "Find: " + TEXT)
    prompt = len(token_vectors(model, "Find: ")) - 1  # without the special token at its end
    mean = tokens[prompt:].mean(0)
    np.testing.assert_allclose(embed(TEXT, files), (mean / np.linalg.norm(mean))[:8], rtol=1e-3)

    short = {**pooling("cls_token"), "sentence_bert_config.json": {"max_seq_length": 4}}
    assert not np.allclose(embed(TEXT, short), embed(TEXT, pooling("cls_token")), atol=1e-3)
    lower = {"sentence_bert_config.json": {"do_lower_case": True}}
    np.testing.assert_allclose(embed(TEXT, lower), embed(TEXT.lower(), {}), rtol=1e-5)


def test_files_of_earlier_classes_and_of_language_models(model, embed, monkeypatch):
    network, _ = model
    roberta = {**pooling("cls_token"), "sentence_roberta_config.json": {"max_seq_length": 4}}
    bert = {**pooling("cls_token"), "sentence_bert_config.json": {"max_seq_length": 4}}
    np.testing.assert_allclose(embed(TEXT, roberta), embed(TEXT, bert), rtol=1e-5)
    monkeypatch.setattr(network.config, "architectures", ["BertForCausalLM"])
    last = token_vectors(model, TEXT)[-1]
    np.testing.assert_allclose(embed(TEXT, {}), last, rtol=1e-4, atol=1e-6)


def test_cls_of_a_text_without_its_prompt_is_its_first_token(model, embed):
    files = pooling("cls_token", include_prompt=False)
    files["config_sentence_transformers.json"] = {
        "prompts": {"query": "Find: "},
        "default_prompt_name": "query",
    }
    prompt = len(token_vectors(model, "Find: ")) - 1
    expected = token_vectors(model, "Find: " + TEXT)[prompt]
    np.testing.assert_allclose(embed(TEXT, files), expected, rtol=1e-4, atol=1e-6)


def test_dense_layer_is_applied(model, embed, tmp_path):
    import torch
    from safetensors.torch import save_file

    from enginery.runtime.pytorch.answers import SentenceRule

    network, path = model
    (tmp_path / "dense").mkdir()
    weights = {"linear.weight": torch.randn(3, 32), "linear.bias": torch.ones(3)}
    save_file(weights, tmp_path / "dense" / "model.safetensors")
    from enginery.runtime.pytorch.answers import _sentence_module

    (tmp_path / "dense" / "config.json").write_text(
        json.dumps(
            {
                "in_features": 32,
                "out_features": 3,
                "bias": True,
                "activation_function": "torch.nn.modules.activation.Tanh",
            }
        )
    )
    layer = _sentence_module("Dense", tmp_path / "dense")
    vector = torch.randn(1, 32)
    with torch.no_grad():
        found = layer({"sentence_embedding": vector})
    expected = torch.tanh(vector @ weights["linear.weight"].T + weights["linear.bias"])
    torch.testing.assert_close(found, expected)
    with pytest.raises(InputError, match="module WordWeights is not known"):
        _sentence_module("WordWeights", tmp_path)
    assert SentenceRule(network, path, {})({"text": TEXT}).arrays["vector"].shape == (32,)


def test_pipelines_answer_alone_and_inputs_that_fail_say_why(tmp_path):
    from transformers import AutoModelForSequenceClassification, pipeline

    from enginery.runtime.pytorch.answers import TorchAnswers

    path = save_tiny("bert", "text-classification", tmp_path / "model")
    network = AutoModelForSequenceClassification.from_pretrained(path).eval()
    answers = TorchAnswers(network, path, lambda _: {}, restore=bool)
    pair = {"text": TEXT, "text_pair": "Who?"}
    first, second, failed = answers("classify", [{"text": TEXT}, pair, {"text": 7}])
    classify = pipeline("text-classification", model=str(path), top_k=None)
    for answer, item in ((first, {"text": TEXT}), (second, pair)):
        assert [[r["label"], r["score"]] for r in classify([item])[0]] == answer.answer
        assert answer.scale > 0
    assert failed.problem
    # A folder without a tokenizer answers nothing.
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError):
        TorchAnswers(network, tmp_path / "empty", lambda _: {}, restore=bool)("classify", [pair])
