"""Options of generation: the model's file, the caller's values, and what is refused."""

import json

import pytest
from transformers import GenerationConfig

from enginery.core.errors import ArtifactError, InputError
from enginery.runtime.generation.options import (
    MAX_ITEMS,
    UNSUPPORTED,
    GenerationOptions,
    read_generation_config,
)

OF_TRANSFORMERS_5 = {"top_h"}
WITHOUT_EFFECT = {
    # how attention and caches are computed
    "use_cache", "cache_implementation", "cache_config", "return_legacy_cache",
    "prefill_chunk_size", "disable_compile", "low_memory",
    # what transformers returns besides the tokens
    "output_attentions", "output_hidden_states", "output_scores", "output_logits",
    "return_dict_in_generate",
    # a second model that drafts tokens, which needs an argument as well
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "max_matching_ngram_size", "assistant_lookbehind",
    "target_lookbehind",
    # about the file
    "_from_model_config", "transformers_version",
}  # fmt: skip


@pytest.fixture
def read(tmp_path):
    """`read(max_length=5)`: the options of a file with these values."""

    def make(**values):
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
        return read_generation_config(tmp_path)

    return make


def test_every_field_of_transformers_is_supported_refused_or_without_effect():
    theirs = GenerationConfig().to_dict()
    ours = GenerationOptions.model_fields
    assert set(theirs) <= {*ours, *UNSUPPORTED, *WITHOUT_EFFECT}
    assert not set(UNSUPPORTED) & set(ours)
    for name, default in UNSUPPORTED.items():
        assert name in OF_TRANSFORMERS_5 or theirs[name] == default


def test_defaults_are_those_of_transformers():
    theirs, ours = GenerationConfig().to_dict(), GenerationOptions()
    for name in set(theirs) & set(GenerationOptions.model_fields) - {"max_length"}:
        found = getattr(ours, name)
        assert (None if found == () else found) == theirs[name], name
    assert ours.longest(7, None) == 7 + theirs["max_length"]


def test_file_without_values_is_that_of_the_defaults(read, tmp_path):
    assert read_generation_config(tmp_path / "nowhere") == GenerationOptions()
    assert read(max_length=20, transformers_version="4.57.6") == GenerationOptions()
    # transformers has its default also beside max_new_tokens, which then counts.
    assert read(max_length=20, max_new_tokens=60) == GenerationOptions(max_new_tokens=60)


def test_callers_values_win_and_none_is_unset(read):
    options = read(max_length=50, num_beams=4, eos_token_id=2, do_sample=True)
    assert options.eos_token_id == (2,)
    found = options.with_arguments(num_beams=2, do_sample=None, stop_strings="\n")
    assert (found.num_beams, found.do_sample, found.max_length) == (2, True, 50)
    assert found.stop_strings == ("\n",)
    assert options.with_arguments(max_new_tokens=5).longest(10, None) == 15
    short = read(max_new_tokens=100).with_arguments(max_length=12)
    assert short.longest(10, None) == 12


def test_length_is_bounded_by_the_models_positions():
    options = GenerationOptions().with_arguments(max_new_tokens=100)
    assert options.longest(10, 64) == 64
    with pytest.raises(InputError, match=r"the prompt has 64 tokens, and the model's limit is 64"):
        options.longest(64, 64)
    with pytest.raises(InputError, match=r"max_length is 8 with the new ones.*set max_new_tokens"):
        GenerationOptions().with_arguments(max_length=8).longest(8, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beem": 2}, r"unknown option 'num_beem'.*num_beams"),
        ({"penalty_alpha": 0.6}, "penalty_alpha: 0.6 is not supported"),
        ({"num_beams": 0}, "num_beams: found 0"),
        ({"num_beams": 65}, "num_beams: found 65, expected at most 64"),
        ({"temperature": 0, "do_sample": True}, "temperature: found 0"),
        ({"top_p": 1.5, "do_sample": True}, "top_p: found 1.5"),
        ({"top_k": -1, "do_sample": True}, "top_k: found -1"),
        ({"min_p": 0.1, "do_sample": True}, "min_p: 0.1 is not supported"),
        ({"bad_words_ids": [[]]}, "bad_words_ids"),
        ({"stop_strings": [""]}, "stop_strings"),
        ({"early_stopping": "sometimes"}, "early_stopping"),
        ({"num_return_sequences": 2}, "greedy search has one result"),
        ({"num_return_sequences": 3, "num_beams": 2}, "at most num_beams, 2"),
        ({"max_new_tokens": 0}, "max_new_tokens: found 0"),
    ],
)
def test_invalid_arguments_are_errors(arguments, message):
    with pytest.raises(InputError, match=message):
        GenerationOptions().with_arguments(**arguments)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"guidance_scale": 2.0}, r"generation_config\.json: guidance_scale is 2.0, .*not supp"),
        ({"num_beam_groups": 2}, "num_beam_groups is 2"),
        ({"typical_p": 0.9, "do_sample": True}, "typical_p is 0.9, which is not supported"),
        ({"temperature": 0.0, "do_sample": True}, r"generation_config\.json: temperature: found 0"),
        ({"max_length": "many"}, r"generation_config\.json: max_length: found 'many'"),
        ({"eos_token_id": [-1]}, "eos_token_id"),
    ],
)
def test_invalid_files_are_errors(read, values, message):
    with pytest.raises(ArtifactError, match=message):
        read(**values)


