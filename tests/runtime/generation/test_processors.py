"""Processors and warpers give the scores of transformers' own, in its order."""

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, GenerationMixin

from enginery.runtime.generation.options import GenerationOptions
from enginery.runtime.generation.processors import make_processors, make_warpers

VOCABULARY = 40
PROMPT = 3
LONGEST = 12


class _Model(GenerationMixin):
    """What transformers needs to choose its processors."""

    config = type("Config", (), {"get_text_config": lambda self: self, "vocab_size": VOCABULARY})()


def theirs(settings, sequences, scores):
    config = GenerationConfig(**settings, max_length=LONGEST)
    ends = settings.get("eos_token_id")
    ends = [ends] if isinstance(ends, int) else ends
    config._eos_token_tensor = None if ends is None else torch.tensor(ends)
    processors = _Model()._get_logits_processor(config, input_ids_seq_length=PROMPT, device="cpu")
    return processors(torch.tensor(sequences), torch.tensor(scores)).numpy()


def ours(settings, sequences, scores):
    options = GenerationOptions.model_validate({**settings, "max_length": LONGEST})
    processors = make_processors(options, prompt=PROMPT, longest=LONGEST)
    warpers = make_warpers(options) if options.do_sample else []
    rows = []
    for tokens, row in zip(sequences, scores, strict=True):
        changed = row
        for processor in processors:
            changed = processor(tokens, changed)
        for warp in warpers:
            changed = warp(changed)
        rows.append(changed)
    return np.stack(rows)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"no_repeat_ngram_size": 1},
        {"no_repeat_ngram_size": 2},
        {"no_repeat_ngram_size": 3},
        {"bad_words_ids": [[3], [1, 2], [2, 2, 1]]},
        {"bad_words_ids": [[7], [3]], "eos_token_id": 7},
        {"min_length": 6, "eos_token_id": [7, 8]},
        {"min_new_tokens": 4, "eos_token_id": 7},
        {"min_length": 6},
        {"forced_bos_token_id": 5},
        {"forced_eos_token_id": 9},
        {"forced_eos_token_id": [9, 10]},
        {"suppress_tokens": [1, 2, 3]},
        {"begin_suppress_tokens": [4, 5]},
        {"do_sample": True, "temperature": 0.7},
        {"do_sample": True, "top_k": 5},
        {"do_sample": True, "top_k": 0, "top_p": 0.6},
        {"do_sample": True, "top_p": 0.01},
        {"do_sample": True, "num_beams": 3, "top_k": 1},
        {"do_sample": True, "num_beams": 3, "top_k": 1, "eos_token_id": [7, 8, 9]},
        {"do_sample": True, "num_beams": 2, "top_k": 0, "top_p": 0.01},
        {
            "repetition_penalty": 1.3,
            "no_repeat_ngram_size": 2,
            "bad_words_ids": [[3]],
            "min_length": 11,
            "eos_token_id": 7,
            "suppress_tokens": [11],
            "do_sample": True,
            "temperature": 1.3,
            "top_k": 10,
            "top_p": 0.8,
        },
    ],
    ids=str,
)
def test_scores_are_those_of_transformers(settings):
    random = np.random.default_rng(0)
    changed = False
    for length in (1, 2, 3, 4, 5, 6, 11):
        # Few tokens, so that they and their pairs repeat.
        sequences = random.integers(1, 4, (16, length)).tolist()
        scores = random.normal(size=(16, VOCABULARY)).astype(np.float32) * 3
        wanted = theirs(settings, sequences, scores.copy())
        found = ours(settings, sequences, scores)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=0)
        changed |= not np.array_equal(found, scores)
    assert changed == (settings != {"min_length": 6})
