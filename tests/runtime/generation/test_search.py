"""Searches over a small vocabulary, where sequences end often, are those of transformers."""

import itertools
import warnings

import numpy as np
import pytest

from enginery.core.errors import InputError
from enginery.runtime.generation.options import GenerationOptions
from enginery.runtime.generation.processors import log_softmax
from enginery.runtime.generation.search import Candidates, TextRules, make_search

END, PAD, VOCABULARY = 3, 0, 12
SEED = 4  # some sequences end, others reach the largest length
PROMPTS = [[4, 5], [6], [7, 8, 9], [10, 4, 4, 5]]


@pytest.fixture(scope="module")
def model():
    """A decoder of twelve tokens, whose sequences end after a few."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
        config = GPT2Config(
            vocab_size=VOCABULARY,
            initializer_range=0.5,
            bos_token_id=1,
            eos_token_id=END,
            pad_token_id=PAD,
            **sizes,
        )
        return GPT2LMHeadModel(config).eval()


def found_by_search(model, prompt, options, rest=()):
    """Run a search on logits that PyTorch computes anew for each step."""
    import torch

    search = make_search(tuple(prompt), options, positions=64, rest=rest)
    sequences = [list(prompt)]
    while not search.done:
        with torch.no_grad():
            logits = model(torch.tensor(sequences)).logits[:, -1].numpy()
        need = search.need
        best = np.argsort(-logits, axis=1, kind="stable")[:, : need.best]
        if need.logits:
            found = Candidates(best[:, :0], logits=logits)
        else:
            log_probs = np.take_along_axis(log_softmax(logits), best, 1)
            found = Candidates(best, log_probs if need.best > 1 else None)
        move = search.advance(found)
        sequences = [
            [*sequences[parent], token]
            for parent, token in zip(move.parents, move.tokens, strict=True)
        ]
    return search.results()


def found_by_transformers(model, prompt, options):
    import torch

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    tokens = []
    for row in found.sequences[:, len(prompt) :].tolist():
        end = row.index(END) + 1 if END in row else len(row)
        tokens.append(tuple(row[:end]))
    return tokens, getattr(found, "sequences_scores", None)


BEAMS = [
    {"num_beams": beams, "early_stopping": stopping, "length_penalty": penalty}
    for beams, stopping, penalty in itertools.product(
        (2, 4), (False, True, "never"), (-1.0, 0.5, 2.0)
    )
]


RENORMALIZED = [
    {"renormalize_logits": True, "num_beams": beams, **options}
    for beams in (1, 3)
    for options in (
        {},
        {"bad_words_ids": [[7]]},
        {"repetition_penalty": 1.5, "length_penalty": 0.6},
    )
]


@pytest.mark.parametrize("options", [{}, *BEAMS, *RENORMALIZED], ids=str)
def test_sequences_that_end_are_those_of_transformers(model, options):
    count = options.get("num_beams", 1)
    given = {"max_new_tokens": 14, "num_return_sequences": count, **options}
    chosen = GenerationOptions(eos_token_id=(END,), pad_token_id=PAD, **given)
    for prompt in PROMPTS:
        tokens, scores = found_by_transformers(model, prompt, given)
        found = found_by_search(model, prompt, chosen)
        assert [each.tokens for each in found] == tokens
        assert [each.finish for each in found] == [
            "stop" if END in row else "length" for row in tokens
        ]
        if scores is not None:
            np.testing.assert_allclose([each.score for each in found], scores, rtol=1e-4)


def test_some_of_these_sequences_end_and_others_do_not(model):
    for options in ({"num_beams": 1}, {"num_beams": 2, "num_return_sequences": 2}):
        given = GenerationOptions(eos_token_id=(END,), max_new_tokens=14, **options)
        found = [each for prompt in PROMPTS for each in found_by_search(model, prompt, given)]
        assert {each.finish for each in found} == {"stop", "length"}


@pytest.mark.parametrize("beams", [1, 3])
def test_places_of_a_prompt_take_the_most_probable_of_their_tokens(model, beams):
    import torch

    options = GenerationOptions(
        num_beams=beams, eos_token_id=END, max_length=12, begin_suppress_tokens=(5, 6)
    )
    found = set()
    for prompt in PROMPTS:
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0, -1].numpy()
        chosen = max((4, 7, 9), key=lambda token: logits[token])
        found.add(chosen)
        wanted = found_by_search(model, [*prompt, chosen, 8], options)
        assert found_by_search(model, prompt, options, rest=((4, 7, 9), (8,))) == wanted
    assert len(found) > 1


def test_a_prompt_counts_as_a_whole():
    with pytest.raises(InputError, match="the prompt has 5 tokens, and max_length is 5"):
        make_search((1,), GenerationOptions(max_length=5), positions=64, rest=((2,),) * 4)


def test_closest_is_the_gap_between_the_last_beam_kept_and_the_first_dropped():
    options = GenerationOptions(num_beams=2, max_new_tokens=2)
    search = make_search([1], options, positions=None)
    first = np.log(np.float32([[0.5, 0.3, 0.15, 0.05]]))
    search.advance(Candidates(np.array([[4, 5, 6, 7]]), first))
    assert search.closest == pytest.approx(np.log(0.3 / 0.15), rel=1e-5)
    # 0.5 × 0.4 and 0.5 × 0.39 go on; the best of the other beam, 0.3 × 0.6, is dropped.
    after = np.log(np.float32([[0.4, 0.39, 0.11, 0.1], [0.6, 0.2, 0.1, 0.1]]))
    search.advance(Candidates(np.array([[4, 5, 6, 7]] * 2), after))
    assert search.done
    assert search.closest == pytest.approx(np.log(0.195 / 0.18), rel=1e-5)


@pytest.mark.parametrize(
    ("chosen", "needs_logits"),
    [
        ({}, False),
        ({"bad_words_ids": [[PAD], [5, 6]], "no_repeat_ngram_size": 1}, False),
        ({"suppress_tokens": [4], "begin_suppress_tokens": [7], "min_new_tokens": 2}, False),
        ({"forced_eos_token_id": [END], "max_new_tokens": 5}, False),
        ({"forced_eos_token_id": [END], "max_new_tokens": 1}, True),  # at this step
        ({"suppress_tokens": list(range(1000))}, True),
        ({"repetition_penalty": 1.2}, True),
        ({"do_sample": True}, True),
    ],
)
def test_beams_read_all_logits_only_if_they_must(chosen, needs_logits):
    options = GenerationOptions(num_beams=2, eos_token_id=[END], **chosen)
    need = make_search((4, 5), options, positions=64).need
    assert need.logits == needs_logits
    if not needs_logits:
        # The best four, and as many as may be excluded.
        assert need.best == 4 + {"bad": 4, "sup": 3}.get(next(iter(chosen), "")[:3], 0)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 3, "temperature": 3.0}]
)
def test_a_draw_from_the_best_tokens_is_the_draw_from_all(options):
    logits = np.random.default_rng(1).normal(size=(1, 500)).astype(np.float32) * 3
    logits[0, [5, 6, 7, 8]] = logits.max()  # as probable as each other
    for seed in range(50):
        drawn = GenerationOptions(do_sample=True, seed=seed, max_new_tokens=2, **options)
        search = make_search((1,), drawn, positions=None)
        need = search.need
        assert not need.logits
        best = np.argsort(-logits, axis=1, kind="stable")[:, : need.best]
        found = Candidates(best, np.take_along_axis(log_softmax(logits), best, 1))
        other = make_search((1,), drawn, positions=None)
        wanted = other.advance(Candidates(best[:, :0], logits=logits))
        assert search.advance(found) == wanted


def test_draws_that_may_need_every_token_read_all_logits():
    for options in ({"top_k": 0}, {"top_k": 1000}, {"repetition_penalty": 1.2}):
        drawn = GenerationOptions(do_sample=True, max_new_tokens=2, **options)
        assert make_search((1,), drawn, positions=None).need.logits


def test_a_greedy_search_is_advanced_from_outside_once_it_has_a_token():
    options = GenerationOptions(max_new_tokens=3, eos_token_id=END)
    search = make_search((4, 5), options, positions=None)
    assert search.greedy is None
    search.advance(Candidates(np.array([[6]])))
    assert search.greedy is search
    search.greedy.tokens.append(7)
    search.settle()
    assert not search.done
    search.greedy.tokens.append(END)
    search.settle()
    assert search.done
    assert search.results()[0].tokens == (6, 7, END)
    for more in ({"num_beams": 2}, {"do_sample": True}, {"repetition_penalty": 1.2}):
        other = make_search((4, 5), GenerationOptions(max_new_tokens=3, **more), positions=None)
        other.advance(
            Candidates(np.array([[6, 7, 8, 9]]), np.zeros((1, 4), np.float32))
            if "num_beams" in more
            else Candidates(np.zeros((1, 0), np.int64), logits=np.zeros((1, 12), np.float32))
        )
        assert other.greedy is None


def test_the_search_behind_a_prompt_is_greedy_too():
    options = GenerationOptions(max_new_tokens=2, eos_token_id=END)
    search = make_search((4,), options, positions=None, rest=((5,), (6,)))
    for token in (9, 9):
        assert search.greedy is None
        search.advance(Candidates(np.array([[token]])))
    search.advance(Candidates(np.array([[7]])))
    search.greedy.tokens.append(8)
    search.settle()
    assert search.done
    assert search.results()[0].tokens == (7, 8)


def test_end_tokens_cost_no_step_a_text():
    """Each continuation of a step would become a text, and there are 64 times as many."""
    texts = []
    options = GenerationOptions(
        num_beams=4, max_new_tokens=9, eos_token_id=tuple(range(64)), stop_strings=("a",)
    )
    search = make_search([99], options, positions=None, rules=TextRules(texts.append))
    logits = np.zeros((1, 500), np.float32)
    logits[0, 100:] = 5
    search.advance(Candidates(np.empty((1, 0), np.int64), logits=logits))
    assert len(texts) == 5
    assert len(search._running) == 4
