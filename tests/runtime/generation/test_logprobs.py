"""Log-probabilities of tokens, and OpenAI's penalties and biases, beside PyTorch's logits."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from enginery.core.errors import InputError
from enginery.runtime.generation.options import GenerationOptions, parse_generation_config
from enginery.runtime.generation.processors import make_processors
from enginery.runtime.model import load_model
from tests.tiny import tiny_artifact
from tests.tolerances import LARGER, OUTPUTS

PROMPTS = ["The engine is", "Who built"]


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    root = tmp_path_factory.mktemp("logprobs")
    return tiny_artifact("gpt2", "text-generation-with-past", root / "writer")


@pytest.fixture(scope="module")
def log_softmax(writer):
    """`log_softmax(prompt, tokens)`: PyTorch's, for the place of each token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = writer.manifest.source.id
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    tokenizer = AutoTokenizer.from_pretrained(source)

    def compute(prompt, tokens):
        ids = [*tokenizer(prompt).input_ids, *tokens]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -len(tokens) - 1 : -1]
        return torch.log_softmax(logits, -1).numpy()

    return compute


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "top_k": 5, "temperature": 0.7, "seed": 3, "num_return_sequences": 3},
        {"do_sample": True, "top_k": 0, "top_p": 0.8, "seed": 3},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.5, "logit_bias": {7: -100, 9: 5}},
    ],
    ids=["greedy", "several draws", "a draw of all", "processor", "OpenAI's"],
)
@pytest.mark.parametrize("top", [0, 4])
def test_logprobs_are_pytorchs(writer, log_softmax, options, top):
    """Whatever changes the choice, they are those of the model itself."""
    with load_model(writer) as model:
        found = model.generate(PROMPTS, max_new_tokens=9, top_logprobs=top, **options)
        plain = model.generate(PROMPTS, max_new_tokens=9, **options)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert plain[0].logprobs == ()
    for place, one in enumerate(found):
        expected = log_softmax(PROMPTS[place * len(PROMPTS) // len(found)], one.tokens)
        assert [entry.token for entry in one.logprobs] == list(one.tokens)
        for entry, values in zip(one.logprobs, expected, strict=True):
            assert entry.logprob == pytest.approx(values[entry.token], abs=OUTPUTS, rel=LARGER)
            assert [token for token, _ in entry.top] == np.argsort(-values)[:top].tolist()
            best = np.sort(values)[::-1][:top]
            np.testing.assert_allclose(
                [value for _, value in entry.top], best, atol=OUTPUTS, rtol=LARGER
            )


def test_penalties_and_biases_are_openais(writer, log_softmax):
    """Greedy search over PyTorch's values, changed by the formula of OpenAI's documentation."""
    options = {"frequency_penalty": 0.7, "presence_penalty": -0.4, "logit_bias": {11: 2.5, 40: -9}}
    with load_model(writer) as model:
        (found,) = model.generate(PROMPTS[:1], max_new_tokens=12, **options)
        (plain,) = model.generate(PROMPTS[:1], max_new_tokens=12)
    tokens: list[int] = []
    for _ in found.tokens:
        values = log_softmax(PROMPTS[0], [*tokens, 0])[-1].astype(np.float64)
        for token, count in Counter(tokens).items():
            values[token] -= 0.7 * count - 0.4
        values[11] += 2.5
        values[40] -= 9
        tokens.append(int(values.argmax()))
    assert list(found.tokens) == tokens
    assert found.tokens != plain.tokens


def test_penalties_count_generated_tokens_alone():
    options = GenerationOptions(frequency_penalty=0.5, presence_penalty=0.25)
    (processor,) = make_processors(options, prompt=3, longest=40)
    scores = np.zeros(6, np.float32)
    changed = processor([1, 1, 2, 4, 4, 5], scores)
    np.testing.assert_array_equal(changed, np.float32([0, 0, 0, 0, -1.25, -0.75]))
    assert not scores.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_logprobs": 21}, "top_logprobs: found 21, expected at most 20"),
        ({"top_logprobs": 1, "num_beams": 2}, "beam search has no log-probabilities"),
        ({"frequency_penalty": 2.5}, "frequency_penalty: found 2.5, expected at most 2"),
        ({"presence_penalty": float("nan")}, "presence_penalty: found nan"),
        ({"logit_bias": {7: 101}}, "logit_bias.7: found 101"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias: found .* at most 1024"),
    ],
)
def test_values_out_of_bounds_are_errors(options, message):
    with pytest.raises(InputError, match=message):
        GenerationOptions().with_arguments(**options)


def test_token_ids_may_be_strings():
    chosen = GenerationOptions().with_arguments(logit_bias={"7": 1})  # as in JSON
    assert chosen.logit_bias == {7: 1.0}


def test_generation_config_has_only_options_of_transformers():
    document = {"frequency_penalty": 1.0, "logit_bias": {"7": 5}, "top_logprobs": 3, "seed": 4}
    assert parse_generation_config(document, "x") == GenerationOptions()