def test_defaults_of_unsupported_fields_and_unknown_keys_are_fine(read):
    assert read(**UNSUPPORTED, chat_format="x") == GenerationOptions()


def test_null_means_what_it_means_to_transformers(read):
    """`top_k` is off; other fields have their defaults."""
    assert read(top_k=None).top_k == 0
    assert read(temperature=None, top_p=None, do_sample=None, num_beams=None) == GenerationOptions()
    assert read(guidance_scale=1.0) == read(guidance_scale=None) == GenerationOptions()


@pytest.mark.parametrize(
    "values",
    [{"temperature": 0.0}, {"top_k": -1}, {"top_p": 0.0}, {"min_p": 0.1}, {"typical_p": 0.5}],
    ids=str,
)
def test_options_of_sampling_are_ignored_until_it_is_on(read, values):
    for options in (read(**values), GenerationOptions().with_arguments(**values)):
        assert not options.with_arguments(num_beams=2).do_sample
        with pytest.raises(InputError, match=next(iter(values))):
            options.with_arguments(do_sample=True)


def test_option_of_the_model_that_sampling_lacks_can_be_switched_off(read):
    options = read(min_p=0.1)
    with pytest.raises(InputError) as error:
        options.with_arguments(do_sample=True)
    assert error.value.do == "Leave it out, or send min_p=0.0."
    assert options.with_arguments(do_sample=True, min_p=0.0).do_sample


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eos_token_id": [7] * 60_000}, "eos_token_id: found 60000 items, expected at most 1024"),
        ({"suppress_tokens": [7] * 60_000}, "suppress_tokens: found 60000 items, .* 2048"),
        ({"begin_suppress_tokens": list(range(9000))}, "begin_suppress_tokens: .* at most 2048"),
        ({"forced_eos_token_id": [1] * 1025}, "forced_eos_token_id: .* at most 1024"),
        ({"stop_strings": ["a"] * 17}, "stop_strings: found 17 items, expected at most 16"),
        ({"stop_strings": ["a", "b" * 257]}, r"stop_strings\.1: found .* at most 256"),
        ({"logit_bias": {"x": 1} | dict.fromkeys(range(2000), 1)}, "found 2001 items, .* 1024"),
        ({"bad_words_ids": [[1] * 1001]}, "bad_words_ids: found 1001 items"),
        ({"bad_words_ids": [[1]] * 10**6}, "bad_words_ids: found 1000000 items"),
        ({"length_penalty": 1e308}, r"length_penalty: found 1e\+308, expected at most 10"),
        ({"length_penalty": -1e9}, "length_penalty: found -1000000000.0"),
        (
            {"repetition_penalty": 1e-300},
            "repetition_penalty: found 1e-300, expected at least 0.01",
        ),
        ({"temperature": 1e-40, "do_sample": True}, "temperature: found 1e-40, expected .* 1e-05"),
        ({"temperature": 1e308, "do_sample": True}, r"temperature: found 1e\+308"),
        ({"top_k": 2**40, "do_sample": True}, "top_k: found 1099511627776"),
        ({"no_repeat_ngram_size": 10**6}, "no_repeat_ngram_size: found 1000000, .* 1024"),
        ({"min_length": 2**62}, "min_length: found 4611686018427387904"),
        ({"eos_token_id": [2**63]}, "eos_token_id"),
        ({"pad_token_id": 2**63}, "pad_token_id: found 9223372036854775808"),
        ({"seed": 2**64}, "seed: found 18446744073709551616"),
        ({"x" * 10**6: 1}, "unknown option 'x{60}'"),
        ({"force_words_ids": [[7] * 10**6]}, "force_words_ids: .* is not supported"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_every_list_and_number_of_a_caller_has_a_bound(arguments, message):
    with pytest.raises(InputError, match=message) as caught:
        GenerationOptions().with_arguments(**arguments)
    assert len(caught.value.message) < 400


def test_every_option_has_a_bound_or_few_values():
    bounds = {"maximum", "maxLength", "maxProperties"}
    unbounded = {
        name
        for name, schema in GenerationOptions.model_json_schema()["properties"].items()
        if not any(bounds & part.keys() for part in schema.get("anyOf", [schema]))
    } - MAX_ITEMS.keys()
    # The characters of a schema have a bound of their own, and draws that of a caller.
    assert unbounded == {
        "do_sample", "early_stopping", "renormalize_logits", "json_schema", "temperature", "top_k"
    }  # fmt: skip


def test_what_sampling_alone_reads_has_any_value_without_it():
    assert GenerationOptions().with_arguments(temperature=0.0, top_k=2**40).top_k == 2**40
