"""Decoders generate the tokens of PyTorch's `generate`, alone and in batches."""

import numpy as np
import pytest

from enginery import export_model, load_model
from enginery.core.errors import ArtifactError, InputError
from tests.tiny import DECODER_KINDS
from tests.tiny_generators import filled, reference_tokens

TEXTS = ["The engine", "Who built the bridge over the river in", "A"]
KINDS = ("gpt2", "llama", "opt", "qwen3")
CASES = {
    "greedy": {},
    "beams": {"num_beams": 4},
    "all beams, long ones": {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 2.0},
    "first beams": {"num_beams": 4, "early_stopping": True},
    "best beams": {"num_beams": 4, "early_stopping": "never", "length_penalty": 0.5},
    "short beams": {"num_beams": 3, "length_penalty": -1.0},
    "no repetition": {"repetition_penalty": 1.5},
    "no repeated pairs": {"no_repeat_ngram_size": 2, "num_beams": 2},
    "bad words": {"bad_words_ids": [[5], [60, 61]], "suppress_tokens": [70, 71]},
    "forced end": {"min_new_tokens": 8, "forced_eos_token_id": 0},
    "many ends": {"eos_token_id": [0, *range(260, 400)], "num_beams": 4},
    "many ends, greedy": {"eos_token_id": [0, *range(260, 500, 2)]},
}


@pytest.fixture
def decoder(tiny_model, home):
    """`decoder("gpt2")`: the source of a tiny decoder, and its artifact."""

    def make(kind):
        source = tiny_model(kind, "text-generation")
        return source, export_model(str(source), task="text-generation-with-past")

    return make


@pytest.mark.more
@pytest.mark.parametrize(
    "kind",
    [
        KINDS[0],
        *(pytest.param(k, marks=pytest.mark.more) for k in KINDS[1:]),
        *(pytest.param(k, marks=pytest.mark.slow) for k in DECODER_KINDS if k not in KINDS),
    ],
)
def test_tokens_are_those_of_pytorch(decoder, kind):
    source, artifact = decoder(kind)
    with load_model(artifact) as model:
        for name, case in CASES.items():
            options = {"max_new_tokens": 15, **case}
            tokens, scores, pad = reference_tokens(source, TEXTS, **options)
            found = model.generate(TEXTS, **options)
            assert [
                filled(each.tokens, len(wanted), pad)
                for each, wanted in zip(found, tokens, strict=True)
            ] == tokens, name
            if scores:
                np.testing.assert_allclose([each.score for each in found], scores, rtol=1e-4)


def test_text_is_decoded_without_prompt_and_special_tokens(decoder):
    source, artifact = decoder("gpt2")
    with load_model(artifact) as model:
        (found,) = model.generate(TEXTS[:1], max_new_tokens=12)
        assert len(found.tokens) == 12
        assert found.finish == "length"
        ended = model.generate(TEXTS[:1], max_new_tokens=12, eos_token_id=found.tokens[3])[0]
        assert ended.tokens == found.tokens[: found.tokens.index(found.tokens[3]) + 1]
        assert ended.finish == "stop"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    assert found.text == tokenizer.decode(found.tokens, skip_special_tokens=True)


@pytest.mark.more
def test_pieces_of_a_stream_are_the_text(decoder):
    _, artifact = decoder("qwen3")
    with load_model(artifact) as model:
        for text in TEXTS:
            pieces = list(model.stream(text, max_new_tokens=40))
            (whole,) = model.generate([text], max_new_tokens=40)
            assert "".join(pieces) == whole.text
            assert len(pieces) > 5
            assert not any(piece.endswith("�") for piece in pieces[:-1])
        assert len(list(model.stream(TEXTS[0], max_new_tokens=10, num_beams=2))) == 1


def test_stop_strings_end_the_text_and_are_never_sent_in_part(decoder):
    _, artifact = decoder("gpt2")
    with load_model(artifact) as model:
        (whole,) = model.generate(TEXTS[:1], max_new_tokens=30)
        stop = whole.text[10:13]
        (found,) = model.generate(TEXTS[:1], max_new_tokens=30, stop_strings=[stop, "zzz"])
        assert found.text == whole.text[: whole.text.index(stop) + len(stop)]
        assert found.finish == "stop"
        pieces = list(model.stream(TEXTS[0], max_new_tokens=30, stop_strings=[stop, "zzz"]))
        assert "".join(pieces) == found.text


def test_samples_follow_the_seed_and_the_probabilities(decoder):
    source, artifact = decoder("gpt2")
    drawn = {"do_sample": True, "max_new_tokens": 1}
    with load_model(artifact) as model:
        options = {**drawn, "max_new_tokens": 10, "seed": 3}
        first, again = (model.generate(TEXTS, **options) for _ in range(2))
        assert first == again
        assert first != model.generate(TEXTS, **{**options, "seed": 4})
        one = model.generate(TEXTS, **options, top_k=1)
        greedy = model.generate(TEXTS, max_new_tokens=10)
        assert [each.tokens for each in one] == [each.tokens for each in greedy]
        shares = np.zeros(4000)
        for seed in range(30):
            found = model.generate(
                TEXTS[:1], **drawn, seed=seed, num_return_sequences=64, top_k=5, temperature=2.0
            )
            for each in found:
                shares[each.tokens[0]] += 1 / (30 * 64)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(source)(TEXTS[0], return_tensors="pt").input_ids
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(source)(ids).logits[0, -1] / 2.0
    top = logits.topk(5)
    wanted = top.values.softmax(0).numpy()
    assert np.count_nonzero(shares) <= 5
    np.testing.assert_allclose(shares[top.indices.numpy()], wanted, atol=0.05)


def test_samples_of_beams_are_among_the_allowed_tokens(decoder):
    _, artifact = decoder("gpt2")
    options = {"do_sample": True, "num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 8}
    with load_model(artifact) as model:
        found = model.generate(TEXTS, **options, seed=1)
        assert found == model.generate(TEXTS, **options, seed=1)
        assert len(found) == 9
        assert all(each.score is not None and each.score < 0 for each in found)


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (["The engine. " * 200], {}, r"the prompt has \d+ tokens, and the model's limit is 128"),
        ([""], {}, "prompt 0 is empty"),
        (["a", 3], {}, "text 1 is an int"),
        ("a", {}, "expected a list"),
        (["a"], {"num_beams": 100}, "num_beams: found 100"),
        (["a"], {"max_tokens": 5}, "unknown option 'max_tokens'"),
    ],
)
def test_bad_input_is_an_error(decoder, texts, options, message):
    with load_model(decoder("gpt2")[1]) as model, pytest.raises(InputError, match=message):
        model.generate(texts, **options)


def test_nothing_in_nothing_out_and_other_methods_name_the_right_one(decoder):
    with load_model(decoder("gpt2")[1]) as model:
        assert model.generate([]) == []
        with pytest.raises(InputError, match=r"Call generate\(\)"):
            model.embed(["x"])
        with pytest.raises(InputError, match="a stream has one text"):
            model.stream("a", num_beams=2, num_return_sequences=2)


def test_a_decoder_without_cache_does_not_generate(tiny_model, home):
    source = str(tiny_model("gpt2", "text-generation"))
    artifact = export_model(source, task="text-generation")
    with pytest.raises(ArtifactError, match="export it for text-generation-with-past"):
        load_model(artifact)
